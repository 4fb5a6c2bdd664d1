"""What torch stores for a thread, to put it back.

The contexts of torch do so at their end, which an interrupt can skip (see ``put_back``).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import IOBase

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils import checkpoint

from .put_back import as_found, put_back, safe_context


def torch_modes() -> Callable[[], None]:
    """A function that puts back gradients, function modes, and hooks on stored tensors as now."""
    records = torch.is_grad_enabled()
    hooks_now = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)  # or None
    count, hooks = len(_get_current_function_mode_stack()), hooks_now()

    def restore() -> None:
        while len(_get_current_function_mode_stack()) > count:
            _pop_mode()
        while hooks_now() not in (hooks, None):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_grad_enabled(records)

    return restore


class gradient_mode(IOBase):
    """Inside, torch records gradients or does not; what it makes can get one in either case.

    In an ``inference_mode`` of the caller it could not. As in ``SafeContext``, no interrupt
    prevents the end; it has no generator, because every pass goes through it.
    """

    def __init__(self, records: bool) -> None:
        self._records = records

    def __enter__(self) -> None:  # type: ignore[override]
        try:
            # Private in torch, whose public class ends its mode in Python; where that is
            # interrupted, the mode ends as soon as the error is forgotten.
            # tests/test_private_names.py verifies it.
            not_inference = torch._C._InferenceMode(False)
            end = partial(not_inference.__exit__, None, None, None)
            self.close = end  # type: ignore[method-assign]
            not_inference.__enter__()
            torch._C._set_grad_enabled(self._records)
        except BaseException:
            self.close()
            raise


@safe_context
def tensor_defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Inside, torch makes tensors on this device and of this type where none is named."""
    found, set_type = torch.get_default_dtype(), torch.set_default_dtype
    types = put_back(partial(set_type, found), partial(set_type, dtype))
    with types, put_back(torch_modes()), torch.device(device):
        yield


@safe_context
def checkpoints_run_to_the_end() -> Iterator[None]:
    """Inside, functions that are checkpointed will run again as a whole."""
    found = as_found((vars(checkpoint), "_enable_checkpoint_early_stop"))
    with put_back(found), checkpoint.set_checkpoint_early_stop(False):
        yield


@safe_context
def own_random_state(
    devices: Iterable[torch.device] = (), seed: int | None = None
) -> Iterator[None]:
    """Afterwards the random state is that of before, as with ``torch.random.fork_rng``.

    A seed is set on the CPU and these kinds of devices alone, unlike with ``torch.manual_seed``.
    """
    kinds = {device.type for device in devices} - {"cpu"}
    modules = [torch.get_device_module(kind) for kind in kinds]
    of_cpu = torch.get_rng_state()
    found = [
        (module, number, module.get_rng_state(torch.device(kind, number)))
        for kind, module in zip(kinds, modules, strict=True)
        for number in range(module.device_count())
    ]

    def restore() -> None:
        torch.set_rng_state(of_cpu)
        for module, number, state in found:
            module.set_rng_state(state, number)

    with put_back(restore):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            for module in modules:
                seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed
                seed_all(seed)
        yield
