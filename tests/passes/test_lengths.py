"""Prompts that are too long are refused before anything of quadratic size is made."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import anchorlens as al
from anchorlens.contexts.selection import by_score
from anchorlens.errors import PromptError
from anchorlens.runs.checks import possible
from tests.support.asked import ask
from tests.support.tiny_models import questions

LENGTH, PROMPTS = 3000, 4
FLOWS = al.SaliencyFlows()
REQUESTS: dict[str, Any] = {
    "possible": lambda model, batch: possible(model, [batch], [FLOWS]),
    "selection by score": lambda model, batch: by_score("small keys", 4).of(model, batch),
    "isolate_labels": lambda model, batch: al.isolate_labels(model, batch, 0),
    "isolate_random": lambda model, batch: al.hooks.isolate_random(model, batch, 0, seed=1),
    "reweight_anchors": lambda model, batch: al.reweight_anchors(
        model, batch, torch.zeros(model.cfg.n_layers, model.cfg.n_heads, 2)
    ),
    "saliency": al.saliency,
    "run": lambda model, batch: al.run(model, [batch], [FLOWS]),
    "run with hooks": lambda model, batch: al.run(
        model, [batch], [al.Loyalty()], hooks=lambda batch: al.isolate_labels(model, batch, 0)
    ),
    "target_logits": lambda model, batch: al.target_logits(
        model, [batch], hooks=lambda batch: al.isolate_labels(model, batch, 0)
    ),
    "isolation": lambda model, batch: ask(
        model, [batch], al.EdgeSweep.isolation({"a": al.Site(0)})
    ),
    "train_reweighting": lambda model, batch: al.contexts.train_reweighting(model, [batch]),
    "compress": al.compress,
    "contexts": lambda model, batch: ask(
        model, [batch], al.ContextComparison({"anchors": al.compress})
    ),
}


class LargestTensor(TorchDispatchMode):
    """Stores the number of elements of the largest storage of what an operation returned."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):  # a view has the storage of another tensor
                size = leaf.untyped_storage().nbytes() // leaf.itemsize
                self.elements = max(self.elements, size)
        return result


def long_prompts() -> al.PromptBatch:
    return al.PromptBatch.from_positions(
        torch.arange(PROMPTS * LENGTH).view(PROMPTS, LENGTH) % 100,
        label_positions=[[1000, 2000]] * PROMPTS,
        label_classes=[[0, 1]] * PROMPTS,
        label_token_ids=[1, 2],
        gold=[0, 1] * (PROMPTS // 2),
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_of_quadratic_size_is_made_before_the_length_is_checked(
    gpt2: Any, name: str
) -> None:
    batch = long_prompts()
    with LargestTensor() as largest, pytest.raises(PromptError, match="but the model's context is"):
        REQUESTS[name](gpt2, batch)
    assert largest.elements < 50 * PROMPTS * LENGTH


def test_a_query_that_is_too_long_for_a_context_is_refused_before_it_is_masked(gpt2: Any) -> None:
    batch = questions(gpt2, count=2)[0]
    context = al.compress(gpt2, batch)
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    long = al.build_prompts(gpt2.tokenizer, al.TASKS["trec"], demos, ["What is it? " * 1000])[0]
    width = long.tokens.shape[1]
    assert width > 3000
    with LargestTensor() as largest, pytest.raises(PromptError, match=r"query has .* tokens"):
        context.logits(gpt2, long)
    assert largest.elements < 100 * width  # the weights are compared by their 288,000 bytes
