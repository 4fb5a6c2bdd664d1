"""Sums by the kernel are those of rows: in Triton's interpreter, and compiled for a GPU."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorlens.passes.fused_attention import FlowTap

ROOT = Path(__file__).parents[2]
# It is a tool of development on Linux alone.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Any:
    """What a kind of kernel_cases.py finds, in a process of its own."""

    @cache
    def of_kind(kind: str) -> dict[str, Any]:
        file = tmp_path_factory.mktemp("kernel") / "found.json"
        command = [sys.executable, "-m", "tests.passes.kernel_cases", str(file), kind]
        flags = {"TRITON_INTERPRET": "0" if kind == "compiled" else "1"}
        environment = {**os.environ, **flags, "TRITON_CACHE_DIR": str(file.parent)}
        completed = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
        )
        assert completed.returncode == 0, completed.stderr[-2000:]
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    return of_kind


@pytest.mark.slow("many passes")
def test_the_kernel_has_the_sums_of_whole_tables(found: Any) -> None:
    errors = found("interpreted")["errors"]
    assert len(errors) == 10 and max(errors.values()) < 2e-6, errors


@pytest.mark.slow("many passes")
def test_runs_have_the_flows_of_rows(found: Any) -> None:
    of_runs = found("interpreted")["runs"]
    for name in ("gpt2", "llama", "gemma3"):
        assert of_runs[f"{name}, why"].endswith("; sums by a kernel")
        assert 0 < of_runs[name] < 2e-6
        # Layers with a window have no fast gradient in the library.
        assert of_runs[f"{name}, layers by rows"] == (2 if name == "gemma3" else 0)
    assert 0 < of_runs["gpt2 again"] < 2e-6  # with checkpoints
    for metric, why in (
        ("own", "the weight of own is a function of your own"),
        ("saliency_flows", "saliency_flows has edges that do not follow from positions alone"),
        ("label_heads", "label_heads reads more than sums over sets of edges"),
    ):
        assert of_runs[f"{metric} why"].endswith(f"rows, because {why}")


@pytest.mark.release("the compiler's output, which a GPU alone would run")
def test_the_kernel_fits_a_gpu(found: Any) -> None:
    """Tensor cores, a pipeline of loads, few spilled registers, and not too much shared memory."""
    taken = found("compiled")
    assert taken["HGMMA"] > 0 and taken["LDGSTS"] > 0
    assert taken["LDL"] <= 16 and taken["shared"] <= 227 * 1024


def test_a_tap_changes_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(1, 2, 9, 4, generator=generator) for _ in range(3)]
    weight = torch.randn(1, 2, 9, 4, generator=generator)
    gradients, tapped = [], list[Any]()
    for has_tap in (False, True):
        query, key, value = (each.clone().requires_grad_() for each in operands)
        z = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        if has_tap:
            detached = query.detach(), key.detach(), value.detach()
            z = FlowTap.apply(z, *detached, lambda *made: tapped.append(made))
        (z * weight).sum().backward()
        gradients.append([query.grad, key.grad, value.grad])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert len(tapped) == 1
    assert all(map(torch.equal, tapped[0], [*operands, weight]))
