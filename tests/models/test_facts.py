"""Facts of a model: found once, beyond windows too, and found again when the model changed."""

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import masking_utils

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models import verify_hooks
from anchorlens.models.facts import facts_of, known_facts
from anchorlens.models.load import ensure_prepared
from anchorlens.passes.shortcuts import why_not_shared
from tests.references.architectures import BY_NAME
from tests.references.comparison import tokenizer
from tests.support.unchanged import found_anew

BEYOND: dict[str, Any] = {"sliding_window": 64}  # of all tokens of a tiny pass
WINDOWED = {
    **dict.fromkeys(("Mistral", "Gemma 2", "Gemma 3", "Gemma 4", "OLMo 3", "Cohere 2"), BEYOND),
    **dict.fromkeys(("StarCoder2", "GPT-OSS", "EXAONE 4", "VaultGemma"), BEYOND),
    "Llama 4": {"attention_chunk_size": 64},
}


@pytest.mark.quick_cases("whole models", "Gemma 3")
@pytest.mark.parametrize("name", WINDOWED)
def test_a_cache_that_is_wrong_beyond_a_window_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a cache the mask forgets the window, which is right for the tokens inside it."""
    text = tokenizer()
    weights = BY_NAME[name].build(len(text), torch.float32, **WINDOWED[name])
    model = al.load_model(weights, tokenizer=text)
    assert not facts_of(model).why_no_cache and not why_not_shared(model)
    masks: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    right = masks["eager"]

    def wrong(*args: Any, **options: Any) -> Any:
        given = inspect.signature(right).bind(*args, **options)
        if given.arguments["q_length"] != given.arguments["kv_length"]:
            given.arguments["mask_function"] = masking_utils.causal_mask_function
        return right(*given.args, **given.kwargs)

    monkeypatch.setitem(masks._global_mapping, "eager", wrong)
    with found_anew(model):
        assert "logits differ by" in why_not_shared(model)
    al.prepare_model(model)
    assert "other logits than in the whole text" in facts_of(model).why_no_cache
    assert why_not_shared(model).startswith("no run from a key-value cache (after")
    monkeypatch.setattr(verify_hooks, "shrunk_windows", nullcontext)
    al.prepare_model(model)  # the windows themselves are longer than a tiny pass
    assert not facts_of(model).why_no_cache


@pytest.mark.slow("whole models")
@pytest.mark.changes_model
def test_facts_are_found_again_when_the_model_changed(gpt2: Any) -> None:
    before = facts_of(gpt2)
    ensure_prepared(gpt2)
    assert facts_of(gpt2) is before
    assert why_not_shared(gpt2) == ""
    gpt2.to(torch.bfloat16)
    ensure_prepared(gpt2)
    assert facts_of(gpt2) is not before and why_not_shared(gpt2).startswith("in low precision")
    gpt2.to(torch.float32)
    al.restore_model(gpt2)
    assert known_facts.get(gpt2) is None
    with pytest.raises(ModelError, match="have not been verified"):
        why_not_shared(gpt2)
