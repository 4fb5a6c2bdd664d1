"""Trains what stands before a query: one loop of steps for every kind of context."""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim import Optimizer
from tqdm.auto import tqdm

from ..errors import MetricError, NotFiniteError, PromptError, StoreError
from ..metrics.predictions import predicted_class, require_gold
from ..models.hooked import HookedModel, device_of, refuse_folded_value_biases
from ..passes.losses import Loss, check_loss, refuse_several_targets
from ..prompts.batch import PromptBatch, digest
from ..results import figures
from ..results.record import Record
from ..runs.fingerprint import fingerprint, in_words, warn_of_unknown
from ..runs.study import Study
from ..system.files import write_atomically
from ..system.processes import is_main
from ..system.warn import warn_user
from .compression import cache_of_tokens
from .context import model_identity
from .query_pass import QueryPass, bos_of

MakeOptimizer = Callable[[list[Tensor]], Optimizer]

_DIGEST = hashlib.sha256().digest_size
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
        "Loss of each step's batch, and loss and accuracy on held-out queries, which are not "
        "trained on. Training returns the step with the highest held-out accuracy. A held-out "
        "loss that rises while the loss of the steps falls says that the training queries are "
        "learned by heart. The paper has no such figure."
    )

    @property
    def best(self) -> int:
        """Index of the best check: the highest accuracy, then the lowest loss, then the first."""
        losses = self.held_out_loss.nan_to_num(nan=inf)
        pairs = zip(self.held_out_accuracy.tolist(), losses.tolist(), strict=True)
        ranks = [(-accuracy, loss) for accuracy, loss in pairs]
        return min(range(len(ranks)), key=ranks.__getitem__)

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


