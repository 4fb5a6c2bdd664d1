"""What contexts do to attention: as demonstrations as a prefix, and checked before they run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.experiments.prefix_effect import effect_contributions
from tests.support.asked import ask
from tests.support.measures import assert_same
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def every_demonstration(batch: al.PromptBatch) -> Tensor:
    return al.edges.demonstrations(batch)


@pytest.mark.every_kind
def test_a_context_of_all_tokens_acts_as_the_demonstrations(model: Any) -> None:
    """Without a BOS the whole context is the prefix; with one BOS is content in both."""
    batches = questions(model, 5, batch_size=3)
    metric = al.PrefixEffect(keys={"context": every_demonstration})
    expected = al.run(model, batches, [metric], **QUIET)["prefix_effect"]
    context = al.compress(model, batches[0], select=al.contexts.selection.everything)
    effect = ask(model, batches, al.PrefixEffect(context=context), **QUIET)
    rounding: dict[str, Any] = {"invariance": torch.zeros(3).double()}
    assert_same(replace(effect, **rounding), replace(expected, **rounding), 1e-4)
    assert effect.indirect[0] == 0 and effect.invariance.max() < 1e-5


@pytest.mark.slow("many passes")
def test_a_context_of_some_tokens_acts_as_these_keys(gpt2: Any, tmp_path: Any) -> None:
    """It acts as the whole prompt without the edges from the query to the other tokens."""
    batches = questions(gpt2, 4)
    context = al.compress(gpt2, batches[0], select=al.contexts.selection.anchors_and_format)
    asked = al.PrefixEffect(context=context, rows=al.edges.target)
    effect = ask(gpt2, batches, asked, **QUIET)
    for _ in range(2):  # computed, then stored
        assert_same(ask(gpt2, batches, asked, folder=tmp_path, **QUIET), effect, 0)
    (batch,) = batches
    metric = al.PrefixEffect(
        keys={"context": lambda batch: al.edges.demonstrations(batch) & selected(batch, context)},
        rows=al.edges.target,
    )
    dropped = al.edges.demonstrations(batch) & ~selected(batch, context)
    hooks = al.block_edges(gpt2, batch, al.edges.between(al.edges.query(batch), dropped), range(3))
    query_pass = al.contexts.QueryPass(batch, None, hooks)
    rows = effect_contributions(gpt2, query_pass, metric.segments_of(batch), metric.rows_of(batch))
    expected = metric.result(al.Contributions(rows))
    for name in ("stolen", "direct", "concentration", "effective_rank", "spread"):
        assert getattr(effect, name).allclose(getattr(expected, name), atol=1e-5), name
    assert (effect.indirect - expected.indirect).abs().max() < 1e-5
    whole = al.run(gpt2, batches, [al.PrefixEffect(rows=al.edges.target)], **QUIET)
    assert float((whole["prefix_effect"].stolen - effect.stolen).min()) > 0


@pytest.mark.slow("many passes")
def test_the_keys_of_a_context_are_divided_into_segments(gpt2: Any) -> None:
    batches = questions(gpt2, 4)
    keys = al.PrefixEffect().keys
    context = al.compress(gpt2, batches[0], select=al.contexts.selection.everything)
    effect = ask(gpt2, batches, al.PrefixEffect(context=context, keys=keys), **QUIET)
    expected = al.run(gpt2, batches, [al.PrefixEffect()], **QUIET)["prefix_effect"]
    assert effect.axis_names("segment") == expected.axis_names("segment")
    assert effect.stolen_by_segment.allclose(expected.stolen_by_segment, atol=1e-6)
    # Two of the label words are stored, at other columns than in the prompt.
    (batch,) = batches
    positions, ends = batch.label_positions[0, [1, 4]], batch.label_ends[0, [1, 4]]
    assert torch.equal(positions, ends)

    def select(demonstrations: al.PromptBatch) -> Tensor:
        stored = torch.zeros_like(demonstrations.attention_mask[0])
        stored[positions], stored[7] = True, True
        return stored

    context = al.compress(gpt2, batch, select=select)
    assert context.is_cut
    queries = context.query_pass(gpt2, batch).batch
    assert queries.label_positions.tolist() == [[1, 2]] * 4
    assert queries.label_classes.equal(batch.label_classes[:, [1, 4]])
    effect, of_anchors = (
        ask(gpt2, batches, al.PrefixEffect(context=context, keys=given), **QUIET)
        for given in (keys, {"anchors": al.edges.anchors})
    )
    of_text, of_labels = effect.stolen_by_segment.unbind(-1)[:2]
    assert (of_text > 1e-4).all() and (of_labels > 1e-4).all()
    assert effect.stolen_by_segment[..., 2:].sum() == 0
    assert of_anchors.stolen.equal(of_labels)


def selected(batch: al.PromptBatch, context: al.contexts.CompressedContext) -> Tensor:
    mask = torch.zeros_like(batch.attention_mask)
    mask[:, : len(context.selected)] = context.selected
    return mask


def test_nothing_before_the_query_does_nothing(llama: Any) -> None:
    nothing = al.PrefixEffect(context=al.contexts.NoContext())
    effect = ask(llama, questions(llama, 3), nothing, **QUIET)
    for name in ("stolen", "direct", "indirect"):
        assert not getattr(effect, name).any(), name
    assert (effect.bos > 0).all()
    assert effect.concentration.isnan().all() and effect.spread.isnan().all()


@pytest.mark.slow("many passes")
def test_wrong_contexts_and_rows_are_refused(gpt2: Any) -> None:
    batches = questions(gpt2, 3)
    context = al.compress(gpt2, batches[0])
    with pytest.raises(MetricError, match="positions of every query"):
        ask(gpt2, batches, al.PrefixEffect(context=context, rows=al.edges.demonstrations), **QUIET)
    parts: Any = al.PrefixEffect().keys
    no_text = al.compress(gpt2, batches[0], select=al.contexts.selection.label_words)
    with pytest.raises(MetricError, match="hold no token of some prompt"):
        asked = al.PrefixEffect(context=no_text, keys={"text": parts["text"]})
        ask(gpt2, batches, asked, **QUIET)
    for draw in (al.PrefixEffect.plot_pattern, al.PrefixEffect.plot_directions):
        with pytest.raises(MetricError, match="there is no prefix"):
            draw(al.PrefixEffect(context=al.contexts.NoContext()), gpt2, batches[0], 0, 0)


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.every_kind
def test_the_figures_of_all_tokens_as_a_context_are_those_of_the_demonstrations(model: Any) -> None:
    batch = questions(model, 4)[0]
    context = al.compress(model, batch, select=al.contexts.selection.everything)
    expected = al.PrefixEffect().plot_pattern(model, batch, 1, 1, prompt=2)
    of_context = al.PrefixEffect(context=context)
    figure = of_context.plot_pattern(model, batch, 1, 1, prompt=2)
    for panel, panel_expected in zip(figure.data, expected.data, strict=True):
        values, wanted = (torch.tensor(p.z, dtype=torch.double) for p in (panel, panel_expected))
        assert values.allclose(wanted, atol=1e-5, equal_nan=True)
    assert figure.layout.xaxis.ticktext == expected.layout.xaxis.ticktext
    assert figure.layout.yaxis.ticktext == expected.layout.yaxis.ticktext
    (dots,) = of_context.plot_directions(model, batch, -1, 0).data
    (wanted_dots,) = al.PrefixEffect().plot_directions(model, batch, -1, 0).data
    scale = max(map(abs, wanted_dots.x))
    # The sign of a singular direction is arbitrary.
    assert [*map(abs, dots.x)] == pytest.approx([*map(abs, wanted_dots.x)], abs=1e-4 * scale)
    assert [*map(abs, dots.y)] == pytest.approx([*map(abs, wanted_dots.y)], abs=1e-3 * scale)


@pytest.mark.slow("many passes")
def test_the_figures_of_a_context_name_its_keys(llama: Any) -> None:
    """Learned keys belong to no token; those of a hard prompt do, and BOS is not learned."""
    batches = questions(llama, 2, batch_size=1)
    learned = al.train_prefix(
        llama, batches[:1], training=al.contexts.Training(steps=0), held_out=batches[1:], length=2
    )
    tokens = al.contexts.hard_prompts.of_tokens(llama, [300, 301], held_out=batches)
    names = []
    for context in (learned, tokens):
        asked = al.PrefixEffect(context=context)
        figure = asked.plot_pattern(llama, batches[0], 1, 1)
        names.append(figure.layout.xaxis.ticktext[:3:2])  # every second one is written
        stolen = torch.tensor(figure.data[1].z)[:, 1:3].sum(1)
        effect = ask(llama, batches[:1], asked, **QUIET)
        assert float(effect.stolen[1, 1]) == pytest.approx(float(stolen.mean()), abs=1e-5)
    assert names[0][1] == "learned_1"
    assert names[1] == (names[0][0], llama.tokenizer.decode(301))
    one = al.train_prefix(
        llama, batches[:1], training=al.contexts.Training(steps=0), held_out=batches[1:], length=1
    )
    of_one = al.PrefixEffect(context=one)
    (dots,) = of_one.plot_directions(llama, batches[0], -1, 0).data
    assert max(map(abs, dots.y)) < 1e-6 * max(map(abs, dots.x))
