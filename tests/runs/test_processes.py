"""Several processes give what one gives, bit for bit, and fail together."""

import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import debug_launcher
from process_work import (
    ANALYSES,
    QUIET,
    Failing,
    assert_equal,
    everything,
    in_process,
    paper_numbers,
    resumed,
    tensors_of,
    two_sets,
)
from tiny_models import questions, tiny_gpt2

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.system.processes import (
    batches_of_process,
    failed_elsewhere,
    fails_together,
    gather_from_processes,
    require_whole_model,
)

pytestmark = [
    pytest.mark.without_jaxtyping,
    pytest.mark.filterwarnings(
        "ignore:some pairs of classes have no prompts",
        "ignore:in . of . sets",
        # Python from 3.12 on warns where the parent has threads.
        "ignore:.*fork.*:DeprecationWarning",
    ),
]


@dataclass
class Launch:
    found: list[dict[str, Any]]
    folder: Path
    expected: dict[str, Any] = field(repr=False)


@pytest.fixture(scope="module")
def tiny(hooked: Any, byte_level: Any) -> Any:
    return hooked(tiny_gpt2(len(byte_level)), byte_level)


@pytest.fixture(scope="module")
def launches(tiny: Any, tmp_path_factory: Any) -> dict[int, Launch]:
    """Everything in 2 and in 3 processes; they are forks, which saves imports and a model each."""
    batches = two_sets(tiny)
    assert len(batches) == 7
    expected = everything(tiny, batches)
    done: dict[int, Launch] = {}
    for count in (2, 3):
        folder = tmp_path_factory.mktemp(f"processes-{count}")
        if done:
            shutil.copytree(done[2].folder / "kept", folder / "earlier")
        debug_launcher(in_process, (tiny, batches, folder), num_processes=count)
        found = [pickle.loads((folder / f"{k}.pickle").read_bytes()) for k in range(count)]
        done[count] = Launch(found, folder, expected)
    return done


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", [*(one.__name__ for one in ANALYSES), "one batch", "the others"])
def test_results_are_those_of_one_process(
    launches: dict[int, Launch], count: int, name: str
) -> None:
    """Batches are planned before they are shared out, so that not even the last bit differs."""
    launch = launches[count]
    for found in launch.found:
        assert_equal(found[name], launch.expected[name])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["info", "untouched", "refused rows"])
def test_and_what_is_said_of_them(launches: dict[int, Launch], count: int, name: str) -> None:
    launch = launches[count]
    assert all(found[name] == launch.expected[name] for found in launch.found)
    assert launch.expected["untouched"] is True
    assert "picky: not prompt " in launch.expected["refused rows"]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other prompts", ("all processes must make the same call", "prompts: process 0 '")),
        ("other settings", ("the same call", "isolated: process 0 ", "'layers': [1]")),
        ("other calls", ("the same call", "metrics: process 0 ", "process 1 None")),
    ],
)
def test_processes_with_other_work_are_refused(
    launches: dict[int, Launch], count: int, name: str, words: Sequence[str]
) -> None:
    said = {found[name] for found in launches[count].found}
    assert len(said) == 1
    assert all(word in next(iter(said)) for word in ("ProcessError: ", *words))


@pytest.mark.parametrize("count", [2, 3])
def test_where_one_finds_other_logits_all_run_whole_prompts(
    launches: dict[int, Launch], count: int
) -> None:
    assert "run once for all" in launches[count].expected["info"]["shared_prefix"]
    for found in launches[count].found:
        assert found["disagreeing"].startswith("off: logits differ")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("bad prompt", "PromptError: token "),
        ("in a pass", "OutOfMemory: no memory is left"),
        ("in a block", "OutOfMemory: in a block"),
    ],
)
def test_one_failure_is_everyones(
    launches: dict[int, Launch], count: int, name: str, own: str
) -> None:
    *others, failed = (found[name] for found in launches[count].found)
    assert failed.startswith(own)
    assert others == [f"ProcessError: process {count - 1} of {count} failed: {failed}"] * len(
        others
    )


