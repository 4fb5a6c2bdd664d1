"""Sets of edges a few query rows at a time, against whole tables."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import questions
from torch import Tensor

import anchorlens as al
from anchorlens.prompts.edge_rows import asked_rows, edge_rows
from anchorlens.prompts.edges import packed
from anchorlens.system import row_pieces

pytestmark = pytest.mark.without_jaxtyping

BY_ROWS: list[Callable[[Any], Tensor]] = [
    al.edges.wp,
    al.edges.pq,
    al.edges.ww,
    al.edges.tq,
    al.edges.every,
    al.edges.from_first,
    lambda batch: al.edges.wp(batch) & ~al.edges.from_first(batch) | al.edges.pq(batch),
    lambda batch: al.edges.between(al.edges.query(batch), al.edges.demonstrations(batch)),
]


def at_least_three_back(batch: al.PromptBatch) -> Tensor:
    """An index of rows, which would be that of another row in some rows alone."""
    return al.edges.wp(batch).tril(-3)


def without_row_5(batch: al.PromptBatch) -> Tensor:
    edges = al.edges.every(batch)
    edges[:, 5] = False
    return edges


def with_own_table(batch: al.PromptBatch) -> Tensor:
    own = torch.ones(batch.tokens.shape[1], batch.tokens.shape[1]).tril(-2).bool()
    return al.edges.every(batch) & own


def joined_by_torch(batch: al.PromptBatch) -> Tensor:
    return torch.logical_or(al.edges.wp(batch), al.edges.pq(batch))


def drawn(batch: al.PromptBatch) -> Tensor:
    return al.edges.random_keys(batch, al.edges.pq(batch), seed=0)


WHOLE = [at_least_three_back, without_row_5, with_own_table, joined_by_torch, drawn]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("function", [*BY_ROWS, *WHOLE])
def test_rows_are_those_of_the_whole_table(function: Any, side: Any, gpt2: Any) -> None:
    batch = questions(gpt2, 3, padding_side=side)[0]
    expected = function(batch)
    checked: list[Any] = []
    rows = edge_rows(function, batch, checked.append)
    assert [table.shape for table in checked] == [expected.shape] * (function in WHOLE)
    for start, stop in ((0, 1), (4, 5), (5, 9), (0, expected.shape[1])):
        assert torch.equal(rows(slice(start, stop)), expected[:, start:stop])
    assert asked_rows() is None


def test_an_error_of_the_function_is_its_own(gpt2: Any) -> None:
    batch = questions(gpt2, 3)[0]

    def wrong(batch: al.PromptBatch) -> Tensor:
        raise ValueError("no such edges")

    with pytest.raises(ValueError, match="no such edges"):
        edge_rows(wrong, batch, lambda table: None)
    assert asked_rows() is None


@pytest.mark.parametrize("draw", [al.edges.random_keys, al.edges.random_edges])
def test_draws_do_not_depend_on_the_size_of_pieces(
    draw: Any, gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = questions(gpt2, 3)[0]
    chosen = al.edges.pq(batch)
    expected = draw(batch, chosen, seed=3)
    monkeypatch.setattr(row_pieces, "PIECE", 1000)
    assert torch.equal(draw(batch, chosen, seed=3), expected)
    assert torch.equal(packed(expected)(slice(7, 31)), expected[:, 7:31])
    assert torch.equal(packed(expected)(slice(None)), expected)
