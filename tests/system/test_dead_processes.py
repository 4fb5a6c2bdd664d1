"""If a process dies in any phase, the others raise an error within the time-out of their group."""

import atexit
import multiprocessing
import os
import pickle
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from accelerate import PartialState
from torch import distributed

from anchorlens.system import processes
from anchorlens.system.processes import fails_together, gather_from_processes, process_device

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.release("waits for processes that die"),
]
TIME_OUT = timedelta(seconds=6)  # two hours outside the tests
SLOW = 3.0  # seconds of work for which the other process waits


def raising() -> None:
    raise OSError("the disk is full")


# How a process dies.
DEATHS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gone": lambda: os._exit(3),
    "raising": raising,
    "working": lambda: None,
}


def at_once(die: Callable[[], None]) -> None:
    die()


def while_loading(die: Callable[[], None]) -> None:
    process_device()
    time.sleep(1)
    die()


def while_working(die: Callable[[], None]) -> None:
    with fails_together():
        time.sleep(1)
        die()
        time.sleep(SLOW)


def between_exchanges(die: Callable[[], None]) -> None:
    gather_from_processes("first", 1)
    time.sleep(1)
    die()


def opening(die: Callable[[], None]) -> None:
    distributed.new_group = lambda *args, **options: die()
    gather_from_processes("last", 1)


def exchanging(die: Callable[[], None]) -> None:
    def die_later(*args: Any, **options: Any) -> None:
        # The other process has the group by then: while it makes one, it waits without a limit for
        # a store whose process is stopped (docs/running.md).
        time.sleep(1)
        die()

    distributed.all_gather_object = die_later
    gather_from_processes("last", 1)


LOST = "the connection to another process is lost"
Case = tuple[int, Callable[..., None], str, str]
# The process that dies, its phase, how it dies, and the message of the other process.
# Process 0 serves the store.
CASES: list[Case] = [
    (1, at_once, "gone", LOST),
    (1, at_once, "raising", LOST),
    (1, while_loading, "stopped", LOST),
    (1, while_working, "killed", LOST),
    (1, while_working, "raising", "process 1 of 2 failed: OSError: the disk is full"),
    (1, while_working, "working", "nothing"),
    (1, between_exchanges, "killed", LOST),
    (1, between_exchanges, "stopped", LOST),
    (1, between_exchanges, "raising", LOST),
    (1, opening, "killed", LOST),
    (1, exchanging, "killed", LOST),
    (1, exchanging, "stopped", LOST),
    (0, at_once, "killed", LOST),
    (0, while_working, "killed", LOST),
    (0, while_working, "raising", "process 0 of 2 failed: OSError: the disk is full"),
    (0, between_exchanges, "killed", LOST),
    (0, between_exchanges, "stopped", LOST),
    (0, between_exchanges, "raising", LOST),
    (0, exchanging, "killed", LOST),
    (0, exchanging, "stopped", LOST),
]
AT_A_TIME = 10  # pairs of processes; if more connect at once, it may take seconds


def work(number: int, case: int, port: int, file: Any, connected: Sequence[Any]) -> None:
    """Run one of two processes: the victim, or the other one, which records its own error."""
    processes.TIME_OUT = TIME_OUT
    rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_CPU": "yes", "OMP_NUM_THREADS": "1"}
    # PyTorch writes its messages to this file.
    os.dup2(os.open(file.with_suffix(f".{number}"), os.O_WRONLY | os.O_CREAT), 2)
    PartialState(cpu=True, timeout=TIME_OUT)
    connected[1 - number].release()
    assert connected[number].acquire(timeout=60)
    victim, phase, die, _ = CASES[case]
    try:
        if number == victim:
            phase(DEATHS[die])
            gather_from_processes("last", 1)
        else:
            file.write_bytes(pickle.dumps(survive(phase)))
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call them


def survive(phase: Callable[..., None]) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        if phase is between_exchanges:
            gather_from_processes("first", 1)
        if phase is while_working:
            with fails_together():
                pass
        gather_from_processes("last", 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


def free_ports(count: int) -> Iterator[int]:
    """Free ports below those that the system gives to connections, such as those of a pair."""
    candidates = iter(random.SystemRandom().sample(range(20_000, 32_000), 50 * count))
    while count:
        port = next(candidates)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            count -= 1
            yield port


def outcome_of(other: Any, file: Any) -> tuple[str, float]:
    """What the process that does not die wrote, after its end."""
    other.join(timeout=120)
    if other.is_alive() or not file.exists():
        return f"it has not ended, or wrote nothing; status {other.exitcode}", 0.0
    message, seconds = pickle.loads(file.read_bytes())
    return message, seconds


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> list[tuple[str, float]]:
    """Several cases run at the same time, because each mostly waits."""
    folder, fork = tmp_path_factory.mktemp("dead"), multiprocessing.get_context("fork")
    ports, found = list(free_ports(len(CASES))), list[tuple[str, float]]()
    for first in range(0, len(CASES), AT_A_TIME):
        pairs = dict[int, list[Any]]()
        for case in range(len(CASES))[first : first + AT_A_TIME]:
            connected = [fork.Semaphore(0), fork.Semaphore(0)]
            given = (case, ports[case], folder / f"{case}", connected)
            pairs[case] = [fork.Process(target=work, args=(number, *given)) for number in (0, 1)]
        of_all = [process for pair in pairs.values() for process in pair]
        for process in of_all:
            process.start()
        try:
            for case, pair in pairs.items():
                found.append(outcome_of(pair[1 - CASES[case][0]], folder / f"{case}"))
        finally:
            for process in of_all:
                process.kill()
                process.join()
    return found


@pytest.mark.parametrize(
    "case",
    range(len(CASES)),
    ids=[f"process {dying} {how} {phase.__name__}" for dying, phase, how, _ in CASES],
)
def test_the_other_process_raises_an_error_and_ends(
    outcomes: list[tuple[str, float]], case: int
) -> None:
    (message, seconds), expected = outcomes[case], CASES[case][3]
    assert expected in message
    if expected == "nothing":
        assert seconds > SLOW
    else:
        assert message.startswith("ProcessError: ")
        # The group is made and used once each; the machine may be busy.
        assert seconds < 2 * TIME_OUT.total_seconds() + 30
