"""Demonstrations that run once give the numbers of whole prompts, or are not shared."""

import logging
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import anchorlens as al
from anchorlens.contexts import compressed
from anchorlens.errors import PromptError
from anchorlens.metrics.question import no_hooks
from anchorlens.models import kv_cache
from anchorlens.passes import shortcuts
from anchorlens.passes.forward import run_pass, run_prefix
from anchorlens.runs.way import shared_lengths, way_of
from tests.support.asked import ask
from tests.support.measures import assert_same, is_shared
from tests.support.tiny_models import questions
from tests.support.unchanged import found_anew

pytestmark = [
    pytest.mark.filterwarnings("ignore:some pairs of classes have no prompts", "ignore:in layers"),
    pytest.mark.filterwarnings("ignore:in .* of .* sets"),
]
METRICS: list[al.Metric] = [
    *(al.AttentionAUCROC(), al.AnchorDistances(3), al.Accuracy()),
    *(al.LabelHeads(draws=2), al.SegmentAttention(["text", "label", "target"], apart=1)),
]
FLOWS: list[al.Metric] = [al.SaliencyFlows()]
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def test_shared_tokens_end_before_the_logits_that_a_loss_reads(gpt2: Any) -> None:
    """Logits in shared tokens come from no prompt, so that a loss would miss them."""
    batches = questions(gpt2, 5, batch_size=3)
    [(set_id, length)] = shared_lengths(batches, None).items()
    last = int(batches[0].label_ends.max())
    assert last + 2 < length - 1

    def reading(position: int) -> Any:
        """A loss of the token after a position, and of the target's token."""

        def chosen(batch: al.PromptBatch) -> torch.Tensor:
            return (batch.positions == position) | (
                batch.positions == batch.target_positions[:, None] - 1
            )

        return al.losses.next_token_cross_entropy(chosen)

    assert shared_lengths(batches, reading(length)) == {set_id: length}
    assert shared_lengths(batches, reading(length - 1)) == {set_id: length - 1}
    assert shared_lengths(batches, reading(last + 1)) == {set_id: last + 1}
    assert shared_lengths(batches, reading(last)) == shared_lengths(batches, reading(3)) == {}


def wrong_gradient(graph: Any, leaves: Any) -> Any:
    for leaf in leaves:
        leaf.grad *= 1.01
    return AT_POINTS(graph, leaves)


def wrong_values(*args: Any, **options: Any) -> Any:
    prefix = run_prefix(*args, **options)
    return replace(prefix, values=tuple(value * 1.001 for value in prefix.values))


fails = Mock(side_effect=RuntimeError("this cache does not fit"))
AT_POINTS = kv_cache.Graph.at_points
FAILED = "off: no run from a key-value cache (this cache does not fit)"


# What is wrong in the package, what is asked, and why nothing is shared then.
WRONG: list[tuple[Any, str, Any, list[al.Metric], str]] = [
    (kv_cache.Graph, "at_points", wrong_gradient, FLOWS, "off: saliencies differ by"),
    (kv_cache.Graph, "at_points", fails, FLOWS, FAILED),
    (shortcuts, "run_prefix", wrong_values, METRICS, "off: logits differ by"),
    (shortcuts, "run_prefix", fails, METRICS, FAILED),
]


