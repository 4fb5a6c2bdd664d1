"""Sets of edges: rows, joins, classes, and what torch does with them, against whole tables."""

import copy
import pickle
from collections.abc import Callable
from operator import and_, or_
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.metrics.edge_sums import ClassSums, EdgeSets, _by_classes
from anchorlens.prompts.edge_set import EdgeSet
from anchorlens.system import row_pieces
from tests.support.tiny_models import questions


def within(batch: al.PromptBatch, queries: Tensor, keys: Tensor) -> Tensor:
    earlier = torch.ones(batch.tokens.shape[1], batch.tokens.shape[1]).tril(-1).bool()
    return queries[:, :, None] & keys[:, None] & earlier


def own_table(batch: al.PromptBatch) -> Tensor:
    return torch.ones(batch.tokens.shape[1], batch.tokens.shape[1]).tril(-3).bool()


PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "and not": (
        lambda b: al.edges.wp(b) & ~al.edges.from_first(b),
        lambda b: al.edges.wp(b).table() & ~al.edges.from_first(b).table(),
    ),
    "between": (
        lambda b: al.edges.between(al.edges.query(b), al.edges.demonstrations(b)),
        lambda b: within(b, al.edges.query(b), al.edges.demonstrations(b)),
    ),
    "a table of queries and keys": (
        lambda b: al.edges.every(b) & own_table(b),
        lambda b: al.edges.every(b).table() & own_table(b),
    ),
    "a table at the left": (
        lambda b: own_table(b)[None] | al.edges.pq(b),
        lambda b: own_table(b) | al.edges.pq(b).table(),
    ),
    "one prompt": (
        lambda b: al.prompts.EdgeSet.of(own_table(b)[None]) & al.edges.ww(b),
        lambda b: own_table(b) & al.edges.ww(b).table(),
    ),
    "random keys": (
        lambda b: al.edges.random_keys(b, al.edges.pq(b), 0),
        lambda b: al.edges.random_keys(b, al.edges.pq(b).table(), 0).table(),
    ),
}


@pytest.fixture(params=["left", "right"])
def batch(request: pytest.FixtureRequest, gpt2: Any) -> al.PromptBatch:
    return questions(gpt2, 3, padding_side=request.param)[0]


@pytest.mark.parametrize("name", PAIRS)
def test_sets_are_lazy_and_equal_tables(name: str, batch: al.PromptBatch) -> None:
    function, table = PAIRS[name]
    edges, expected = function(batch), table(batch)
    assert isinstance(edges, al.prompts.EdgeSet) and type(expected) is Tensor and expected.any()
    assert (edges.shape, edges.dtype, edges.device) == (expected.shape, torch.bool, expected.device)
    for start, stop in ((0, 1), (4, 5), (5, 9), (0, expected.shape[1])):
        assert torch.equal(edges.rows(slice(start, stop)), expected[:, start:stop])
    assert torch.equal(edges.rows(slice(None)), expected) and type(edges.table()) is Tensor
    assert edges.counts().tolist() == expected.sum((1, 2)).tolist()
    assert torch.equal(edges.before(40).table(), expected[:1, :40, :40])
    stored = edges.stored()
    assert torch.equal(stored.rows(slice(3, 9)), stored.rows(slice(3, 9)))
    assert torch.equal(stored, expected)


# Whatever else a tensor can do. Each gives a plain tensor, or another object of Python.
OPERATIONS: list[Callable[[Any], Any]] = [
    lambda e: e[:, 5:9, 2],
    lambda e: e == e.tril(-5),
    lambda e: e & False,
    lambda e: True | e,
    lambda e: e.float(),
    lambda e: torch.stack([e, ~e], 1),
    lambda e: torch.arange(e.numel()).view(e.shape)[e],
    lambda e: list(e)[2],
    lambda e: e.detach(),
    lambda e: torch.tensor(e.tolist()),
    lambda e: torch.from_numpy(e.numpy()),
    lambda e: torch.from_numpy(np.asarray(e)),
    lambda e: pickle.loads(pickle.dumps(e)),
    lambda e: copy.deepcopy(e).float(),
    lambda e: copy.copy(e),
]


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_torch_does_with_sets_what_it_does_with_tables(number: int, batch: al.PromptBatch) -> None:
    edges, operation = al.edges.wp(batch), OPERATIONS[number]
    ours, expected = operation(edges), operation(edges.table())
    assert type(ours) is Tensor and ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


