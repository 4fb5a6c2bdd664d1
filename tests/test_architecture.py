"""The walls of the house: a file imports only from files above it, and none is too long."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anchorlens

ROOT = Path(anchorlens.__file__).parent
ORDER = [
    "errors",
    "files",
    "checksum",
    "sealed",
    "heartbeats",
    "processes",
    "datafiles",
    "tasks",
    "checks",
    "batch",
    "memory",
    "prompts",
    "edges",
    "hooked",
    "model_state",
    "hooks",
    "taps",
    "prefix",
    "start",
    "checkpoint",
    "losses",
    "forward",
    "probe",
    "weights",
    "models",
    "results",
    "intervals",
    "figures",
    "metrics.__init__",
    "metrics.metric",
    "metrics.products",
    "metrics.saliency",
    "metrics.aucroc",
    "metrics.distances",
    "metrics.loyalty",
    "metrics.accuracy",
    "fingerprint",
    "store",
    "passes",
    "sharing",
    "collect",
    "observed",
    "run",
    "experiments.__init__",
    "experiments.places",
    "experiments.isolation",
    "experiments.diagnosis",
    "experiments.reweighting",
    "experiments.kept",
    "experiments.context",
    "experiments.compression",
    "experiments.compression_loyalty",
    "experiments.published",
    "experiments.paper_parts",
    "experiments.paper",
    "experiments.appendix",
    "experiments.text_tables",
    "experiments.paper_tables",
    "experiments.paper_figures",
    "analysis",
    "report",
    "stopping",
    "command_data",
    "cli",
    "__init__",
    "__main__",
]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")
}


def imports_of(name: str) -> set[str]:
    """Files of the package that a file imports, wherever in it the import stands."""
    folder = name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("anchorlens") for alias in node.names), name
        if not isinstance(node, ast.ImportFrom):
            continue
        if not node.level:
            if (node.module or "").split(".")[0] == "anchorlens":
                found.add("__init__")
            continue
        parts = folder[: len(folder) - node.level + 1] + (node.module or "").split(".")
        target = ".".join(part for part in parts if part)
        for alias in node.names:
            deeper = f"{target}.{alias.name}".strip(".")
            found.add(deeper if deeper in FILES else target)
    return found


def test_every_file_has_a_place() -> None:
    assert set(FILES) == set(ORDER), f"give {set(FILES) ^ set(ORDER)} a place in ORDER"


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_only_from_above(name: str) -> None:
    above = set(ORDER[: ORDER.index(name)])
    imports = imports_of(name)
    assert imports <= set(FILES), f"{name} imports what is no file: {imports - set(FILES)}"
    assert imports <= above, f"{name} imports {imports - above} from below"


def test_the_rule_sees_imports() -> None:
    assert {"errors", "batch", "edges"} <= imports_of("hooks")
    assert {"figures", "results", "metrics.metric"} <= imports_of("metrics.saliency")


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_is_too_long(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= 400


def test_three_files_know_transformer_lens() -> None:
    knowing = {
        name
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_lens"))
        or (
            isinstance(node, ast.Import)
            and any(alias.name.startswith("transformer_lens") for alias in node.names)
        )
    }
    assert knowing == {"models", "taps", "prefix"}


def test_import_is_light() -> None:
    heavy = ("transformer_lens", "transformers", "datasets", "accelerate")
    code = f"import sys, anchorlens; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
