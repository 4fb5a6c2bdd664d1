"""Prompts whose two highest scores of labels are equal are counted and warned of."""

from typing import Any

import pytest
import torch

import anchorlens as al
from tests.support.tiny_models import questions, tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
EQUAL = "of 4 prompts have two labels with equal scores"


@pytest.fixture(scope="module")
def tied(byte_level: Any) -> tuple[Any, list[al.PromptBatch]]:
    """A model that gives the first and the third label equal scores, and prompts."""
    weights = tiny_gpt2(len(byte_level), tie_word_embeddings=False)
    weights.lm_head.weight = torch.nn.Parameter(weights.lm_head.weight.clone())
    model = al.load_model(weights, tokenizer=byte_level)
    batches = questions(model, 4, batch_size=3)
    tokens = batches[0].label_token_ids
    with torch.no_grad():
        rows = model.unembed.original_component.weight
        rows[tokens] = rows[tokens[0]] * torch.linspace(1, 0.1, len(tokens))[:, None]
        rows[tokens[2]] = rows[tokens[0]]
    return model, batches


@pytest.mark.filterwarnings("ignore:in . of . sets of demonstrations")
@pytest.mark.parametrize("kind", ["run", "caches", "loyalty", "study"])
def test_ties_are_counted_and_said(kind: str, tied: Any) -> None:
    model, batches = tied
    logits = al.target_logits(model, batches, progress=False)
    tokens = batches[0].label_token_ids
    first, second = logits[:, tokens].topk(2).values.T
    count = int((first == second).sum())
    assert count > 0
    asked = [al.Accuracy(), al.AttentionAUCROC(), al.SegmentAttention()]
    with pytest.warns(UserWarning, match=f"^{count} {EQUAL}, the highest") as told:
        records: Any
        if kind == "run":
            records = al.run(model, batches, asked, **QUIET)
        elif kind == "caches":
            passes = (model.run_with_cache(batch.tokens) for batch in batches)
            records = al.caches.from_caches(asked, batches, passes, model=model, resamples=0)
        elif kind == "study":
            context = al.ContextComparison({"nothing": al.contexts.NoContext()}, repeats=0)
            records = al.run(model, batches, [context], **QUIET)
        else:
            records = {"accuracy": al.metrics.loyalty(logits, logits, tokens)}
    assert len([each for each in told if EQUAL in str(each.message)]) == 1
    for name, record in records.items():
        expected = None if name == "segment_attention" else f"{count} of 4 prompts"
        assert record.info.get("ties") == expected


def test_scores_that_differ_are_no_ties(gpt2: Any) -> None:
    assert "ties" not in al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], **QUIET)["accuracy"].info
