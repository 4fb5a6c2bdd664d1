"""The memory that is free: of the machine, and below the limit of a control group."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from anchorlens.system import free_memory
from anchorlens.system.free_memory import free_bytes, free_for_layers

GIB = 2**30


# The groups of a process, files of groups, and what is free in each.
GROUPS: dict[str, tuple[str, dict[str, str], list[int]]] = {
    "a limit of a group and of the groups above it": (
        "0::/jobs/mine\n",
        {
            "jobs/memory.max": "1000\n",
            "jobs/memory.current": "700\n",
            "jobs/memory.stat": "anon 400\ninactive_file 300\n",
            "jobs/mine/memory.max": "max\n",
            "jobs/mine/memory.current": "600\n",
        },
        [600],
    ),
    "version 1": (
        "5:cpu:/x\n4:memory:/hidden/mine\n",
        {  # a container sees its own group as the top
            "memory/memory.limit_in_bytes": "500\n",
            "memory/memory.usage_in_bytes": "600\n",
            "memory/memory.stat": "inactive_file 0\n",
        },
        [0],
    ),
    "no groups": ("", {}, []),
}


@pytest.mark.parametrize("name", GROUPS)
def test_limits_of_groups_are_read_from_their_files(name: str, tmp_path: Path) -> None:
    own, files, free = GROUPS[name]
    if own:
        (tmp_path / "cgroup").write_text(own)
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert [*free_memory._free_in_groups(tmp_path / "cgroup", tmp_path)] == free


def test_the_smaller_of_the_machine_and_the_group_divided_among_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cpu = torch.device("cpu")
    for limits, expected in (([], 8 * GIB), ([GIB, 2 * GIB], GIB), ([2**60], 8 * GIB)):
        monkeypatch.setattr(free_memory, "_free_in_groups", lambda limits=limits: limits)
        assert free_bytes(cpu) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(cpu) == 2 * GIB


def test_what_pytorch_holds_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    assert free_bytes(torch.device("cuda")) == 7 * GIB


def test_layers_can_use_as_much_as_the_fullest_device_lets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three layers share 10 GiB, so that four can use 13.3 GiB; the fourth has 8 GiB for itself."""
    free = {"cuda:0": 10 * GIB, "cuda:1": 8 * GIB}
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: free[str(device)])
    spread = [torch.device("cuda:0")] * 3 + [torch.device("cuda:1")]
    assert free_for_layers(spread) == 10 * GIB * 4 // 3
    assert free_for_layers(spread[:3]) == 10 * GIB
