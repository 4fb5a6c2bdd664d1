"""Trains what stands before a query: one loop of steps for every kind of context.

1. A step takes one batch: its loss, the gradient in the parameters, and a step of the optimizer.
2. All batches are taken in each round, in an order that the seed and the round decide.
3. Every ``check_every`` steps held-out queries are answered, and the state is stored.
4. The context whose answers were best is returned. Training that diverges stops before.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim import Optimizer

from ..errors import MetricError, NotFiniteError, PromptError, StoreError
from ..metrics.accuracy import predicted_class, require_gold
from ..models.hooked import HookedModel, dtype_of, refuse_folded_value_biases
from ..passes.forward import mean_loss_with_gradient
from ..passes.loss_checks import check_loss, refuse_several_targets
from ..passes.losses import LossOfBatch, label_cross_entropy
from ..prompts.batch import PromptBatch, digests
from ..results import figures
from ..results.record import Record
from ..runs.identity import as_words, differences, fingerprint, warn_of_unknown
from ..runs.store import make_folder, require_same
from ..runs.study import Study
from ..system.arguments import check_counts, checked, fitted
from ..system.devices import sent
from ..system.digest_file import read_with_digest, to_bytes_with_digest
from ..system.files import bytes_of, kind_of, write_atomically
from ..system.processes import gather_from_processes, is_main
from ..system.steps import Bar
from ..system.texts import name_of
from ..system.torch_state import gradient_mode
from ..system.warn import warn_user
from .compressed import cache_of_tokens
from .protocol import Context, QueryPass, bos_of, check_queries, model_identity, query_pass_of

MakeOptimizer = Callable[[list[Tensor]], Optimizer]

ADAM = partial(torch.optim.Adam, lr=0.003)
_TOO_HIGH = 2.0  # a mean loss higher by this many times that of the start means divergence


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingRecord(Record):
    """How training went.

    Attributes:
        losses: Mean loss of each step's batch before the step, in nats; low is good.
        checked_steps: The steps after which held-out queries were answered; 0 is the start.
        held_out_accuracy: Share of held-out queries that are answered right, from 0 to 1.
        held_out_loss: Mean loss of the held-out queries, in nats.
    """

    losses: Float[Tensor, " step"]
    checked_steps: Int[Tensor, " check"]
    held_out_accuracy: Float[Tensor, " check"]
    held_out_loss: Float[Tensor, " check"]

    caption: ClassVar[str] = (
        "Loss of each step's batch, and loss and accuracy on held-out queries. Training returns "
        "the step with the highest held-out accuracy. A held-out loss that rises while that of the "
        "steps falls says that training queries are learned by heart. The paper has no such figure."
    )

    @property
    def best(self) -> int:
        """Index of the best check: the highest accuracy, then the lowest loss, then the first."""
        accuracies = self.held_out_accuracy.tolist()
        losses = self.held_out_loss.nan_to_num(nan=inf).tolist()
        return min(range(len(losses)), key=lambda check: (-accuracies[check], losses[check]))

    @property
    def best_accuracy(self) -> Float[Tensor, ""]:
        """Held-out accuracy of the context that training returned, from 0 to 1."""
        return self.held_out_accuracy[self.best]

    def plot(self) -> go.Figure:
        """Loss of each step, and loss and accuracy on held-out queries."""
        steps = torch.arange(len(self.losses), device="cpu")
        best = f"{float(self.best_accuracy):.2f} after step {int(self.checked_steps[self.best])}"
        return figures.lines_by_step(
            {
                "loss of a step's batch": (steps, self.losses),
                "loss of held-out queries": (self.checked_steps, self.held_out_loss),
                "accuracy on held-out queries": (self.checked_steps, self.held_out_accuracy),
            },
            title=f"Training: best held-out accuracy {best}",
            y_title="loss in nats, accuracy as a share",
        )


@checked
@dataclass(frozen=True, kw_only=True)
class Training:
    """How something is trained, and what all trainers have in common.

    Every trainer takes ``model``, which stays as it is, ``batches``, training prompts with their
    true labels, and ``held_out``, other prompts with theirs. Each batch is a step. What is trained
    takes the place of the demonstrations, after a BOS: only the queries are run. Returned is, with
    its training record, what had the highest held-out accuracy at a check, of equal ones the lowest
    loss. Training that diverges stops with a warning.

    Every trainer raises a PromptError for no training or held-out prompts, a query in both, and a
    prompt without a true label or that does not fit the model; a MetricError for a setting out of
    its range; a ModelError if hooks do not act, value biases are folded, or there is no key-value
    cache; a StoreError for the folder of another training.

    Attributes:
        steps: Number of optimizer steps; 0 returns the start. Default 300; re-weighting: 10 rounds.
        optimizer: Function from a list of parameters to their ``torch.optim`` one; a trainer has
            its own.
        clip: Largest norm of the gradient over all parameters. Default 1, for re-weighting none.
        check_every: Steps from one check to the next.
        seed: Of the order of the batches and of what the trainer draws.
        loss: Function of (logits, batch) to a number for each prompt.
        folder: Where the state is stored at checks; after an interruption the same call continues.
        progress: Show a progress bar.

    Examples:
        >>> training = al.contexts.Training(steps=2, check_every=1, progress=False)
        >>> prompt = al.train_soft_prompt(model, batches[:1], training, held_out=batches[1:])
    """

    steps: int | None = None
    optimizer: MakeOptimizer | None = None
    clip: float | None = None
    check_every: int = 25
    seed: int = 0
    loss: LossOfBatch = label_cross_entropy
    folder: str | Path | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        check_counts(MetricError, 0, steps=self.steps)
        check_counts(MetricError, check_every=self.check_every)
        if self.clip is not None and not self.clip > 0:
            raise MetricError(f"clip must be a number above 0; got {self.clip!r}")


@runtime_checkable
class Trainable(Protocol):
    """What ``al.contexts.train_context`` trains: parameters, and how queries are run with them.

    A context of your own is trained if it is of this class too, and has ``parameters``.
    """

    @property
    def parameters(self) -> list[Tensor]:
        """The leaves that the optimizer changes."""
        ...

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch after the context as it stands now."""
        ...

    def backward(self, model: HookedModel, batch: PromptBatch, loss: LossOfBatch) -> float:
        """Add the gradient of the mean loss to the parameters; NaN if the loss is not finite."""
        with gradient_mode(True):
            queries = query_pass_of(self, model, batch)
        return mean_loss_with_gradient(
            model, queries.batch, loss, self.parameters, hooks=queries.hooks, prefix=queries.prefix
        )

    def after_step(self, step: int) -> None:
        """Change the parameters after the optimizer's step with this number, from 0."""
        return

    def candidate(self) -> list[Tensor]:
        """Copies of what defines the context as it stands now."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def order(self, number: int, count: int, seed: int) -> list[int]:
        """The numbers of all ``count`` batches in the order of a round, from round 0."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
        return torch.randperm(count, generator=generator, device="cpu").tolist()


