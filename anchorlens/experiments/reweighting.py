"""Anchor re-weighting: learn how much the target attends to each label word (section 3.1)."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import HookError, MetricError, ModelError, PromptError
from ..hooks import reweight_anchors
from ..metrics.accuracy import Accuracy, AccuracyComparisonRecord, compare_accuracies
from ..models.hooked import Hook, HookedModel, device_of, refuse_folded_value_biases, vocabulary_of
from ..models.kv_cache import Prefix
from ..models.load import ensure_prepared
from ..models.model_state import undisturbed
from ..passes.forward import run_pass
from ..passes.losses import Loss, label_cross_entropy
from ..passes.shared_prefix import all_but_target
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.bootstrap import check_resamples
from ..results.record import Record
from ..runs.loop import as_run, check_batches, check_same_call, describe, sets_of
from ..runs.run import run
from ..system.processes import gathered, is_main, together


@dataclass(frozen=True, eq=False, kw_only=True)
class Beta(Record):
    """What the target's attention to each label word is multiplied by, as a logarithm.

    Attributes:
        beta: ``A(q, p_i)`` is multiplied by ``exp(beta_i)``, for the label words in order of
            appearance. 0 changes nothing, above 0 the label word is read more.
        label_classes: Class of each label word, by which prompts are told to fit.
        losses: Mean loss of each epoch's steps, in nats; low is good.
        vanilla_loss: Mean loss at beta = 0, in nats. Losses above it say that training diverged,
            or began at a worse beta.
    """

    beta: Float[Tensor, "layer head anchor"]
    label_classes: Int[Tensor, " anchor"]
    losses: Float[Tensor, " epoch"]
    vanilla_loss: Float[Tensor, ""]

    def of_prompts(self, batch: PromptBatch) -> Float[Tensor, "layer head anchor"]:
        """The beta, for prompts whose label words are those that it was learned for.

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

    def plot(self) -> Any:
        """What multiplies the attention to each label word, by layer, as a mean over heads."""
        labels = self.info.get("labels")
        names = [
            f"label word {place}" + (f": {labels[label]}" if labels else "")
            for place, label in enumerate(self.label_classes.tolist())
        ]
        return figures.lines_by_layer(
            self.beta.exp().mean(1).T,
            names,
            title=f"Re-weighting: loss {self.vanilla_loss:.2f} to {self.losses[-1]:.2f}",
            y_title="exp(beta), mean over heads",
            reference=1.0,
        )


