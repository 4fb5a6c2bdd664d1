"""The memory that is free: of the machine, and below the limit of a control group."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from anchorlens.system import free_memory
from anchorlens.system.free_memory import free_bytes, free_for_layers

GIB = 2**30


@pytest.fixture
def group(tmp_path: Path) -> Callable[..., list[int]]:
    """What is free in groups whose files are written by hand."""

    def free(own: str, files: dict[str, str]) -> list[int]:
        (tmp_path / "cgroup").write_text(own)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return [*free_memory._free_in_groups(tmp_path / "cgroup", tmp_path)]

    return free


def test_a_limit_of_a_group_and_of_the_groups_above_it(group: Callable[..., list[int]]) -> None:
    limits = {
        "jobs/memory.max": "1000\n",
        "jobs/memory.current": "700\n",
        "jobs/memory.stat": "anon 400\ninactive_file 300\n",
        "jobs/mine/memory.max": "max\n",
        "jobs/mine/memory.current": "600\n",
    }
    assert group("0::/jobs/mine\n", limits) == [600]


def test_a_limit_of_a_group_in_version_1(group: Callable[..., list[int]]) -> None:
    limits = {  # a container sees its own group as the top
        "memory/memory.limit_in_bytes": "500\n",
        "memory/memory.usage_in_bytes": "600\n",
        "memory/memory.stat": "inactive_file 0\n",
    }
    assert group("5:cpu:/x\n4:memory:/hidden/mine\n", limits) == [0]


def test_no_groups(tmp_path: Path) -> None:
    assert [*free_memory._free_in_groups(tmp_path / "none", tmp_path)] == []


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