@checked
def train_context(
    model: HookedModel,
    trainable: Trainable,
    batches: Sequence[PromptBatch],
    training: Training = Training(),
    *,
    held_out: Sequence[PromptBatch],
) -> tuple[list[Tensor], TrainingRecord]:
    """Train a context of your own, by default with Adam at learning rate 0.003.

    ``Training`` explains the other arguments and the errors. The parameters are changed.

    Returns:
        What ``trainable.candidate`` gave at the best check: by default copies of the parameters.
        With it the record, whose ``info`` a context needs.
    """
    about = type(trainable).__name__
    run = TrainingRun.of(model, batches, held_out, training, ADAM, about, (trainable,))
    with run.study.entered():
        run.check(torch.cat([run.bos, run.bos.new_zeros(1)]))
        return gather_from_processes("training", run.take_steps(trainable))[0]


@dataclass(frozen=True)
class TrainingRun:
    """One training: what decides it, and its loop."""

    study: Study  # of the training prompts, then the held-out ones
    count: int  # of training batches
    training: Training
    optimizer: MakeOptimizer  # this and the next two: of the trainer, if ``training`` has none
    steps: int
    clip: float
    about: str  # what is trained, and from which start, in words

    @classmethod
    def of(
        cls,
        model: HookedModel,
        batches: Sequence[PromptBatch],
        held_out: Sequence[PromptBatch] | None,
        training: Training,
        optimizer: MakeOptimizer,
        about: str,
        made_of: Sequence[Any] = (),
        *,
        steps: int = 300,
        clip: float = 1.0,
    ) -> "TrainingRun":
        """A training with the defaults of its trainer; ``made_of`` decides the result too."""
        for name, prompts in (("training", batches), ("held-out", held_out)):
            if prompts is not None and not prompts:
                raise PromptError(
                    f"there are no {name} prompts; give batches of queries with true labels, "
                    "others held out (held_out=...)"
                )
        optimizer = training.optimizer or optimizer
        with gradient_mode(True):  # a step of a number, so that a wrong one is seen at once
            number = torch.zeros(1, dtype=torch.float32, requires_grad=True, device="cpu")
            number.grad = torch.zeros_like(number)
            try:
                optimizer([number]).step()
            except Exception as error:  # whatever a function of the user raises
                raise MetricError(
                    "optimizer must be a function from a list of parameters to an optimizer whose "
                    "step needs no arguments, such as functools.partial(torch.optim.Adam, "
                    f"lr=0.01); got {optimizer!r}, which raises {type(error).__name__}: {error}"
                ) from error
        steps = steps if training.steps is None else training.steps
        clip = clip if training.clip is None else training.clip
        decides = {
            "steps": steps,
            "clip": clip,
            "check_every": training.check_every,
            "seed": training.seed,
            "optimizer": optimizer,
            "loss": training.loss,
            "context": [about, *made_of],
        }
        prompts = [*batches, *(held_out or ())]
        study = Study(model, prompts, decides, resamples=0, progress=training.progress)
        return cls(study, len(batches), training, optimizer, steps, clip, about)

    @property
    def batches(self) -> list[PromptBatch]:
        """The training prompts."""
        return self.study.batches[: self.count]

    @property
    def held_out(self) -> list[PromptBatch]:
        """The held-out prompts; none if the last step counts."""
        return self.study.batches[self.count :]

    @property
    def bos(self) -> Int[Tensor, " position"]:
        """The BOS with which all prompts begin, or no token."""
        return bos_of(self.batches[0])

    def check(self, tokens: Int[Tensor, " position"]) -> None:
        """Raise an error for prompts with which training after so many tokens fails or misleads."""
        model, prompts, loss = self.study.model, self.study.batches, self.training.loss
        check_queries(model, prompts, len(tokens))
        refuse_folded_value_biases(model)
        if any(not torch.equal(bos_of(batch), bos_of(prompts[0])) for batch in prompts):
            raise PromptError(
                "prompts must begin with one BOS, or all without; build them with one tokenizer"
            )
        if any(batch.gold is None for batch in prompts):
            raise PromptError(
                "training needs the true label of each query; give queries with labels"
            )
        if both := {*query_digests(self.batches)} & {*query_digests(self.held_out)}:
            raise PromptError(
                f"{len(both)} held-out queries are training queries too; hold out others"
            )
        refuse_several_targets(loss)
        check_loss(loss, prompts, model)
        cache_of_tokens(model, prompts[0], tokens)

    def describe(self) -> dict[str, Any]:
        """What a trained context says of itself."""
        return {
            **self.study.describe(),
            **model_identity(self.study.model),
            **{name: as_words(value) for name, value in self.study.settings.items()},
            "context": self.about,
            "bos": self.bos.tolist(),
            "queries_in_training": sorted(query_digests(self.study.batches)),
        }

    def take_steps(
        self, trainable: Trainable, start_loss: float = nan
    ) -> tuple[list[Tensor], TrainingRecord]:
        """Take all steps; give the best candidate on held-out queries, or the last, and the record.

        Where nothing is held out, ``start_loss`` is the mean loss at the start.
        """
        window, seed, count = self.training.check_every, self.training.seed, self.count
        quiet = not (self.training.progress and is_main())
        with gradient_mode(True):
            what, given = f"parameters of {type(trainable).__name__}", trainable.parameters
            parameters: list[Tensor] = fitted(what, given, list[Tensor])
            if not parameters or not all(
                each.is_leaf and each.requires_grad for each in parameters
            ):
                raise MetricError(
                    f"{what} must be leaves that require a gradient (torch.zeros(3, "
                    "requires_grad=True))"
                )
            optimizer = self.optimizer(parameters)
            file = _StateFile.of(self, trainable)
            state = _State()
            self._check(state, trainable, start_loss)
            if (stored := file.read(trainable)) is None:
                file.write(state, trainable, optimizer)
            else:
                before, tensors = stored
                self._require_same_start(state, before, trainable, file)
                file.put(tensors, trainable, optimizer)
                state = before
            done = len(state.losses)
            shown: dict[str, Any] = {"title": "training", "unit": " steps", "disable": quiet}
            with Bar(total=self.steps, initial=done, **shown) as bar:
                while (step := len(state.losses)) < self.steps and not state.diverges(window):
                    if step == done or step % count == 0:
                        order = trainable.order(step // count, count, seed)
                    batch = self.batches[order[step % count]]
                    optimizer.zero_grad()
                    loss = trainable.backward(self.study.model, batch, self.training.loss)
                    state.losses.append(loss)
                    if not isfinite(loss):
                        break
                    torch.nn.utils.clip_grad_norm_(trainable.parameters, self.clip)
                    optimizer.step()
                    trainable.after_step(step)
                    bar.update()
                    if (step + 1) % window == 0 or step + 1 == self.steps:
                        self._check(state, trainable, _mean(state.losses[-window:]))
                        file.write(state, trainable, optimizer)
        record = state.record(self.describe())
        if not state.diverges(window):
            return state.best if self.held_out else trainable.candidate(), record
        warn_user(
            f"training diverged: the loss of step {len(state.losses)} is {state.losses[-1]:.3g}, "
            f"that of the checks was {state.held_out_losses[0]:.3g} at the start and is "
            f"{state.held_out_losses[-1]:.3g} now. What was trained is as after step "
            f"{int(record.checked_steps[record.best])}; use a lower learning rate"
        )
        return state.best, record

    def _require_same_start(
        self, start: "_State", stored: "_State", trainable: Trainable, file: "_StateFile"
    ) -> None:
        """Compute the first numbers again: a fingerprint does not tell what a model does."""
        computed = [*start.held_out_losses]
        before = [*stored.held_out_losses[:1], *stored.losses[:1]]
        if stored.losses:
            first = self.batches[trainable.order(0, self.count, self.training.seed)[0]]
            computed.append(trainable.backward(self.study.model, first, self.training.loss))
            for parameter in trainable.parameters:
                parameter.grad = None
        pairs = [{"losses": torch.tensor(each, device="cpu")} for each in (before, computed)]
        require_same(
            *pairs,
            dtype=dtype_of(self.study.model),
            told=f"the losses at the start are {computed} and were {before} when {file.path} was "
            "written",
            reason="so the model does not compute as it did then (a hook, an activation or a "
            "forward was changed)",
            cure="use another folder, or start over: delete the file",
        )

    def _check(self, state: "_State", trainable: Trainable, recent_loss: float) -> None:
        """Answer the held-out queries; without them the best candidate has the lowest loss."""
        model = self.study.model
        accuracy, loss = 0.0, recent_loss
        if self.held_out:
            try:
                accuracy, loss = answers(model, trainable, self.held_out, self.training.loss)
            except NotFiniteError:
                if not state.losses:
                    raise
                loss = nan  # the last steps were too large
        if not state.losses and not isfinite(loss):
            raise MetricError(
                f"the mean of the loss {name_of(self.training.loss)} must be finite before the "
                f"first step; got {loss}; give one that is finite here"
            )
        state.checked.append(len(state.losses))
        state.accuracies.append(accuracy)
        state.held_out_losses.append(loss)
        if state.record().best == len(state.checked) - 1:
            state.best = trainable.candidate()


def query_digests(batches: Sequence[PromptBatch]) -> list[int]:
    """A number for the tokens of each query, the same for the same query in other prompts."""
    of_batches = (digests(batch, batch.from_query).tolist() for batch in batches)
    return [number for of_batch in of_batches for number in of_batch]


def answers(
    model: HookedModel,
    context: Context | Trainable,
    batches: Sequence[PromptBatch],
    loss: LossOfBatch,
) -> tuple[float, float]:
    """Accuracy and mean loss of the queries of batches on the model's device after a context."""
    right: list[Tensor] = []
    losses: list[Tensor] = []
    for batch in batches:
        logits = query_pass_of(context, model, batch).logits(model)
        gold = require_gold(batch.gold, "accuracy")
        right.append(predicted_class(batch.label_scores(logits)).eq(sent(gold, logits.device)))
        losses.append(loss(logits, batch))
    accuracy, mean = (torch.cat(values).cpu().double().mean() for values in (right, losses))
    return float(accuracy), float(mean)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass
class _State:
    """Where training stands: everything that the next step depends on, apart from the batches."""

    losses: list[float] = field(default_factory=list)  # of each step that was taken
    checked: list[int] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)  # the candidate of the best check

    def record(self, info: Mapping[str, Any] | None = None) -> TrainingRecord:
        return TrainingRecord(
            losses=torch.tensor(self.losses, dtype=torch.float32, device="cpu"),
            checked_steps=torch.tensor(self.checked, device="cpu"),
            held_out_accuracy=torch.tensor(self.accuracies, dtype=torch.float32, device="cpu"),
            held_out_loss=torch.tensor(self.held_out_losses, dtype=torch.float32, device="cpu"),
            info=info or {},
        )

    def diverges(self, window: int) -> bool:
        """Whether a last loss is not finite, or the last ones are far above those of the start."""
        if not all(map(isfinite, [*self.losses[-1:], *self.held_out_losses[-1:]])):
            return True
        if len(self.losses) < 2 * window:
            return False
        start = max(_mean(self.losses[:window]), self.held_out_losses[0])
        # A loss near 0 may be several times as high and still be low.
        return _mean(self.losses[-window:]) > start + _TOO_HIGH * max(abs(start), 1.0)


