"""The reasons for which prompts run whole, and patterns stay whole: the only table of these words.

Nothing runs: how batches run is decided before the first pass.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

import anchorlens as al
from anchorlens.metrics.question import no_hooks
from anchorlens.models.hooked import pattern_name
from anchorlens.passes.provide import Observation
from anchorlens.runs import way
from anchorlens.runs.way import Way, way_of
from tests.runs.test_hooks_on_edges import OTHERS, Change
from tests.support.tiny_models import questions

FLOWS, VALUES = al.SaliencyFlows(), al.SegmentFlows(weight=al.weights.value_norm)
LOSS = al.losses.label_cross_entropy


def watching(point: str) -> al.Question:
    class Watching(al.Accuracy):
        def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
            return {"none": al.reads.Hooks({}, [(point, lambda tensor, hook: None)])}

    return Watching()


def long_queries(batch: al.PromptBatch) -> Any:
    return al.edges.anchors(batch) & (al.edges.query(batch).sum(1) > 22)[:, None]


def decided(model: Any, asked: list[al.Question], change: Change | None, **options: Any) -> Way:
    batches = options.pop("batches", None) or questions(model, 6, batch_size=3)
    changes = [partial(change, model) if change else no_hooks]
    observed = [Observation(model, each, batches[0]) for each in asked]
    return way_of(model, batches, changes, observed, **{"loss": LOSS} | options)


def own_hook(model: Any, batch: al.PromptBatch) -> Any:
    own = (pattern_name(0), lambda pattern, hook: pattern * (pattern > 0.1))
    return [*al.block_edges(model, batch, al.edges.wp, 0), own]


def random_words(model: Any, batch: al.PromptBatch) -> Any:
    return al.hooks.isolate_random(model, batch, 0, seed=int(batch.index[0]))


# What is asked, the hooks, other options, and why prompts run whole.
WHOLE_PROMPTS: list[tuple[list[al.Question], Change | None, dict[str, Any], str]] = [
    ([al.Accuracy()], None, {"share_prefix": False}, "off: share_prefix=False"),
    ([FLOWS], None, {"gradient_checkpointing": True}, "off: blocks are checkpointed"),
    ([FLOWS, VALUES], None, {}, "off: segment_flows needs the values of all tokens of each prompt"),
    (
        [al.SegmentRollout()],
        None,
        {},
        "off: segment_rollout reads blocks of the pattern of each pr",
    ),
    (
        [watching("hook_embed")],
        None,
        {},
        "off: accuracy has hooks of its own, which see whole prompts",
    ),
    ([FLOWS], own_hook, {}, "off: hooks of your own act on positions"),
    ([FLOWS], random_words, {}, "off: hooks differ between prompts"),
    (
        [al.SegmentAttention({"anchors": long_queries, "bos": al.edges.bos}, apart=1)],
        None,
        {},
        "off: segment_attention differs between prompts that share their demonstrations",
    ),
]


@pytest.mark.parametrize(("asked", "change", "options", "reason"), WHOLE_PROMPTS)
def test_prompts_run_whole_for_a_reason(
    asked: Any, change: Any, options: Any, reason: str, gpt2: Any
) -> None:
    assert decided(gpt2, asked, change, **options).shared_prefix.startswith(reason)


def test_few_tokens_run_whole_where_passes_take_longer_to_start(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way, "WORK_OF_A_START", {"cpu": 1e6})
    assert decided(gpt2, [FLOWS], None).shared_prefix.startswith("off: shared tokens would save")


def test_prompts_that_share_nothing_run_whole(gpt2: Any) -> None:
    examples = al.load_examples("questions")
    sets = [al.sample_demonstrations(examples, seed=seed) for seed in range(4)]
    batches = al.build_prompts(gpt2.tokenizer, al.TASKS["trec"], sets, examples[:4])
    reason = decided(gpt2, [al.Accuracy()], None, batches=batches).shared_prefix
    assert reason.startswith("off: no two prompts share")


def selected(model: Any, batch: al.PromptBatch) -> Any:
    return [(lambda name: name.endswith("hook_z"), lambda z, hook: z * 0)]


# What is asked, the hooks, other options, and why long prompts have whole patterns.
WHOLE_PATTERNS: list[tuple[list[al.Question], Change | None, dict[str, Any], str]] = [
    ([FLOWS, al.SegmentRollout()], None, {}, "segment_rollout needs them"),
    ([VALUES], None, {}, "segment_flows needs them"),
    # Its block may run twice.
    ([FLOWS, watching("blocks.0.attn.hook_q")], None, {}, "accuracy needs them"),
    ([FLOWS], OTHERS["after the softmax"], {}, "hooks act at blocks.0.attn.hook_pattern"),
    ([FLOWS], OTHERS["scale"], {}, "hooks act at blocks.0"),
    ([al.Accuracy()], selected, {}, "hooks act at the points that a function selects"),
    ([FLOWS], None, {"hooked": True}, "hooks may act on them"),
    (
        [FLOWS],
        None,
        {"loss": al.losses.word_cross_entropy()},
        "the words of the loss continue the prompts",
    ),
]


@pytest.mark.parametrize(("asked", "change", "options", "reason"), WHOLE_PATTERNS)
def test_patterns_of_long_prompts_stay_whole_for_a_reason(
    asked: Any, change: Any, options: Any, reason: str, gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way, "LARGE", 0)
    hooks = [("blocks.0.hook_resid_pre", lambda resid, hook: None)]
    with gpt2.hooks(fwd_hooks=hooks) if "hooked" in options else nullcontext():
        given = {name: value for name, value in options.items() if name != "hooked"}
        attention = decided(gpt2, asked, change, **given).attention
    assert attention.startswith(f"whole patterns, because {reason}")


def test_fused_and_shared_prompts_say_how_they_run(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, once = decided(gpt2, [FLOWS], None), "tokens of each prompt, run once for all"
    [length] = shared.lengths.values()
    assert shared.info() == {"passes": "native", "shared_prefix": f"{length} {once}"}
    monkeypatch.setattr(way, "LARGE", 0)
    cases: list[tuple[list[al.Question], str]] = [
        ([al.Accuracy()], once),
        ([FLOWS, al.Accuracy()], f"{once}, but whole prompts for rows of the attention"),
        ([FLOWS], "off: attention is fused"),
    ]
    for asked, told in cases:
        fused = decided(gpt2, asked, None)
        assert fused.attention.startswith("fused: the patterns of a prompt would take")
        assert fused.shared_prefix.endswith(told)
