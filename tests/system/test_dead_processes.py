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
from pathlib import Path
from typing import Any, NamedTuple

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
Case = tuple[int, Callable[..., None], Callable[[], None], str]
# The process that dies, its phase, how it dies, and the message of the other process.
# Process 0 serves the store.
CASES: list[Case] = [
    (1, at_once, gone, LOST),
    (1, at_once, raising, LOST),
    (1, while_loading, stopped, LOST),
    (1, while_working, killed, LOST),
    (1, while_working, raising, "process 1 of 2 failed: OSError: the disk is full"),
    (1, while_working, nothing, "nothing"),
    (1, between_exchanges, killed, LOST),
    (1, between_exchanges, stopped, LOST),
    (1, between_exchanges, raising, LOST),
    (1, opening, killed, LOST),
    (1, exchanging, killed, LOST),
    (1, exchanging, stopped, LOST),
    (0, at_once, killed, LOST),
    (0, while_working, killed, LOST),
    (0, while_working, raising, "process 0 of 2 failed: OSError: the disk is full"),
    (0, between_exchanges, killed, LOST),
    (0, between_exchanges, stopped, LOST),
    (0, between_exchanges, raising, LOST),
    (0, exchanging, killed, LOST),
    (0, exchanging, stopped, LOST),
]
AT_A_TIME = 10  # pairs of processes; if more connect at once, it may take seconds


def name_of(case: Case) -> str:
    victim, phase, die, _ = case
    return f"process {victim} {die.__name__} {phase.__name__}".replace("_", " ")


def work(number: int, case: int, port: int, file: Path, connected: Sequence[Any]) -> None:
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
            phase(die)
            gather_from_processes("last", 1)
        else:
            file.write_bytes(pickle.dumps(survive(phase)))
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call them


def survive(phase: Callable[..., None]) -> tuple[str, float]:
    """The error of the other process, and the seconds until it was raised."""
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


class Outcome(NamedTuple):
    message: str
    seconds: float
    ended: bool


def start(case: int, port: int, file: Path) -> list[Any]:
    """Start the two processes of a case."""
    fork = multiprocessing.get_context("fork")
    connected = [fork.Semaphore(0), fork.Semaphore(0)]
    pair = [
        fork.Process(target=work, args=(number, case, port, file, connected)) for number in (0, 1)
    ]
    for process in pair:
        process.start()
    return pair


def outcome_of(other: Any, file: Path) -> Outcome:
    """What the process that does not die wrote, when it ended."""
    other.join(timeout=120)
    if not file.exists():
        return Outcome(f"nothing was written; status {other.exitcode}", 0.0, not other.is_alive())
    message, seconds = pickle.loads(file.read_bytes())
    return Outcome(message, seconds, not other.is_alive())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> list[Outcome]:
    """Several cases run at the same time, because each mostly waits."""
    folder = tmp_path_factory.mktemp("dead")
    ports, found = list(free_ports(len(CASES))), list[Outcome]()
    for first in range(0, len(CASES), AT_A_TIME):
        wave = range(len(CASES))[first : first + AT_A_TIME]
        files = [folder / f"{case}" for case in wave]
        pairs = [start(case, ports[case], file) for case, file in zip(wave, files, strict=True)]
        try:
            others = [pair[1 - CASES[case][0]] for case, pair in zip(wave, pairs, strict=True)]
            found += map(outcome_of, others, files)
        finally:
            for process in (process for pair in pairs for process in pair):
                process.kill()
                process.join()
    return found


@pytest.mark.parametrize("case", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_the_other_process_raises_an_error_and_ends(outcomes: list[Outcome], case: int) -> None:
    outcome, expected = outcomes[case], CASES[case][3]
    assert expected in outcome.message, outcome
    assert outcome.ended, outcome
    if expected == "nothing":
        assert outcome.seconds > SLOW
    else:
        assert outcome.message.startswith("ProcessError: ")
        # The group is made and used once each; the machine may be busy.
        assert outcome.seconds < 2 * TIME_OUT.total_seconds() + 30
