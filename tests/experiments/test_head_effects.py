"""Effects of heads against loops with raw hooks over single prompts, heads and layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import AnchorlensError, HookError, StoreError
from anchorlens.passes import shared_prefix
from anchorlens.passes.shared_prefix import shared_tokens
from tests.references import states
from tests.support.measures import does_not_run
from tests.support.tiny_models import tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TASK, EXAMPLES = al.TASKS["trec"], al.load_examples("questions")
Batches = list[al.PromptBatch]


def prompts(
    model: Any,
    queries: slice,
    how: Any = al.relabeling.gold,
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> Batches:
    """Prompts of each set of demonstrations, with these of the examples that are in no set."""
    sets = [al.sample_demonstrations(EXAMPLES, seed=seed) for seed in (0, 1)]
    rest = [example for example in EXAMPLES if not any(example in demos for demos in sets)][queries]
    return [
        batch
        for seed in seeds
        for batch in al.build_prompts(
            model.tokenizer, *al.relabeling.relabel(sets[seed], TASK, how), rest, **options
        )
    ]


MIXED = al.relabeling.random(seed=1)


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_it_equals_loops_with_raw_hooks(hooked: Any, byte_level: Any, kind_of_model: str) -> None:
    model = hooked(tiny_gpt2(len(byte_level)).double(), byte_level)
    compare(model, 1e-10 if kind_of_model == "bridge" else 1e-7)


@pytest.mark.quick_cases("many passes", "gpt2")
def test_it_equals_loops_in_other_architectures(model: Any) -> None:
    """Grouped keys, BOS, and a norm after the attention."""
    compare(model, 1e-4)


def compare(model: Any, tolerance: float) -> None:
    of_mean = prompts(model, slice(3), batch_size=2, padding_side="left")
    shuffled = prompts(model, slice(3, 6), MIXED, batch_size=2, padding_side="left")
    record = al.head_effects(model, of_mean, shuffled, **QUIET)
    assert record.info["not_started_late"] == {}
    outputs = states.mean_outputs(model, of_mean)
    torch.testing.assert_close(record.outputs, outputs, rtol=tolerance, atol=tolerance)
    effects, of_probability = states.effects(model, shuffled, outputs)
    assert (effects.abs().amax(0) > 1e-3).all() and (effects > 0).any() and (effects < 0).any()
    options: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(record.effect_of_prompts, effects, **options)
    torch.testing.assert_close(record.effect, effects.mean(0), **options)
    torch.testing.assert_close(record.probability_effect, of_probability.mean(0), **options)


@pytest.mark.filterwarnings("ignore:1 queries are in both lists")
def test_own_outputs_have_no_effect(model: Any) -> None:
    [prompt] = prompts(model, slice(1))
    record = al.head_effects(model, [prompt], [prompt], **QUIET)
    assert not record.effect_of_prompts.any() and not record.probability_effect.any()
    logits = al.target_logits(model, [prompt], progress=False)[0].double()
    assert prompt.gold is not None
    expected = states.log_odds(logits, int(prompt.label_token_ids[prompt.gold]))
    torch.testing.assert_close(record.log_odds[0], expected, rtol=1e-6, atol=1e-6)


def test_shared_tokens_run_once_for_all_heads(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the target alone leaves the keys and values of shared tokens as they are."""
    lengths: list[int] = []

    def count(batch: al.PromptBatch) -> al.PromptBatch:
        lengths.append(len(batch))
        return shared_tokens(batch)

    shuffled = prompts(gpt2, slice(3, 9), MIXED, batch_size=3)
    of_mean = prompts(gpt2, slice(3))
    monkeypatch.setattr(shared_prefix, "shared_tokens", count)
    al.head_effects(gpt2, of_mean, shuffled, **QUIET)
    assert len(lengths) <= 2  # of the trial, and of all passes


def test_the_largest_heads_of_each_sign_and_what_replaces_them(gpt2: Any) -> None:
    of_mean = prompts(gpt2, slice(3))
    with pytest.warns(UserWarning, match="rough"):
        record = al.head_effects(
            gpt2, of_mean, prompts(gpt2, slice(3, 6), MIXED), resamples=20, progress=False
        )
    assert record.intervals.keys() == {"effect", "probability_effect"}
    table = record.largest(2)
    effects = sorted(record.effect.flatten().tolist())
    positive, negative = [each for each in effects[::-1] if each > 0], [e for e in effects if e < 0]
    assert table["effect"].tolist() == positive[:2] + negative[:2]
    assert table["sign"].tolist() == [1] * len(positive[:2]) + [-1] * len(negative[:2])
    for _, row in table.iterrows():
        index = int(row["layer"]), int(row["head"])
        estimate = record.estimate("effect", *index)
        assert (row["effect"], row["low"], row["high"]) == tuple(vars(estimate).values())[:3]
        assert row["probability_effect"] == float(record.probability_effect[index])
    tensors: Any = record.tensors()
    bare = al.records.HeadEffectsRecord(**tensors)
    assert "low" not in bare.largest() and len(bare.largest(99)) == record.effect.numel()
    figure = record.plot()
    assert figure.data[0].z[1][2] == float(record.effect[2, 1])
    assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax < 0
    with pytest.raises(AnchorlensError, match="count"):
        record.largest(0)