@dataclass(frozen=True)
class _StateFile:
    """A file that holds the state of one training, or none without a folder."""

    path: Path | None
    facts: Mapping[str, str]  # that decide the result of the training
    is_known: bool = True  # and not computed with what cannot be seen, and is not believed

    @classmethod
    def of(cls, run: TrainingRun, trainable: Trainable) -> "_StateFile":
        if run.training.folder is None:
            return cls(None, {})
        folder = make_folder(run.training.folder)
        decides = run.study.settings | {
            "number of training batches": str(run.count),
            "shape": str([tuple(parameter.shape) for parameter in trainable.parameters]),
        }
        facts, unknown = fingerprint(run.study.model, run.study.batches, decides)
        warn_of_unknown(folder, unknown)
        return cls(folder / "training.safetensors", facts, not unknown)

    def read(self, trainable: Trainable) -> tuple[_State, Mapping[str, Tensor]] | None:
        """The state and the tensors that are stored, if they may be used."""
        if self.path is None or not kind_of(self.path):
            return None
        bytes_of(self.path)  # an error if it cannot be read
        try:
            header, tensors = read_with_digest(self.path)
        except StoreError:
            warn_user(f"{self.path} is damaged; training begins again")
            return None
        if not self.is_known:
            return None
        with self._of_this_version():
            stored = header["training"]
            differ = differences(stored, self.facts)
            different = [name for name, is_believed in differ.items() if not is_believed]
            if not different:
                now = enumerate(trainable.candidate())
                best = [tensors[f"best.{n}"].to(each.device).view_as(each) for n, each in now]
                state = _State(**header["numbers"], best=best)
                if state.checked[-1] != len(state.losses) or state.record().misfit():
                    raise ValueError("numbers of other steps than were taken")
                return state, tensors
        raise StoreError(
            f"{self.path} is of a training with another {', '.join(different)}; use another "
            "folder, or start over in this one: delete the file"
        )

    def put(
        self, tensors: Mapping[str, Tensor], trainable: Trainable, optimizer: Optimizer
    ) -> None:
        """Put what is stored into the parameters and the optimizer."""
        with self._of_this_version():
            with gradient_mode(False):
                for n, parameter in enumerate(trainable.parameters):
                    parameter.copy_(tensors[f"parameter.{n}"].view_as(parameter))
            own = io.BytesIO(tensors["optimizer"].numpy().tobytes())
            optimizer.load_state_dict(torch.load(own, map_location="cpu", weights_only=True))

    @contextmanager
    def _of_this_version(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # optimizers raise errors of any kind for what is not theirs
            raise StoreError(
                f"{self.path} is no training of this version ({type(error).__name__}: {error}); "
                "delete it, or use another folder"
            ) from error

    def write(self, state: _State, trainable: Trainable, optimizer: Optimizer) -> None:
        if self.path is None or not is_main():
            return
        own = io.BytesIO()  # only the optimizer knows the form of its state
        torch.save(optimizer.state_dict(), own)
        tensors = {f"best.{n}": tensor for n, tensor in enumerate(state.best)}
        tensors |= {f"parameter.{n}": tensor for n, tensor in enumerate(trainable.parameters)}
        tensors["optimizer"] = torch.frombuffer(bytearray(own.getvalue()), dtype=torch.uint8)
        numbers = {name: value for name, value in vars(state).items() if name != "best"}
        header = {"training": dict(self.facts), "numbers": numbers}
        write_atomically(self.path, to_bytes_with_digest(header, tensors))
