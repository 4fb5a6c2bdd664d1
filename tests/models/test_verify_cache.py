"""A cache gives what the whole text does, beyond windows too, or no path takes it; other facts."""

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
from anchorlens.models.kinds import name_of_cache
from anchorlens.models.load import ensure_prepared
from anchorlens.models.native_attention import _run_cached
from anchorlens.models.verify_hooks import cached_step
from anchorlens.passes.shortcuts import why_not_shared
from tests.references.architectures import BY_NAME
from tests.references.comparison import tokenizer
from tests.support.measures import hooks_on
from tests.support.tiny_models import questions
from tests.support.unchanged import found_anew

TEXT = "The museum opens at ten. When? At"


def leave_empty(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every attention ignore its cache, as one that does not know the cache's name does."""
    if hasattr(model, "original_model"):
        from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge

        monkeypatch.setattr(AttentionBridge, "_update_kv_cache", lambda self, k, v, **more: (k, v))
    else:
        from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry

        monkeypatch.setattr(TransformerLensKeyValueCacheEntry, "append", lambda self, k, v: (k, v))


@pytest.mark.slow("whole models")
@pytest.mark.every_kind
@pytest.mark.changes_model
def test_a_model_whose_cache_stays_empty_runs_whole_or_is_refused(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_empty(gpt2, monkeypatch)
    al.prepare_model(gpt2)
    reason = "takes no key-value cache, or stores only a part of it"
    assert reason in facts_of(gpt2).why_no_cache
    batches = questions(gpt2, 4)
    with pytest.raises(ModelError, match=f"does not run from a key-value cache.*{reason}"):
        al.compress(gpt2, batches[0])
    record = al.run(gpt2, batches, [al.Accuracy()], resamples=0, progress=False)["accuracy"]
    assert record.info["shared_prefix"].startswith("off: no run from a key-value cache")
    trace = al.trace_generation(gpt2, TEXT, max_new_tokens=4, stop_at_eos=False)
    with torch.no_grad():
        likeliest = gpt2(trace.batch.tokens)[0].argmax(-1)
    assert likeliest[-5:-1].tolist() == trace.batch.tokens[0, -4:].tolist()
    monkeypatch.undo()
    al.prepare_model(gpt2)
    assert not facts_of(gpt2).why_no_cache
    assert len(al.compress(gpt2, batches[0]).prefix) > 0


@pytest.mark.every_kind
@pytest.mark.changes_model
@pytest.mark.parametrize("options", [{}, {"do_sample": True}])
def test_text_of_another_model_than_the_pass_is_refused(
    options: dict[str, Any], gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is emptied after the model was verified."""
    if not hasattr(gpt2, "original_model"):
        pytest.skip("a HookedTransformer fails on a cache that is too short")
    leave_empty(gpt2, monkeypatch)
    options = {"max_new_tokens": 4, "stop_at_eos": False, **options}
    with pytest.raises(ModelError, match="the model wrote token 2 of the answer with the prob"):
        al.trace_generation(gpt2, TEXT, **options)
    al.trace_generation(gpt2, TEXT, use_past_kv_cache=False, **options)


@pytest.mark.every_kind
@pytest.mark.changes_model
def test_a_renamed_cache_is_undone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(llama, "original_model") or name_of_cache(llama) != "cache":
        pytest.skip("transformers names the cache as TransformerLens does")

    def forwards() -> list[Any]:
        return [vars(block.attn).get("forward") for block in llama.blocks]

    hooks = hooks_on(llama)
    al.restore_model(llama)
    assert forwards() == [None] * len(llama.blocks)
    assert "takes no key-value cache" in cached_step(llama)[0]
    al.prepare_model(llama)
    renamed = forwards()
    assert None not in renamed and not cached_step(llama)[0]
    al.prepare_model(llama)
    assert all(now is before for now, before in zip(forwards(), renamed, strict=True))
    al.restore_model(llama)
    leave_empty(llama, monkeypatch)  # then the other name makes no difference
    al.prepare_model(llama)
    assert "takes no key-value cache" in facts_of(llama).why_no_cache
    assert not any(forward.func is _run_cached for forward in forwards() if forward)
    al.restore_model(llama)
    assert forwards() == [None] * len(llama.blocks)
    assert hooks_on(llama) == hooks


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
