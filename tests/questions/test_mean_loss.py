"""Mean losses, compared with plain transformers whose heads are cut by hand."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.models.kinds import original_of
from anchorlens.runs import way
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 20, "progress": False}
TEXTS = [
    "The museum opens at ten. The library opens at nine, and closes late.",
    "Who wrote it? Nobody knows who wrote it.",
    "Ben has pears. Anna has red apples. The apples are of Anna.",
]
CUT = {0: [1], 2: [0]}  # heads by layer


def late(batch: al.PromptBatch) -> Tensor:
    """The second half of each text, each of its predicted tokens with the same weight."""
    has_next = batch.attention_mask & ~al.edges.target(batch)
    start = (batch.starts + batch.target_positions) // 2
    chosen = (has_next & (batch.positions >= start[:, None])).double()
    return chosen / chosen.sum(1, keepdim=True)


def without_heads(model: Any, heads: dict[int, list[int]]) -> Any:
    zeros = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_head)

    def hooks(batch: al.PromptBatch) -> Any:
        site, tokens = al.Site(heads=heads), batch.attention_mask
        return al.replace_heads(model, batch, zeros, site, positions=tokens)

    return hooks


def plain_losses(model: Any, weights: Any, heads: dict[int, list[int]]) -> Tensor:
    size, handles = model.cfg.d_head, []
    for layer, module in weights.named_modules():
        if layer.endswith(("attn.c_proj", "self_attn.o_proj")):
            cut = heads.get(int(layer.split(".")[-3]), [])

            def silence(module: Any, inputs: Any, cut: list[int] = cut) -> Any:
                z = inputs[0].unflatten(-1, (-1, size)).clone()
                z[:, :, cut] = 0
                return (z.flatten(2),)

            handles.append(module.register_forward_pre_hook(silence))
    assert len(handles) == model.cfg.n_layers
    losses = []
    for text in TEXTS:
        (alone,) = al.build_segments(model.tokenizer, [text])
        ids = alone.tokens
        with torch.no_grad():
            logits = weights(ids).logits[0, :-1]
        of_tokens = cross_entropy(logits, ids[0, 1:], reduction="none")
        losses.append(of_tokens[(ids.shape[1] - 1) // 2 :].mean())
    for handle in handles:
        handle.remove()
    return torch.stack(losses)


def test_losses_at_chosen_positions_are_those_of_plain_transformers(exact_model: Any) -> None:
    model, size = exact_model, exact_model.W_E.shape[0]
    make = tiny_gpt2 if "gpt2" in original_of(model).config.model_type else tiny_gemma3
    plain = make(size).double()
    asked = al.Loss(al.losses.next_token_cross_entropy(late))
    batches = al.build_segments(model.tokenizer, TEXTS, batch_size=2)
    record = al.run(model, batches, [asked], hooks=without_heads(model, CUT), **QUIET)["loss"]
    clean, changed = (plain_losses(model, plain, heads) for heads in ({}, CUT))
    assert difference(record.loss_per_prompt, changed) < 1e-10
    assert difference(record.clean_loss_per_prompt, clean) < 1e-10
    assert abs(float(record.change - (changed - clean).mean())) < 1e-10
    assert float((changed - clean).abs().min()) > 1e-4
    low, high = record.intervals["change"]
    assert low < record.change < high
    unchanged = al.run(model, batches, [asked], **QUIET)["loss"]
    assert torch.equal(unchanged.loss_per_prompt, record.clean_loss_per_prompt)
    assert unchanged.change == 0


def test_hooks_that_change_no_loss_are_told(gpt2: Any) -> None:
    """By default heads are replaced at the target, after which a text ends."""
    asked = [al.Loss(al.losses.span_cross_entropy("text"))]
    with pytest.warns(UserWarning, match="hooks change the loss of no prompt; .*positions="):
        record = al.run(
            gpt2,
            al.build_segments(gpt2, TEXTS),
            asked,
            hooks=lambda batch: al.replace_heads(gpt2, batch, 0.0, 1),
            **QUIET,
        )["loss"]
    assert record.change == 0


def test_losses_of_labels_are_means_over_sets_in_every_way(exact_gpt2: Any) -> None:
    batches = [*questions(exact_gpt2, 4, batch_size=2), *questions(exact_gpt2, 4, seed=2)]
    cut = without_heads(exact_gpt2, CUT)
    asked = [
        al.Loss(al.losses.label_cross_entropy),
        al.Loss(al.losses.word_cross_entropy(), name="words"),
    ]
    results = al.run(exact_gpt2, batches, asked, hooks=cut, **QUIET)
    record = results["loss"]
    hooked = al.target_logits(exact_gpt2, batches, hooks=cut, progress=False)
    clean = al.target_logits(exact_gpt2, batches, progress=False)
    gold = torch.cat([batch.gold for batch in batches if batch.gold is not None])
    order = torch.cat([batches[n].index + 4 * (n > 1) for n in range(3)]).argsort()
    ids = batches[0].label_token_ids
    for logits, found in ((hooked, record.loss_per_prompt), (clean, record.clean_loss_per_prompt)):
        expected = cross_entropy(logits[:, ids], gold[order], reduction="none")
        assert difference(found, expected) < 1e-10
    assert difference(record.loss, record.loss_per_prompt.view(2, 4).mean(1).mean()) < 1e-12
    assert difference(results["words"].loss_per_prompt, record.loss_per_prompt) < 1e-10
    with patch.object(way, "LARGE", 0):
        fused = al.run(exact_gpt2, batches, asked[:1], **QUIET)["loss"]
    assert "fused" in fused.info["attention"]
    assert difference(fused.loss_per_prompt, record.clean_loss_per_prompt) < 1e-10


def test_a_loss_that_does_not_fit_is_refused_before_any_pass(gpt2: Any) -> None:
    (text,) = al.build_segments(gpt2.tokenizer, TEXTS[:1])
    with pytest.raises(MetricError, match="needs the true label of each query"):
        al.run(gpt2, [text], [al.Loss(al.losses.label_cross_entropy)], **QUIET)
    with pytest.raises(MetricError, match=r"loss.*one number"):
        al.run(gpt2, [text], [al.Loss(lambda logits, batch: logits)], **QUIET)
    of_text = al.losses.span_cross_entropy("text")
    with pytest.raises(MetricError, match=r"no question .* takes its loss: loss need .*al\.Loss\("):
        al.run(gpt2, [text], [al.Loss(of_text)], loss=of_text, **QUIET)