EDITS: list[Callable[[Any], Any]] = [
    lambda e: e.__setitem__((0, 5), False),
    lambda e: e.fill_(True),
    lambda e: torch.logical_not(e.table(), out=e),
]


@pytest.mark.parametrize("number", range(len(EDITS)))
def test_a_set_cannot_be_edited(number: int, batch: al.PromptBatch) -> None:
    edges = al.edges.wp(batch)
    before = edges.table()
    with pytest.raises(PromptError, match=r"cannot be edited.*table = edges.table\(\)"):
        EDITS[number](edges)
    assert torch.equal(edges, before)


def test_edits_of_what_a_set_was_made_of_do_not_change_it(batch: al.PromptBatch) -> None:
    edges = wp = al.edges.wp(batch)
    edges |= al.edges.pq(batch)
    assert torch.equal(edges, wp.table() | al.edges.pq(batch).table())
    edges &= wp
    assert torch.equal(edges, wp) and edges is not wp
    assert torch.equal(wp, al.edges.wp(batch))
    queries, keys = al.edges.query(batch), al.edges.demonstrations(batch)
    own = own_table(batch)
    edges = al.edges.between(queries, keys) & own
    expected = edges.table()
    for each in (queries, keys, own, edges.table(), edges.rows(slice(0, 9))):
        each.zero_()
    assert torch.equal(edges, expected) and expected.any()
    table = al.prompts.EdgeSet.of(expected)
    table.rows(slice(0, 90)).zero_()
    assert torch.equal(table, expected)
    of = al.edges
    named = [each(batch) for each in (of.wp, of.pq, of.ww, of.tq, of.every, of.from_first)]
    before = [edges.table() for edges in named]
    batch.attention_mask.zero_()
    assert all(map(torch.equal, named, before))


def test_sets_made_in_inference_mode_work_outside(gpt2: Any) -> None:
    with torch.inference_mode():
        edges = al.edges.wp(questions(gpt2, 2)[0]) & ~al.edges.from_first(questions(gpt2, 2)[0])
    weights = torch.ones(edges.shape, requires_grad=True)
    weights.masked_fill(edges, 0.0).sum().backward()
    assert weights.grad is not None and torch.equal(weights.grad, (~edges.table()).float())


@pytest.mark.parametrize("draw", [al.edges.random_keys, al.edges.random_edges])
def test_pieces_do_not_change_draws(draw: Any, gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = questions(gpt2, 3)[0]
    chosen = al.edges.pq(batch)
    expected = draw(batch, chosen, seed=3).table()
    monkeypatch.setattr(row_pieces, "PIECE", 1000)
    drawn = draw(batch, chosen, seed=3)
    assert torch.equal(drawn, expected)
    assert torch.equal(drawn.rows(slice(7, 31)), expected[:, 7:31])
    assert drawn.counts().tolist() == expected.sum((1, 2)).tolist()


def test_rows_of_a_long_prompt_make_no_table() -> None:
    length = 100_000  # a table would take 10 GB
    positions = torch.ones(1, length, dtype=torch.bool)
    edges = al.edges.between(positions, positions) & ~al.edges.between(positions, ~positions)
    assert edges.rows(slice(50_000, 50_003)).sum(2).tolist() == [[50_000, 50_001, 50_002]]


N = 17
POSITION = torch.arange(N)


def table_of(edges: EdgeSet) -> Tensor:
    classes: Any = edges.classes()
    of_pairs = classes.table[classes.queries[:, :, None], classes.keys[:, None]]
    return torch.where(POSITION[:, None] > POSITION, of_pairs, torch.tensor(classes.later))


def some_sets(seed: int) -> list[EdgeSet]:
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