@pytest.mark.slow("many passes")
def test_effects_belong_to_the_outputs_that_replace_heads(gpt2: Any, tmp_path: Path) -> None:
    shuffled = prompts(gpt2, slice(3, 6), MIXED)
    options: dict[str, Any] = {"folder": tmp_path, **QUIET}
    al.head_effects(gpt2, prompts(gpt2, slice(3)), shuffled, **options)
    al.forget_run(tmp_path / "outputs")
    with pytest.raises(StoreError, match="holds 'head_effects' of another run"):
        al.head_effects(gpt2, prompts(gpt2, slice(6, 9)), shuffled, **options)


def test_a_site_of_single_heads_needs_one() -> None:
    assert al.Site.of_heads([(2, 1), (0, 1), (2, 0)]).heads == {2: [1, 0], 0: [1]}


def test_outputs_of_another_width_are_refused(gpt2: Any) -> None:
    [batch] = prompts(gpt2, slice(1))
    for outputs in (torch.zeros(3, 2, 11), torch.ones(3, 2, 13)):
        with pytest.raises(AnchorlensError, match=r"layer 1 gives out 12 numbers; got 1[13]"):
            [(_, write)] = al.replace_heads(gpt2, batch, outputs, al.Site(1, 0))
            write(torch.zeros(1, batch.tokens.shape[1], 2, 12), hook=None)
    padded = torch.nn.functional.pad(torch.ones(3, 2, 12), (0, 4))
    exact, wider = (
        al.replace_heads(gpt2, batch, values, al.Site.of_heads([(-2, 0), (1, 1)]))
        for values in (torch.ones(3, 2, 12), padded)
    )
    assert [name for name, _ in exact] == ["blocks.1.attn.hook_z"]
    z = torch.zeros(1, batch.tokens.shape[1], 2, 12)
    changed, same = (hooks[0][1](z, hook=None) for hooks in (exact, wider))
    assert changed is not None and same is not None and torch.equal(changed, same)
    assert changed[0, -1].all() and float(changed.sum()) == 24 and not z.any()


def test_heads_are_replaced_at_any_positions(gpt2: Any) -> None:
    """By a hook of one's own; in a run prompts that share tokens are then run whole."""
    batches = al.sample_prompts(gpt2, "questions", queries=4, batch_size=2)
    zeros, site = torch.zeros(3, 2, 12), al.Site(1, heads=[1])

    def everywhere(batch: al.PromptBatch) -> Any:
        return batch.attention_mask

    def by_hand(z: torch.Tensor, hook: Any) -> torch.Tensor:
        return z.index_fill(2, torch.tensor([1]), 0.0)

    def hooks(batch: al.PromptBatch, where: Any = everywhere) -> list[Any]:
        return al.replace_heads(gpt2, batch, zeros, site, positions=where)

    logits = al.target_logits(gpt2, batches, hooks=hooks, progress=False)
    plain = al.target_logits(
        gpt2, batches, hooks=lambda batch: [("blocks.1.attn.hook_z", by_hand)], progress=False
    )
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-5)  # which run on the bridge
    at_target = al.target_logits(
        gpt2, batches, hooks=lambda batch: hooks(batch, al.edges.target(batch)), progress=False
    )
    default = al.target_logits(
        gpt2,
        batches,
        hooks=lambda batch: al.replace_heads(gpt2, batch, zeros, site),
        progress=False,
    )
    assert torch.equal(at_target, default) and (default - plain).abs().max() > 1e-4
    [(_, hook)] = hooks(batches[0])
    assert not hook.is_for(batches[1])
    for where, message in (
        (torch.ones(1, 2), r"positions must be True and False of the shape \(prompt, position\)"),
        (lambda batch: al.edges.target(batch) & False, "positions are False in all tokens"),
    ):
        with pytest.raises(HookError, match=message), does_not_run(gpt2):
            hooks(batches[0], where)
