"""A batch with padding on either side gives the numbers of each prompt alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import HookError, PromptError
from tests.references.architectures import BY_NAME
from tests.support.hooked_transformers import with_its_bos
from tests.support.measures import assert_same, difference
from tests.support.tiny_models import questions, tiny_gemma3

pytestmark = pytest.mark.every_kind
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TASK = al.Task("{text} ->{label}", labels=(" Location", " Human"))
DEMONSTRATIONS = [al.Example("Where", 0), al.Example("Who", 1)]
LONG = (
    "In which town on the banks of the wide river that flows through the capital "
    "did the author live as a child?"
)
QUERIES = [al.Example("Who?", 1), al.Example(LONG, 0)]


# Attention has a temperature that depends on the column.
TEMPERED: dict[str, Any] = {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5}
TEMPERED |= {"max_position_embeddings": 512, "attention_chunk_size": 512}


@pytest.mark.slow("many passes")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_model_that_counts_columns(byte_level: Any, side: Any) -> None:
    weights = BY_NAME["Llama 4"].build(len(byte_level), **TEMPERED)
    model = al.load_model(weights, tokenizer=with_its_bos(byte_level))
    (batch,) = al.build_prompts(
        byte_level, TASK, DEMONSTRATIONS, QUERIES, padding_side=side, batch_size=2
    )
    check_each_alone(model, batch)
    training = al.contexts.Training(steps=2, progress=False)
    beta, other = (
        al.contexts.train_reweighting(model, [each], training).beta
        for each in (batch, batch.padded_right())
    )
    assert difference(beta, other) < 1e-5


@pytest.mark.slow("many passes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_is_longer_than_a_window_changes_nothing(
    sentencepiece_like: Any, hooked: Any, side: Any, dtype: torch.dtype
) -> None:
    """Some rows of padding then have no token to attend to."""
    weights: Any = tiny_gemma3(len(sentencepiece_like))
    model = hooked(weights.to(dtype), sentencepiece_like)
    (batch,) = al.build_prompts(
        sentencepiece_like, TASK, DEMONSTRATIONS, QUERIES, padding_side=side, batch_size=2
    )
    short, long = batch.attention_mask.sum(1).tolist()
    assert long - short > 24
    check_each_alone(model, batch)


def check_each_alone(model: Any, batch: al.PromptBatch) -> None:
    isolation = al.EdgeSweep.isolation({"isolated": al.Site(range(2))}, draws=1)
    whole = al.run(model, [batch], [al.SaliencyFlows(), isolation], **QUIET)
    maps, logits = al.saliency(model, batch), al.target_logits(model, [batch], progress=False)
    for row, number in enumerate(batch.index.argsort().tolist()):
        prompt, inside = batch.prompt(number), batch.attention_mask[number]
        alone = al.run(model, [prompt], [al.SaliencyFlows(), isolation], **QUIET)
        flows, overlap = whole["saliency_flows"].per_prompt, whole["isolation"].word_overlap
        assert difference(flows[row], alone["saliency_flows"].per_prompt[0]) < 1e-5
        assert torch.equal(overlap[row], alone["isolation"].word_overlap[0])
        expected = al.target_logits(model, [prompt], progress=False)[0]
        assert difference(logits[row], expected) < 1e-5
        between_tokens = inside[:, None] & inside
        of_prompt = al.saliency(model, prompt)[0]
        assert difference(maps[number][:, between_tokens], of_prompt.flatten(1)) < 1e-5
        assert not maps[number][:, ~between_tokens].any()
    metrics = [al.AttentionAUCROC(), al.AnchorDistances(1)]
    of_sides = [al.run(model, [each], metrics, **QUIET) for each in (batch, batch.padded_right())]
    for name, record in of_sides[0].items():
        assert_same(record, of_sides[1][name], 0)


def test_hooks_of_the_user_are_not_moved_silently(gpt2: Any) -> None:
    """They may hold positions of the batch as it was given."""
    (left,) = questions(gpt2, 3, padding_side="left")
    (right,) = questions(gpt2, 3)
    edges = al.edges.pq(left)

    def change(batch: al.PromptBatch) -> Any:
        return al.block_edges(gpt2, batch, edges, 0)

    for call in (
        lambda: al.run(gpt2, [left], [al.Accuracy()], hooks=change, **QUIET),
        lambda: al.target_logits(gpt2, [left], hooks=change, progress=False),
    ):
        with pytest.raises(PromptError, match=r"belong to padding.*make them of this batch"):
            call()
    logits, expected = (
        al.target_logits(
            gpt2, [each], hooks=lambda batch: al.isolate_labels(gpt2, batch, 0), progress=False
        )
        for each in (left, right)
    )
    assert torch.equal(logits, expected)


def test_hooks_of_other_prompts_are_refused(gpt2: Any) -> None:
    """Hooks of another batch of the same shape would cut at the positions of that batch."""
    first, second = (batch.prompt(0) for batch in questions(gpt2, 2, batch_size=1))
    second = replace(first, tokens=first.tokens.flip(1), index=second.index)
    cut = al.isolate_labels(gpt2, first, 0)
    beta = torch.zeros(3, 2, first.label_positions.shape[1])
    for hooks in (cut, al.reweight_anchors(gpt2, first, beta)):

        def of_first(batch: al.PromptBatch, hooks: Any = hooks) -> Any:
            return hooks

        with pytest.raises(HookError, match="made for other prompts"):
            al.run(gpt2, [first, second], [al.Accuracy()], hooks=of_first, **QUIET)
    (left,) = questions(gpt2, 3, padding_side="left")
    cut_on_the_left = al.isolate_labels(gpt2, left, 0)
    with pytest.raises(HookError, match="made for other prompts"):
        al.target_logits(gpt2, [left], hooks=lambda batch: cut_on_the_left, progress=False)
    assert al.run(gpt2, [first], [al.Accuracy()], hooks=lambda batch: cut, **QUIET)
