"""The work of test_processes.py, in each of several processes and in a single one."""

import importlib
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from accelerate import PartialState
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import anchorlens as al
from anchorlens.errors import MetricError, PromptError, RunError
from anchorlens.runs import way
from anchorlens.system.processes import (
    failed_elsewhere,
    fails_together,
    is_single_process,
    require_whole_model,
)
from tests.support.asked import ask
from tests.support.catalogue import SHARED, Scene
from tests.support.measures import tensors_of
from tests.support.own_parts import EveryPass
from tests.support.stored_runs import Logits
from tests.support.tiny_models import questions

papers: Any = importlib.import_module("anchorlens.replication.paper")
QUIET: dict[str, Any] = {"resamples": 5, "progress": False}


def wait_or_fail(process: int) -> None:
    """Fail in one process; the others wait until they learn of it."""
    if PartialState().process_index == process:
        raise OutOfMemory("no memory is left")
    end = time.monotonic() + 20
    while not failed_elsewhere() and time.monotonic() < end:
        time.sleep(0.01)


class OutOfMemory(RuntimeError):
    """An error that only one process raises."""


WAIT_OR_FAIL = al.named("waits or fails, 1", wait_or_fail)


@dataclass(frozen=True)
class Failing(Logits):
    """Fails in one process at its second batch, where the others wait until they learn of it."""

    process: int = field(default=0, repr=False, compare=False)
    name: ClassVar[str] = "failing"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        if len(self.seen) == 1:
            WAIT_OR_FAIL(self.process)
        return super().contributions(batch, seen)


@dataclass(frozen=True)
class Picky(Logits):
    """Raises an error for prompts with an index above 3."""

    name: ClassVar[str] = "picky"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        if (batch.index > 3).any():
            raise MetricError(f"not prompt {int(batch.index.max())}")
        return super().contributions(batch, seen)


def trained(scene: Scene) -> al.contexts.Beta:
    training = al.contexts.Training(steps=4, progress=False)
    return al.contexts.train_reweighting(scene.model, scene.batches[:3], training)


CALLS = ["metrics", "isolated", "isolation", "contexts", "faithfulness", "attribution"]
CALLS += ["head effects", "task vectors"]
ANALYSES = {name: SHARED[name] for name in CALLS} | {"trained": trained}


