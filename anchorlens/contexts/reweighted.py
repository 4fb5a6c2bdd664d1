"""Demonstrations whose label words are read more, or less (section 3.1): learned, and a context."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import HookError, PromptError
from ..hooks import reweight_anchors
from ..models.hooked import (
    HookedModel,
    LearnedBeta,
    device_of,
    dtype_of,
    refuse_folded_value_biases,
)
from ..models.load import ensure_prepared
from ..models.model_state import has_user_hooks
from ..models.rotary import rotate_alike
from ..passes.forward import run_prefix
from ..passes.loss_checks import check_loss, refuse_several_targets
from ..passes.losses import LossOfBatch
from ..passes.shortcuts import why_not_shared
from ..prompts.batch import PromptBatch, check_batch, longest_prompt
from ..results import figures
from ..results.estimate import in_digits
from ..results.record import Record
from ..system.arguments import checked
from ..system.processes import gather_from_processes
from ..system.torch_state import gradient_mode
from .compressed import CompressedContext, compress
from .protocol import Context, QueryPass
from .selection import everything
from .training import Trainable, Training, TrainingRun


@dataclass(frozen=True, eq=False, kw_only=True)
class Beta(Record):
    """Logarithm of the factor of the target's attention to each label word.

    Attributes:
        beta: ``A(q, p_i)`` is multiplied by ``exp(beta_i)``, label words in order of appearance. 0
            changes nothing; above 0 the label word is read more.
        label_classes: Class of each label word, which prompts must have in this order.
        losses: Mean loss of the steps of each round over all batches, in nats; low is good.
        vanilla_loss: Mean loss at beta = 0, in nats. Losses above it: it diverged, or began worse.
    """

    beta: Float[Tensor, "layer head anchor"]
    label_classes: Int[Tensor, " anchor"]
    losses: Float[Tensor, " round"]
    vanilla_loss: Float[Tensor, ""]

    caption: ClassVar[str] = (
        "exp(beta) multiplies the target's attention to a label word: above 1 it is read more, "
        "below 1 less. The loss falls where re-weighting helps on the training prompts. In the "
        "paper it raises the accuracy on all four tasks."
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
                    f"appearance; the prompt has {classes}. Train one for these demonstrations, or "
                    "build prompts with those that it was trained on"
                )
        return self.beta

    def plot(self) -> go.Figure:
        """Factor of the attention to each label word, by layer, as a mean over heads."""
        labels, last = self.info.get("labels"), [self.vanilla_loss, *self.losses][-1]
        names = [
            f"label word {number}" + (f": {labels[label]}" if labels else "")
            for number, label in enumerate(self.label_classes.tolist())
        ]
        return figures.lines_by_layer(
            self.beta.exp().mean(1).T,
            names,
            title=f"Re-weighting: loss {in_digits(self.vanilla_loss)} to {in_digits(last)}",
            y_title="exp(beta), mean over heads",
            reference=1.0,
        )


@checked
def train_reweighting(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    training: Training = Training(),  # noqa: B008 - a frozen record
    *,
    start: Float[Tensor, "_ _ _"] | None = None,
) -> Beta:
    r"""Learn beta by gradient descent on the label loss.

    ``Training`` explains what all trainers have in common; here nothing is held out, whole prompts
    are trained on, and the beta of the last step counts; if training diverges, that of the check
    before which the mean loss was lowest. The paper uses batches of one prompt
    (``build_prompts(..., batch_size=1)``), 4 training examples a class, and the defaults: 10 rounds
    with Adam at learning rate 0.01. All processes get the beta of the main one.

    $$
    A_{h\ell}(q, p_i) \; \mapsto \; A_{h\ell}(q, p_i) \, \exp(\beta_{h\ell i})
    $$

    acts after the softmax, without renormalisation, on the row of the target only. So all before it
    is run once, where the cache gives the same logits, and a step runs one token of each prompt.

    How to read:
        Above 0 the target reads the label word more, below 0 less.

    Pitfalls:
        A few examples can be learned by heart: read the accuracy on other queries and its paired
        interval, and what the same examples give in other ways (``examples/reweighting.py``).

    Source:
        Section 3.1, Table 1. The published code numbers anchors by class, not by appearance.

    Args:
        batches: Training prompts, all with the same demonstrations and with their true labels.
        start: Beta at the start, 0 by default. Axes of length 1 are shared: (layer, 1, anchor).

    Raises:
        PromptError: The prompts differ in their label words.
        HookError: ``start`` does not fit the model and the prompts.

    Examples:
        >>> training = al.contexts.Training(steps=4, progress=False)
        >>> beta = al.contexts.train_reweighting(model, batches, training)
        >>> results = al.run(model, batches, [al.Accuracy()], progress=False,
        ...     hooks=lambda batch: al.reweight_anchors(model, batch, beta))
    """
    about, made_of = "re-weighting", () if start is None else (start,)
    steps, adam = 10 * len(batches), partial(torch.optim.Adam, lr=0.01)
    run = TrainingRun.of(
        model, batches, None, training, adam, about, made_of, steps=steps, clip=inf
    )
    with run.study.entered():
        refuse_folded_value_biases(model)
        orders = torch.cat([each.label_classes for each in run.study.batches]).unique(dim=0)
        if len(orders) > 1:
            raise PromptError(
                "a beta is for one order of label words, but prompts have the classes "
                f"{orders.tolist()}; train each set of demonstrations separately"
            )
        classes, loss = orders[0].tolist(), training.loss
        refuse_several_targets(loss)
        check_loss(loss, run.study.batches, model)
        shape = (model.cfg.n_layers, model.cfg.n_heads, len(classes))
        with gradient_mode(True):
            parameter = _parameter(model, shape, start)
            ready = {id(batch): _all_but_target(model, batch) for batch in run.batches}
            trainable = _TrainedBeta(parameter, ready)
            vanilla = start_loss = _mean_loss(model, loss, ready.values())
            if start is not None:
                passes = (trainable.query_pass(model, batch) for batch in run.batches)
                start_loss = _mean_loss(model, loss, passes)
        (best,), record = run.take_steps(trainable, start_loss)
        rounds = [losses.double().mean() for losses in record.losses.split(len(run.batches))]
        whole = sum(each.prefix is None for each in ready.values())
        shared = "everything before the target, run once for all rounds"
        if whole:
            shared = f"off for {whole} of {len(ready)} batches: other logits after a cached prefix"
        trained = Beta(
            beta=best.expand(shape).cpu().clone(),
            label_classes=torch.tensor(classes, device="cpu"),
            losses=torch.tensor(rounds, dtype=torch.float32, device="cpu"),
            vanilla_loss=torch.tensor(vanilla, dtype=torch.float32, device="cpu"),
            info=run.describe() | {"learned_shape": list(parameter.shape), "shared_prefix": shared},
        )
        # On GPUs the betas of processes may differ in the last bits, but a later run divides its
        # prompts between the processes: all need the same beta.
        return gather_from_processes("beta", trained)[0]


@dataclass(frozen=True, eq=False)
class _TrainedBeta(Trainable):
    beta: Float[Tensor, "_ _ _"]  # an axis of length 1 is shared
    ready: Mapping[int, QueryPass]  # by the ``id`` of each batch, without hooks

    @property
    def parameters(self) -> list[Tensor]:
        return [self.beta]

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        ready = self.ready[id(batch)]
        shape = (model.cfg.n_layers, model.cfg.n_heads, ready.batch.label_positions.shape[1])
        hooks = reweight_anchors(model, ready.batch, self.beta.expand(shape))
        return replace(ready, hooks=hooks)

    def backward(self, model: HookedModel, batch: PromptBatch, loss: LossOfBatch) -> float:
        if not (self.beta < inf).all():  # the step before was too large
            return nan
        return super().backward(model, batch, loss)

    def order(self, number: int, count: int, seed: int) -> list[int]:
        """All rounds draw from one generator, as in the published code."""
        generator = torch.Generator().manual_seed(seed % 2**64)
        for _ in range(number):
            torch.randperm(count, generator=generator, device="cpu")
        return torch.randperm(count, generator=generator, device="cpu").tolist()


def _mean_loss(model: HookedModel, loss: LossOfBatch, passes: Iterable[QueryPass]) -> float:
    losses = [float(loss(each.logits(model), each.batch).mean()) for each in passes]
    return sum(losses) / len(losses)


def _parameter(
    model: HookedModel, shape: tuple[int, ...], start: Float[Tensor, "_ _ _"] | None
) -> Tensor:
    values = (
        torch.zeros(shape, dtype=torch.float32, device="cpu") if start is None else start.detach()
    )
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


@dataclass(frozen=True, eq=False)
class ReweightedContext(Context):
    """Cached demonstrations; the target's attention to their label words is multiplied.

    Attributes:
        demonstrations: The keys and values of all tokens of the demonstrations.
        beta: Logarithm of the factors; see ``reweight_anchors``.
    """

    demonstrations: CompressedContext
    beta: Float[Tensor, "layer head anchor"] | LearnedBeta

    def __repr__(self) -> str:
        """One line: the demonstrations."""
        return f"ReweightedContext({self.demonstrations!r})"

    @property
    def info(self) -> Mapping[str, Any]:
        """The model, its type and weights, and digests of the queries that beta was trained on."""
        trained = getattr(self.beta, "info", {}).get("queries_in_training", [])
        return self.demonstrations.info | {"queries_in_training": trained}

    @property
    def size(self) -> int:
        """Bytes of the stored keys and values, without the few of beta."""
        return self.demonstrations.size

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``.

        Raises:
            HookError: Beta is for other label words.
            PromptError: The prompts begin with other tokens, or a query is too long.
        """
        query_pass = self.demonstrations.query_pass(model, batch)
        # All tokens are stored, so that the label words have the positions of whole prompts.
        hooks = reweight_anchors(model, query_pass.batch, self.beta)
        return replace(query_pass, hooks=[*query_pass.hooks, *hooks])


