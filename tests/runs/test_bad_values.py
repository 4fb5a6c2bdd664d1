"""Values that no function can use raise an error of this package."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import anchorlens as al
from anchorlens.errors import (
    ArgumentError,
    DataError,
    HookError,
    MetricError,
    ModelError,
    PromptError,
    StoreError,
)
from anchorlens.passes.forward import run_pass
from anchorlens.system.arguments import called
from tests.references.architectures import BY_NAME, native
from tests.references.comparison import tokenizer
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
BAD, GOOD = al.Example("bad", 0), al.Example("good", 1)
INF, NAN = float("inf"), float("nan")


def changed(tensor: Any, index: Any, value: Any) -> Any:
    other = tensor.clone()
    other[index] = value
    return other


LOGITS, PAIR = torch.eye(3, 8), torch.tensor([0, 1])
POSITIONS: dict[str, Any] = {
    "tokens": torch.tensor([[5, 1, 6, 2, 7, 8]]),
    "label_positions": [[1, 3]],
    "label_classes": [[0, 1]],
    "label_token_ids": [1, 2],
}
ONE = {"one": torch.ones(2)}

# The error, its message, a call, and values that it refuses.
WRONG: list[tuple[type[Exception], str, Callable[[Any], Any], list[Any]]] = [
    (
        MetricError,
        "logits must be finite numbers, but some are NaN or inf",
        lambda logits: al.metrics.loyalty(logits[0], logits[1], PAIR),
        [
            (changed(LOGITS, (1, 2), value), LOGITS)[::order]
            for value in (NAN, INF, -INF)
            for order in (1, -1)
        ],
    ),
    (
        MetricError,
        r"must be a row of different whole numbers from 0 to 7, .*; got",
        lambda ids: al.metrics.loyalty(LOGITS, LOGITS, torch.tensor(ids)),
        [[0, 8], [-1, 1], [], [0.0, 1.0], [[0, 1]], [True, False], [1, 1]],
    ),
    (
        MetricError,
        r"resamples must be a whole number from 0 to 1,000,000; got",
        lambda count: al.metrics.compare_accuracies(ONE, resamples=count),
        [-1],
    ),
    (
        MetricError,
        "the answers of 'odd' must be a tensor of 0 and 1, one",
        lambda odd: al.metrics.compare_accuracies(
            {"first": torch.ones(2), "odd": odd}, resamples=0
        ),
        [torch.tensor([0.5, 1]), torch.tensor([2, 1]), torch.tensor([NAN, 1]), torch.ones(2, 1)],
    ),
    (
        MetricError,
        r"the set of each of the 2 prompts; got the shape \(3,\)",
        lambda sets: al.metrics.compare_accuracies(ONE, sets=sets, resamples=0),
        [torch.arange(3)],
    ),
    (
        DataError,
        "count must be a whole number from 1 to 1,000,000; got -1",
        lambda count: al.sample_queries([BAD, GOOD], count),
        [-1],
    ),
    (
        DataError,
        "shots must be a whole number from 1 to 1,000,000; got 0",
        lambda shots: al.sample_demonstrations([BAD, GOOD], shots),
        [0],
    ),
    *(
        (
            PromptError,
            message,
            lambda part: al.PromptBatch.from_positions(**POSITIONS | part),
            parts,
        )
        for message, parts in (
            ("tokens must be whole numbers from 0, .*got torch.float", [{"tokens": LOGITS}]),
            (
                "tokens must be whole numbers from 0, .*; got -3",
                [{"tokens": torch.full((1, 6), -3)}],
            ),
            (
                "attention_mask must hold 1 for tokens",
                [{"attention_mask": torch.full((1, 6), value)} for value in (NAN, 2)],
            ),
            (
                "label_positions must be whole .*complex",
                [{"label_positions": torch.tensor([[1j, 3]])}],
            ),
        )
    ),
]


@pytest.mark.parametrize(
    ("error", "message", "call", "value"),
    [(*row, value) for *row, values in WRONG for value in values],
)
def test_wrong_values_are_named(error: Any, message: str, call: Any, value: Any) -> None:
    al.PromptBatch.from_positions(**POSITIONS)
    with pytest.raises(error, match=message):
        call(value)


def test_impossible_paths_are_refused(gpt2: Any) -> None:
    refused = partial(pytest.raises, StoreError)
    record = al.metrics.compare_accuracies({"one": torch.ones(2)}, resamples=0)
    with refused(match="cannot be a folder of contributions: .*embedded null"):
        al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], folder="\0", progress=False, resamples=0)
    for write in (partial(al.write_report, {"one": record}), record.save):
        with refused(match="cannot be written: .*embedded null"):
            write("\0")
    with refused(match="cannot be read: .*embedded null"):
        type(record).load("\0")


def test_a_beta_is_below_infinity_and_may_be_minus_infinity(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    shape = (gpt2.cfg.n_layers, gpt2.cfg.n_heads, batch.label_positions.shape[1])
    training = al.contexts.Training(steps=1, progress=False)
    for value in (NAN, INF):
        with pytest.raises(HookError, match="beta must be numbers below infinity"):
            start = changed(torch.zeros(shape), (0, 0, 0), value)
            al.contexts.train_reweighting(gpt2, [batch], training, start=start)
    hooks = al.reweight_anchors(gpt2, batch, torch.full(shape, -INF))
    hooks_by_hand = al.reweight_anchors(gpt2, batch, torch.full(shape, -80.0))  # as good as 0
    logits = run_pass(gpt2, batch, hooks=hooks)
    assert torch.equal(logits, run_pass(gpt2, batch, hooks=hooks_by_hand))
    assert not torch.equal(logits, run_pass(gpt2, batch))


class Falsy(list[Any]):
    """A user's hooks that are a list and a function. The list is empty and counts as False."""

    def __call__(self, batch: al.PromptBatch) -> list[Any]:
        return [("blocks.0.attn.hook_pattern", lambda tensor, hook: tensor * 0.5)]


