"""Runs and trainings that go on in their folder after the user's code has changed.

A number stands at a random place of a user's module: a constant, a default, a closure, a field, a
file. The code around it makes hooks, a loss, a metric, a question with passes of its own, edges
that are cut or the learning rate of a training. The first call may stop in the middle. The second
has the same number or another. It must give the results of a call without a folder bit for bit, or
be refused; and what is the same must not be refused.
"""

import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import StoreError
from tests.attack.attack_scene import QUIET, scene
from tests.support.measures import tensors_of
from tests.support.stored_runs import Killed, LogitsRecord
from tests.support.tiny_models import questions as prompts

Scale = Callable[[Any], Any]  # x to x times the number

# tests/runs/test_identity_sources.py has every other place.
PLACES = {
    "a constant": "def scale(x):\n return x * {n}",
    "a default": "def scale(x, k={n}):\n return x * k",
    "a closure": "def make(k):\n return lambda x: x * k\nscale = make({n})",
    "a global of a function that is called": (
        "k = {n}\ndef f(x):\n return x * k\ndef scale(x):\n return f(x)"
    ),
    "a tensor": "import torch\nk = torch.tensor({n})\ndef scale(x):\n return x * float(k)",
    "a field": (
        "class Scale:\n def __init__(self, k):\n  self.k = k\n"
        " def __call__(self, x):\n  return x * self.k\nscale = Scale({n})"
    ),
    "a file": (
        "from pathlib import Path\nfile = {file!r}\n"
        "def scale(x):\n return x * float(Path(file).read_text())"
    ),
}


@dataclass
class Stop:
    """Ends a call as a job that is out of time; what it counts decides no number."""

    at: int | None = field(compare=False)
    calls: int = field(default=0, compare=False)

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Killed


@dataclass(frozen=True)
class Loss:
    scale: Scale
    stop: Stop = field(compare=False)

    def __call__(self, logits: Tensor, batch: al.PromptBatch) -> Tensor:
        self.stop()
        return self.scale(al.losses.label_cross_entropy(logits, batch))


@dataclass(frozen=True)
class Logits(al.Metric):
    """A user's metric, which acts on the third prompt alone."""

    scale: Scale
    stop: Stop = field(compare=False)
    name: ClassVar[str] = "logits"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        self.stop()
        found = seen.logits[:, batch.label_token_ids]
        return {"logits": self.scale(found) if int(batch.index.min()) == 2 else found}

    def result(self, rows: Any) -> LogitsRecord:
        return LogitsRecord(logits=rows["logits"])


def unchanged(x: Any) -> Any:
    return x


class Call(NamedTuple):
    scale: Scale
    stop: Stop
    folder: Path | None

    def run(self, *questions: al.Question, **options: Any) -> dict[str, Tensor]:
        setup = scene()
        batches = prompts(setup.model, count=5, batch_size=1)
        options |= {"folder": self.folder, "resamples": 0, **QUIET}
        return tensors_of(al.run(setup.model, batches, questions, **options))


def hooks(call: Call) -> dict[str, Tensor]:
    """They act on the third prompt alone, so that the first and the last are the same."""

    def late(batch: al.PromptBatch) -> Any:
        acts = int(batch.index.min()) == 2
        return [("blocks.0.hook_resid_post", lambda x, hook: call.scale(x) if acts else x)]

    return call.run(Logits(unchanged, call.stop), hooks=late)


def metric(call: Call) -> dict[str, Tensor]:
    return call.run(Logits(call.scale, call.stop))


def loss(call: Call) -> dict[str, Tensor]:
    return call.run(al.SaliencyFlows(), loss=Loss(call.scale, call.stop))


@dataclass(frozen=True)
class Experiment(al.Question):
    """A user's question, which acts on the third prompt alone."""

    scale: Scale
    stop: Stop = field(compare=False)
    name: ClassVar[str] = "experiment"

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
        self.stop()
        logits = passes.logits(batch)[:, batch.label_token_ids].cpu()
        return {"logits": self.scale(logits) if int(batch.index.min()) == 2 else logits}

    def result(self, rows: Any) -> LogitsRecord:
        return LogitsRecord(logits=rows["logits"])


def experiment(call: Call) -> dict[str, Tensor]:
    return call.run(Experiment(call.scale, call.stop))


def sweep(call: Call) -> dict[str, Tensor]:
    """Other edges are cut in the third prompt, where the number is large."""
    scale = call.scale

    def cut(batch: al.PromptBatch) -> al.edges.Edges:
        is_large = int(batch.index.min()) == 2 and scale(1.0) > 1
        return al.edges.wp(batch) if is_large else al.edges.tq(batch)

    asked = al.EdgeSweep(cut, {"first": al.Site(0)}, draws=1, control=al.edges.random_edges)
    return call.run(Logits(unchanged, call.stop), asked)


def among_others(call: Call) -> dict[str, Tensor]:
    """Two questions beside others: of these the same is stored."""
    asked = Logits(call.scale, call.stop), Experiment(unchanged, Stop(None))
    return call.run(*asked, al.Accuracy(), al.SaliencyFlows())


def training(call: Call) -> dict[str, Tensor]:
    setup, scale = scene(), call.scale
    batches = prompts(setup.model, count=6, batch_size=2)
    context = al.train_prefix(
        setup.model,
        batches[:2],
        al.contexts.Training(
            steps=4,
            check_every=2,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=scale(0.1)),
            loss=Loss(unchanged, call.stop),
            folder=call.folder,
            **QUIET,
        ),
        held_out=batches[2:],
        length=2,
    )
    return tensors_of([*context.prefix.keys, *context.prefix.values])


CALLS: list[Any] = [hooks, metric, loss, experiment, sweep, among_others, training]


def stale_results(rng: random.Random) -> None:
    place, call = rng.choice([*PLACES]), rng.choice(CALLS)
    first, second = rng.sample([0.5, 0.9, 1.5, 3.0], 2)
    is_same = rng.random() < 0.4
    numbers = (first, first if is_same else second)
    stop_at = rng.choice([None, None, 2, 4])
    case = f"{place} of {call.__name__}: {numbers}, stopped at {stop_at}"
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name, "results"), Path(name, "number")

        def scale_of(number: float) -> Scale:
            file.write_text(str(number))
            module: dict[str, Any] = {"__name__": "notebook"}
            exec(PLACES[place].format(n=number, file=str(file)), module)
            found: Scale = module["scale"]
            return found

        with suppress(Killed):
            call(Call(scale_of(numbers[0]), Stop(stop_at), folder))
        scale = scale_of(numbers[1])
        try:
            ours = call(Call(scale, Stop(None), folder))
        except StoreError as error:
            if is_same and place != "a file":
                raise AssertionError(f"{case}: refused: {error}") from error
            return
        expected = call(Call(scale, Stop(None), None))
    assert all(torch.equal(ours[key], value) for key, value in expected.items()), (
        f"{case}: not the results of a call without a folder"
    )
