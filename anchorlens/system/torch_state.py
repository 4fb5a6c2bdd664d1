"""What torch stores for a thread, to put it back.

The contexts of torch do so at their end, which an interrupt can skip (see ``put_back``).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from .put_back import put_back, safe_context


def torch_modes() -> Callable[[], None]:
    """A function that puts back what torch does at each operation now.

    That is whether it records gradients, which function modes see the operation, and which hooks
    see the tensors that are stored for a gradient.
    """
    records = torch.is_grad_enabled()
    count, hooks = len(_get_current_function_mode_stack()), _saved_tensors_hooks()

    def restore() -> None:
        while len(_get_current_function_mode_stack()) > count:
            _pop_mode()
        while _saved_tensors_hooks() not in (hooks, None):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_grad_enabled(records)

    return restore


def _saved_tensors_hooks() -> object:
    """The hooks of ``saved_tensors_hooks`` that act now; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@safe_context
def own_random_state(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Do what ``torch.random.fork_rng`` does: afterwards the random state is that of before.

    Args:
        devices: CUDA devices whose state is put back too.
    """
    found = torch.get_rng_state()
    of_devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        torch.set_rng_state(found)
        for device, state in of_devices:
            torch.cuda.set_rng_state(state, device)

    with put_back(restore):
        yield
