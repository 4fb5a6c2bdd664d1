"""Random edges: as many as are asked for, others than those, whatever the batch and the padding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError
from anchorlens.prompts import edges
from tests.support.tiny_models import questions

Draw = Callable[[al.PromptBatch, Tensor, int], Tensor]
DRAWS = {"random_keys": edges.random_keys, "random_edges": edges.random_edges}


def forerunners_read(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.forerunners(batch))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_other_edges_are_drawn_as_many_as_there_are(model: Any, draw: Draw) -> None:
    batch = questions(model, 5, padding_side="left")[0]
    chosen = forerunners_read(batch)
    assert int(chosen.sum(2).max()) == batch.label_positions.shape[1]
    draws = [draw(batch, chosen, seed) for seed in range(10)]
    for drawn in draws:
        assert torch.equal(drawn.sum((1, 2)), chosen.sum((1, 2)))
        if draw is edges.random_keys:
            assert torch.equal(drawn.sum(2), chosen.sum(2))
        assert not (drawn & (chosen | edges.from_first(batch) | ~edges.every(batch))).any()
    assert all(not torch.equal(draws[0], other) for other in draws[1:])
    assert torch.equal(draw(batch, chosen, 3), draws[3])


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_depends_on_the_seed_and_the_prompt_alone(gpt2: Any, draw: Draw) -> None:
    for side in ("left", "right"):
        [batch] = questions(gpt2, 7, padding_side=side)
        drawn = draw(batch, forerunners_read(batch), 5)
        for row, mask in enumerate(batch.attention_mask):
            alone = batch.prompt(row)
            expected = draw(alone, forerunners_read(alone), 5)[0]
            assert torch.equal(drawn[row][mask][:, mask], expected)


def test_other_demonstrations_have_other_draws(gpt2: Any) -> None:
    """Of prompts that are equal but for their set, so that nothing else can change a draw."""
    batch = questions(gpt2, 1)[0]
    other = replace(batch, demonstrations_id=batch.demonstrations_id + 1)
    draws: dict[str, Callable[[al.PromptBatch, int], Tensor]] = {
        "random_positions": edges.random_positions,
        "random_keys": lambda each, seed: edges.random_keys(each, edges.pq, seed),
        "random_edges": lambda each, seed: edges.random_edges(each, edges.pq, seed),
        "random_and_format": lambda each, seed: al.contexts.selection.random_and_format(seed)(each),
    }
    for name, draw in draws.items():
        drawn, again, of_other = (
            torch.stack([torch.as_tensor(draw(each, seed)) for seed in range(4)])
            for each in (batch, batch, other)
        )
        assert torch.equal(drawn, again), name
        # A draw of one number is not that of the next number after other demonstrations either.
        assert len({tuple(each.flatten().tolist()) for each in (*drawn, *of_other)}) == 8, name


@pytest.mark.slow("many passes")
def test_every_free_key_is_drawn_equally_often(gpt2: Any) -> None:
    """Each key's count over draws is binomial; six standard deviations are allowed."""
    batch = questions(gpt2, 1)[0]
    chosen, count = edges.pq(batch), 400
    target = int(batch.target_positions[0])
    drawn = torch.stack([edges.random_keys(batch, chosen, seed)[0] for seed in range(count)])
    free = (edges.every(batch) & ~chosen & ~edges.from_first(batch))[0, target]
    chance = float(chosen[0, target].sum() / free.sum())
    limit = 6 * (count * chance * (1 - chance)) ** 0.5
    assert ((drawn.sum(0)[target][free] - count * chance).abs() < limit).all()


def test_all_free_keys_are_drawn_and_one_more_is_an_error(gpt2: Any) -> None:
    batch = questions(gpt2, 1)[0]
    row = edges.every(batch) & edges.between(edges.target(batch), batch.attention_mask)
    free = int(row.sum()) - 1  # without the first token
    half = row & (row.cumsum(2) <= free // 2 + 1) & ~edges.from_first(batch)
    assert int(edges.random_keys(batch, half, 0).sum()) == int(half.sum())
    with pytest.raises(HookError, match=r"prompt 0 has 1 other edges .* for \d+ .*=al.edges.rando"):
        edges.random_keys(batch, row & (row.cumsum(2) <= free), 0)
    assert int(edges.random_edges(batch, row, 0).sum()) == int(row.sum())


def test_forerunners_stand_before_the_label_words(gpt2: Any) -> None:
    batch = questions(gpt2, 4, padding_side="left")[0]
    expected = torch.zeros_like(batch.attention_mask).scatter(1, batch.label_positions - 1, True)
    assert torch.equal(edges.forerunners(batch), expected)
    at_the_start = replace(batch, label_positions=batch.label_positions.clone())
    at_the_start.label_positions[:, 0] = batch.attention_mask.long().argmax(1)
    found = edges.forerunners(at_the_start)
    assert int(found.sum()) == int(expected.sum()) - 4
    assert not (found & ~batch.attention_mask).any()