@together()
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

    Adam, one step a batch: with ``build_prompts(..., batch_size=1)`` as in the paper, which takes
    10 epochs at lr 0.01 over 4 training examples a class. Batches are shuffled anew in each epoch.
    Beta acts on the target's row alone, so that everything before it is run once and a step runs
    one token a prompt; where the model's cache gives other logits, steps run whole prompts. Steps
    follow one another, so that several processes train the same, and all get the main one's beta.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        batches: Training prompts, all with the same demonstrations and with their true labels.
        epochs: Times that each batch is seen.
        lr: Learning rate of Adam.
        seed: Seeds the order of the batches; the global random state is not touched.
        start: Beta at the start, 0 by default. An axis of length 1 is shared: (layer, 1, anchor)
            learns one for each layer and label word, (layer, 1, 1) one for each layer.
        loss: Function of (logits, batch) to one number a prompt; the mean over a batch counts.
        progress: Show a progress bar.

    Returns:
        The beta with its losses, for ``reweight_anchors(model, batch, beta)``. Where training
        diverges it stops with a warning, and the beta is the one with the lowest loss.

    Raises:
        PromptError: The prompts do not fit the model, or differ in their label words.
        MetricError: The prompts have no true labels, or a setting is no positive number.
        HookError: ``start`` does not fit the model and the prompts.
        ModelError: The model's hooks do not act, or its value biases are folded.

    Examples:
        >>> beta = al.train_reweighting(model, batches, epochs=1, progress=False)
        >>> again = al.Beta.load(beta.save(folder / "beta.safetensors"))
        >>> results = al.run(model, batches, [al.Accuracy()], progress=False,
        ...     hooks=lambda batch: al.reweight_anchors(model, batch, again))
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples=0)
    batches = as_run(batches)
    refuse_folded_value_biases(model)
    classes = _classes(batches)
    if epochs < 1 or not (lr > 0 and isfinite(lr)):
        raise MetricError(f"epochs and lr must be positive numbers; got {epochs} and {lr}")
    loss(torch.zeros(len(batches[0]), vocabulary_of(model)), batches[0].to("cpu"))
    said = {"epochs": str(epochs), "lr": str(lr), "seed": str(seed)}
    check_same_call(model, batches, said)
    quiet = not (progress and is_main())
    shape = (model.cfg.n_layers, model.cfg.n_heads, len(classes))
    with undisturbed(model), torch.inference_mode(False):
        parameter = _parameter(model, shape, start)
        device = device_of(model)
        bar = tqdm(batches, disable=quiet, desc="training prompts")
        steps = [all_but_target(model, batch.to(device)) for batch in bar]
        training = _Training(model, parameter, loss, torch.optim.Adam([parameter], lr=lr))
        vanilla = training.loss_of(steps, torch.zeros_like(parameter))
        begin = vanilla if start is None else training.loss_of(steps, parameter.detach())
        generator = torch.Generator().manual_seed(seed % 2**64)
        losses: list[float] = []
        betas = [parameter.detach().expand(shape).cpu().clone()]
        for epoch in tqdm(range(epochs), disable=quiet, desc="epochs"):
            order = torch.randperm(len(steps), generator=generator).tolist()
            losses.append(_mean([training.step(*steps[number]) for number in order]))
            # The first epoch is on its way from the start; a tenth more is no noise of steps.
            limit = max(vanilla, begin) + 0.1 * abs(max(vanilla, begin))
            if not isfinite(losses[-1]) or (epoch and losses[-1] > limit):
                _warn_of_divergence(losses, begin, lr)
                break
            betas.append(parameter.detach().expand(shape).cpu().clone())
    whole = sum(prefix is None for _, prefix in steps)
    settings = {"epochs": epochs, "lr": lr, "seed": seed, "learned_shape": list(parameter.shape)}
    settings["shared_prefix"] = (
        f"off for {whole} of {len(steps)} batches: other logits behind a cache"
        if whole
        else "everything before the target, run once for all epochs"
    )
    trained = Beta(
        # All but the last of a training that diverged, and its best.
        beta=betas[-1] if len(betas) > len(losses) else betas[_lowest([begin, *losses[:-1]])],
        label_classes=torch.tensor(classes),
        losses=torch.tensor(losses),
        vanilla_loss=torch.tensor(vanilla),
        info=describe(model, batches) | settings,
    )
    # Not each its own: on GPUs they may differ in the last bits, and prompts are shared out.
    return gathered("beta", trained)[0]


def reweighting_accuracy(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    beta: Beta,
    more_shots: Sequence[PromptBatch],
    *,
    resamples: int = 200,
    progress: bool = True,
) -> AccuracyComparisonRecord:
    """Accuracy as it is, with more demonstrations, and re-weighted (the paper's Table 1).

    A gain is worth something next to what the training examples give as demonstrations.

    Args:
        model: A hooked model.
        batches: Test prompts with the demonstrations that ``beta`` was learned for.
        beta: From :func:`train_reweighting`.
        more_shots: The same queries behind those demonstrations and the training examples.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        progress: Show a progress bar.

    Returns:
        Accuracies of "vanilla", "more shots" and "re-weighted", and the gain of each over vanilla.

    Raises:
        HookError: The beta is for other label words.
        MetricError: The two lists of prompts are not of the same queries, or ``resamples`` is no
            number from 0: before any runs.
        PromptError: The prompts do not fit the model.

    Examples:
        >>> beta = al.train_reweighting(model, batches, epochs=1, progress=False)
        >>> record = al.reweighting_accuracy(model, batches, beta, batches, progress=False)
        >>> record.gain.shape
        torch.Size([3])
    """
    check_resamples(resamples)
    ensure_prepared(model)
    for prompts in (batches, more_shots):
        check_batches(model, prompts, resamples=0)
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
    many = run(model, more_shots, [Accuracy()], **options)["accuracy"]
    weighted = run(
        model,
        batches,
        [Accuracy()],
        hooks=lambda batch: reweight_anchors(model, batch, beta),
        **options,
    )["accuracy"]
    correct = {
        "vanilla": vanilla.correct,
        "more shots": many.correct,
        "re-weighted": weighted.correct,
    }
    info, sets = describe(model, batches), sets_of(batches)
    return compare_accuracies(correct, sets=sets, resamples=resamples, info=info)


