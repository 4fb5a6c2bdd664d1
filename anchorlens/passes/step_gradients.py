"""The gradient of each predicted token alone, of one forward pass.

``dL/dA_h,ij = (dL/dz)_h,i . v_h,j``, where z is the output of a head (before W_O) and v are its
values. So the gradients of the outputs suffice, for any number of tokens at once. Where a model
computes its outputs or values in another way (a norm after them), the gradients of the patterns
are taken, which cost more memory. Which of the two it is, is tried on the first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..models.hooked import (
    HookedModel,
    at_known_points,
    hooks_by_layer,
    pattern_name,
    refuse_folded_value_biases,
    values_name,
    z_name,
)
from ..models.kinds import cached_heads
from ..models.model_state import frozen_in_eval_mode
from ..prompts.batch import PromptBatch
from ..system.devices import sent, wide
from .forward import Acting, Pass, at_rows, is_finite, not_finite
from .losses import columns_of

StepPattern = Float[Tensor, "1 head query key"]

TOLERANCE_OF_PRODUCTS = 1e-5  # of the largest product in its layer


def step_gradients(
    model: HookedModel,
    batch: PromptBatch,
    positions: Bool[Tensor, "1 position"],
    use: Callable[[int, int, StepPattern, StepPattern], None],
    *,
    chunk: int = 8,
) -> tuple[Float[Tensor, " step"], str]:
    """Run a prompt without padding once, then backward from the loss of each position's next token.

    ``use`` gets the number of the step, the layer, A and dL/dA; ``chunk`` steps go backward at the
    same time. Returned are the loss of each step, in nats, and how dL/dA was computed.
    """
    refuse_folded_value_biases(model)
    layers = range(model.cfg.n_layers)
    patterns: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    with frozen_in_eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        columns, _ = columns_of(positions)
        selected: list[Tensor] = []
        following = batch.tokens.gather(1, columns + 1)[0]

        def select(resid: Tensor) -> Tensor:
            selected.append(at_rows(resid, columns))
            return selected[0]

        def store_output(layer: int, output: Tensor, hook: Any) -> Tensor:
            # A bridge shows its hooks a copy, and goes on with the original unless one returns it.
            outputs[layer] = output.view_as(output)
            return outputs[layer]

        observers = [
            *hooks_by_layer(model, pattern_name, patterns.__setitem__),
            *at_known_points(model, hooks_by_layer(model, values_name, values.__setitem__)),
        ]
        at_outputs = ((z_name(layer), partial(store_output, layer)) for layer in layers)
        described = Pass(model, batch, at_known_points(model, at_outputs), observers)
        described.check()
        acting = Acting(described, [], select)
        with acting.inside:
            logits = acting.outputs()[0][0]
        logits = wide(logits)
        if not is_finite(logits):
            raise not_finite(described, "at the predicted tokens")
        losses = cross_entropy(logits, sent(following, logits.device), reduction="none")
        rows = selected[0]
        of_rows = torch.autograd.grad(losses.sum(), rows, retain_graph=True)[0]
        of_steps = partial(_gradients_of_steps, rows, of_rows)
        of_patterns = [patterns[layer] for layer in layers]
        route = _Route("gradients of the patterns", of_patterns, lambda layer, slope: slope)
        if len(outputs) == len(values) == len(layers):
            of_values = [values[layer].detach() for layer in layers]
            from_outputs = _from_outputs(model, [outputs[layer] for layer in layers], of_values)
            route = from_outputs if _agree(of_steps, from_outputs, route) else route
        for start in range(0, len(losses), chunk):
            steps = range(start, min(start + chunk, len(losses)))
            gradients = of_steps(route.tensors, steps)
            for layer in layers:
                for row, step in enumerate(steps):
                    slope = route.of_pattern(layer, gradients[layer][row])
                    use(step, layer, patterns[layer].detach(), slope)
    return losses.detach().cpu(), route.name


@dataclass(frozen=True, eq=False)
class _Route:
    """Tensors of the layers, and dL/dA of a layer from the gradient of its tensor."""

    name: str
    tensors: Sequence[Tensor]
    of_pattern: Callable[[int, Tensor], StepPattern]


def _from_outputs(
    model: HookedModel, outputs: Sequence[Tensor], values: Sequence[Tensor]
) -> _Route:
    def of_pattern(layer: int, gradient: Tensor) -> StepPattern:
        heads = cached_heads(model, values[layer].shape[2]).to(gradient.device)
        of_heads = values[layer][:, :, heads]
        return torch.einsum("bqhd,bkhd->bhqk", gradient, of_heads)

    return _Route("gradients of the heads' outputs, times values", outputs, of_pattern)


def _gradients_of_steps(
    rows: Float[Tensor, "1 step channel"],
    of_rows: Float[Tensor, "1 step channel"],
    tensors: Sequence[Tensor],
    steps: Sequence[int],
) -> list[Tensor]:
    """The gradients of the losses of some steps, [step, ...] for each tensor, at once if they can.

    A loss depends on its own row before the unembedding alone: the vocabulary is gone through once.
    """
    numbers = torch.tensor(steps, device=rows.device)
    chosen = of_rows.new_zeros(len(steps), *rows.shape)
    chosen[range(len(steps)), 0, numbers] = of_rows[0, numbers]
    gradients_of = partial(torch.autograd.grad, rows, tensors, retain_graph=True)
    if len(chosen) > 1:
        try:
            return list(gradients_of(grad_outputs=chosen, is_grads_batched=True))
        except RuntimeError:  # an operation has no batched gradient
            pass
    each = [gradients_of(grad_outputs=row) for row in chosen]
    return [torch.stack(of_layer) for of_layer in zip(*each, strict=True)]


def _agree(of_steps: Callable[..., list[Tensor]], route: _Route, patterns: _Route) -> bool:
    """Whether both routes give the same products for the first step."""
    count = len(route.tensors)
    try:
        gradients = of_steps([*route.tensors, *patterns.tensors], [0])
        for layer, pattern in enumerate(patterns.tensors):
            expected = gradients[count + layer][0] * pattern
            product = route.of_pattern(layer, gradients[layer][0]) * pattern
            if not (product - expected).abs().max() <= TOLERANCE_OF_PRODUCTS * expected.abs().max():
                return False
    except (RuntimeError, IndexError):  # a tensor is not in the graph, or has another width
        return False
    return True
