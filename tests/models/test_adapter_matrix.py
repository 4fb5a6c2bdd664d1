"""Contexts of every architecture as adapters of peft, and prefixes of peft as contexts."""

from pathlib import Path

import pytest
import torch

import anchorlens as al
from anchorlens.errors import ModelError
from tests.models.test_cache_matrix import NO_CACHE
from tests.models.test_matrix import cases, hooked
from tests.references.comparison import batch_of, weights_of
from tests.support.measures import difference
from tests.support.peft_oracle import peft_logits, saved_by_peft

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

UNLIKE = {
    "Gemma 4": "has keys and values of one shape in every layer",
    "Gemma 4 (global keys)": "has keys and values of one shape in every layer",
    "Gemma 4 (shared)": "with 5 layers caches them in 3",
    "DeepSeek V2": "has latent attention",
    "DeepSeek V3": "has latent attention",
}
CASES = [case for case in cases("bridge") if case.values[0] not in NO_CACHE]


@pytest.mark.quick_cases("whole models", "Llama")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_peft_and_a_context_give_the_same_logits(name: str, kind: str, tmp_path: Path) -> None:
    model, batch = hooked(name, torch.float32, kind), batch_of("right")
    weights, ours = weights_of(name, torch.float32), tmp_path / "ours"
    context = al.compress(model, batch, select=al.contexts.selection.everything)
    if name in UNLIKE:
        with pytest.raises(ModelError, match=UNLIKE[name]):
            al.contexts.context_to_peft(context, model, ours)
        return
    al.contexts.context_to_peft(context, model, ours)
    assert difference(peft_logits(weights, ours, batch), context.logits(model, batch)) < 1e-5
    # peft does not find the sizes of MPT and XGLM by itself, and takes wrong ones of Falcon.
    _, heads, _, d_head = context.prefix.keys[0].shape
    sizes = {"num_layers": model.cfg.n_layers, "num_attention_heads": heads}
    theirs = saved_by_peft(weights, tmp_path / "theirs", 3, **sizes, token_dim=heads * d_head)
    prefix = al.contexts.context_from_peft(theirs, model, batch)
    assert difference(prefix.logits(model, batch), peft_logits(weights, theirs, batch)) < 1e-5