@dataclass(frozen=True)
class _Training:
    """What every step needs."""

    model: HookedModel
    parameter: Float[Tensor, "_ _ _"]
    loss: Loss
    optimizer: torch.optim.Optimizer

    def loss_of(
        self, steps: Sequence[tuple[PromptBatch, Prefix | None]], beta: Float[Tensor, "_ _ _"]
    ) -> float:
        """Mean loss of all steps at one beta."""
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

    def step(self, batch: PromptBatch, prefix: Prefix | None) -> float:
        """One step of the optimizer; the mean loss before it, NaN where logits overflow."""
        if not (self.parameter < torch.inf).all():  # after a step too far
            return nan
        seen = []

        def mean_loss(logits: Tensor, batch: PromptBatch) -> Tensor:
            seen.append(self.loss(logits, batch))
            return seen[-1] / len(batch)

        self.optimizer.zero_grad()
        with torch.enable_grad():
            hooks = self.hooks(batch, self.parameter)
        try:
            run_pass(
                self.model,
                batch,
                hooks=hooks,
                loss=mean_loss,
                into=[self.parameter],
                prefix=prefix,
            )
        except ModelError:
            return nan
        self.optimizer.step()
        return float(seen[0].detach().mean())


def _queries(batches: Sequence[PromptBatch]) -> list[tuple[int, list[int]]]:
    """The place and the tokens of each query."""
    queries = []
    for batch in batches:
        where = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        inside = batch.attention_mask & (where >= batch.query_start[:, None])
        rows = zip(batch.index.tolist(), batch.tokens, inside, strict=True)
        queries += [(place, tokens[keep].tolist()) for place, tokens, keep in rows]
    return sorted(queries)


def _classes(batches: Sequence[PromptBatch]) -> list[int]:
    """The classes of the label words in order of appearance, the same in all prompts."""
    found = torch.cat([batch.label_classes.cpu() for batch in batches]).unique(dim=0)
    if len(found) > 1:
        raise PromptError(
            "one beta is for one order of label words, but the prompts have the classes "
            f"{found.tolist()}; train each set of demonstrations by itself"
        )
    return [int(one) for one in found[0]]


def _parameter(
    model: HookedModel, shape: tuple[int, ...], start: Float[Tensor, "_ _ _"] | None
) -> Tensor:
    begin = torch.zeros(shape) if start is None else start.detach()
    fits = begin.ndim == 3 and all(
        got in (1, want) for got, want in zip(begin.shape, shape, strict=True)
    )
    if not fits or begin.shape[0] != shape[0]:
        raise HookError(
            f"start must have the shape (layer, head, anchor) = {shape}, or 1 for heads or anchors "
            f"that share theirs; got {tuple(begin.shape)}"
        )
    wide = torch.promote_types(next(iter(model.parameters())).dtype, torch.float32)  # type: ignore[attr-defined]
    return begin.to(device_of(model), wide, copy=True).requires_grad_()


def _lowest(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _warn_of_divergence(losses: Sequence[float], begin: float, lr: float) -> None:
    warnings.warn(
        f"training diverged: the mean loss of epoch {len(losses)} is {losses[-1]:.3g}, and at the "
        f"start it is {begin:.3g}. It was stopped, and the beta is that of its best epoch before, "
        f"or of the start where no epoch was better; use a lower lr than {lr}",
        stacklevel=4,  # together() stands between
    )
