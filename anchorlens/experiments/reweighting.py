"""Anchor re-weighting: learn how much the target attends to each label word (section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ..contexts.training import query_digests
from ..errors import HookError, MetricError, PromptError
from ..hooks import reweight_anchors
from ..metrics.accuracy import Accuracy, AccuracyComparisonRecord, compare_accuracies
from ..models.hooked import (
    Hook,
    HookedModel,
    device_of,
    dtype_of,
    refuse_folded_value_biases,
)
from ..models.kv_cache import KeyValues
from ..passes.descent import mean_loss_with_gradient
from ..passes.forward import run_pass
from ..passes.losses import Loss, check_loss, label_cross_entropy, refuse_several_targets
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.bootstrap import check_resamples
from ..results.record import Record
from ..runs.order import sets_of
from ..runs.run import run
from ..runs.study import Study, checked_batches, describe
from ..system.arguments import checked
from ..system.processes import gather_from_processes, is_main
from ..system.warn import warn_user
from ..trials.may_share import all_but_target


@dataclass(frozen=True, eq=False, kw_only=True)
class Beta(Record):
    """Logarithm of the factor of the target's attention to each label word.

    Attributes:
        beta: ``A(q, p_i)`` is multiplied by ``exp(beta_i)``, for the label words in order of
            appearance. 0 changes nothing; above 0 the label word is read more.
        label_classes: Class of each label word; prompts must have the same classes in this order.
        losses: Mean loss of each epoch's steps, in nats; low is good.
        vanilla_loss: Mean loss at beta = 0, in nats. Losses above it mean that training diverged,
            or began at a worse beta.
    """

    beta: Float[Tensor, "layer head anchor"]
    label_classes: Int[Tensor, " anchor"]
    losses: Float[Tensor, " epoch"]
    vanilla_loss: Float[Tensor, ""]

    caption: ClassVar[str] = (
        "exp(beta) multiplies the target's attention to a label word. At 1 nothing changes; "
        "above 1 the label word is read more, below 1 less. The loss falls where re-weighting "
        "helps on the prompts that it was trained on. In the paper it raises the accuracy on all "
        "four tasks."
    )

    @checked
    def of_prompts(self, batch: PromptBatch) -> Float[Tensor, "layer head anchor"]:
        """The beta, for prompts with the label words that it was learned for.

        Raises:
            HookError: Their number or the order of their classes differs.
        """
        expected = self.label_classes.tolist()
        for classes in batch.label_classes.tolist():
            if classes != expected:
                raise HookError(
                    f"this beta is for label words of the classes {expected} in order of "
                    f"appearance; the prompt has {classes}. Train one on prompts with these "
                    "demonstrations, or build the prompts with those that it was trained on"
                )
        return self.beta

    def plot(self) -> go.Figure:
        """Factor of the attention to each label word, by layer, as a mean over heads."""
        labels = self.info.get("labels")
        names = [
            f"label word {number}" + (f": {labels[label]}" if labels else "")
            for number, label in enumerate(self.label_classes.tolist())
        ]
        return figures.lines_by_layer(
            self.beta.exp().mean(1).T,
            names,
            title=f"Re-weighting: loss {self.vanilla_loss:.2f} to {self.losses[-1]:.2f}",
            y_title="exp(beta), mean over heads",
            reference=1.0,
        )


@checked
def train_reweighting(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    *,
    epochs: int = 10,
    lr: float = 0.01,
    seed: int = 0,
    start: Float[Tensor, "_ _ _"] | None = None,
    loss: Loss = label_cross_entropy,
    progress: bool = True,
) -> Beta:
    """Learn beta by gradient descent on the label loss; the model is frozen.

    Each batch is a step of Adam. The paper uses batches of one prompt
    (``build_prompts(..., batch_size=1)``), 10 epochs at lr 0.01, and 4 training examples a class.
    Batches are shuffled in each epoch. Beta acts on the target's row alone, so everything before
    the target is run once, and a step runs one token of each prompt. Where the model's cache gives
    other logits, steps run whole prompts. A step needs the step before it, so several processes all
    do the same training, and all get the beta of the main process.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Training prompts, all with the same demonstrations and with their true labels.
        epochs: Number of passes over all batches.
        lr: Learning rate of Adam.
        seed: Seeds the order of the batches; the global random state is not touched.
        start: Beta at the start, 0 by default. An axis of length 1 is shared: (layer, 1, anchor)
            learns a value for each layer and label word, (layer, 1, 1) a value for each layer.
        loss: Function of (logits, batch) that returns a number for each prompt; a step uses its
            mean over the batch.
        progress: Show a progress bar.

    Returns:
        The beta with its losses, for ``reweight_anchors(model, batch, beta)``. If training
        diverges, it stops with a warning, and the beta is that with the lowest loss.

    Raises:
        PromptError: The prompts do not fit the model, or differ in their label words.
        MetricError: The prompts have no true labels, or a setting is no positive number.
        HookError: ``start`` does not fit the model and the prompts.
        ModelError: The model's hooks do not act, or its value biases are folded.

    Examples:
        >>> beta = al.train_reweighting(model, batches, epochs=1, progress=False)
        >>> loaded = al.Beta.load(beta.save(folder / "beta.safetensors"))
        >>> results = al.run(model, batches, [al.Accuracy()], progress=False,
        ...     hooks=lambda batch: al.reweight_anchors(model, batch, loaded))
    """
    settings: dict[str, Any] = {"epochs": epochs, "lr": lr, "seed": seed}
    with Study(model, batches, settings, resamples=0, progress=progress).entered() as study:
        batches = study.batches
        refuse_folded_value_biases(model)
        classes = _classes(batches)
        if epochs < 1 or not (lr > 0 and isfinite(lr)):
            raise MetricError(f"epochs and lr must be positive numbers; got {epochs} and {lr}")
        refuse_several_targets(loss)
        check_loss(loss, batches, model)
        quiet = not (progress and is_main())
        shape = (model.cfg.n_layers, model.cfg.n_heads, len(classes))
        with torch.inference_mode(False):
            parameter = _parameter(model, shape, start)
            device = device_of(model)
            bar = tqdm(batches, disable=quiet, desc="training prompts")
            steps = [all_but_target(model, batch.to(device)) for batch in bar]
            training = _Training(model, parameter, loss, torch.optim.Adam([parameter], lr=lr))
            vanilla = training.loss_of(steps, torch.zeros_like(parameter))
            start_loss = vanilla if start is None else training.loss_of(steps, parameter.detach())
            generator = torch.Generator().manual_seed(seed % 2**64)
            losses: list[float] = []
            betas = [parameter.detach().expand(shape).cpu().clone()]
            for epoch in tqdm(range(epochs), disable=quiet, desc="epochs"):
                order = torch.randperm(len(steps), generator=generator, device="cpu").tolist()
                losses.append(_mean([training.step(*steps[number]) for number in order]))
                # The mean loss of the first epoch includes the start, so it is not compared. The
                # limit is a tenth higher, which is more than the noise of steps.
                limit = max(vanilla, start_loss) + 0.1 * abs(max(vanilla, start_loss))
                if not isfinite(losses[-1]) or (epoch and losses[-1] > limit):
                    _warn_of_divergence(losses, start_loss, lr)
                    break
                betas.append(parameter.detach().expand(shape).cpu().clone())
        whole = sum(prefix is None for _, prefix in steps)
        settings["learned_shape"] = list(parameter.shape)
        settings["queries_in_training"] = sorted(query_digests(batches))
        settings["shared_prefix"] = (
            f"off for {whole} of {len(steps)} batches: other logits after a cached prefix"
            if whole
            else "everything before the target, run once for all epochs"
        )
        trained = Beta(
            # After divergence: the best beta, without the last epoch's.
            beta=betas[-1]
            if len(betas) > len(losses)
            else betas[_lowest([start_loss, *losses[:-1]])],
            label_classes=torch.tensor(classes, device="cpu"),
            losses=torch.tensor(losses, device="cpu"),
            vanilla_loss=torch.tensor(vanilla, device="cpu"),
            info=study.describe() | settings,
        )
        # On GPUs the betas of processes may differ in the last bits, but a later run divides its
        # prompts between the processes: all need the same beta.
        return gather_from_processes("beta", trained)[0]


@checked
def reweighting_accuracy(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    beta: Beta,
    more_shots: Sequence[PromptBatch],
    *,
    resamples: int = 200,
    progress: bool = True,
) -> AccuracyComparisonRecord:
    """Accuracies of the plain model, with more demonstrations, and re-weighted (Table 1).

    Compare the gain of re-weighting with the gain from the training examples as demonstrations.

    Args:
        model: A hooked model.
        batches: Test prompts with the demonstrations that ``beta`` was learned for.
        beta: From ``train_reweighting``.
        more_shots: The same queries after those demonstrations and the training examples.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        progress: Show a progress bar.

    Returns:
        Accuracies of "vanilla", "more shots" and "re-weighted", and the gain of each over vanilla.

    Raises:
        HookError: The beta is for other label words.
        MetricError: The two lists of prompts have different queries, or ``resamples`` is no number
            from 0. It is raised before any run.
        PromptError: The prompts do not fit the model.

    Examples:
        >>> beta = al.train_reweighting(model, batches, epochs=1, progress=False)
        >>> record = al.reweighting_accuracy(model, batches, beta, batches, progress=False)
        >>> record.gain.shape
        torch.Size([3])
    """
    check_resamples(resamples)
    for prompts in (batches, more_shots):
        checked_batches(model, prompts)
    for batch in batches:
        beta.of_prompts(batch)
    if _queries(batches) != _queries(more_shots):
        raise MetricError(
            "accuracies are compared on the same queries, but the prompts with more demonstrations "
            f"have others: {sum(map(len, batches))} prompts, and {sum(map(len, more_shots))} with "
            "more; build both from one list of queries (drop_too_long leaves long ones out)"
        )
    options: dict[str, Any] = {"resamples": 0, "progress": progress}
    vanilla = run(model, batches, [Accuracy()], **options)["accuracy"]
    with_more = run(model, more_shots, [Accuracy()], **options)["accuracy"]
    weighted = run(
        model,
        batches,
        [Accuracy()],
        hooks=lambda batch: reweight_anchors(model, batch, beta),
        **options,
    )["accuracy"]
    correct = {
        "vanilla": vanilla.correct,
        "more shots": with_more.correct,
        "re-weighted": weighted.correct,
    }
    info, sets = describe(model, batches), sets_of(batches)
    return compare_accuracies(correct, sets=sets, resamples=resamples, info=info)


@dataclass(frozen=True)
class _Training:
    """Model, loss and optimizer, which every step uses."""

    model: HookedModel
    parameter: Float[Tensor, "_ _ _"]
    loss: Loss
    optimizer: torch.optim.Optimizer

    def loss_of(
        self, steps: Sequence[tuple[PromptBatch, KeyValues | None]], beta: Float[Tensor, "_ _ _"]
    ) -> float:
        """Mean loss of all steps at this beta."""
        losses = []
        for batch, prefix in steps:
            hooks = self.hooks(batch, beta) if beta.any() else []
            logits = run_pass(self.model, batch, hooks=hooks, prefix=prefix)
            losses.append(float(self.loss(logits, batch).mean()))
        return _mean(losses)

    def hooks(self, batch: PromptBatch, beta: Float[Tensor, "_ _ _"]) -> list[Hook]:
        n_anchors = batch.label_positions.shape[1]
        shape = (self.model.cfg.n_layers, self.model.cfg.n_heads, n_anchors)
        return reweight_anchors(self.model, batch, beta.expand(shape))

    def step(self, batch: PromptBatch, prefix: KeyValues | None) -> float:
        """Take an optimizer step; return the mean loss before it, NaN where logits overflow."""
        if not (self.parameter < torch.inf).all():  # the step before was too large
            return nan
        self.optimizer.zero_grad()
        with torch.enable_grad():
            hooks = self.hooks(batch, self.parameter)
        mean = mean_loss_with_gradient(
            self.model, batch, self.loss, [self.parameter], hooks=hooks, prefix=prefix
        )
        if isfinite(mean):
            self.optimizer.step()
        return mean


def _queries(batches: Sequence[PromptBatch]) -> list[tuple[int, int]]:
    """The index of each query, and a digest of its tokens."""
    indices = [index for batch in batches for index in batch.index.tolist()]
    return sorted(zip(indices, query_digests(batches), strict=True))


def _classes(batches: Sequence[PromptBatch]) -> list[int]:
    """The classes of the label words in order of appearance, the same in all prompts."""
    orders = torch.cat([batch.on_cpu.label_classes for batch in batches]).unique(dim=0)
    if len(orders) > 1:
        raise PromptError(
            "a beta is for a single order of label words, but the prompts have the classes "
            f"{orders.tolist()}; train each set of demonstrations separately"
        )
    return [int(label) for label in orders[0]]


def _parameter(
    model: HookedModel, shape: tuple[int, ...], start: Float[Tensor, "_ _ _"] | None
) -> Tensor:
    values = torch.zeros(shape, device="cpu") if start is None else start.detach()
    fits = values.ndim == 3 and all(
        size in (1, full) for size, full in zip(values.shape, shape, strict=True)
    )
    if not fits or values.shape[0] != shape[0]:
        raise HookError(
            f"start must have the shape (layer, head, anchor) = {shape}, or 1 for heads or anchors "
            f"that share theirs; got {tuple(values.shape)}"
        )
    wide = torch.promote_types(dtype_of(model), torch.float32)
    return values.to(device_of(model), wide, copy=True).requires_grad_()


def _lowest(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _warn_of_divergence(losses: Sequence[float], start_loss: float, lr: float) -> None:
    warn_user(
        f"training diverged: the mean loss of epoch {len(losses)} is {losses[-1]:.3g}, and at the "
        f"start it is {start_loss:.3g}. It was stopped, and the beta is that of its best epoch "
        f"before, or of the start where no epoch was better; use a lower lr than {lr}"
    )
