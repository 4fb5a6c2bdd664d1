"""Tests of loyalty against slow Python sets, of ties, of KL, and of errors."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.passes.forward import run_pass
from tests.support.tiny_models import questions


def pair(seed: int = 0, size: int = 40, vocab: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randn(size, vocab, generator=generator)
    return clean, clean + 0.7 * torch.randn(size, vocab, generator=generator)


@pytest.mark.parametrize("top", [1, 5, 10, 30])
def test_loyalty_equals_slow_python_sets(top: int) -> None:
    clean, changed = pair()
    ids = [7, 3, 11]
    record = al.metrics.loyalty(clean, changed, torch.tensor(ids), top=top)
    equal, overlap = [], []
    for a, b in zip(clean.tolist(), changed.tolist(), strict=True):
        equal.append(max(ids, key=a.__getitem__) == max(ids, key=b.__getitem__))
        best_a = set(sorted(range(30), key=lambda word: -a[word])[:top])
        best_b = set(sorted(range(30), key=lambda word: -b[word])[:top])
        overlap.append(len(best_a & best_b) / len(best_a | best_b))
    assert 0 < sum(equal) < 40
    assert record.label_kept.tolist() == [float(same) for same in equal]
    assert record.word_overlap.tolist() == pytest.approx(overlap)
    assert float(record.label_loyalty) == pytest.approx(sum(equal) / 40)
    assert float(record.word_loyalty) == pytest.approx(sum(overlap) / 40)


def test_kl_equals_pytorch() -> None:
    clean, changed = pair()
    record = al.metrics.loyalty(clean, changed, torch.tensor([0, 1]))
    clean, changed = clean.double(), changed.double()
    expected = torch.nn.functional.kl_div(
        changed.log_softmax(-1), clean.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(record.kl_per_prompt, expected)
    torch.testing.assert_close(record.kl, expected.mean())
    assert float(record.kl) > 0


@pytest.mark.filterwarnings("ignore:3 of 3 prompts have two labels with equal scores")
def test_ties_go_to_the_lowest_class() -> None:
    clean = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 0.0]])
    changed = torch.tensor([[0.0, 2.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    label_kept = al.metrics.loyalty(clean, changed, torch.tensor([1, 2]), top=2).label_kept
    assert label_kept.tolist() == [1.0, 1.0, 0.0]
    label_kept = al.metrics.loyalty(clean, changed, torch.tensor([2, 1]), top=2).label_kept
    assert label_kept.tolist() == [0.0, 0.0, 1.0]


def test_low_precision_logits_give_the_same_as_float32() -> None:
    clean, changed = (logits.bfloat16() for logits in pair())
    record = al.metrics.loyalty(clean, changed, torch.tensor([0, 1]))
    wide = al.metrics.loyalty(clean.float(), changed.float(), torch.tensor([0, 1]))
    for name, values in record.tensors().items():
        torch.testing.assert_close(values, getattr(wide, name))


def test_of_bare_texts_the_likeliest_token_is_the_label(gpt2: Any) -> None:
    batches = al.build_segments(gpt2.tokenizer, ["Who was it?", "Where is the red house?"])

    def hooks(batch: al.PromptBatch) -> Any:
        return al.block_edges(gpt2, batch, al.edges.previous_token, range(3))

    record = al.run(gpt2, batches, [al.Loyalty()], hooks=hooks, progress=False)["loyalty"]
    clean, changed = (
        al.target_logits(gpt2, batches, hooks=each, progress=False) for each in (None, hooks)
    )
    assert record.label_kept.tolist() == (clean.argmax(1) == changed.argmax(1)).double().tolist()
    kl = (clean.softmax(1) * (clean.log_softmax(1) - changed.log_softmax(1))).sum(1)
    torch.testing.assert_close(record.kl_per_prompt.float(), kl, atol=1e-6, rtol=1e-4)


def test_loyalty_of_a_run_equals_loyalty_of_its_logits(gpt2: Any) -> None:
    batches = questions(gpt2, 9, batch_size=4)

    def hooks(batch: al.PromptBatch) -> Any:
        return al.isolate_labels(gpt2, batch, range(2))

    options: dict[str, Any] = {"hooks": hooks, "resamples": 20, "progress": False}
    results = al.run(gpt2, batches, [al.Loyalty(top=3)], **options)
    clean, changed = torch.empty(2, 9, gpt2.W_E.shape[0])
    for batch in batches:
        clean[batch.index] = run_pass(gpt2, batch)
        changed[batch.index] = run_pass(gpt2, batch, hooks=hooks(batch))
    expected = al.metrics.loyalty(clean, changed, batches[0].label_token_ids, top=3)
    for name, values in results["loyalty"].tensors().items():
        torch.testing.assert_close(values, getattr(expected, name))
    assert set(results["loyalty"].intervals) == {"label_loyalty", "word_loyalty", "kl"}
