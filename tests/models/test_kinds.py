"""Kinds of models are compared with each other: folded, processed, HookedTransformer (--kind)."""

from typing import Any

import pytest
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.passes.forward import run_pass
from tests.references.architectures import BY_NAME
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.every_kind


@pytest.mark.slow("whole models")
def test_a_model_that_is_folded_after_verification_is_refused(byte_level: Any) -> None:
    bridge = al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)
    batch = questions(bridge, 3)[0]
    assert al.saliency(bridge, batch).any()
    bridge.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(ModelError, match="biases of this model are folded"):
        al.saliency(bridge, batch)


@pytest.mark.slow("whole models")
def test_folded_attention_sinks_are_refused(raw: Any, byte_level: Any) -> None:
    """Rows of attention do not sum to 1 here. TransformerLens folds anyway, and logits change."""
    weights = BY_NAME["GPT-OSS"].build(len(byte_level), max_position_embeddings=512)
    folded = al.prepare_model(raw(weights, byte_level, fold=True))
    with pytest.raises(ModelError, match=r"folded .*attention sinks.*fold_value_biases=False"):
        run_pass(folded, questions(folded, 2)[0])


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, tiny_gemma3])
def test_padding_on_the_left_never_gives_nan_in_bfloat16(
    make: Any, raw: Any, request: pytest.FixtureRequest
) -> None:
    """Rows of padding attend to no key. Each of a dozen roundings changes a number by 0.004."""
    of_model = "byte_level" if make is tiny_gpt2 else "sentencepiece_like"
    tokenizer = request.getfixturevalue(of_model)
    model = al.prepare_model(raw(make(len(tokenizer)).bfloat16(), tokenizer))
    logits, flows = list[Tensor](), list[Tensor]()
    for side in ("left", "right"):
        (batch,) = questions(model, 4, padding_side=side)
        assert batch.attention_mask[:, 0].all() == (side == "right")
        logits.append(run_pass(model, batch))
        maps, mask = al.saliency(model, batch).transpose(0, 1), batch.attention_mask
        inside = mask[:, :, None] & mask[:, None]
        assert maps.isfinite().all() and not maps[:, ~inside].any()
        flows.append(maps[:, inside])
    assert difference(*logits) <= 0.05 and difference(*flows) <= 0.05
