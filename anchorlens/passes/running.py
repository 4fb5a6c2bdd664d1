"""What runs a pass: the hooked model with hooks at its points, or its twin of transformers.

The twin runs where it is known to give the same numbers (``why_not_native``), nothing of the user
acts in the model, and the hooks of the pass are those of this package.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ..models.head import head_in_float32
from ..models.hooked import Hook, HookedModel, before_block, names_of_layers, run_sent, scores_name
from ..models.model_state import added_hooks
from ..models.replaced_attention import attention_by
from ..models.twin import Twin
from ..prompts.batch import PromptBatch
from ..system.devices import sent
from ..system.put_back import SafeContext, safe_context
from .native_pass import Inside, NativePass

RunTokens = Callable[..., Tensor]  # logits of tokens and further inputs


def running(
    model: HookedModel, batch: PromptBatch, twin: Twin | None, inside: Inside
) -> tuple[RunTokens, SafeContext[None]]:
    """What runs tokens, the twin or the hooked model, and a context in which hooks act in it."""
    if twin is not None:
        # Keys before these columns may be padding although the batch has none.
        has_padding = None if batch.first_query > 0 else _has_padding(batch)
        hears = twin.hears(NativePass(model, inside).listener(has_padding))
        return partial(run_sent, twin.run, model), hears
    return partial(run_sent, model, model), _with_hooks(model, batch, inside)


@safe_context
def _with_hooks(model: HookedModel, batch: PromptBatch, inside: Inside) -> Iterator[None]:
    hooks = [*_padding_hooks(model, batch), *inside.forward]
    with (
        head_in_float32(model),
        nullcontext() if inside.attend is None else attention_by(model, inside.attend),
        nullcontext() if inside.blocks is None else inside.blocks.inside(model),
        added_hooks(model, hooks, inside.backward),
    ):
        yield


def leaf_hook(leaves: list[Tensor]) -> Hook:
    """Makes the input of block 0 require a gradient, because all parameters are frozen."""

    def make_leaf(resid: Tensor, hook: Any) -> Tensor:
        leaves.append(resid.detach().requires_grad_())
        return leaves[-1]

    return before_block(0), make_leaf


def _has_padding(batch: PromptBatch) -> bool:
    """Whether some of the columns that run are padding."""
    return not bool(batch.attention_mask[:, batch.first_query :].all())


def _padding_hooks(model: HookedModel, batch: PromptBatch) -> list[Hook]:
    """Hooks that set the scores in the rows of padding to 0.

    Some of these rows have no position to attend to (padding on the left, or beyond a sliding
    window). Their softmax is NaN where the mask is -inf: in float64 through transformers, and on a
    processed bridge of transformer-lens 3.9, which hides it from the pattern, not from gradients.
    """
    if not _has_padding(batch):
        return []
    padding = ~batch.attention_mask[:, batch.first_query :]

    def fill_scores(scores: Tensor, hook: Any) -> Tensor:
        return scores.masked_fill(sent(padding, scores.device)[:, None, :, None], 0.0)

    return [(name, fill_scores) for name in names_of_layers(model, scores_name)]
