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
# Relative. In bfloat16 each of a dozen roundings changes a number by up to 0.004.
TOLERANCE = {torch.float64: 1e-6, torch.bfloat16: 0.05}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prompts_have_the_tokens_of_the_tokenizer(
    name: str, raw: Any, request: pytest.FixtureRequest
) -> None:
    """This includes BOS: Llama's tokenizer adds one, GPT-2's does not."""
    tokenizer = request.getfixturevalue(TOKENIZER[name])
    model = raw(MAKE[name](len(tokenizer)), tokenizer)
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
@pytest.mark.filterwarnings("ignore:some pairs of classes", "ignore:in 1 of 1 sets")
def test_other_analyses_of_a_folded_model_give_the_same_numbers(raw: Any, byte_level: Any) -> None:
    plain = al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)
    folded = raw(tiny_gpt2(len(byte_level)), byte_level, fold=True)
    batches = questions(plain, 12)
    metrics: list[al.Metric] = [al.AttentionAUCROC(), al.AnchorDistances(), al.Loyalty()]

    def results(model: Any) -> list[Tensor]:
        def cut(batch: al.PromptBatch) -> Any:
            al.prepare_model(model)
            return al.isolate_labels(model, batch, range(3))

        records = al.run(model, batches, metrics, hooks=cut, resamples=0, progress=False)
        assert records["attention_aucroc"].aucroc.isfinite().all()
        logits = run_pass(model, batches[0], hooks=cut(batches[0]))
        alone = al.compress(model, batches[0], separately=True).logits(model, batches[0])
        numbers = [records["anchor_distances"].anchor_distance, records["loyalty"].kl]
        return [*numbers, logits.log_softmax(-1), alone.log_softmax(-1)]

    for values, expected in zip(results(folded), results(plain), strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-5)


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_on_the_left_never_gives_nan(
    name: str, dtype: torch.dtype, raw: Any, request: pytest.FixtureRequest
) -> None:
    """Rows of padding attend to no key; in float64 the mask of transformers makes them NaN."""
    tokenizer = request.getfixturevalue(TOKENIZER[name])
    model = al.prepare_model(raw(MAKE[name](len(tokenizer)).to(dtype), tokenizer))
    left, right = (questions(model, 4, padding_side=side)[0] for side in ("left", "right"))
    assert not left.attention_mask[:, 0].all()
    ours, expected = run_pass(model, left), run_pass(model, right)
    assert difference(ours, expected) <= TOLERANCE[dtype]
    maps, expected_maps = al.saliency(model, left), al.saliency(model, right)
    real, expected_real = (edges_between_tokens(batch).expand_as(maps) for batch in (left, right))
    assert maps.isfinite().all() and not maps[~real].any()
    assert difference(maps[real], expected_maps[expected_real]) <= TOLERANCE[dtype]


def edges_between_tokens(batch: al.PromptBatch) -> Tensor:
    """Return Bool["batch 1 query key"], in the same order for padding on either side."""
    mask = batch.attention_mask[:, None]
    return mask[..., None] & mask[..., None, :]
