"""Suppression of segments, as documented, against plain transformers with masks of four axes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

import anchorlens as al
from anchorlens.errors import PromptError
from tests.support.asked import ask
from tests.support.measures import does_not_run
from tests.support.printed_code import printed
from tests.support.tiny_models import questions, tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
Suppression = printed("own_question.md", "Suppression")
NAMES = ("question", "step", "answer")
TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30], [0, 0, 17, 4, 25, 9, 60, 12, 33]])
MASK = torch.tensor([[1] * 9, [0, 0, *[1] * 7]])
# The step of the first prompt is scattered, and the second prompt has none.
SEGMENTS = [[0, 0, 1, -1, 0, 1, 2, -1, 2], [-1, -1, 0, 0, -1, 0, 2, -1, 2]]


@pytest.fixture
def batch() -> al.PromptBatch:
    return al.PromptBatch.from_segments(TOKENS, SEGMENTS, NAMES, attention_mask=MASK)


def plain_kl(weights: Any, tokens: Tensor, segments: list[int]) -> Tensor:
    count = len(tokens)

    def log_probs(allowed: Tensor) -> Tensor:
        mask = torch.zeros(count, count, dtype=torch.double)
        mask.masked_fill_(~allowed, torch.finfo(torch.double).min)
        with torch.no_grad():
            out = weights(tokens[None], attention_mask=mask[None, None], use_cache=False)
        return out.logits[0].log_softmax(-1)

    causal = torch.ones(count, count, dtype=torch.bool).tril()
    clean, result = log_probs(causal), torch.full((3, 3), torch.nan, dtype=torch.double)
    for s in range(3):
        inside = [j for j in range(count) if segments[j] == s]
        if not inside:
            continue
        allowed = causal.clone()
        for i in range(inside[-1] + 1, count):
            allowed[i, inside] = False
        suppressed = log_probs(allowed)
        for a in range(3):
            values = [
                kl_div(suppressed[t], clean[t], reduction="sum", log_target=True)
                for t in range(inside[-1] + 1, count - 1)
                if segments[t + 1] == a
            ]
            if values:
                result[a, s] = torch.stack(values).mean()
    return result


@pytest.mark.quick_cases("many passes", "right")
@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_it_equals_plain_transformers(
    side: str, exact_gpt2: Any, byte_level: Any, batch: al.PromptBatch, kind_of_model: str
) -> None:
    model = exact_gpt2
    given = batch if side == "left" else batch.padded_right()
    record = ask(model, [given], Suppression(NAMES), **QUIET)
    weights: Any = tiny_gpt2(len(byte_level)).double()
    weights.set_attn_implementation("eager")
    prompts = zip(TOKENS, batch.segments, batch.attention_mask, strict=True)
    stacked = torch.stack([plain_kl(weights, row[m], of[m].tolist()) for row, of, m in prompts])
    assert stacked[0].isfinite().tolist() == [[False] * 3, [False] * 3, [True, True, False]]
    assert stacked[1].isfinite().tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    assert (stacked[stacked.isfinite()] > 1e-3).all()
    # The processed weights of other kinds went through float32.
    tolerance = 1e-10 if kind_of_model == "bridge" else 2 * torch.finfo(torch.float32).eps
    options: dict[str, Any] = {"rtol": 0, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(record.kl_of_prompts, stacked, **options)
    torch.testing.assert_close(record.kl, stacked.nanmean(0), **options)


def test_label_words_are_a_scattered_segment(gpt2: Any) -> None:
    batches = questions(gpt2, 3, batch_size=2, padding_side="left")
    record = ask(gpt2, batches, Suppression(("label", "query")), **QUIET)
    assert record.axis_names("segment") == ("label", "query")
    assert float(record.kl[1, 0]) > 0 and int(record.kl.isfinite().sum()) == 1
    with pytest.raises(PromptError, match="there is no segment 'reply'"), does_not_run(gpt2):
        ask(gpt2, batches, Suppression(("reply",)), **QUIET)