@pytest.mark.parametrize("count", [2, 3])
def test_the_others_stop_at_once_and_go_on_in_step(launches: dict[int, Launch], count: int) -> None:
    launch = launches[count]
    *others, failed = (found["seen"] for found in launch.found)
    # Of 3 batches at least in one of the others: heard before the second of them, or in it.
    assert failed == 1 and all(seen <= 2 for seen in others)
    first = launch.found[0]["afterwards"]
    assert all(torch.equal(found["afterwards"], first) for found in launch.found)


def test_a_run_goes_on_in_another_number_of_processes(
    launches: dict[int, Launch], tiny: Any
) -> None:
    """Interrupted in 2 processes, resumed in 2, in 3 and in one."""
    names = {path.name for path in (launches[2].folder / "kept").glob("rows-*")}
    assert 1 < len(names) < 7 and "rows-00000.safetensors" in names
    batched = questions(tiny, count=7, batch_size=1)
    expected = tensors_of(
        al.run(tiny, batched, [Failing(process=-1, seen=[0, 0]), al.Accuracy()], **QUIET)
    )
    runs = [[found["resumed left"] for found in launches[2].found]]
    runs += [[found["resumed earlier"] for found in launches[3].found]]
    runs += [[resumed(tiny, launches[2].folder / "kept")]]
    for run in runs:
        for tensors, _ in run:
            assert_equal(tensors, expected)
        # The first is computed again, to see that it is the same.
        assert sum(computed for _, computed in run) == 7 - len(names) + 1
    assert max(computed for _, computed in runs[0]) < 7 - len(names)  # what is left is shared


@pytest.mark.parametrize("count", [2, 3])
def test_a_part_of_the_paper_that_fails_spares_the_others(
    launches: dict[int, Launch], tiny: Any, count: int
) -> None:
    expected, kept, _ = paper_numbers(tiny, [])
    assert expected and len(kept) == 2
    launch = launches[count]
    for number, found in enumerate(launch.found):
        numbers, kept, said = found["paper"]
        assert numbers == expected
        assert len(kept) == (0 if number else 2)  # files are the main process's
        own = "in a part" if number == count - 1 else f"process {count - 1} of {count} failed"
        assert own in said[0] and len(said) == 1


@pytest.mark.draws
@pytest.mark.parametrize("count", [2, 3])
def test_a_model_over_all_processes_is_refused(launches: dict[int, Launch], count: int) -> None:
    for found in launches[count].found:
        assert "each needs the whole model" in found["split weights"]
    require_whole_model(torch.nn.Linear(1, 1))


def test_parts_are_contiguous_whole_and_even(monkeypatch: Any) -> None:
    def parts(costs: list[int], count: int) -> list[list[int]]:
        found = []
        for number in range(count):
            state = type("State", (), {"num_processes": count, "process_index": number})
            monkeypatch.setattr("anchorlens.system.processes._state", lambda state=state: state)
            found.append(batches_of_process(costs))
        return found

    assert parts([5] * 7, 2) == [[0, 1, 2], [3, 4, 5, 6]]
    assert parts([5] * 7, 3) == [[0, 1], [2, 3, 4], [5, 6]]
    assert sorted(map(len, parts([9], 3))) == [0, 0, 1]
    assert parts([30, 10, 10, 10], 2) == [[0], [1, 2, 3]]
    assert parts([0, 0, 8, 8, 0, 0], 2) == [[0, 1, 2], [3, 4, 5]]
    for costs in ([0, 0, 0], [], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 0, 0, 1]):
        for count in (2, 3, 5):
            joined = [number for part in parts(costs, count) for number in part]
            assert joined == list(range(len(costs)))


def test_alone_nothing_is_exchanged() -> None:
    assert (
        gather_from_processes("x", 3) == [3]
        and batches_of_process([1, 2]) == [0, 1]
        and not failed_elsewhere()
    )
    with pytest.raises(PromptError, match="mine"), fails_together():
        raise PromptError("mine")
