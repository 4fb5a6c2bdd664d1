"""Several processes give the numbers of one, bit for bit; an error in one is raised in all."""

import importlib
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from accelerate import PartialState, debug_launcher
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import anchorlens as al
from anchorlens.errors import MetricError, PromptError, RunError
from anchorlens.runs import way
from anchorlens.system.processes import (
    batches_of_process,
    failed_elsewhere,
    fails_together,
    gather_from_processes,
    is_single_process,
    require_whole_model,
)
from tests.support.asked import ask
from tests.support.catalogue import SHARED, Scene, scene_of
from tests.support.measures import same, tensors_of
from tests.support.own_parts import EveryPass
from tests.support.stored_runs import Logits
from tests.support.tiny_models import questions, tiny_gpt2

pytestmark = [
    pytest.mark.slow("starts processes"),
    pytest.mark.filterwarnings(
        "ignore:some pairs of classes have no prompts",
        "ignore:in . of . sets",
        "ignore:. queries are in both lists",
        "ignore:.*fork.*:DeprecationWarning",
    ),
]

papers: Any = importlib.import_module("anchorlens.replication.paper")
QUIET: dict[str, Any] = {"resamples": 5, "progress": False}


def wait_or_fail(process: int) -> None:
    if PartialState().process_index == process:
        raise RuntimeError("no memory is left")
    end = time.monotonic() + 20
    while not failed_elsewhere() and time.monotonic() < end:
        time.sleep(0.01)


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
    name: ClassVar[str] = "picky"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        if (batch.index > 3).any():
            raise MetricError(f"not prompt {int(batch.index.max())}")
        return super().contributions(batch, seen)


def trained(scene: Scene) -> al.contexts.Beta:
    training = al.contexts.Training(steps=4, progress=False)
    return al.contexts.train_reweighting(scene.model, scene.batches[:3], training)


NAMES = ["metrics", "isolated", "isolation", "contexts", "faithfulness", "attribution"]
NAMES += ["head effects", "task vectors"]
ANALYSES = {name: SHARED[name] for name in NAMES} | {"trained": trained}


def everything(scene: Scene) -> dict[str, Any]:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, batches = scene.model, scene.batches
    results: dict[str, Any] = {name: tensors_of(call(scene)) for name, call in ANALYSES.items()}
    results["untouched"] = torch.equal(before, torch.get_rng_state())
    results["one batch"] = al.target_logits(model, batches[:1], progress=False)
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

    def in_nested_blocks() -> None:
        with fails_together(), fails_together():
            if process == last:
                raise RuntimeError("in a block")

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
        "in a block": raised_by(in_nested_blocks),
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
    with warnings.catch_warnings(), patch.object(papers._PartsOfTask, "table_1", failing):
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


def resumed(model: Any, folder: Path | None) -> tuple[dict[str, Tensor], int]:
    metric = Failing(process=-1, seen=[0, 0])
    batched = questions(model, count=7, batch_size=1)
    results = al.run(model, batched, [metric, al.Accuracy()], folder=folder, **QUIET)
    return tensors_of(results), len(metric.seen) - 2


@dataclass(frozen=True)
class Counting(EveryPass):
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
    layer, mesh = torch.nn.Linear(1, 1), init_device_mesh("cpu", (state.num_processes,))
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
    results["split weights"] = raised_by(lambda: require_whole_model(layer))
    (folder / f"{state.process_index}.pickle").write_bytes(pickle.dumps(results))


@dataclass
class Launch:
    results: list[dict[str, Any]]
    folder: Path
    expected: dict[str, Any] = field(repr=False)


@pytest.fixture(scope="module")
def tiny(hooked: Any, byte_level: Any) -> Any:
    return hooked(tiny_gpt2(len(byte_level)), byte_level)


@pytest.fixture(scope="module")
def launched(tiny: Any, tmp_path_factory: Any) -> Callable[[int], Launch]:
    """All work in a number of processes. They are forks, which saves imports and models."""
    scene = scene_of(tiny, Path(), prompts=11, sets=2, resamples=5)
    assert len(scene.batches) == 6
    expected = everything(scene)
    expected["added"] = added(tiny, tmp_path_factory.mktemp("alone"))

    @cache
    def of(count: int) -> Launch:
        folder = tmp_path_factory.mktemp(f"processes-{count}")
        if count != 2:
            shutil.copytree(of(2).folder / "kept", folder / "earlier")
        debug_launcher(in_process, (scene, folder), num_processes=count)
        results = [
            pickle.loads((folder / f"{number}.pickle").read_bytes()) for number in range(count)
        ]
        return Launch(results, folder, expected)

    return of


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.release("more processes"))]
)
def launch(request: Any, launched: Callable[[int], Launch]) -> Launch:
    return launched(request.param)


@pytest.mark.parametrize("name", [*ANALYSES, "one batch", "the others"])
def test_results_equal_those_of_one_process(launch: Launch, name: str) -> None:
    """Batches are planned before processes divide them, so that every bit is equal."""
    for results in launch.results:
        assert same(results[name], launch.expected[name])


