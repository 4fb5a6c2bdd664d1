"""The random control isolates other words of the demonstrations, as many as there are labels."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.prompts import edges
from tests.support.measures import patterns_of
from tests.support.tiny_models import LONG_LABELS, questions


def random_by_prompt(model: Any, seed: int, **options: Any) -> dict[int, list[int]]:
    drawn: dict[int, list[int]] = {}
    for batch in questions(model, 7, **options):
        of_batch = batch.index.tolist(), edges.random_positions(batch, seed), batch.attention_mask
        for index, row, mask in zip(*of_batch, strict=True):
            drawn[index] = row[mask].nonzero().flatten().tolist()
    return drawn


@pytest.mark.quick_cases("many passes", "llama")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_random_words_depend_only_on_the_seed_and_the_demonstrations(
    name: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    state = torch.get_rng_state()
    draws = [random_by_prompt(model, seed, batch_size=3) for seed in range(20)]
    assert torch.equal(torch.get_rng_state(), state)
    for options in ({"batch_size": 1}, {"padding_side": "left"}):
        assert random_by_prompt(model, 5, **options) == draws[5]
    assert len({tuple(draw[0]) for draw in draws}) == 20
    batch = questions(model, 1)[0]
    labels = edges.segment(batch, "label") | edges.anchors(batch)
    words = set(labels[0].nonzero().flatten().tolist())
    for draw in draws:
        assert len(set(draw[0])) == batch.label_positions.shape[1]
        assert not {0, *words} & set(draw[0])
        assert max(draw[0]) < int(batch.label_ends.max())
        # Prompts with the same demonstrations have the same draw.
        assert all(draw[index] == draw[0] for index in draw)


def test_any_whole_number_is_a_seed(gpt2: Any) -> None:
    batch = questions(gpt2, 1)[0]
    draws = [edges.random_positions(batch, seed) for seed in (-(2**70), 2**62, 2**62 + 1, 2**70)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) > 1


SITES = [al.Site(), al.Site(1, heads=0), al.Site(1, renormalize=False)]


@pytest.mark.parametrize("site", SITES)
def test_isolate_random_blocks_the_edges_of_one_draw(gpt2: Any, site: al.Site) -> None:
    batch = questions(gpt2, 4, batch_size=4, padding_side="left")[0]
    cut = edges.between(edges.random_positions(batch, 3), batch.attention_mask)
    patterns = patterns_of(gpt2, batch, al.hooks.isolate_random(gpt2, batch, site, seed=3))
    assert torch.equal(patterns, patterns_of(gpt2, batch, al.block_edges(gpt2, batch, cut, site)))
    by_default = patterns_of(gpt2, batch, al.hooks.isolate_random(gpt2, batch, 1, seed=3))
    assert not torch.equal(patterns, by_default)


@pytest.mark.parametrize("whole_words", [False, True])
def test_the_random_control_has_as_many_tokens_as_are_isolated(
    gpt2: Any, whole_words: bool
) -> None:
    """Of a label word of several tokens the first is isolated, or all of them."""
    demos = [al.Example("one two three four five", 0), al.Example("six seven eight nine", 1)]
    batch = al.build_prompts(gpt2.tokenizer, LONG_LABELS, demos, ["four five"])[0]
    labels = edges.segment(batch, "label")
    assert int(labels.sum()) > len(demos)
    drawn = edges.random_positions(batch, 3, whole_words=whole_words)
    assert int(drawn.sum()) == (int(labels.sum()) if whole_words else len(demos))
    assert not (drawn & labels).any()
    hooks = al.hooks.isolate_random(gpt2, batch, 0, seed=3, whole_words=whole_words)
    alone = patterns_of(gpt2, batch, hooks)[0, 0, 0].diagonal()[1:] == 1
    assert torch.equal(alone, drawn[0, 1:])


def test_instructions_are_never_drawn(gpt2: Any) -> None:
    task = replace(LONG_LABELS, instructions="Say which it is.\n" * 9)
    demos = [al.Example("one two three", 0), al.Example("six seven eight", 1)]
    batch = al.build_prompts(gpt2.tokenizer, task, demos, ["four five"])[0]
    instructions = edges.segment(batch, "other")
    assert int(instructions.sum()) > 20
    for seed in range(20):
        assert not (edges.random_positions(batch, seed) & instructions).any()
