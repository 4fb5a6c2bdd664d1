"""Several processes give the numbers of one, bit for bit; an error in one is raised in all."""

import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import debug_launcher

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.system.processes import (
    batches_of_process,
    failed_elsewhere,
    fails_together,
    gather_from_processes,
    require_whole_model,
)
from tests.support.catalogue import scene_of
from tests.support.measures import same, tensors_of
from tests.support.process_work import (
    ANALYSES,
    QUIET,
    Failing,
    added,
    everything,
    in_process,
    paper_records,
    resumed,
)
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


@pytest.mark.parametrize("name", ["info", "untouched", "refused rows"])
def test_info_random_state_and_errors_equal_those_of_one_process(launch: Launch, name: str) -> None:
    assert all(results[name] == launch.expected[name] for results in launch.results)
    assert launch.expected["untouched"] is True
    assert "picky: not prompt " in launch.expected["refused rows"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other prompts", ("all processes must make the same call", "prompts: process 0 '")),
        (
            "other settings",
            ("the same call", "what isolation computes: process 0 ", "layers=0,", "layers=1,"),
        ),
        (
            "other calls",
            ("the same call", "what saliency_flows computes: process 0 ", "process 1 None"),
        ),
    ],
)
def test_processes_with_different_calls_raise_an_error(
    launch: Launch, name: str, words: Sequence[str]
) -> None:
    messages = {results[name] for results in launch.results}
    assert len(messages) == 1
    assert all(word in next(iter(messages)) for word in ("ProcessError: ", *words))


def test_different_logits_in_one_process_make_all_run_whole_prompts(launch: Launch) -> None:
    assert "run once for all" in launch.expected["info"]["shared_prefix"]
    for results in launch.results:
        assert results["little memory"].endswith("and 0.0 MiB are free")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad prompt", "PromptError: token "),
        ("in a pass", "OutOfMemory: no memory is left"),
        ("in a block", "OutOfMemory: in a block"),
    ],
)
def test_an_error_in_one_process_is_raised_in_all(launch: Launch, name: str, message: str) -> None:
    *others, failed = (results[name] for results in launch.results)
    assert failed.startswith(message)
    assert others == [
        f"ProcessError: process {len(launch.results) - 1} of {len(launch.results)} failed: {failed}"
    ] * len(others)


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
    batched = questions(tiny, count=7, batch_size=1)
    asked = [Failing(process=-1, seen=[0, 0]), al.Accuracy()]
    expected = tensors_of(al.run(tiny, batched, asked, **QUIET))
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
    for process, results in enumerate(launch.results):
        numbers, kept, error = results["paper"]
        assert same(numbers, expected)
        assert kept == ([] if process else names)  # only the main process calls keep
        message = (
            "in a part"
            if process == len(launch.results) - 1
            else f"process {len(launch.results) - 1} of {len(launch.results)} failed"
        )
        assert error.startswith("no result, or not all, for questions, table 1: ")
        assert message in error


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
    assert (
        gather_from_processes("x", 3) == [3]
        and batches_of_process([1, 2]) == [0, 1]
        and not failed_elsewhere()
    )
    with pytest.raises(PromptError, match="mine"), fails_together():
        raise PromptError("mine")