def test_hooks_that_count_as_false_act(gpt2: Any) -> None:
    batches = questions(gpt2, 2)
    plain = partial(al.run, gpt2, batches, [al.Loyalty()], progress=False, resamples=0)
    assert float(plain(hooks=Falsy())["loyalty"].kl) > 0
    logits = partial(al.target_logits, gpt2, batches, progress=False)
    assert not torch.equal(logits(hooks=Falsy()), logits())


def test_a_model_that_cannot_run_in_a_type_is_refused(byte_level: Any) -> None:
    """XGLM of transformers puts the lowest number of float64 into a float32."""
    with pytest.raises(ModelError, match=r"XGLMForCausalLM cannot run in float64: .*; use float32"):
        al.load_model(native("XGLM"), tokenizer=byte_level, dtype=torch.float64)


def test_a_bridge_that_cannot_run_in_a_type_is_refused() -> None:
    """TransformerLens multiplies a pattern in float32 by values in bfloat16."""
    weights = BY_NAME["OLMo 2"].build(len(tokenizer()), torch.bfloat16)
    message = (
        "cannot run in bfloat16: .*; use float32 .*; if that fails too, TransformerLens raises"
    )
    with pytest.raises(ModelError, match=message):
        al.load_model(weights, tokenizer=tokenizer())


def test_a_bridge_that_is_not_fully_built_is_refused() -> None:
    with pytest.raises(ModelError, match="that is not fully built, so that it has no hook"):
        al.prepare_model(TransformerBridge.__new__(TransformerBridge))


def test_a_mistake_inside_a_function_of_the_user_is_their_own() -> None:
    def add(pattern: Any, gradient: Any) -> Any:
        return pattern + "1"

    with pytest.raises(TypeError, match="unsupported operand"):
        called("weight", add, "(pattern, gradient)", 1, 2)
    with pytest.raises(ArgumentError, match=r"must be a function of \(pattern\); got add, which"):
        called("weight", add, "(pattern)", 1)
