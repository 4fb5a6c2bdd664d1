"""Sets by classes of queries and keys hold the same edges, and the same sums, as their tables."""

from collections.abc import Callable
from operator import and_, or_
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.metrics.edge_sums import ClassSums, EdgeSets, _by_classes
from anchorlens.prompts.edge_set import EdgeSet
from tests.support.tiny_models import questions

N = 17
POSITION = torch.arange(N)


def table_of(edges: EdgeSet) -> Tensor:
    """The edges by their classes alone."""
    classes: Any = edges.classes()
    of_pairs = classes.table[classes.queries[:, :, None], classes.keys[:, None]]
    return torch.where(POSITION[:, None] > POSITION, of_pairs, torch.tensor(classes.later))


def some_sets(seed: int) -> list[EdgeSet]:
    """Sets of random positions, and what is made of them."""
    generator = torch.Generator().manual_seed(seed)

    def positions() -> Tensor:
        return torch.rand(3, N, generator=generator) > 0.5

    sets: list[Any] = [al.edges.between(positions(), positions()) for _ in range(3)]
    joins: list[Callable[[Any, Any], Any]] = [and_, or_, lambda first, second: first & ~second]
    for _ in range(4):
        sizes = (len(sets), len(sets), 3)
        first, second, join = (int(torch.randint(n, (), generator=generator)) for n in sizes)
        sets.append(joins[join](sets[first], sets[second]))
    return [*sets, ~sets[-1]]


@pytest.mark.parametrize("seed", range(8))
def test_classes_hold_the_edges_of_a_set(seed: int) -> None:
    for edges in some_sets(seed):
        assert torch.equal(table_of(edges), edges.table())


@pytest.mark.parametrize("seed", range(4))
def test_sums_by_classes_are_those_of_tables(seed: int) -> None:
    sets = some_sets(seed)[:4]
    weights = torch.rand(3, 5, N, N, generator=torch.Generator().manual_seed(seed)).double()
    sums = _by_classes(sets)
    assert isinstance(sums, ClassSums)
    every = slice(0, N)
    expected = torch.einsum("bhqk,bsqk->bhs", weights, EdgeSet.stacked(sets).double())
    for computed in (sums.sums(every, every, weights), EdgeSets(sets).sums(every, every, weights)):
        torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)
    pieces = [(0, 5), (5, 6), (6, N)]  # no row has an edge to a later key
    parts = [sums.sums(slice(a, b), slice(0, b), weights[:, :, a:b, :b]) for a, b in pieces]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-12, atol=1e-12)


def test_sets_that_are_not_made_of_positions_have_no_classes(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    table = al.edges.wp(batch).table()
    drawn = al.edges.random_edges(batch, al.edges.wp(batch), seed=0)
    for edges in (EdgeSet.of(table), drawn, al.edges.wp(batch) & table):
        assert edges.classes() is None
    assert al.edges.ww(batch).classes() is not None
    later = ~al.edges.wp(batch)
    assert _by_classes([later]) is None, "edges to later tokens are in no row of a piece"