def everything(scene: Scene) -> dict[str, Any]:
    """Results that must be equal in one process and in several."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, batches = scene.model, scene.batches
    results: dict[str, Any] = {name: tensors_of(call(scene)) for name, call in ANALYSES.items()}
    results["untouched"] = torch.equal(before, torch.get_rng_state())
    results["one batch"] = {"": al.target_logits(model, batches[:1], progress=False)}
    sweep = al.EdgeSweep.isolation({"first": al.Site([0])}, draws=1)
    results["info"] = ask(model, batches, sweep, **QUIET).info
    with pytest.raises(RunError) as refused:
        al.run(model, batches[:3], [Picky(), al.Accuracy()], **QUIET)
    results["refused rows"] = str(refused.value)
    results["the others"] = tensors_of(dict(refused.value.results))
    return results


def raised_by(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failures(model: Any, batches: list[al.PromptBatch], folder: Path) -> dict[str, Any]:
    """The errors that each process raises; after each error the processes can run again."""
    state = PartialState()
    process = state.process_index
    last = state.num_processes - 1
    too_long = replace(batches[0], tokens=batches[0].tokens + 10_000)

    def flows(of_batches: list[al.PromptBatch]) -> Any:
        return al.run(model, of_batches, [al.SaliencyFlows()], **QUIET)

    def changing() -> Any:
        sweep = al.EdgeSweep.isolation({"isolated": al.Site([process % 2])}, draws=1)
        return ask(model, batches, sweep, **QUIET).info

    def in_last_process(work: Callable[[], Any]) -> None:
        """Run ``work`` in the last process, in two nested blocks."""
        with fails_together(), fails_together():
            if process == last:
                work()

    def raises() -> None:
        raise OutOfMemory("in a block")

    failing, stored = Failing(process=last), Failing(process=0)
    batched = questions(model, count=7, batch_size=1)
    ids = batches[0].label_token_ids
    free = 1 if process == last else 10**12
    with patch.object(way, "LARGE", 0), patch.object(way, "free_for_layers", lambda of: free):
        little_memory = flows(batches)["saliency_flows"].info["attention"]
    return {
        "little memory": little_memory,
        "other prompts": raised_by(lambda: flows(batches[process:])),
        "other settings": raised_by(changing),
        "other calls": raised_by(lambda: changing() if process else flows(batches)),
        "bad prompt": raised_by(lambda: flows([too_long] if process == last else batches)),
        "in a pass": raised_by(lambda: al.run(model, batched, [failing], **QUIET)),
        "in a block": raised_by(lambda: in_last_process(raises)),
        "interrupted": raised_by(
            lambda: al.run(model, batched, [stored, al.Accuracy()], folder=folder, **QUIET)
        ),
        "seen": len(failing.seen),
        "afterwards": al.target_logits(model, batches, progress=False)[:, ids],
    }


def paper_records(model: Any) -> tuple[dict[str, Tensor], list[str], str]:
    """The paper with two parts, of which the first fails in the last of several processes.

    Gives the numbers, what ``keep`` was called with, and the error.
    """

    def failing(asked: Any) -> dict[str, Any]:
        if not is_single_process() and PartialState().is_last_process:
            raise PromptError("in a part")
        return {}

    examples, kept, error = al.load_examples("questions"), list[str](), ""
    options: dict[str, Any] = {"queries": 11, "seeds": [1], "depth": 1, "draws": 1, **QUIET}
    options |= {"parts": ["table 1", "other settings"]}
    with warnings.catch_warnings(), patch.object(papers._Asked, "table_1", failing):
        warnings.simplefilter("ignore")
        try:
            found: Any = al.paper(
                model,
                {"questions": (examples, examples)},
                keep=lambda task, name, record: kept.append(name),
                **options,
            )
        except RunError as raised:
            found, error = raised.results, str(raised)
    return tensors_of(found["questions (other settings)"]), kept, error


def split_weights(count: int) -> torch.nn.Module:
    """A layer whose rows are split over the processes."""
    mesh = init_device_mesh("cpu", (count,))
    layer = torch.nn.Linear(count, count)
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
    return layer


def resumed(model: Any, folder: Path) -> tuple[dict[str, Tensor], int]:
    """Results of a resumed run, and the number of batches that this process computed."""
    metric = Failing(process=-1, seen=[0, 0])
    batched = questions(model, count=7, batch_size=1)
    results = al.run(model, batched, [metric, al.Accuracy()], folder=folder, **QUIET)
    return tensors_of(results), len(metric.seen) - 2


@dataclass(frozen=True)
class Counting(EveryPass):
    """A question with passes of its own, which counts its batches."""

    seen: list[int] = field(default_factory=list, repr=False, compare=False)

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
        self.seen.append(len(batch))
        return super().of_batch(passes, batch)


def added(model: Any, folder: Path) -> tuple[dict[str, Tensor], int, int]:
    """Results of a call with one more question, and how many batches were computed here of each."""
    stored, more = Logits(), Counting()
    batched = questions(model, count=7, batch_size=1)
    al.run(model, batched, [Logits()], folder=folder, **QUIET)
    results = al.run(model, batched, [stored, more], folder=folder, **QUIET)
    return tensors_of(results), len(stored.seen), len(more.seen)


def in_process(scene: Scene, folder: Path) -> None:
    """Do the work of one of several processes, and write its results to a file."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate warns if it is not set
    state = PartialState(cpu=True)
    model = scene.model
    results = everything(scene) | failures(model, scene.batches, folder / "left")
    if state.is_main_process:
        shutil.copytree(folder / "left", folder / "kept")
    for name in ("left", "earlier"):
        if (folder / name).exists():
            state.wait_for_everyone()
            results[f"resumed {name}"] = resumed(model, folder / name)
    results["added"] = added(model, folder / "added")
    results["paper"] = paper_records(model)
    layer = split_weights(state.num_processes)
    results["split weights"] = raised_by(lambda: require_whole_model(layer))
    (folder / f"{state.process_index}.pickle").write_bytes(pickle.dumps(results))