@runtime_checkable
class Trainable(Protocol):
    """What is trained, and how queries are run with it."""

    @property
    def parameters(self) -> list[Tensor]:
        """The leaves that the optimizer changes."""
        ...

    def backward(self, batch: PromptBatch, loss: Loss) -> float:
        """Put the gradient of the mean loss into the parameters; NaN if it is not finite."""
        ...

    def after_step(self, step: int) -> None:
        """Change the parameters after the optimizer's step with this number, from 0."""
        ...

    def candidate(self) -> list[Tensor]:
        """Copies of what defines the context as it stands now."""
        ...

    def query_pass(self, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch after the context as it stands now."""
        ...


@dataclass(frozen=True)
class Settings:
    """How a context is trained.

    Attributes:
        steps: Number of optimizer steps; each takes one batch.
        optimizer: Makes the optimizer of the parameters.
        clip: Largest norm of the gradient over all parameters; infinity for no limit.
        check_every: Steps from one check on held-out queries to the next.
        seed: Seeds the order of the batches, and what the context draws.
        loss: Function of (logits, batch) to one number a prompt.
        folder: Where the state is stored at every check, so that the same call continues; or None.
        progress: Show a progress bar.
        context: What is trained, and from which start, in words.
        made_of: The rest of what decides the result: the start, a method, a tokenizer.
    """

    steps: int
    optimizer: MakeOptimizer
    clip: float
    check_every: int
    seed: int
    loss: Loss
    folder: str | Path | None
    progress: bool
    context: str = ""
    made_of: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("check_every", 1)):
            if getattr(self, name) < least:
                raise MetricError(
                    f"{name} must be a whole number from {least}; got {getattr(self, name)}"
                )
        if not self.clip > 0:
            raise MetricError(f"clip must be a number above 0; got {self.clip!r}")
        _check_optimizer(self.optimizer)

    def decides(self) -> dict[str, Any]:
        """What decides the result, apart from the model and the prompts."""
        names = ("steps", "clip", "check_every", "seed", "optimizer", "loss")
        values = {name: getattr(self, name) for name in names}
        return values | {"context": [self.context, *self.made_of] if self.made_of else self.context}

    def describe(self) -> dict[str, str]:
        """The same in words."""
        return {name: in_words(value) for name, value in self.decides().items()} | {
            "context": self.context
        }


def _check_optimizer(make: MakeOptimizer) -> None:
    """Take a step with an optimizer of a number, so that a wrong function is an error at once."""
    with torch.inference_mode(False):
        number = torch.zeros(1, requires_grad=True, device="cpu")
        number.grad = torch.zeros(1, device="cpu")
        try:
            make([number]).step()
        except Exception as error:  # whatever a function of the user raises
            raise MetricError(
                "optimizer must be a function from a list of parameters to an optimizer whose "
                "step needs no arguments, such as functools.partial(torch.optim.Adam, lr=0.01); "
                f"got {make!r}, which raises {type(error).__name__}: {error}"
            ) from error


@dataclass
class _State:
    """Where training stands: everything that the next step depends on, apart from the batches."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    checked: list[int] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)  # the candidate of the best check

    def record(self) -> TrainingRecord:
        return TrainingRecord(
            losses=torch.tensor(self.losses, device="cpu"),
            checked_steps=torch.tensor(self.checked, device="cpu"),
            held_out_accuracy=torch.tensor(self.accuracies, device="cpu"),
            held_out_loss=torch.tensor(self.held_out_losses, device="cpu"),
        )


def prepared_study(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    held_out: Sequence[PromptBatch],
    settings: Settings,
) -> Study:
    """A study of the training and the held-out prompts, which are checked on entering."""
    for name, prompts in (("training", batches), ("held-out", held_out)):
        if not prompts:
            raise PromptError(
                f"there are no {name} prompts; give batches of queries with their true labels, the "
                "held-out ones (held_out=...) unlike those of training"
            )
    return Study(
        model, [*batches, *held_out], settings.decides(), resamples=0, progress=settings.progress
    )


def check_training(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    held_out: Sequence[PromptBatch],
    settings: Settings,
    tokens: Int[Tensor, " position"],
) -> None:
    """Raise an error for prompts with which training would fail or mislead.

    Args:
        model: A prepared model.
        batches: Training prompts.
        held_out: Other prompts.
        settings: How to train.
        tokens: As many tokens as will stand before a query, with the BOS.

    Raises:
        PromptError: A query is in both lists or has no true label, or some prompts begin with
            another BOS.
        MetricError: The loss does not give one number a prompt.
        ModelError: The model gives other logits after a cached prefix, or its value biases are
            folded.
    """
    refuse_folded_value_biases(model)
    for batch in (*batches, *held_out):
        if not torch.equal(bos_of(batch), bos_of(batches[0])):
            raise PromptError(
                "all prompts must begin with the same BOS, or all without one; build them with one "
                "tokenizer"
            )
    if any(batch.gold is None for batch in (*batches, *held_out)):
        raise PromptError("training needs the true label of each query; give queries with labels")
    both = set(query_digests(batches)) & set(query_digests(held_out))
    if both:
        raise PromptError(
            f"{len(both)} held-out queries are training queries too, so that their accuracy would "
            "be too high; hold out other queries"
        )
    refuse_several_targets(settings.loss)
    check_loss(settings.loss, [*batches, *held_out], model)
    cache_of_tokens(model, batches[0], tokens)


def query_digests(batches: Sequence[PromptBatch]) -> list[int]:
    """A number for the tokens of each query, the same for the same query in other prompts."""
    digests = []
    for batch in batches:
        rows = zip(batch.tokens, batch.from_query, strict=True)
        digests += [digest(tokens[mask].tolist()) for tokens, mask in rows]
    return digests


def describe_training(
    study: Study, batches: Sequence[PromptBatch], settings: Settings
) -> dict[str, Any]:
    """What a trained context says of itself."""
    return {
        **study.describe(),
        **model_identity(study.model),
        **settings.describe(),
        "bos": bos_of(batches[0]).tolist(),
        "queries_in_training": sorted(query_digests(study.batches)),
    }


def train(
    model: HookedModel,
    trainable: Trainable,
    batches: Sequence[PromptBatch],
    held_out: Sequence[PromptBatch],
    settings: Settings,
) -> tuple[list[Tensor], TrainingRecord]:
    """Take all steps, and return the best candidate on the held-out queries, with the record.

    Batches come in a new random order in each round. Training that diverges stops with a warning.
    With a folder the state is stored at every check, and training goes on from there.

    Args:
        model: A prepared model that is frozen.
        trainable: What is trained; its parameters are changed.
        batches: Training prompts.
        held_out: Other prompts, by which the best candidate is chosen.
        settings: How to train.
    """
    device = device_of(model)
    batches = [batch.to(device) for batch in batches]
    held_out = [batch.to(device) for batch in held_out]
    quiet = not (settings.progress and is_main())
    with torch.inference_mode(False):
        optimizer = settings.optimizer(trainable.parameters)
        store = _StateFile.of(model, trainable, batches, held_out, settings)
        state = store.read(trainable, optimizer)

        def check() -> None:
            try:
                accuracy, loss = answers(model, trainable.query_pass, held_out, settings.loss)
            except NotFiniteError:
                if state.step == 0:
                    raise
                accuracy, loss = 0.0, nan  # the last steps were too large
            state.checked.append(state.step)
            state.accuracies.append(accuracy)
            state.held_out_losses.append(loss)
            if state.record().best == len(state.checked) - 1:
                state.best = trainable.candidate()
            store.write(state, trainable, optimizer)

        if not state.checked:
            check()
        bar = tqdm(total=settings.steps, initial=state.step, disable=quiet, desc="training steps")
        with bar:
            while state.step < settings.steps and not _diverges(state, settings.check_every):
                batch = batches[_number_of_batch(state.step, len(batches), settings.seed)]
                optimizer.zero_grad()
                state.losses.append(trainable.backward(batch, settings.loss))
                if not isfinite(state.losses[-1]):
                    break
                torch.nn.utils.clip_grad_norm_(trainable.parameters, settings.clip)
                optimizer.step()
                trainable.after_step(state.step)
                state.step += 1
                bar.update()
                if state.step % settings.check_every == 0 or state.step == settings.steps:
                    check()
    if _diverges(state, settings.check_every):
        _warn_of_divergence(state)
    return state.best, state.record()


def answers(
    model: HookedModel,
    query_pass: Callable[[PromptBatch], QueryPass],
    batches: Sequence[PromptBatch],
    loss: Loss,
) -> tuple[float, float]:
    """Accuracy and mean loss over batches on the model's device, whose queries run so."""
    right: list[Tensor] = []
    losses: list[Tensor] = []
    for batch in batches:
        logits = query_pass(batch).logits(model)
        gold = require_gold(batch.gold, "accuracy")
        right.append(torch.eq(predicted_class(batch.label_scores(logits)), gold))
        losses.append(loss(logits, batch))
    accuracy, mean = (torch.cat(values).cpu().double().mean() for values in (right, losses))
    return float(accuracy), float(mean)


def _number_of_batch(step: int, count: int, seed: int) -> int:
    """The batch of a step: all batches in each round, in an order that the round decides."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step // count) % 2**63)
    return int(torch.randperm(count, generator=generator, device="cpu")[step % count])


def _diverges(state: _State, window: int) -> bool:
    """Whether a last loss is not finite, or the last losses are far above those of the start."""
    if not all(map(isfinite, [*state.losses[-1:], *state.held_out_losses[-1:]])):
        return True
    if len(state.losses) < 2 * window:
        return False
    start = max(sum(state.losses[:window]) / window, state.held_out_losses[0])
    # A loss near 0 may be several times as high and still be low.
    return sum(state.losses[-window:]) / window > start + _TOO_HIGH * max(abs(start), 1.0)


def _warn_of_divergence(state: _State) -> None:
    best = state.record()
    warn_user(
        f"training diverged: the loss of step {len(state.losses)} is {state.losses[-1]:.3g}, that "
        f"of held-out queries was {state.held_out_losses[0]:.3g} at the start and is "
        f"{state.held_out_losses[-1]:.3g} now. It was stopped, and the context is that after step "
        f"{int(best.checked_steps[best.best])}; use a lower learning rate"
    )


@dataclass(frozen=True)
class _StateFile:
    """A file that holds the state of one training, or none without a folder.

    Attributes:
        path: The file; None without a folder.
        run: What decides the result of the training.
        unknown: What of it cannot be seen, so that a stored state is not believed.
    """

    path: Path | None
    run: dict[str, str]
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: HookedModel,
        trainable: Trainable,
        batches: Sequence[PromptBatch],
        held_out: Sequence[PromptBatch],
        settings: Settings,
    ) -> "_StateFile":
        if settings.folder is None:
            return cls(None, {})
        folder = Path(settings.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise StoreError(f"{folder} cannot be made: {error}; use another folder") from error
        decides = settings.decides() | {
            "number of training batches": str(len(batches)),
            "shape": str([tuple(parameter.shape) for parameter in trainable.parameters]),
        }
        run, unknown = fingerprint(model, [*batches, *held_out], decides)
        warn_of_unknown(folder, unknown)
        return cls(folder / "training.pt", run, unknown)

    def read(self, trainable: Trainable, optimizer: Optimizer) -> _State:
        """The stored state, which is put into the parameters and the optimizer; or a new one.

        Raises:
            StoreError: The file is of another training, or cannot be read.
        """
        stored = self._stored()
        if stored is None:
            return _State()
        try:
            # Every field by name, because those that are missing would begin anew.
            state = _State(**{name: stored["state"][name] for name in vars(_State())})
            run = stored["run"]
            different = [name for name in self.run if run.get(name) != self.run[name]]
        except (AttributeError, KeyError, TypeError) as error:
            raise self._not_ours(error) from error
        if different:
            raise StoreError(
                f"{self.path} is of a training with another {', '.join(different)}; use another "
                "folder, or start over in this one: delete the file"
            )
        try:
            with torch.no_grad():
                if state.best:  # it goes to the devices of the model
                    own = zip(state.best, trainable.candidate(), strict=True)
                    state.best = [best.to(each.device) for best, each in own]
                values = zip(trainable.parameters, stored["parameters"], strict=True)
                for parameter, value in values:
                    parameter.copy_(value)
            optimizer.load_state_dict(stored["optimizer"])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise self._not_ours(error) from error
        return state

    def _not_ours(self, error: Exception) -> StoreError:
        return StoreError(
            f"{self.path} does not hold a training of this version ({type(error).__name__}: "
            f"{error}); delete it, or use another folder"
        )

    def _stored(self) -> Any:
        """What the file holds; None if there is none, or if it cannot be believed."""
        if self.path is None or not self.path.exists():
            return None
        try:
            written = self.path.read_bytes()
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be read: {error.strerror}; use another folder"
            ) from error
        digest, data = written[:_DIGEST], written[_DIGEST:]
        if hashlib.sha256(data).digest() != digest:
            warn_user(f"{self.path} is damaged; training begins again")
            return None
        if self.unknown:
            return None
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # pickles raise errors of any kind
            raise self._not_ours(error) from error

    def write(self, state: _State, trainable: Trainable, optimizer: Optimizer) -> None:
        if self.path is None or not is_main():
            return
        data = io.BytesIO()
        stored = {
            "run": self.run,
            "parameters": [parameter.detach() for parameter in trainable.parameters],
            "optimizer": optimizer.state_dict(),
            "state": vars(state),
        }
        torch.save(stored, data)
        # torch.load does not notice a changed number.
        write_atomically(self.path, hashlib.sha256(data.getvalue()).digest() + data.getvalue())
