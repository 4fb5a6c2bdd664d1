"""What differs between devices: a Mac's has no float64, and layers may lie on several devices."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

Device = torch.device | str


def holds_numbers(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor to compute with: real numbers, or True and False, that can be read."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_meta or value.is_complex())
    )


def with_numbers(values: Mapping[str, object]) -> set[str]:
    """The names of those that are tensors to compute with."""
    return {name for name, value in values.items() if holds_numbers(value)}


@cache
def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def in_float64(values: Tensor) -> Tensor:
    """The values in float64, on their device if it has this type, else on the CPU."""
    return (values if widest(values.device) == torch.float64 else values.cpu()).double()


def wide(values: Tensor) -> Tensor:
    """The values in float32, or in their own type if it is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sent(values: Tensor, device: Device) -> Tensor:
    """The values on a device. Python waits for a CPU alone, which could read them too early."""
    return values.to(device, non_blocking=torch.device(device).type != "cpu")


def beside(values: Tensor, *others: Tensor) -> Iterable[Tensor]:
    """Other tensors on the device of the values, which may be that of one layer."""
    return (sent(other, values.device) for other in others)


def on_one_device(values: list[Tensor]) -> list[Tensor]:
    """The same tensors, which are moved to the CPU if their layers lie on several devices."""
    devices = {each.device for each in values}
    return values if len(devices) < 2 else [each.cpu() for each in values]
