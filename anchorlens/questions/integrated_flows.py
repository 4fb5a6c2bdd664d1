"""Flows with the integrated gradient: attention attribution, one layer at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics.accuracy import predicted_class
from ..metrics.edge_sums import EdgeSums
from ..metrics.question import Question
from ..metrics.saliency_flows import by_heads
from ..metrics.segments import SegmentFlows, SegmentFlowsRecord
from ..metrics.weights import Pattern, Weight, refuse_values, signed
from ..models.batch_hooks import WholeHook
from ..models.head_outputs import FrozenNorms
from ..models.hooked import (
    Hook,
    HookedModel,
    attention_layers,
    hooks_by_layer,
    pattern_name,
    refuse_folded_value_biases,
)
from ..models.model_state import added_hooks
from ..passes.blocks import Start, Starts
from ..passes.forward import losses_of, run_pass
from ..passes.loss_checks import check_gradient_of_loss
from ..passes.losses import LossOfBatch
from ..prompts.batch import PromptBatch
from ..prompts.positions import SegmentsOfBatch
from ..results.contributions import Contributions
from ..results.kinds import mean
from ..runs.passes import WHOLE, Passes
from ..system.arguments import check_counts, checked
from ..system.devices import on_one_device, widest
from ..system.processes import is_main
from ..system.put_back import each_call_inside
from ..system.texts import name_of
from ..system.torch_state import gradient_mode
from ..system.warn import warn_user

# The sum of all attributions may differ from F(A) - F(0) by this part of it, and also by this part
# of F, before it is called incomplete.
INCOMPLETE, SMALL = 0.1, 1e-3


@dataclass(frozen=True, eq=False, kw_only=True)
class IntegratedFlowsRecord(SegmentFlowsRecord):
    """Flows between segments of the integrated gradient, with what they should sum to.

    Attributes:
        change: F(A) - F(0), what the output loses without the attention of a layer, in the unit of
            F; mean over prompts, then over sets. Above 0 where the attention raises F.
        attributed: The sum of the attributions of all edges of a layer, those of tokens to
            themselves too, in the unit of F; where it is not ``change``, flows say nothing.
    """

    change: Float[Tensor, " layer"] = mean("change")
    attributed: Float[Tensor, " layer"] = mean("attributed")

    caption: ClassVar[str] = (
        "Flow from one segment (read) to another (reading) by the integrated gradient, in each "
        "layer alone: above 0 where the attention raises the output."
    )


@checked
@dataclass(frozen=True)
class IntegratedFlows(Question):
    r"""Flows between segments with the integrated gradient instead of the gradient.

    In each layer alone the pattern A grows from 0 to what it is, in m steps, while the other layers
    compute as they do:

    $$
    \text{Attr}_h = A_h \cdot \frac{1}{m} \sum\limits_{s=1}^{m}
    \frac{\partial F(\alpha_s A)}{\partial (\alpha_s A_h)}
    \qquad \alpha_s = \frac{s - 1/2}{m}
    $$

    The sum over all edges of a layer, those of tokens to themselves too, is F(A) - F(0), but for an
    error that falls as 1 / m^2. The record has both, with a warning where they differ.

    Where a norm takes the scale of the attention away (Gemma 2 to 4, OLMo 2 and 3, GLM-4, EXAONE 4,
    BitNet), F(alpha A) = F(A), and the gradient along A is 0. So the norm divides by what it
    divides by in the clean run, and its output grows from 0 to what it is. This is the usual way to
    attribute through a norm; the choice is ours. A tiny pass finds such norms.

    Each layer needs m passes forward and backward and one forward, from this layer on where that
    gives the same logits (``info`` says where not).

    Range:
        Any number.

    How to read:
        Above 0 the attention raises F; for a loss it does harm. Edges whose gradient became 0
        because the model is certain are seen too.

    Pitfalls:
        Where F jumps, as other experts are chosen on the path (Mixtral, GPT-OSS), no number of
        steps helps. No model was trained on the baseline, a layer without attention. Layers do not
        add up: each is scaled alone.

    Source:
        Hao et al., *Self-Attention Attribution* (AAAI 2021). Midpoints instead of right ends, and
        the mean over segments, are ours.

    Args:
        segments: See ``SegmentFlows``.
        output: F, a function of (logits, batch) to one number a prompt, as a loss is. By default
            the probability of the label (without label words, of the next token) that is predicted.
        steps: m; twice as many take twice the time.
        weight: Function of the pattern and the mean gradient, as in ``SegmentFlows``; by default
            their product, summed over heads. ``al.weights.positive`` is for a loss.

    Raises:
        MetricError: ``steps`` is below 1, or ``output``, segments or weight do not fit.
        PromptError: The prompts do not fit the model, or lack a segment.
        ModelError: The attention hooks do not act, or value biases are folded.

    Examples:
        >>> asked = al.IntegratedFlows(["text", "label", "target"], steps=10)
        >>> record = al.run(model, batches[:1], [asked], progress=False)["integrated_flows"]
    """

    segments: SegmentsOfBatch | None = None
    _: KW_ONLY
    output: LossOfBatch | None = None
    steps: int = 20
    weight: Weight = signed
    name: str = "integrated_flows"
    record: ClassVar = IntegratedFlowsRecord

    def __post_init__(self) -> None:
        check_counts(MetricError, steps=self.steps)
        refuse_values(self.weight, "al.IntegratedFlows")

    @property
    def _flows(self) -> SegmentFlows:
        """The metric whose sets of edges are summed."""
        return SegmentFlows(self.segments, self.weight, name=self.name)

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error for folded biases, segments, a weight or an output that do not fit."""
        refuse_folded_value_biases(model)
        self._flows.check(model, batches, changed=False)
        if self.output is not None:
            check_gradient_of_loss(self.output, batches, model)

    # An inference_mode of the caller would make tensors that autograd rejects.
    @each_call_inside(gradient_mode, True)
    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """The sums of edges of each prompt, and F(A) - F(0)."""
        model, layers = passes.model, attention_layers(passes.model)
        sums = EdgeSums(self._flows.sets_of(batch), self.weight)
        patterns: dict[int, Tensor] = {}
        norms = FrozenNorms(model)
        store = hooks_by_layer(model, pattern_name, patterns.__setitem__)
        starts = Starts({*layers} - passes.why_not_late(layers).keys())
        with added_hooks(model, of_modules=norms.observers()):
            clean = run_pass(model, batch, observers=store, starts=starts)
        if self.output is None:
            of_prompts = probability_of_prediction(clean, batch)
            whole = of_prompts(clean, batch)
        else:
            of_prompts, whole = self.output, losses_of(model, batch, self.output)
        changes, attributed = [], []
        # The last layer first: the first has the largest graph, when few patterns are left.
        for layer in reversed(layers):
            start = starts.found.get(layer)
            of_pattern = partial(output_with, model, batch, of_prompts, layer, start)
            pattern = patterns.pop(layer)
            with added_hooks(model, of_modules=norms.hooks_of(layer)):
                gradient = mean_gradient(of_pattern, pattern, self.steps)
                changes.append(whole - of_pattern(pattern * 0.0))
            pattern = pattern.to(gradient.dtype)
            attributed.append((pattern * gradient).sum((1, 2, 3), dtype=widest(pattern.device)))
            sums.add(layer, pattern, gradient)
        by_layer = {"change": changes[::-1], "attributed": attributed[::-1]}
        totals = {
            name: torch.stack(on_one_device(values), 1).cpu().double()
            for name, values in by_layer.items()
        }
        of_edges = {**by_heads(sums.total()), "counts": sums.sets.counts()}
        return of_edges | totals | {"output": whole.cpu().double()}

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The output, and the layers that were not started late."""
        output = self.output
        name = "probability of the prediction" if output is None else name_of(output)
        info: dict[str, Any] = {"integrated gradient": name, "steps": self.steps}
        if reasons := passes.why_not_late(attention_layers(passes.model)):
            info["whole passes"] = reasons
        _warn_if_incomplete(contributions, self.steps)
        return {"info": info | {"shared_prefix": WHOLE}}

    def result(self, contributions: Contributions) -> IntegratedFlowsRecord:
        """The flows, and the means of what their edges sum to and should sum to."""
        flows = self._flows.result(contributions)
        return IntegratedFlowsRecord.of(contributions, **flows.tensors(), info=flows.info)


def output_with(
    model: HookedModel,
    batch: PromptBatch,
    output: LossOfBatch,
    layer: int,
    start: Start | None,
    pattern: Pattern,
    into: Sequence[Tensor] = (),
) -> Float[Tensor, " batch"]:
    """F of each prompt with another pattern in a layer."""

    def replace(clean: Tensor, hook: Any) -> Tensor:
        return pattern

    replaced: list[Hook] = [(pattern_name(layer), WholeHook(replace))]
    return losses_of(model, batch, output, hooks=replaced, into=into, start=start)


def mean_gradient(
    output: Callable[..., Float[Tensor, " batch"]], pattern: Pattern, steps: int
) -> Pattern:
    """``1/m sum_s dF / d(alpha_s A)``, in float32 or wider; ``output`` gives F of a pattern."""
    wide = torch.promote_types(pattern.dtype, torch.float32)
    total = torch.zeros_like(pattern, dtype=wide)
    for step in range(steps):
        leaf = (pattern * ((step + 0.5) / steps)).requires_grad_()
        output(leaf, into=[leaf])
        assert leaf.grad is not None
        total += leaf.grad
    return total / steps


def _warn_if_incomplete(contributions: Mapping[str, Tensor], steps: int) -> None:
    """Warn of layers where the attributions of prompts do not sum to F(A) - F(0)."""
    change, attributed = contributions["change"], contributions["attributed"]
    error = (attributed - change).abs().mean(0)
    sizes = torch.maximum(change.abs().mean(0), attributed.abs().mean(0))
    limit = INCOMPLETE * sizes + SMALL * contributions["output"].abs().mean()
    wrong = (error > limit).nonzero().flatten().tolist()
    if wrong and is_main():
        worst = max(wrong, key=lambda layer: float(error[layer] / sizes[layer]))
        warn_user(
            f"in layers {wrong} the attributions do not sum to F(A) - F(0): in layer {worst} they "
            f"sum to {float(attributed[:, worst].mean()):.3g}, and F(A) - F(0) is "
            f"{float(change[:, worst].mean()):.3g} (means over prompts). Take more steps than "
            f"{steps}; if the difference does not fall, F jumps on the path (other experts are "
            "chosen), and these layers have no integrated gradient"
        )


def probability_of_prediction(
    clean: Float[Tensor, "batch vocab"], batch: PromptBatch
) -> LossOfBatch:
    """The probability of what the clean run predicts: a label, or a token without label words."""

    def log_probs(logits: Tensor, batch: PromptBatch) -> Tensor:
        scores = batch.label_scores(logits) if batch.has_label_words else logits
        return scores.log_softmax(-1)

    predicted = predicted_class(log_probs(clean, batch))[:, None]
    return lambda logits, batch: log_probs(logits, batch).gather(1, predicted)[:, 0].exp()
