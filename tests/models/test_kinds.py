"""Kinds of models are compared with each other: folded, processed, HookedTransformer (--kind)."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.passes.forward import run_pass
from tests.references.architectures import BY_NAME
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.every_kind

MAKE: dict[str, Any] = {"gpt2": tiny_gpt2, "llama": tiny_llama, "gemma3": tiny_gemma3}
TOKENIZER = {
    "gpt2": "byte_level",
    "llama": "sentencepiece_like",
    "gemma3": "sentencepiece_like",
}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.usefixtures("kind_of_model")
def test_prompts_have_the_tokens_of_the_tokenizer(
    name: str, request: pytest.FixtureRequest
) -> None:
    """This includes BOS: Llama's tokenizer adds one, GPT-2's does not."""
    model, tokenizer = map(request.getfixturevalue, (name, TOKENIZER[name]))
    batch = questions(model, 2)[0]
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    queries = [example for example in examples if example not in demos][:2]
    plain = al.build_prompts(tokenizer, al.TASKS["trec"], demos, queries)[0]
    assert torch.equal(batch.attention_mask, plain.attention_mask)
    mask = batch.attention_mask
    assert torch.equal(batch.tokens[mask], plain.tokens[mask])
    assert batch.begins_with_bos == plain.begins_with_bos == (name == "llama")


@pytest.mark.slow("whole models")
def test_a_model_that_is_folded_after_verification_is_refused(byte_level: Any) -> None:
    bridge = al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)
    batch = questions(bridge, 3)[0]
    assert al.saliency(bridge, batch).any()
    bridge.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(ModelError, match="biases of this model are folded"):
        al.saliency(bridge, batch)


@pytest.mark.slow("whole models")
def test_folding_breaks_a_model_with_attention_sinks(raw: Any, byte_level: Any) -> None:
    """Rows of attention do not sum to 1 here. TransformerLens folds anyway, and logits change."""
    weights = BY_NAME["GPT-OSS"].build(len(byte_level), max_position_embeddings=512)
    unfolded, folded = (raw(deepcopy(weights), byte_level, fold=fold) for fold in (False, True))
    batch = questions(unfolded, 2)[0]
    ours = run_pass(al.prepare_model(unfolded), batch)
    with torch.no_grad():
        tokens = batch.tokens[:1, : int(batch.target_positions[0]) + 1]
        theirs = weights(tokens).logits[0, -1]
        broken = folded(tokens)[0, -1]
    torch.testing.assert_close(ours[0].log_softmax(-1), theirs.log_softmax(-1))
    assert (broken.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() > 0.01
    al.prepare_model(folded)
    with pytest.raises(ModelError, match=r"folded .*attention sinks.*fold_value_biases=False"):
        run_pass(folded, batch)


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("name", MAKE)
def test_padding_on_the_left_never_gives_nan_in_bfloat16(
    name: str, raw: Any, request: pytest.FixtureRequest
) -> None:
    """Rows of padding attend to no key. Each of a dozen roundings changes a number by 0.004."""
    tokenizer = request.getfixturevalue(TOKENIZER[name])
    model = al.prepare_model(raw(MAKE[name](len(tokenizer)).bfloat16(), tokenizer))
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
