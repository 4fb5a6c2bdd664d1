"""Every public function computes the numbers of the CPU on other devices.

On a GPU where there is one, and on simulated ones: with a model that lies on two of them, both
without float64, and on one that is the default device.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.public import public

HERE = Path(__file__).parent
SIMULATED = "two_devices", "default_device", "waits", "batches", "docstrings", "readme", "started"
Found = dict[str, dict[str, Any]]
SIMULATES = pytest.mark.release("simulates devices, for minutes")
WITHOUT_RESULT_ON_A_DEVICE = {
    # values that are made or read without a model
    *("AnchorlensError", "ChatTask", "Context", "EdgeSet", "Example", "SEGMENTS", "Metric"),
    *("NoContext", "Site", "TASKS", "Task", "Verbalizer", "figures", "hard_prompts", "kinds"),
    *("relabeling", "relabel", "load_examples", "paper_tables", "named", "read_task"),
    *("sample_demonstrations", "sample_queries", "forget_run", "Trainable"),
    # images are read and laid out before a model sees them; tests/models/test_images.py runs them
    "with_images",
    # it computes by the other calls
    "paper",
}
# What the calls return, or hold while they run.
RETURNED = {
    *("Answer", "AnswerFlows", "Claim", "CompressedContext", "GenerationTrace", "HardPrompt"),
    *("KeyValues", "LossAtPositions", "PrefixContext", "PromptFlows"),
    *("Contributions", "QueryPass", "Results"),
    *("ReweightedContext", "SoftPrompt"),
}


@pytest.fixture(scope="module")
def compare(tmp_path_factory: Any) -> Callable[..., Found]:
    """Runs kinds of compare_devices.py in one other process."""

    @cache
    def compare(*kinds: str) -> Found:
        file = tmp_path_factory.mktemp("devices") / "found.json"
        command = [sys.executable, "-m", "tests.devices.compare_devices", str(file), *kinds]
        completed = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
        assert completed.returncode == 0, completed.stderr[-2000:]
        found: Found = json.loads(file.read_text())
        return found

    return compare


def assert_equal_to_the_cpu(found: dict[str, Any], limit: float, count: int) -> None:
    wrong = {name: each for name, each in found.items() if isinstance(each, str) or each[0] > limit}
    assert len(found) > count and not wrong


@SIMULATES
@pytest.mark.parametrize(("kind", "count"), [("two_devices", 45), ("default_device", 9)])
def test_calls_on_simulated_devices(kind: str, count: int, compare: Callable[..., Found]) -> None:
    """After another default some, as test_architecture.py finds each tensor that follows it."""
    assert_equal_to_the_cpu(compare(*SIMULATED)[kind], 1e-5, count)


@SIMULATES
def test_the_readme_and_examples_of_docstrings_on_a_device(compare: Callable[..., Found]) -> None:
    found = compare(*SIMULATED)
    assert found["docstrings"] == {} and found["readme"]["README"][0] <= 1e-5


@SIMULATES
def test_batches_lie_on_the_cpu(compare: Callable[..., Found]) -> None:
    found = compare(*SIMULATED)["batches"]
    assert len(found) == 4 and all(found.values()), found


# How often the host waits for one more batch, or step: not more often in a deeper model.
# One of them is for ties, where scores of labels are read.
MOST_WAITS = {"flows and AUCROC": 6, "distances": 6, "isolation, two draws": 12}
MOST_WAITS |= {"a step of training": 3}


@SIMULATES
@pytest.mark.parametrize("name", MOST_WAITS)
def test_the_host_waits_seldom(name: str, compare: Callable[..., Found]) -> None:
    of_few, of_many = compare(*SIMULATED)["waits"][name]
    assert of_few == of_many <= MOST_WAITS[name]


MOST_STARTED = {"gpt2": 1.15, "llama": 1.10, "isolated": 1.25, "calls of a layer": 450}
MOST_STARTED |= {"gpt2, waits": 12, "llama, waits": 11}


@SIMULATES
def test_runs_start_few_operations_beside_plain_ones(compare: Callable[..., Found]) -> None:
    """Of models as deep as GPT-2 XL and Llama 7B: see benchmarks/operations.py."""
    found = compare(*SIMULATED)["started"]
    assert {name for name, most in MOST_STARTED.items() if found[name] > most} == set(), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_every_call_on_a_gpu(compare: Callable[..., Found]) -> None:
    """It adds in another order, and a tiny model enlarges what differs."""
    assert_equal_to_the_cpu(compare("cuda")["cuda"], 1e-3, count=45)


def test_every_public_name_is_called_on_the_devices() -> None:
    """By its name in the code of the calls, or as what one of them returns."""
    support = HERE.parent / "support"
    files = support / "catalogue.py", support / "own_parts.py", HERE / "compare_devices.py"
    called = {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("al.")
    }
    returned = RETURNED | {name for name in public() if name.endswith("Record")}
    modules = {name for name, value in public().items() if hasattr(value, "__all__")}
    missing = set(public()) - called - returned - WITHOUT_RESULT_ON_A_DEVICE - modules
    assert not missing, f"add calls of {sorted(missing)} to catalogue.py"
