"""Flows with the integrated gradient: attention attribution, one layer at a time."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics.products import SegmentSums
from ..metrics.segment_flows import SegmentFlows, SegmentFlowsRecord, rows_of_sums
from ..metrics.weights import Weight, refuse_values, signed
from ..models.hooked import (
    Hook,
    HookedModel,
    hooks_by_layer,
    pattern_name,
    refuse_folded_value_biases,
)
from ..passes.forward import run_pass
from ..passes.late_start import Start, started, stored_starts
from ..passes.losses import Loss, check_gradient_of_loss, check_loss
from ..passes.shared_prefix import HooksOfBatch
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..runs.study import Study
from ..runs.trial import late_starts
from ..system.names import name_of
from ..system.processes import fails_together

Pattern = Float[Tensor, "batch head query key"]


@fails_together()
def integrated_flows(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    segments: Mapping[str, edges.PositionsOfBatch] | Sequence[str] | None = None,
    *,
    output: Loss | None = None,
    steps: int = 20,
    weight: Weight = signed,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> SegmentFlowsRecord:
    """Flows between segments with the integrated gradient instead of the gradient.

    Attention attribution (Hao et al., 2021): in each layer alone the pattern A grows from 0 to what
    it is, in m steps, while the other layers compute as they do:

        Attr = A * 1/m sum_s dF(alpha_s A) / d(alpha_s A)        alpha_s = (s - 1/2) / m

    So it also sees an edge whose gradient has become 0 because the model is certain. The sum of
    Attr over all edges of a layer, those of tokens to themselves too, is F(A) - F(0), but for an
    error that falls as 1 / m^2.

    Each layer needs m passes forward and backward, from this layer on where a trial finds the same
    logits.

    Args:
        model: A hooked model.
        batches: Prompts from ``build_prompts`` or ``build_segments``.
        segments: See ``SegmentFlows``.
        output: F, a function of (logits, batch) to one number a prompt, as a loss is; also a
            ``LossAtPositions``. By default the probability of the label that the clean run predicts
            among the labels; in prompts without label words, of the likeliest next token.
        steps: m; twice as many take twice the time.
        weight: Function of the pattern and the mean gradient, as in ``SegmentFlows``. By default
            their product, summed over heads: above 0 where the attention raises F. Note that
            ``al.weights.positive`` is made for a loss, where low is good.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        A record as that of ``SegmentFlows``, in the unit of F. ``info`` has the output, the number
        of steps, and the layers that could not be started late, with the reason.

    Raises:
        MetricError: ``steps`` is no whole number from 1, ``output`` is no function or does not give
            one number a prompt, or segments or weight do not fit; see ``SegmentFlows``.
        PromptError: The prompts do not fit the model, or lack a segment.
        ModelError: The attention hooks do not act, or value biases are folded.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Examples:
        >>> record = al.integrated_flows(
        ...     model, batches[:1], ["text", "label", "target"], steps=2, progress=False)
        >>> record.total.shape == (model.cfg.n_layers, 3, 3)
        True
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise MetricError(f"steps must be a whole number from 1; got {steps!r}")
    if output is not None and not callable(output):
        raise MetricError(
            "output is a function of (logits, batch) to one number a prompt, such as "
            f"al.label_cross_entropy; got {output!r}"
        )
    refuse_values(weight, "al.integrated_flows")
    metric = SegmentFlows(segments, weight)
    name = "probability of the prediction" if output is None else name_of(output)
    study = Study(
        model,
        batches,
        {"integrated gradient": f"{steps} steps of {name}", "metric": metric},
        folder=folder,
        resamples=resamples,
        progress=progress,
        title="integrated gradient",
    )
    with study:
        refuse_folded_value_biases(model)
        metric.check(model, study.batches, changed=False)
        if output is not None:
            check_loss(output, study.batches, model)
            check_gradient_of_loss(output, study.batches, model)
        plan = study.plan(share_prefix=False)
        layers = range(model.cfg.n_layers)
        reasons = late_starts(
            plan.passes, study.batches, {layer: _halved(layer) for layer in layers}
        )

        # An inference_mode of the caller would make tensors that autograd rejects.
        @torch.inference_mode(False)
        def rows_of_batch(batch: PromptBatch) -> dict[str, Tensor]:
            sums = SegmentSums(metric.segments_of(batch), weight, 0)
            patterns: dict[int, Tensor] = {}
            with stored_starts(model, layers - reasons.keys()) as starts:
                clean = run_pass(
                    model,
                    batch,
                    observers=hooks_by_layer(model, pattern_name, patterns.__setitem__),
                )
            of_prompts = probability_of_prediction(clean, batch) if output is None else output
            # The last layer first: the first has the largest graph, when few patterns are left.
            for layer in reversed(layers):
                pattern = patterns.pop(layer)
                gradient = mean_gradient(
                    model, batch, layer, pattern, of_prompts, steps, starts.get(layer)
                )
                sums.add(layer, pattern.to(gradient.dtype), gradient)
            return rows_of_sums(sums, batch)

        rows = study.collect(rows_of_batch)
        info: dict[str, Any] = {"integrated gradient": name, "steps": steps}
        if reasons:
            info["whole passes"] = reasons
        return study.record(metric.result, rows, info)


def mean_gradient(
    model: HookedModel,
    batch: PromptBatch,
    layer: int,
    pattern: Pattern,
    output: Loss,
    steps: int,
    start: Start | None = None,
) -> Pattern:
    """``1/m sum_s dF / d(alpha_s A)`` of a layer, in float32 or wider.

    Args:
        model: A frozen model.
        batch: Whole prompts on the model's device.
        layer: The number of the layer.
        pattern: A, that of the clean run.
        output: F.
        steps: m.
        start: Where the passes begin; at the first layer by default.
    """
    wide = torch.promote_types(pattern.dtype, torch.float32)
    total = torch.zeros_like(pattern, dtype=wide)
    with started(model, start):
        for step in range(steps):
            leaf = (pattern * ((step + 0.5) / steps)).requires_grad_()
            hook: Hook = (pattern_name(layer), partial(_replace, leaf))
            run_pass(model, batch, hooks=[hook], loss=output, into=[leaf])
            assert leaf.grad is not None
            total += leaf.grad
    return total / steps


def probability_of_prediction(clean: Float[Tensor, "batch vocab"], batch: PromptBatch) -> Loss:
    """The probability of what the clean run predicts: a label, or a token without label words.

    The prediction stays that of the clean run where a smaller pattern makes another one likelier.
    """

    def log_probs(logits: Tensor, batch: PromptBatch) -> Tensor:
        scores = batch.label_scores(logits) if batch.has_label_words else logits
        return scores.log_softmax(-1)

    predicted = log_probs(clean, batch).argmax(-1, keepdim=True)
    return lambda logits, batch: log_probs(logits, batch).gather(1, predicted)[:, 0].exp()


def _replace(leaf: Tensor, pattern: Tensor, hook: Any) -> Tensor:
    return leaf


def _halved(layer: int) -> HooksOfBatch:
    """A change of one layer, for the trial."""

    def halve(pattern: Tensor, hook: Any) -> Tensor:
        return pattern / 2

    return lambda batch: [(pattern_name(layer), halve)]
