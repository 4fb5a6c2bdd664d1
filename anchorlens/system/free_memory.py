"""The memory of a device that is free now: on a CPU, the system ends a process that takes more."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

# Limit and use of a control group of Linux, by the controller in /proc/self/cgroup (v2: "").
_LIMITS = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def free_bytes(device: torch.device) -> int:
    """The bytes of a device that this process can use now; of a CPU its part, if several run."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min([psutil.virtual_memory().available, *_free_in_groups()]) // processes


def free_for_layers(devices: Sequence[torch.device]) -> int:
    """The bytes that all layers can use together, each as much as the others on its device."""
    layers = Counter(devices)
    return min(free_bytes(device) * len(devices) // count for device, count in layers.items())


def _free_in_groups(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """What is free of each limit of a control group of this process; none where it has no limit."""
    lines = []
    with suppress(OSError):  # another system
        lines = groups.read_text().splitlines()
    for line in lines:
        _, controller, path = line.split(":", 2)
        if controller not in _LIMITS:
            continue
        top = root / controller
        group = top / path.strip("/")
        for folder in (group, *(each for each in group.parents if each.is_relative_to(top))):
            with suppress(OSError, ValueError):  # the group is hidden, or its limit is "max"
                limit, used = (int((folder / name).read_text()) for name in _LIMITS[controller])
                stat = (folder / "memory.stat").read_text().splitlines()
                # Files that count as used, and that the system gives up when memory is needed.
                cached = dict(line.split() for line in stat).get("inactive_file", 0)
                yield max(0, limit - used + int(cached))
