"""Each folder of the package imports only from the folders above it."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import anchorlens

pytestmark = pytest.mark.with_shapes

ROOT = Path(anchorlens.__file__).parent
# In the order in which data passes through them. A folder, or a file next to the folders, imports
# only from those above it.
FOLDERS = [
    "errors",
    "system",
    "prompts",
    "models",
    "hooks",
    "passes",
    "results",
    "metrics",
    "trials",
    "runs",
    "contexts",
    "experiments",
    "report",
    "replication",
    "cli",
    "__init__",
    "__main__",
]
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in ROOT.rglob("*.py")
}


def imports_of(name: str) -> set[str]:
    """Files of the package that a file imports, at its top or inside a function."""
    folder = name.split(".")[:-1]
    imports = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("anchorlens") for alias in node.names), name
        if not isinstance(node, ast.ImportFrom):
            continue
        if not node.level:
            if (node.module or "").split(".")[0] == "anchorlens":
                imports.add("__init__")
            continue
        parts = folder[: len(folder) - node.level + 1] + (node.module or "").split(".")
        target = ".".join(part for part in parts if part)
        for alias in node.names:
            submodule = f"{target}.{alias.name}".strip(".")
            imports.add(submodule if submodule in TREES else target)
    return imports


def folder_of(name: str) -> str:
    return name.partition(".")[0]


def test_folders_of_all_files_are_listed() -> None:
    assert {folder_of(name) for name in TREES} == set(FOLDERS)


@pytest.mark.parametrize("name", sorted(TREES))
def test_a_file_imports_only_from_folders_above_it(name: str) -> None:
    above = FOLDERS[: FOLDERS.index(folder_of(name)) + 1]
    imports = imports_of(name)
    assert imports <= set(TREES), f"{name} imports names that are not files: {imports - set(TREES)}"
    below = {other for other in imports if folder_of(other) not in above}
    assert not below, f"{name} imports {below} from below"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_inside_a_folder_have_no_cycle(folder: str) -> None:
    inside = {name for name in TREES if folder_of(name) == folder}
    list(TopologicalSorter({name: imports_of(name) & inside for name in inside}).static_order())


def test_contributing_lists_the_folders() -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, flags=re.MULTILINE)
    assert listed == [name for name in FOLDERS if not name.startswith("__")]


def test_imports_of_a_file_are_found() -> None:
    assert {"errors", "prompts.batch", "prompts.edges"} <= imports_of("hooks")
    expected = {"results.figures", "results.record", "metrics.attention_times_gradient"}
    assert expected <= imports_of("metrics.saliency_flows")


def test_only_models_imports_transformer_lens_and_transformers() -> None:
    importing = {
        folder_of(name)
        for name, tree in TREES.items()
        for module in packages_of(tree)
        if module in ("transformer_lens", "transformers")
    }
    assert importing == {"models"}


def packages_of(tree: ast.Module) -> Iterator[str]:
    """Packages that a file imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


def test_one_file_puts_hooks_on_models() -> None:
    """Elsewhere an interrupt between storing a hook and its handle would leave the hook."""
    methods = {
        *("hooks", "add_hook", "add_perma_hook", "run_with_hooks", "run_with_cache"),
        *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    }
    calling = {
        name
        for name, tree in TREES.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in methods
        and not (isinstance(call.func.value, ast.Name) and call.func.value.id == "self")
    }
    assert calling == {"models.added_hooks"}


MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
MAKERS |= {"randperm", "tensor", "tril_indices", "triu_indices", "zeros"}


def test_every_new_tensor_names_its_device() -> None:
    """Otherwise it would be where ``torch.set_default_device`` of the user says."""
    without = {
        f"{name}:{call.lineno}"
        for name, tree in TREES.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in {("torch", maker) for maker in MAKERS}
        and not any(keyword.arg == "device" for keyword in call.keywords)
    }
    assert not without


def protocols() -> set[str]:
    """The names of all protocols of the package."""
    classes = [
        node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    return {node.name for node in classes if any(map(is_protocol, node.bases))}


def is_protocol(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id == "Protocol"


def asked_by_isinstance(tree: ast.Module) -> set[str]:
    """Names in the second argument of every ``isinstance``."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    questions = [call for call in calls if getattr(call.func, "id", "") == "isinstance"]
    return {
        node.id
        for call in questions
        for node in ast.walk(call.args[1])
        if isinstance(node, ast.Name)
    }


def test_no_file_asks_isinstance_of_a_protocol() -> None:
    """Its answer depends on the version of Python: see system/arguments.py."""
    known = protocols()
    asked = {name: asked_by_isinstance(tree) & known for name, tree in TREES.items()}
    assert not any(asked.values()), asked


def test_questions_about_protocols_are_found() -> None:
    assert {"Context", "HookedModel"} <= protocols()
    tree = ast.parse("isinstance(a, HookedModel | int) or isinstance(b, (str, Context))")
    assert asked_by_isinstance(tree) == {"HookedModel", "int", "str", "Context"}
