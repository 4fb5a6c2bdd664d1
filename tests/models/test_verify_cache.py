"""A model continues from its key-value cache as from the whole text, or no path takes its cache."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models.facts import facts_of
from anchorlens.models.kinds import name_of_cache
from anchorlens.models.native_attention import _run_cached
from anchorlens.models.verify_hooks import cached_step
from tests.support.measures import hooks_on
from tests.support.tiny_models import questions

pytestmark = pytest.mark.every_kind

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