@pytest.mark.slow("many passes")
def test_different_numbers_turn_sharing_off(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = questions(gpt2, 5)
    for owner, name, instead, asked, reason in WRONG:
        expected = al.run(gpt2, batches, asked, **QUIET)
        with monkeypatch.context() as patch, found_anew(gpt2):
            patch.setattr(owner, name, instead)
            results = al.run(gpt2, batches, asked, **QUIET)
        for each, record in results.items():
            assert record.info["shared_prefix"].startswith(reason)
            assert_same(record, expected[each])


def test_hooks_on_the_model_see_whole_prompts_in_each_pass(gpt2: Any) -> None:
    batches = questions(gpt2, 4, batch_size=2)
    lengths = list[int]()

    def note(resid: torch.Tensor, hook: Any) -> None:
        lengths.append(resid.shape[1])

    sweep = al.EdgeSweep.isolation({"last": al.Site(2)}, draws=1)
    al.run(gpt2, batches, [al.Accuracy(), sweep], **QUIET)  # which finds what the model allows
    with gpt2.hooks(fwd_hooks=[("blocks.0.hook_resid_post", note)]):
        al.run(gpt2, batches, [al.Accuracy(), sweep], **QUIET)
    # In the pass of the run, with cut edges, and with others that are drawn.
    assert lengths == [batch.tokens.shape[1] for batch in batches for _ in range(3)]


@pytest.mark.parametrize(("second", "hidden", "shared"), [(1, [], [4]), (0, [], []), (1, [2], [])])
def test_prompts_with_other_label_positions_or_a_gap_in_the_mask_share_nothing(
    gpt2: Any, second: int, hidden: list[int], shared: list[int]
) -> None:
    tokens = torch.tensor([[5, 1, 6, 2, 7, 8], [5, 1, 6, 2, 9, 8]])
    mask = torch.ones_like(tokens).bool()
    mask[:, hidden] = False
    batch = al.PromptBatch.from_positions(
        tokens,
        label_positions=[[1, 3], [second, 3]],
        label_classes=[[0, 1]] * 2,
        label_token_ids=[1, 2],
        attention_mask=mask,
    )
    lengths = way_of(gpt2, [batch], [no_hooks]).lengths
    assert lengths == dict(zip(batch.demonstrations_id.tolist(), shared))  # noqa: B905


@pytest.mark.parametrize("side", ["padded_right", "padded_left"])
def test_a_gap_after_the_labels_stays_in_the_prompt(side: str) -> None:
    """The width of a prompt includes its gaps."""
    batch = al.PromptBatch.from_positions(
        torch.tensor([[0, 5, 1, 6, 2, 7, 8, 0]]),
        label_positions=[[2, 4]],
        label_classes=[[0, 1]],
        label_token_ids=[1, 2],
        attention_mask=torch.tensor([[0, 1, 1, 1, 1, 0, 1, 0]]),
    )
    padded = getattr(batch, side)()
    assert padded.tokens.tolist() == [[5, 1, 6, 2, 7, 8]]
    assert (padded.label_positions.tolist(), padded.target_positions.tolist()) == ([[1, 3]], [5])


def test_prompts_must_begin_where_the_prefix_ends(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 3)
    ready = replace(batch, first_query=12)
    prefix = run_prefix(gpt2, batch.prompt(0).before(12))
    assert run_pass(gpt2, ready, prefix=prefix).isfinite().all()
    for wrong, other_prefix in (
        (ready, None),
        (batch, prefix),
        (replace(batch, first_query=3), prefix),
    ):
        with pytest.raises(PromptError, match="a batch of whole prompts has first_query=0"):
            run_pass(gpt2, wrong, prefix=other_prefix)
    with pytest.raises(PromptError, match="run from position 12, but keys of 0 tokens"):
        al.contexts.train_reweighting(gpt2, [ready], al.contexts.Training(steps=1, progress=False))


def test_padding_moves_from_one_side_to_the_other(gpt2: Any) -> None:
    (right,) = questions(gpt2, 6)
    (left,) = questions(gpt2, 6, padding_side="left")
    for ours, theirs in ((left.padded_right(), right), (right.padded_left(), left)):
        for name, value in vars(theirs).items():
            moved = getattr(ours, name)
            if name == "tokens":
                moved, value = moved[ours.attention_mask], value[theirs.attention_mask]
            same = torch.equal(moved, value) if isinstance(value, torch.Tensor) else moved == value
            assert same, name


def test_an_unexpected_error_is_logged(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake of the package is an error of the tests, although the run only gets slower."""
    batches = questions(gpt2, 4)
    with monkeypatch.context() as patch, found_anew(gpt2):
        patch.setattr(shortcuts, "run_prefix", int)  # takes no such arguments
        with pytest.raises(AssertionError, match="by a mistake of"):  # see RaisedLog in conftest.py
            al.run(gpt2, batches, [al.Accuracy()], **QUIET)
        patch.setattr(logging.getLogger("anchorlens"), "handlers", [])
        info = al.run(gpt2, batches, [al.Accuracy()], **QUIET)["accuracy"].info
    assert "no run from a key-value cache (TypeError: " in info["shared_prefix"]
    (record,) = caplog.records
    assert record.levelname == "DEBUG" and "TypeError" in caplog.text


def test_out_of_memory_in_a_trial_is_raised(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, full = questions(gpt2, 2)[0], torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(compressed, "run_prefix", Mock(side_effect=full))
    with pytest.raises(torch.OutOfMemoryError):
        al.compress(gpt2, batch)


def test_prefixes_that_do_not_fit_into_free_memory_are_computed_again(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = questions(gpt2, 6, batch_size=2)
    sweep = al.EdgeSweep.isolation({"first": al.Site(0), "last": al.Site(2)}, draws=1)
    expected = ask(gpt2, batches, sweep, **QUIET)
    monkeypatch.setattr(kv_cache, "free_for_layers", lambda devices: 0)
    ours = ask(gpt2, batches, sweep, **QUIET)
    assert is_shared(ours)
    assert_same(ours, expected)
