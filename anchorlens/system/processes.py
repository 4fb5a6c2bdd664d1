"""Several processes that share one run: how the work is divided, exchanged and synchronized.

The processes are those of accelerate. If the state of accelerate was not made, accelerate is not
imported and the process runs alone.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import distributed

from ..errors import ProcessError
from .heartbeats import Heart
from .process_state import is_main as is_main
from .process_state import is_single_process as is_single_process
from .process_state import process_state, was_launched
from .warn import warn_user

T = TypeVar("T")

# The time limit of sending data. Waiting for the others is not part of it: all arrived before.
MOVING = timedelta(minutes=10)


def process_device() -> torch.device | None:
    """The device that accelerate gave this process; None without accelerate."""
    state = process_state()
    if not is_single_process():
        _connection()  # from now on the others see that this process lives
    return None if state is None else torch.device(state.device)


def batches_of_process(costs: Sequence[int]) -> list[int]:
    """The numbers of this process's batches: a contiguous part, about as costly as the others.

    The part is contiguous, so that most sets of demonstrations run in one process only.
    """
    if is_single_process():
        return list(range(len(costs)))
    state, total, before, part = process_state(), sum(costs) or 1, 0, []
    for number, cost in enumerate(costs):
        middle = (2 * before + cost) * state.num_processes // (2 * total)
        if min(middle, state.num_processes - 1) == state.process_index:
            part.append(number)
        before += cost
    return part


def gather_from_processes(what: str, value: T) -> list[T]:
    """The values of all processes, returned on every process; ``[value]`` if there is only one.

    Args:
        what: The name of the exchange, by which processes at different calls are recognised.
        value: Anything that can be pickled, on the CPU.

    Raises:
        ProcessError: A process failed (see ``fails_together``), died, or made another call.
    """
    return [value] if is_single_process() else _exchange(what, value, None)


@contextmanager
def fails_together() -> Iterator[None]:
    """A block, or with ``@together()`` a function, that fails in all processes if it fails in one.

    The process that fails raises its own error. The others raise a ProcessError at their next
    exchange, at the latest at the end of the block, so that no process waits for a failed one.
    """
    if is_single_process():
        yield
        return
    _connection()  # from now on the others see that this process lives
    try:
        yield
    except ProcessError:
        raise  # all processes know of it
    except Exception as error:
        if not hasattr(error, "_announced"):  # announced already by a block inside this block
            error._announced = True  # type: ignore[attr-defined]
            connection = _connection()
            connection.heart.fail(connection.exchanges)
            _exchange("failure", None, error)
        raise
    gather_from_processes("end of a block", None)


def failed_elsewhere() -> bool:
    """Whether another process failed since the last exchange, so that this one can stop."""
    if is_single_process():
        return False
    connection = _connection()
    return connection.heart.another_failed(connection.exchanges)


def require_equal_settings(what: Mapping[str, str]) -> None:
    """Raise an error if the processes got different settings: their rows do not belong together.

    Raises:
        ProcessError: In all processes; the message names the difference.
    """
    first, *others = gather_from_processes("settings", dict(what))
    for number, other in enumerate(others, start=1):
        different = [
            f"{name}: process 0 {first.get(name)!r}, process {number} {other.get(name)!r}"
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if different:
            raise ProcessError(
                "all processes must make the same call, whose work is divided among them; got "
                f"different calls ({'; '.join(different)}). To analyse other prompts in each "
                "process, make no accelerate state"
            )


def require_whole_model(model: Any) -> None:
    """Raise an error if a model is split among the processes: each must run its own prompts."""
    if any(hasattr(weights, "device_mesh") for weights in model.parameters()):
        raise ProcessError(
            "prompts are divided among the processes, so that each needs the whole model, but "
            "the weights of this one are split among them (tensor parallelism or FSDP). Load the "
            "whole model in each process, or over the devices of one process with device_map"
        )


def main_first(make: Callable[[], T]) -> T:
    """Call ``make`` in the main process first and then in the others, for example to open files."""
    made = [make()] if is_main() else []
    gather_from_processes("what the main process does first", None)
    return made[0] if made else make()


def join_launched() -> None:
    """Make the accelerate state of a process that `accelerate launch` or `torchrun` started."""
    if not was_launched():
        return
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # Without an accelerator and this setting, accelerate would let each process run alone.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    atexit.register(_leave)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and state.num_processes != launched:
        raise ProcessError(
            f"{launched} processes were started, but accelerate cannot connect them on "
            f"{state.device}; start them with ACCELERATE_USE_CPU=true in the environment"
        )
    # accelerate's launcher sets MASTER_ADDR only if several processes were asked for.
    if state.num_processes == 1 and "MASTER_ADDR" in os.environ and "LOCAL_RANK" not in os.environ:
        warn_user(
            "accelerate launch was asked for several processes and started one, as it does on a "
            "CPU or a single GPU; add --multi_gpu, which starts all of them on any machine, or use "
            "torchrun --nproc-per-node"
        )


def _leave() -> None:
    """Close the group of all processes, because that of GPUs warns if it is left open."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


@dataclass
class _Connection:
    """The signs of life and the data exchange of the processes of one accelerate state."""

    heart: Heart
    exchanges: int = 0
    group: Any = None

    def gather(self, values: list[Any], value: Any) -> None:
        """Fill the list with the values of all processes, which have arrived."""
        # A separate group for the CPU, because that of GPUs would send rows through their memory.
        self.group = self.group or distributed.new_group(backend="gloo", timeout=MOVING)
        distributed.all_gather_object(values, value, group=self.group)

    def close(self) -> None:
        """Close the group, whose threads would otherwise abort the process when Python ends."""
        self.heart.stop()
        group, self.group = self.group, None
        if group is not None and distributed.is_initialized():
            distributed.destroy_process_group(group)


def _connection() -> _Connection:
    return _connection_of(distributed.group.WORLD)


@cache
def _connection_of(world: Any) -> _Connection:
    state = process_state()
    connection = _Connection(
        Heart(world.get_group_store(), state.process_index, state.num_processes)
    )
    atexit.register(connection.close)
    return connection


def _exchange(what: str, value: T, error: Exception | None) -> list[T]:
    connection, state = _connection(), process_state()
    failure = None if error is None else f"{type(error).__name__}: {error}"
    answers: list[Any] = [None] * state.num_processes
    try:
        connection.heart.arrive(connection.exchanges)
        with _lost_connection_reported():
            connection.heart.watch(lambda: connection.gather(answers, (what, value, failure)))
    except ProcessError:
        if error is None:
            raise
        return []  # the caller raises its own error
    connection.exchanges += 1
    failures = [
        (number, reason) for number, (_, _, reason) in enumerate(answers) if reason is not None
    ]
    if error is None and failures:
        number, reason = failures[0]
        raise ProcessError(f"process {number} of {state.num_processes} failed: {reason}")
    calls = [call for call, _, _ in answers]
    if error is None and len(set(calls)) > 1:
        raise ProcessError(
            f"all processes must make the same calls in the same order; they are at {calls}"
        )
    return [value for _, value, _ in answers]


@contextmanager
def _lost_connection_reported() -> Iterator[None]:
    """Raise a ProcessError in place of PyTorch's error for a closed connection."""
    try:
        yield
    except RuntimeError as closed:
        raise ProcessError(
            "the connection to another process is lost; see its own output for the reason "
            f"({closed})"
        ) from closed
