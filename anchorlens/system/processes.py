"""Several processes that share one run, as accelerate started them: parts, and what is exchanged.

Nothing of accelerate is imported where nobody made its state: such a process runs alone.
"""

import atexit
import os
import sys
import warnings
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

T = TypeVar("T")

# All have arrived when data begins to move, so that this is for the data alone.
MOVING = timedelta(minutes=10)


def alone() -> bool:
    """Whether no other process takes part."""
    state = _state()
    return state is None or state.num_processes == 1


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    state = _state()
    return state is None or bool(state.is_main_process)


def own_device() -> torch.device | None:
    """The device that accelerate gave this process; None without accelerate."""
    state = _state()
    if not alone():
        _line()  # the others see from now on that this process lives
    return None if state is None else torch.device(state.device)


def own_part(costs: Sequence[int]) -> list[int]:
    """Numbers of the batches of this process: a contiguous part, about as costly as the others'.

    Contiguous, so that most sets of demonstrations are run in one process only.
    """
    if alone():
        return list(range(len(costs)))
    state, total, before, own = _state(), sum(costs) or 1, 0, []
    for number, cost in enumerate(costs):
        middle = (2 * before + cost) * state.num_processes // (2 * total)
        if min(middle, state.num_processes - 1) == state.process_index:
            own.append(number)
        before += cost
    return own


def gathered(what: str, value: T) -> list[T]:
    """The value of each process, on every process; ``[value]`` for one alone.

    Args:
        what: In a word, so that processes that are at different places are told apart.
        value: Anything that can be pickled, on the CPU.

    Raises:
        ProcessError: A process failed meanwhile (see ``together``), died, or is elsewhere.
    """
    return [value] if alone() else _exchange(what, value, None)


@contextmanager
def together() -> Iterator[None]:
    """A block, or with ``@together()`` a function, that fails in all processes if it does in one.

    Where a process fails it keeps its own error, and the others get a ProcessError from what they
    exchange next, at the latest at the end of the block: nobody waits for one that will not come.
    """
    if alone():
        yield
        return
    _line()  # the others see from now on that this process lives
    try:
        yield
    except ProcessError:
        raise  # of which all know
    except Exception as error:
        if not hasattr(error, "_told"):  # in a block within this one
            error._told = True  # type: ignore[attr-defined]
            line = _line()
            line.heart.fail(line.exchanges)
            _exchange("failure", None, error)
        raise
    gathered("end of a block", None)


def failed_elsewhere() -> bool:
    """Whether another process failed since the last exchange, so that going on is in vain."""
    if alone():
        return False
    line = _line()
    return line.heart.someone_failed(line.exchanges)


def same_everywhere(what: Mapping[str, str]) -> None:
    """Refuse processes of which each was given something else: their rows are of several runs.

    Raises:
        ProcessError: On all processes; the message says what differs.
    """
    first, *others = gathered("settings", dict(what))
    for number, other in enumerate(others, start=1):
        different = [
            f"{name}: process 0 {first.get(name)!r}, process {number} {other.get(name)!r}"
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if different:
            raise ProcessError(
                "all processes must make the same call, which is shared out among them; got "
                f"different ones ({'; '.join(different)}). To analyse other prompts in each "
                "process, make no accelerate state"
            )


def refuse_split_weights(model: Any) -> None:
    """Refuse a model that runs over all processes at once: each must run its own prompts."""
    if any(hasattr(weights, "device_mesh") for weights in model.parameters()):
        raise ProcessError(
            "prompts are shared out among the processes, so that each needs the whole model; the "
            "weights of this one are split among them (tensor parallelism or FSDP). Load it whole "
            "in each process, or over the devices of one process with device_map"
        )


def main_first(make: Callable[[], T]) -> T:
    """What is made, in the main process before the others begin: files in one folder, say."""
    made = [make()] if is_main() else []
    gathered("what the main process does first", None)
    return made[0] if made else make()


def join_launched() -> None:
    """Make the accelerate state of a process that `accelerate launch` or `torchrun` started."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ and "LOCAL_RANK" not in os.environ:
        return
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # Without an accelerator accelerate would let each process run by itself.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    atexit.register(_leave)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and state.num_processes != launched:
        raise ProcessError(
            f"{launched} processes were started, but accelerate cannot connect them on "
            f"{state.device}; start them with ACCELERATE_USE_CPU=true in the environment"
        )
    # Of its launcher's environment this is set for several processes only.
    if state.num_processes == 1 and "MASTER_ADDR" in os.environ and "LOCAL_RANK" not in os.environ:
        warnings.warn(
            "accelerate launch was asked for several processes and started one, as it does on a "
            "CPU or a single GPU; add --multi_gpu, which starts as many as it is told on any "
            "machine, or use torchrun --nproc-per-node",
            stacklevel=2,
        )


def _leave() -> None:
    """The group of GPUs warns where a process ends without this."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


@dataclass
class _Line:
    """What the processes of one state talk over."""

    heart: Heart
    exchanges: int = 0
    group: Any = None

    def gather(self, found: list[Any], value: Any) -> None:
        """Fill the list with the values of all processes, which are there."""
        # A group of our own: rows lie on the CPU, while that of GPUs would send them through their
        # memory.
        self.group = self.group or distributed.new_group(backend="gloo", timeout=MOVING)
        distributed.all_gather_object(found, value, group=self.group)

    def hang_up(self) -> None:
        """Threads of a group that is still held when the interpreter goes abort the process."""
        self.heart.stop()
        group, self.group = self.group, None
        if group is not None and distributed.is_initialized():
            distributed.destroy_process_group(group)


def _line() -> _Line:
    return _line_of(distributed.group.WORLD)


@cache
def _line_of(world: Any) -> _Line:
    state = _state()
    store = distributed.distributed_c10d._get_default_store()
    line = _Line(Heart(store, state.process_index, state.num_processes))
    atexit.register(line.hang_up)
    return line


def _exchange(what: str, value: T, error: Exception | None) -> list[T]:
    line, state = _line(), _state()
    failure = None if error is None else f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * state.num_processes
    try:
        line.heart.arrive(line.exchanges)
        with _connected():
            line.heart.watch(lambda: line.gather(found, (what, value, failure)))
    except ProcessError:
        if error is None:
            raise
        return []  # it is raised all the same
    line.exchanges += 1
    failures = [(number, why) for number, (_, _, why) in enumerate(found) if why is not None]
    if error is None and failures:
        number, why = failures[0]
        raise ProcessError(f"process {number} of {state.num_processes} failed: {why}")
    places = [place for place, _, _ in found]
    if error is None and len(set(places)) > 1:
        raise ProcessError(
            f"all processes must make the same calls in the same order; they are at {places}"
        )
    return [value for _, value, _ in found]


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as closed:
        raise ProcessError(
            f"the connection to another process is lost; it says itself why it ended ({closed})"
        ) from closed


def _state() -> Any:
    """The accelerate state that somebody made, or None; asking for it would make one."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.PartialState._shared_state:
        return None
    return module.PartialState()
