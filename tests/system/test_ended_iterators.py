"""A function of the user that reads an iterator beyond its end is named in the error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import anchorlens as al
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def ended(*given: Any, **options: Any) -> Any:
    return next(iter(()))


class Ended(al.Accuracy):
    """A metric whose contributions read such an iterator."""

    def contributions(self, batch: Any, seen: Any) -> dict[str, Any]:
        return {"correct": ended(batch)}


def run(**options: Any) -> Callable[[Any, Any], Any]:
    asked = options.pop("asked", [al.SaliencyFlows()])
    return lambda model, batches: al.run(model, batches, asked, **QUIET, **options)


class Later(torch.optim.SGD):
    """An optimizer that ends after the trial of a training, which is of one number."""

    def step(self, closure: Any = None) -> Any:
        return ended() if self.param_groups[0]["params"][0].numel() > 1 else None


def train(model: Any, batches: Any) -> Any:
    training = al.contexts.Training(steps=1, optimizer=Later, progress=False)
    return al.train_prefix(model, batches[:1], training, held_out=batches[1:], length=2)


CALLS = {
    "hooks": run(hooks=ended),
    "hook": run(hooks=lambda batch: [("blocks.0.hook_resid_post", ended)]),
    "loss": run(loss=lambda logits, batch: ended() + logits.sum(-1)),
    "metric": run(asked=[Ended()]),
    "weight": run(asked=[al.SaliencyFlows(weight=ended)]),
    "edges": lambda model, batches: al.block_edges(model, batches[0], ended),
    "optimizer": train,
    "saliency": lambda model, batches: al.saliency(model, batches[0], loss=ended),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_function_whose_iterator_ended_is_named(call: str, gpt2: Any) -> None:
    line = ended.__code__.co_firstlineno + 1
    with pytest.raises(al.AnchorlensError, match=rf"^ended \(.*test_ended_iter.*py, line {line}\)"):
        CALLS[call](gpt2, questions(gpt2, 2, batch_size=1))
    assert torch.is_grad_enabled()
