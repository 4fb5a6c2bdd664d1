"""Positions that a score of the model selects, beside the formulas of kvpress, and wrong scores."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

import anchorlens as al
from anchorlens.contexts import placement, selection
from anchorlens.contexts.selection import by_score
from anchorlens.errors import AnchorlensError
from anchorlens.prompts.segment_names import OTHER
from tests.contexts.test_compression import shared
from tests.support.asked import ask
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gpt2, tiny_llama

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def scores_of(model: Any, select: selection.ByScore, batch: al.PromptBatch) -> tuple[Any, Tensor]:
    found: list[Any] = []

    def score(cache: Any, seen: Any) -> Any:
        found.append(select.score(cache, seen))
        return found[-1]

    selected = replace(select, score=score).of(model, batch)
    return found[0], selected


def plain_scores(weights: Any, tokens: Tensor) -> dict[str, list[Tensor]]:
    """Each press of kvpress 0.5.5 in every layer: [kv head, position]."""
    weights.set_attn_implementation("eager")  # the others give out no patterns
    with torch.no_grad():
        out = weights(tokens[None], use_cache=True, output_attentions=True)
    scores: dict[str, list[Tensor]] = {}
    for layer, attentions in zip(out.past_key_values.layers, out.attentions, strict=True):
        keys, (_, heads, length, _) = layer.keys, layer.keys.shape
        scores.setdefault("small keys", []).append(-keys.norm(dim=-1)[0])
        scores.setdefault("large values", []).append(layer.values.norm(dim=-1)[0])
        received = attentions.sum(2)
        summed = received.view(1, heads, -1, length).mean(2)[0]
        scores.setdefault("H2O", []).append(summed)
        scores.setdefault("heavy hitters", []).append(summed / torch.arange(length, 0, -1))
        of_window = attentions[..., -8:, :-8].mean(dim=-2)
        pooled = avg_pool1d(of_window, kernel_size=5, padding=2, stride=1)
        scores.setdefault("most read", []).append(pooled.view(1, heads, -1, length - 8).mean(2)[0])
    return scores


@pytest.mark.parametrize("exact_model", ["gpt2", "llama"], indirect=True)
def test_scores_are_those_of_kvpress_in_every_layer(
    exact_model: Any, byte_level: Any, sentencepiece_like: Any
) -> None:
    """And one set of positions has the highest means, of as many as label words and format."""
    is_gpt2 = "gpt2" in exact_model.cfg.model_name.lower()
    tokenizer, make = (byte_level, tiny_gpt2) if is_gpt2 else (sentencepiece_like, tiny_llama)
    batch = questions(exact_model, 3, padding_side="left")[0]
    demos = shared(batch)
    length = demos.tokens.shape[1]
    budget = int(selection.anchors_and_format(demos).sum())
    expected = plain_scores(make(len(tokenizer)).double(), demos.tokens[0])
    selects: dict[str, Any] = {name: by_score(name) for name in selection.SCORE_NAMES}
    summed: Any = lambda cache, seen: seen["received"][0]  # noqa: E731
    selects["H2O"] = replace(selects["heavy hitters"], score=summed, last=budget // 2)
    masks = []
    for name, select in selects.items():
        ours, selected = scores_of(exact_model, select, batch)
        theirs = torch.stack([by_head.mean(0) for by_head in expected[name]])
        count = theirs.shape[1]  # without the window
        assert len(ours) == 3
        for layer in range(3):
            # The norms of Llama in transformers compute in float32.
            assert difference(ours[layer, :count], theirs[layer]) < (1e-12 if is_gpt2 else 1e-6)
        kept = {j for j in range(length) if demos.segments[0, j] == OTHER}
        kept |= set(range(length - select.last, length))
        means = theirs.mean(0).tolist()
        rest = sorted((j for j in range(count) if j not in kept), key=lambda j: (-means[j], j))
        best = kept | set(rest[: budget - len(kept)])
        assert selected.nonzero().flatten().tolist() == sorted(best), name
        assert len(best) == budget < length
        masks.append(selected)
    assert len({tuple(mask.tolist()) for mask in masks}) == 5
    # The mean of all heads is not the set of each head.
    by_head = [heads.topk(budget).indices for heads in torch.cat(expected["small keys"])]
    assert len({tuple(sorted(head.tolist())) for head in by_head}) > 1


@pytest.mark.slow_cases("trained contexts", "gemma3")
@pytest.mark.every_kind
def test_as_many_positions_as_asked_for_are_stored(model: Any) -> None:
    [batch] = questions(model, 3)
    demos, make = shared(batch), partial(by_score, "heavy hitters")
    length = demos.tokens.shape[1]
    whole = al.compress(model, batch, make(keep=length))
    everything = al.compress(model, batch, selection.everything)
    assert torch.equal(whole.logits(model, batch), everything.logits(model, batch))
    few = al.compress(model, batch, make(keep=0.5))
    anchors = int(selection.anchors_and_format(demos).sum())
    selects = [*map(by_score, selection.SCORE_NAMES)]
    for select, count in (*((each, anchors) for each in selects), (make(40), 40)):
        assert int(select.of(model, batch).sum()) == count
    assert int(few.selected.sum()) == round(length / 2)
    assert few.info["scored"] == "heavy hitters, one set for all layers and heads"
    assert f"selection {few.info['scored']}" in repr(few)
    assert "scored" not in everything.info and few.selected[demos.segments[0] == OTHER].all()


def test_of_equal_scores_the_lower_positions_are_stored(llama: Any) -> None:
    batch = questions(llama, 3)[0]
    equal = selection.ByScore(lambda cache, seen: cache.keys[0].new_zeros(len(cache)), 30, last=2)
    selected = equal.of(llama, batch)
    length = len(selected)
    assert selected.nonzero().flatten().tolist() == [*range(28), length - 2, length - 1]
    # Scores in float16 are compared as they are, also where they are far apart in size.
    rising = replace(equal, score=lambda cache, seen: torch.arange(length).half(), last=0)
    assert rising.of(llama, batch).nonzero().flatten().tolist() == [0, *range(length - 29, length)]


@pytest.mark.slow("trained contexts")
def test_the_pass_of_a_score_has_the_edges_of_what_is_stored(llama: Any) -> None:
    """Demonstrations that run separately do not read each other, and positions can be moved."""
    batch, found = questions(llama, 3)[0], list[Tensor]()

    def score(cache: Any, seen: Any) -> Tensor:
        found.append(seen["row"][0, :, :, 0])
        return found[-1]

    def last(demonstrations: al.PromptBatch) -> Any:
        return {"row": al.reads.At("pattern", torch.tensor([[demonstrations.tokens.shape[1] - 1]]))}

    select = selection.ByScore(score, 60, reads=last, name="read at the end")
    for separately in (False, True):
        al.compress(llama, batch, select, separately=separately)
    first = slice(1, int(batch.padded_right().label_ends[0, 0]) + 1)
    joint, apart = (rows[..., first].sum(-1) for rows in found)
    assert (joint > 1e-3).all() and (apart == 0).all()
    moved = al.compress(llama, batch, select, positions=placement.rebased)
    assert moved.has_no_gap and len(moved.cached_tokens) == 60


@pytest.mark.changes_model
def test_a_score_is_of_the_model_with_the_hooks_of_its_user(gpt2: Any) -> None:
    [batch] = questions(gpt2, 3)
    clean, _ = scores_of(gpt2, by_score("large values"), batch)
    gpt2.add_hook("blocks.0.attn.hook_v", lambda value, hook: value / 2)
    for dropout in (each for each in gpt2.modules() if isinstance(each, torch.nn.Dropout)):
        dropout.p = 0.5
    gpt2.train()
    changed, _ = scores_of(gpt2, by_score("large values"), batch)
    assert gpt2.training and difference(changed[0], clean[0] / 2) < 1e-6


def test_random_tokens_are_drawn_from_all_that_is_not_always_stored(llama: Any) -> None:
    demos = shared(questions(llama, 3)[0])
    draws = torch.stack([selection.random_tokens(seed)(demos) for seed in range(40)])
    budget = int(selection.anchors_and_format(demos).sum())
    assert (draws.sum(1) == budget).all() and draws[:, 0].all() and draws.any(0).all()
    assert len({tuple(draw.tolist()) for draw in draws}) == 40
    assert torch.equal(draws[3], selection.random_tokens(3)(demos))
    assert draws[:, 1:].double().mean() == pytest.approx((budget - 1) / (demos.tokens.shape[1] - 1))


@pytest.mark.slow("trained contexts")
def test_a_score_may_be_the_control_of_a_comparison(llama: Any) -> None:
    control = replace(by_score("small keys"), keep=60)
    contexts: dict[str, Any] = {"60": partial(al.compress, select=control)}
    drawn = al.ContextComparison(contexts, draws=1, control=lambda seed: control, repeats=0)
    record = ask(llama, questions(llama, 3), drawn, **QUIET)
    assert torch.equal(record.random_kl, record.kl)


def no_cut(cache: Any, seen: Any) -> Tensor:
    return torch.zeros(len(cache))


SLOPE = {"a": al.reads.At("slope", al.edges.anchors)}
RETURNS = {"a": al.reads.Hooks([], [("blocks.0.hook_mlp_out", lambda states, hook: states)])}
REFUSED: list[tuple[Any, Any, str]] = [  # a score, what it reads, and words of the message
    (lambda cache, seen: torch.zeros(3), {}, r"the \d+ positions .* own score gave .* \(3,\)"),
    (lambda cache, seen: no_cut(cache, seen) - torch.inf, {}, "finite numbers"),
    (lambda cache, seen: 3, {}, "own score gave a int"),
    (lambda cache: 0, {}, "score must be a function of keys and values, and what was read"),
    (no_cut, SLOPE, "own score reads a gradient, but demonstrations have no loss"),
    (no_cut, RETURNS, "a hook of metric 'own score' must return None"),
]


@pytest.mark.parametrize(("score", "reads", "message"), REFUSED)
def test_wrong_scores_are_refused(gpt2: Any, score: Any, reads: Any, message: str) -> None:
    [batch] = questions(gpt2, 3)
    with pytest.raises(AnchorlensError, match=message):
        al.compress(gpt2, batch, selection.ByScore(score, reads=lambda demonstrations: reads))
