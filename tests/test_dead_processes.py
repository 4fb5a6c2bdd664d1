"""A process that dies, in any phase, is an error in the others soon, and never a wait for ever."""

import atexit
import multiprocessing
import os
import pickle
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from torch import distributed

from anchorlens import heartbeats, processes
from anchorlens.processes import gathered, own_device, together

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.without_jaxtyping,
]
# What is a minute, and half an hour.
SILENCE, TIME_OUT = 6.0, 10.0


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def gone() -> None:
    os._exit(3)


def raising() -> None:
    raise OSError("the disk is full")


def nothing() -> None:
    pass


def at_once(die: Callable[[], None]) -> None:
    time.sleep(1)  # until the other has its state as well
    die()


def while_loading(die: Callable[[], None]) -> None:
    own_device()
    time.sleep(1)
    die()


def while_working(die: Callable[[], None]) -> None:
    with together():
        time.sleep(1)
        die()
        time.sleep(2 * SILENCE)  # one that lives is waited for


def between_exchanges(die: Callable[[], None]) -> None:
    gathered("first", 1)
    time.sleep(1)
    die()


def opening(die: Callable[[], None]) -> None:
    distributed.new_group = lambda *args, **options: die()
    gathered("first", 1)


def exchanging(die: Callable[[], None]) -> None:
    distributed.all_gather_object = lambda *args, **options: die()
    gathered("first", 1)


LOST = "connection to another process is lost|process 0, does not answer|gave no sign of life"
SILENT = "gave no sign of life"
UNHEARD = "did not call anchorlens within"
ENDED = "ended before it did what the others do"
# In what phase, how, and what the other says where it is process 1 that dies; where it is process
# 0, which serves the store, it says that, or that the connection is lost.
CASES: list[tuple[Callable[..., None], Callable[[], None], str]] = [
    (at_once, gone, UNHEARD),
    (at_once, killed, UNHEARD),
    (at_once, stopped, UNHEARD),
    (at_once, raising, UNHEARD),
    (while_loading, killed, SILENT),
    (while_loading, stopped, SILENT),
    (while_loading, gone, SILENT),
    (while_loading, raising, ENDED),
    (while_working, killed, SILENT),
    (while_working, raising, "process . of 2 failed: OSError: the disk is full"),
    (between_exchanges, killed, SILENT),
    (between_exchanges, stopped, SILENT),
    (between_exchanges, raising, ENDED),
    (opening, killed, LOST),
    (exchanging, killed, LOST),
    (exchanging, stopped, LOST),
    (while_working, nothing, "nothing"),
]


def name_of(case: tuple[Any, ...]) -> str:
    return f"{case[1].__name__} {case[0].__name__}".replace("_", " ")


def work(number: int, victim: int, port: int, case: int, file: Path) -> None:
    """One of two processes: the victim, or the one that writes down what it is told."""
    heartbeats.SILENCE, heartbeats.BEAT = SILENCE, 0.2
    processes.MOVING = timedelta(seconds=TIME_OUT)
    rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_CPU": "yes", "OMP_NUM_THREADS": "1"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where PyTorch writes
    PartialState(cpu=True, timeout=timedelta(seconds=TIME_OUT))
    phase, die, _ = CASES[case]
    try:
        if number == victim:
            phase(die)
            gathered("first" if phase is not between_exchanges else "second", 1)
            return
        began, said = time.monotonic(), "nothing"
        try:
            if phase is between_exchanges:
                gathered("first", 1)
            if phase is while_working:
                with together():
                    pass
            gathered("first" if phase is not between_exchanges else "second", 1)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        file.write_bytes(pickle.dumps((said, time.monotonic() - began)))
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]


@dataclass
class Outcome:
    said: str
    seconds: float
    ended: bool


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> dict[tuple[int, int], Outcome]:
    """All cases at once, as each mostly waits."""
    folder = tmp_path_factory.mktemp("dead")
    fork = multiprocessing.get_context("fork")
    started: dict[tuple[int, int], list[Any]] = {}
    ports = iter(free_ports(2 * len(CASES)))
    for case in range(len(CASES)):
        for victim in (0, 1):
            port, file = next(ports), folder / f"{case}-{victim}"
            pair = [
                fork.Process(target=work, args=(k, victim, port, case, file), daemon=True)
                for k in (0, 1)
            ]
            for process in pair:
                process.start()
            started[case, victim] = pair
    end = time.monotonic() + 90
    found = {}
    for (case, victim), pair in started.items():
        other = pair[1 - victim]
        other.join(timeout=max(0.1, end - time.monotonic()))
        file, ended = folder / f"{case}-{victim}", not other.is_alive()
        said, seconds = pickle.loads(file.read_bytes()) if file.exists() else ("no word", 0.0)
        found[case, victim] = Outcome(said, seconds, ended)
    for pair in started.values():
        for process in pair:
            with suppress(ProcessLookupError):
                process.kill()
            process.join()
    return found


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_the_other_hears_of_it_and_ends(
    outcomes: dict[tuple[int, int], Outcome], case: int, victim: int
) -> None:
    outcome, expected = outcomes[case, victim], CASES[case][2]
    if victim == 0 and expected != "nothing":
        expected = f"{expected}|{LOST}"
    assert re.search(expected, outcome.said), outcome
    assert outcome.ended, outcome
    if expected == "nothing":
        assert outcome.said == "nothing" and outcome.seconds > SILENCE
    else:
        assert outcome.said.startswith("ProcessError: ")
        assert outcome.seconds < SILENCE + TIME_OUT + 30  # a machine that does other things too
