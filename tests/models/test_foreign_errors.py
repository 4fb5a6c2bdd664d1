"""What the code of a model raises is a reason; what this package raises by mistake is never one."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from transformer_lens.model_bridge import TransformerBridge

import anchorlens as al
from anchorlens.models.facts import facts_of
from anchorlens.models.tiny_pass import is_own_mistake
from anchorlens.passes.comparison import reason_of
from tests.support.tiny_models import questions, tiny_gpt2

KINDS = (AttributeError, IndexError, KeyError, ValueError, TypeError, AssertionError, RuntimeError)


def raising(error: BaseException, module: str = "transformers.models.tiny") -> Callable[..., Any]:
    namespace = {"__name__": module, "error": error}
    exec("def forward(*args, **kwargs):\n    raise error", namespace)
    function: Callable[..., Any] = namespace["forward"]  # type: ignore[assignment]
    return function


def raised(error: BaseException, module: str) -> Exception:
    with pytest.raises(type(error)) as caught:
        raising(error, module)()
    return caught.value  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_forward_raises_is_a_model_error(
    kind: type[Exception], byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: Any = tiny_gpt2(len(byte_level))
    monkeypatch.setattr(type(weights), "forward", raising(kind("no such part")))
    message = r"cannot run in float32: .*no such part.*; the model's own code raises this"
    with pytest.raises(al.errors.ModelError, match=message) as caught:
        al.load_model(weights, tokenizer=byte_level)
    assert type(caught.value.__cause__) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_forward_raises_in_a_trial_is_a_reason(
    kind: type[Exception], byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a traceback in the log, which the tests make an error."""
    weights: Any = tiny_gpt2(len(byte_level))
    forward = type(weights).forward

    @functools.wraps(forward)
    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache", kwargs.get("past_key_values")) is not None:
            raising(kind("no such part"))()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(weights), "forward", without)
    model = al.load_model(weights, tokenizer=byte_level)
    assert "no such part" in facts_of(model).why_no_cache
    record = al.run(model, questions(model, 4), [al.Accuracy()], resamples=0, progress=False)
    assert "no such part" in record["accuracy"].info["shared_prefix"]


def test_an_own_mistake_is_not_hidden(byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, foreign = (
        raised(KeyError("gone"), module) for module in ("anchorlens.passes.x", "somebody.model")
    )
    assert is_own_mistake(own) and not is_own_mistake(foreign)
    assert reason_of(foreign) == "KeyError: 'gone'"
    with pytest.raises(AssertionError, match="a quicker way failed by a mistake of anchorlens"):
        reason_of(own)
    # Operations of torch fail on tensors of an architecture, also in hooks of this package.
    assert not is_own_mistake(raised(RuntimeError("shapes"), "anchorlens.passes.x"))
    wrong = raising(IndexError("gone"), "anchorlens.models.x")
    monkeypatch.setattr("anchorlens.models.tiny_pass.inputs_without_cache", wrong)
    with pytest.raises(IndexError, match="gone"):
        al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)


def test_a_bridge_that_is_not_fully_built_is_refused() -> None:
    with pytest.raises(al.errors.ModelError, match="not fully built, so that it has no hook"):
        al.prepare_model(TransformerBridge.__new__(TransformerBridge))