def test_info_random_state_and_errors_equal_those_of_one_process(launch: Launch) -> None:
    for name in ("info", "untouched", "refused rows"):
        assert all(results[name] == launch.expected[name] for results in launch.results)
    assert launch.expected["untouched"] is True
    assert "picky: not prompt " in launch.expected["refused rows"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other prompts", ["prompts: process 0 '"]),
        ("other settings", ["what isolation computes: process 0 ", "layers=0,", "layers=1,"]),
        ("other calls", ["what saliency_flows computes: process 0 ", "process 1 None"]),
    ],
)
def test_processes_with_different_calls_raise_an_error(
    launch: Launch, name: str, words: Sequence[str]
) -> None:
    [message] = {results[name] for results in launch.results}
    assert message.startswith("ProcessError: all processes must make the same call")
    assert all(word in message for word in words)


def test_different_logits_in_one_process_make_all_run_whole_prompts(launch: Launch) -> None:
    assert "run once for all" in launch.expected["info"]["shared_prefix"]
    for results in launch.results:
        assert results["little memory"].endswith("and 0.0 MiB are free")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad prompt", "PromptError: token "),
        ("in a pass", "RuntimeError: no memory is left"),
        ("in a block", "RuntimeError: in a block"),
    ],
)
def test_an_error_in_one_process_is_raised_in_all(launch: Launch, name: str, message: str) -> None:
    *others, failed = (results[name] for results in launch.results)
    assert failed.startswith(message)
    of_failed = f"process {len(others)} of {len(launch.results)} failed"
    assert others == [f"ProcessError: {of_failed}: {failed}"] * len(others)


def test_the_other_processes_stop_soon_and_can_run_again(launch: Launch) -> None:
    *others, failed = (results["seen"] for results in launch.results)
    # One of the others has 3 batches or more. It learns of the failure in the second, or before.
    assert failed == 1 and all(seen <= 2 for seen in others)
    first = launch.results[0]["afterwards"]
    assert all(torch.equal(results["afterwards"], first) for results in launch.results)


def test_a_run_resumes_in_another_number_of_processes(
    launch: Launch, launched: Callable[[int], Launch], tiny: Any, tmp_path: Path
) -> None:
    """The run is interrupted in 2 processes, and resumes in 2, in 3 and in 1."""
    kept = shutil.copytree(launched(2).folder / "kept", tmp_path / "kept")
    names = {path.name for path in kept.glob("rows-*")}
    assert 1 < len(names) < 7 and "rows-00000.safetensors" in names
    expected, _ = resumed(tiny, None)
    name = "resumed left" if launch is launched(2) else "resumed earlier"
    in_several, in_one = [results[name] for results in launch.results], [resumed(tiny, kept)]
    for run in (in_several, in_one):
        for tensors, _ in run:
            assert same(tensors, expected)
        # The first and the last stored batch are computed again to check that they are equal.
        assert sum(computed for _, computed in run) == 7 - len(names) + 2
    most = max(computed for _, computed in in_several)
    assert most < 7 - len(names) + 2  # processes divide the rest


def test_a_question_that_is_added_is_divided_among_the_processes(launch: Launch) -> None:
    others = [0] * (len(launch.results) - 1)
    assert [results["added"][1] for results in launch.results] == [2, *others]
    computed = [results["added"][2] for results in launch.results]
    assert sum(computed) == 7 and max(computed) < 7
    for results in launch.results:
        assert same(results["added"][0], launch.expected["added"][0])


def test_a_failing_part_of_the_paper_leaves_the_records_of_the_others(
    launch: Launch, tiny: Any
) -> None:
    expected, names, none = paper_records(tiny)
    assert len(names) == 3 and not none
    count = len(launch.results)
    for process, results in enumerate(launch.results):
        numbers, kept, error = results["paper"]
        assert same(numbers, expected)
        assert kept == ([] if process else names)  # only the main process calls keep
        is_last = process == count - 1
        assert error.startswith("no result, or not all, for questions, table 1: ")
        assert ("in a part" if is_last else f"process {count - 1} of {count} failed") in error


@pytest.mark.draws
def test_a_model_split_over_processes_is_refused(launch: Launch) -> None:
    for results in launch.results:
        assert "each needs the whole model" in results["split weights"]
    require_whole_model(torch.nn.Linear(1, 1))


def test_processes_get_contiguous_complete_and_even_parts(monkeypatch: Any) -> None:
    def parts(costs: list[int], count: int) -> list[list[int]]:
        divided = []
        for number in range(count):
            state = type("State", (), {"num_processes": count, "process_index": number})
            name = "anchorlens.system.processes.process_state"
            monkeypatch.setattr(name, lambda state=state: state)
            divided.append(batches_of_process(costs))
        return divided

    assert parts([5] * 7, 2) == [[0, 1, 2], [3, 4, 5, 6]]
    assert parts([5] * 7, 3) == [[0, 1], [2, 3, 4], [5, 6]]
    assert sorted(map(len, parts([9], 3))) == [0, 0, 1]
    assert parts([30, 10, 10, 10], 2) == [[0], [1, 2, 3]]
    assert parts([0, 0, 8, 8, 0, 0], 2) == [[0, 1, 2], [3, 4, 5]]
    for costs in ([0, 0, 0], [], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 0, 0, 1]):
        for count in (2, 3, 5):
            joined = [number for part in parts(costs, count) for number in part]
            assert joined == list(range(len(costs)))


def test_a_single_process_exchanges_nothing() -> None:
    assert gather_from_processes("x", 3) == [3] and batches_of_process([1, 2]) == [0, 1]
    assert not failed_elsewhere()
    with pytest.raises(PromptError, match="mine"), fails_together():
        raise PromptError("mine")