@checked
def reweight_demonstrations(
    model: HookedModel,
    demonstrations: PromptBatch,
    beta: Float[Tensor, "layer head anchor"] | LearnedBeta,
) -> ReweightedContext:
    """Run demonstrations once, and answer queries with re-weighted attention to the label words.

    The answers are those of ``reweight_anchors`` on whole prompts.

    Args:
        demonstrations: Any batch of ``build_prompts`` with these demonstrations.
        beta: From ``train_reweighting``, or the logarithm of the factors.

    Raises:
        PromptError: The prompts have several sets of demonstrations.
        HookError: Beta does not fit the model and the prompts.
        ModelError: The model takes no key-value cache, or its value biases are folded.

    Examples:
        >>> beta = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, len(demos))
        >>> context = al.contexts.reweight_demonstrations(model, batch, beta)
    """
    ensure_prepared(model)
    check_batch(demonstrations)
    reweight_anchors(model, demonstrations, beta)  # an error before the model runs
    return ReweightedContext(compress(model, demonstrations, everything), beta)


def _all_but_target(model: HookedModel, batch: PromptBatch) -> QueryPass:
    """A batch after everything before its targets; whole if logits after that could be others."""
    left = batch.padded_left()
    ready = left.after(int(left.target_positions.min()))
    before = left.before(ready.first_query)
    alike = rotate_alike(model, longest_prompt(before), longest_prompt(left))
    if has_user_hooks(model) or why_not_shared(model) or not alike:
        return QueryPass(batch, None)
    return QueryPass(ready, run_prefix(model, before))
