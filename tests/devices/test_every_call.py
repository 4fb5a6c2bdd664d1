"""Every public function computes the numbers of the CPU on other devices.

On a GPU where there is one, and else on a simulated one: of one device, without float64 and with
another default device, and with a model that lies on two devices.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_calls import RETURNED, WITHOUT_RESULT_ON_A_DEVICE

import anchorlens as al

HERE = Path(__file__).parent
KINDS = ["one_device", "as_on_a_mac", "two_devices", "cuda"]
TOLERANCE = {"cuda": 1e-3}  # a GPU adds in another order, and tiny models enlarge what differs


@pytest.mark.without_jaxtyping
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.xdist_group(k)) for k in KINDS])
def test_every_call_gives_the_numbers_of_the_cpu(kind: str, tmp_path: Path) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    command = [sys.executable, str(HERE / "compare_devices.py"), kind, str(tmp_path / "found")]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr[-2000:]
    found: dict[str, Any] = json.loads((tmp_path / "found").read_text())
    limit = TOLERANCE.get(kind, 1e-5)
    wrong = {name: each for name, each in found.items() if isinstance(each, str) or each[0] > limit}
    assert len(found) > 45 and not wrong


def test_every_public_name_is_called_on_the_devices() -> None:
    """By its name in the code of the calls, or as what one of them returns."""
    files = HERE.parent / "support" / "device_calls.py", HERE / "compare_devices.py"
    called = {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "al"
    }
    returned = RETURNED | {name for name in al.__all__ if name.endswith("Record")}
    missing = set(al.__all__) - called - returned - WITHOUT_RESULT_ON_A_DEVICE
    assert not missing, f"add calls of {sorted(missing)} to device_calls.py"


def test_torch_has_the_private_names_of_the_simulated_device() -> None:
    """If one is missing: see how torch's own test of a device in Python registers it now."""
    from torch.utils import backend_registration, hooks

    assert callable(backend_registration._setup_privateuseone_for_python_backend)
    assert callable(torch._C._to_dlpack) and callable(torch._C._from_dlpack)
    assert torch._C.DispatchKeySet(torch._C.DispatchKey.CPU) is not None
    assert callable(torch.autograd._engine_run_backward)
    assert callable(hooks.BackwardHook)
