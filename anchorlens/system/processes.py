"""Several processes that share one run: how the work is divided, exchanged and synchronized.

The processes are those of accelerate; without its state, a process runs alone, which it knows
without an import of PyTorch. ``torch.distributed`` notices a process that died or does not come;
what the others then do is ended by its errors.
"""

import atexit
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ProcessError
from .warn import warn_user

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# The longest wait for another process that computes, if accelerate's own time-out is not longer.
TIME_OUT = timedelta(hours=2)


def was_launched() -> bool:
    """Whether `accelerate launch` or `torchrun` started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ or "LOCAL_RANK" in os.environ


def process_state() -> Any:
    """The accelerate state of this process, or None if it was not made."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return None
    # PartialState() would make the state. An object made without __init__ only tells whether the
    # state exists; tests/test_private_names.py verifies it.
    made = module.PartialState.__new__(module.PartialState).initialized
    return module.PartialState() if made else None


def is_single_process() -> bool:
    state = process_state()
    return state is None or state.num_processes == 1


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    state = process_state()
    return state is None or bool(state.is_main_process)


def process_device() -> "torch.device | None":
    """The device that accelerate gave this process; None without accelerate."""
    state = process_state()
    return None if state is None else state.device


def batches_of_process(costs: Sequence[int]) -> list[int]:
    """A contiguous part of the batches, so that most sets of demonstrations run in one process."""
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
    """The values of all processes, on every process; ``what`` tells whether all are at one call."""
    return [value] if is_single_process() else _exchange(what, value)


@contextmanager
def fails_together() -> Iterator[None]:
    """A block, or as ``@fails_together()`` a function, that fails in all processes if in one.

    The others raise a ProcessError at their next exchange, at the latest at the end of the block.
    """
    if is_single_process():
        yield
        return
    try:
        yield
    except ProcessError:
        raise  # all processes know of it
    except Exception as error:
        if not hasattr(error, "_announced"):  # announced already by a block inside this block
            error._announced = True  # type: ignore[attr-defined]
            # The others may be gone; the caller raises its own error in any case.
            with suppress(ProcessError), _lost_connection_reported():
                connection = _connection()
                connection.store.set(connection.failure, "")
                _exchange("failure", None, error)
        raise
    gather_from_processes("end of a block", None)


def failed_elsewhere() -> bool:
    """Whether another process failed since the last exchange, so that this one can stop."""
    if is_single_process():
        return False
    with _lost_connection_reported():
        return bool(_connection().store.check([_connection().failure]))


def require_equal_settings(what: Mapping[str, str]) -> None:
    """Raise an error in all processes if they got different settings: their rows do not fit."""
    first, *others = gather_from_processes("settings", dict(what))
    for number, other in enumerate(others, start=1):
        different = [
            f"{name}: process 0 {first.get(name)!r}, process {number} {other.get(name)!r}"
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if different:
            raise ProcessError(
                f"all processes must make the same call; got different calls "
                f"({'; '.join(different)}). For other prompts in each, make no accelerate state"
            )


def require_whole_model(model: Any) -> None:
    """Raise an error if a model is split among the processes: each must run its own prompts."""
    if any(hasattr(weights, "device_mesh") for weights in model.parameters()):
        raise ProcessError(
            "prompts are divided among the processes, so that each needs the whole model, but "
            "the weights of this one are split among them (tensor parallelism or FSDP). Load the "
            "whole model in each process, or over the devices of one process with device_map"
        )


def join_launched() -> None:
    """Make the accelerate state of a process that `accelerate launch` or `torchrun` started."""
    if not was_launched():
        return
    import torch
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # Without an accelerator and this setting, accelerate would let each process run alone.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    # That of GPUs warns if it is left open.
    atexit.register(_close, None)
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
            "CPU or a single GPU; add --multi_gpu, or use torchrun --nproc-per-node"
        )


def _close(group: Any) -> None:
    """Close a group of processes; None is that of all."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group(group)


@dataclass
class _Connection:
    """The store and the group of the processes of one accelerate state."""

    store: Any
    exchanges: int = 0
    group: Any = None

    def gather(self, value: Any, count: int) -> list[Any]:
        """The values of all processes, when all of them have come."""
        from torch import distributed

        # A separate group for the CPU, because that of GPUs would send rows through their memory.
        limit = max(TIME_OUT, self.store.timeout)
        if self.group is None:
            self.group = distributed.new_group(backend="gloo", timeout=limit)
            # Its threads would otherwise abort the process when Python ends.
            atexit.register(_close, self.group)
        values: list[Any] = [None] * count
        distributed.all_gather_object(values, value, group=self.group)
        self.exchanges += 1
        return values

    @property
    def failure(self) -> str:
        """What a process that fails before the next exchange puts into the store."""
        return f"anchorlens/failure/{self.exchanges}"


def _connection() -> _Connection:
    from torch import distributed

    return _connection_of(distributed.group.WORLD)


@cache
def _connection_of(world: Any) -> _Connection:
    from torch.distributed.distributed_c10d import _get_default_store

    return _Connection(_get_default_store())


def _exchange(what: str, value: T, error: Exception | None = None) -> list[T]:
    failure = None if error is None else f"{type(error).__name__}: {error}"
    count = process_state().num_processes
    with _lost_connection_reported():
        answers = _connection().gather((what, value, failure), count)
    for number, (_, _, reason) in enumerate(answers):
        if reason is not None:
            raise ProcessError(f"process {number} of {count} failed: {reason}")
    calls = [call for call, _, _ in answers]
    if len(set(calls)) > 1:
        raise ProcessError(
            f"all processes must make the same calls in the same order; they are at {calls}"
        )
    return [value for _, value, _ in answers]


@contextmanager
def _lost_connection_reported() -> Iterator[None]:
    """Raise a ProcessError in place of PyTorch's error for a closed connection or a time-out."""
    try:
        yield
    except RuntimeError as closed:
        raise ProcessError(
            "the connection to another process is lost: it died, ended, or was not there in time; "
            f"see its own output for the reason, and start all of them again ({closed})"
        ) from closed
