"""A fused attention has the logits and products of whole patterns, on every architecture, or none.

The numbers of whole patterns are those of plain transformers (see test_matrix.py).
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gptj import modeling_gptj

import anchorlens as al
from anchorlens.metrics.question import no_hooks
from anchorlens.models.batch_hooks import in_leading_tokens
from anchorlens.models.hooked import Hook
from anchorlens.models.kv_cache import shared_tokens
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.models.native_pass import Interface
from anchorlens.models.replaced_attention import attention_by
from anchorlens.passes.forward import run_pass, run_prefix
from anchorlens.passes.fused_attention import run_fused
from anchorlens.passes.provide import product_hooks
from anchorlens.passes.shortcuts import why_no_fused_prefix
from tests.models.test_matrix import cases, hooked
from tests.references.architectures import ALL
from tests.references.comparison import CUT_HEADS, batch_of, precise
from tests.support.measures import difference

# Their attention is written in the code of the model, or is of TransformerLens's own models.
NOT_REPLACED = {
    *(() if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS") else ("GPT-J",)),  # from 5.24 on
    *("GPT-Neo", "Bloom", "MPT", "Falcon", "Falcon (ALiBi)", "CodeGen", "XGLM"),
    *(row.name for row in ALL if row.name.startswith("Toy")),
}
# A bridge caches keys of each head, and transformers what they are computed from (5.24).
LATENT = ("DeepSeek V2", "DeepSeek V3")
LIMIT = 1e-12  # in float64
OTHER_TERMS: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "its mask has numbers that are added"),
    ({"position_bias": torch.zeros(1, 1, 4, 4)}, "its attention .* adds a bias to the scores"),
    ({"dropout": 0.1}, "its attention has dropout"),
    ({"is_causal": False}, "its attention has no mask, and is not causal"),
]
SIDES = dict(zip([row.name for row in ALL], cycle(("left", "right")), strict=False))


def whole(
    model: Any, batch: al.PromptBatch, hooks: Sequence[Hook]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits and products A * dL/dA of each layer, by patterns."""
    products: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        products[layer] = pattern * gradient

    observers, backward_hooks = product_hooks(model, store)
    options: dict[str, Any] = {"observers": observers, "backward_hooks": backward_hooks}
    logits = run_pass(model, batch, hooks=hooks, loss=al.losses.label_cross_entropy, **options)
    return logits, products


def fused(
    model: Any, batch: al.PromptBatch, hooks: Sequence[Hook]
) -> tuple[Tensor, dict[int, Tensor]]:
    length, products = batch.tokens.shape[1], dict[int, Tensor]()

    def store(layer: int, rows: slice, keys: slice, pattern: Tensor, gradient: Tensor) -> None:
        of_layer = pattern.new_zeros(*pattern.shape[:2], length, length)
        products.setdefault(layer, of_layer)[:, :, rows, keys] = pattern * gradient

    loss = al.losses.label_cross_entropy
    return run_fused(run_pass, model, batch, use=store, hooks=hooks, loss=loss), products


def after_fused(model: Any, batch: al.PromptBatch, hooks: Any) -> Tensor:
    right = batch.padded_right()
    after = right.after(int(right.label_ends.max()))
    acting = hooks(after)
    leading = in_leading_tokens(acting, after.first_query)
    prefix = run_fused(run_prefix, model, shared_tokens(after), hooks=leading)
    return run_pass(model, after, hooks=acting, prefix=prefix)


@pytest.mark.quick_cases("whole models", "DeepSeek V3", "Falcon (ALiBi)", "NeoX (Pythia)", "Toy")
@pytest.mark.parametrize(("name", "kind"), cases("bridge", "HookedTransformer"))
def test_a_fused_attention_has_the_numbers_of_whole_patterns(name: str, kind: str) -> None:
    model, batch = hooked(name, torch.float64, kind), batch_of(SIDES[name])
    is_replaced = model.cfg.positional_embedding_type != "alibi"
    if kind == "bridge":
        is_replaced = name not in NOT_REPLACED

    def isolated(prompts: al.PromptBatch) -> Any:
        return al.isolate_labels(model, prompts, al.Site(heads=CUT_HEADS))

    inside = batch.attention_mask[:, None, :, None] & batch.attention_mask[:, None, None]
    with frozen_in_eval_mode(model), precise(torch.float64):
        if not is_replaced:
            with pytest.raises(al.errors.ModelError, match=r"its attention|its scores"):
                fused(model, batch, [])
            return
        reason = why_no_fused_prefix(model)
        assert ("other keys and values" in reason) if name in LATENT else not reason
        for change in (no_hooks, isolated):
            hooks = change(batch)
            expected_logits, expected = whole(model, batch, hooks)
            if not reason:
                assert difference(after_fused(model, batch, change), expected_logits) <= LIMIT
            logits, products = fused(model, batch, hooks)
            assert difference(logits, expected_logits) <= LIMIT
            assert len(products) == model.cfg.n_layers
            for layer, of_layer in products.items():
                assert difference(of_layer * inside, expected[layer] * inside) <= LIMIT


@pytest.mark.parametrize(("options", "message"), OTHER_TERMS)
def test_an_attention_with_other_terms_is_not_replaced(
    gpt2: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what an architecture could give to the attention interface of transformers."""
    attend = Interface.attention

    def with_terms(self: Any, *args: Any, **given: Any) -> Any:
        names = ("module", "query", "key", "value", "attention_mask")
        return attend(self, **dict(zip(names, args, strict=True)) | given | options)

    monkeypatch.setattr(Interface, "attention", with_terms)
    with (
        attention_by(gpt2, lambda layer, query, *others: query),
        pytest.raises(al.errors.ModelError, match=message),
    ):
        gpt2(torch.arange(4)[None])
