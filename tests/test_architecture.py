"""Each folder of the package imports only from the folders above it."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import anchorlens

ROOT = Path(anchorlens.__file__).parent
# A folder, or a file next to the folders, imports only from those above it, in the order of the
# first table of CONTRIBUTING.md. So a metric knows neither the model nor how it is run.
CONTRIBUTING = (ROOT.parent / "CONTRIBUTING.md").read_text()
FOLDERS = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", CONTRIBUTING, flags=re.MULTILINE)
FOLDERS += ["__init__", "__main__"]
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in ROOT.rglob("*.py")
}


NODES = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]
CALLS = [(name, node) for name, node in NODES if isinstance(node, ast.Call)]
CLASSES = [(name, node) for name, node in NODES if isinstance(node, ast.ClassDef)]


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
            found = [name for name in (submodule, f"{submodule}.__init__") if name in TREES]
            imports.add(found[0] if found else target)
    return imports


def folder_of(name: str) -> str:
    return name.partition(".")[0]


def test_a_file_imports_only_from_folders_above_it() -> None:
    imports = {name: imports_of(name) for name in TREES}
    below = {
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in others
        if other not in TREES or FOLDERS.index(folder_of(other)) > FOLDERS.index(folder_of(name))
    }
    assert below == set()
    assert set(TopologicalSorter(imports).static_order()) == set(TREES)  # there is no cycle
    assert {"errors", "prompts.batch", "prompts.edges"} <= imports["hooks"]  # they are found


def test_only_models_imports_transformer_lens_and_transformers() -> None:
    tops = {
        (folder_of(name), module.partition(".")[0])
        for name, node in NODES
        for module in modules_of(node)
    }
    libraries = ("transformer_lens", "transformers")
    assert {folder for folder, top in tops if top in libraries} == {"models"}


def modules_of(node: ast.AST) -> list[str]:
    """Modules of other packages that are imported, at the top of a file or inside a function."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


# What asks the system about a path, and raises an OSError where the system refuses to look.
OF_PATHS = {"is_file", "is_dir", "exists", "stat", "lstat", "iterdir", "glob", "rglob", "walk"}
OF_PATHS |= {"isfile", "isdir", "listdir", "scandir", "is_symlink", "is_mount", "is_fifo"}
OF_PATHS |= {"samefile"}
# What puts hooks on a model: an interrupt between storing a hook and its handle would leave it.
OF_HOOKS = {"hooks", "add_hook", "add_perma_hook", "run_with_hooks", "run_with_cache"}
OF_HOOKS |= {f"register_{kind}_hook" for kind in ("forward", "forward_pre", "full_backward")}


@pytest.mark.parametrize(
    ("methods", "but", "file"),
    [(OF_HOOKS, "self.", "models.model_state"), (OF_PATHS, "ast.walk", "system.files")],
)
def test_one_file_alone_calls_them(methods: set[str], but: str, file: str) -> None:
    calling = {
        name
        for name, call in CALLS
        if getattr(call.func, "attr", "") in methods and not ast.unparse(call.func).startswith(but)
    }
    assert calling == {file}


# What changes something for a while, and restores it at an end that Ctrl-C can skip; and what
# changes it without an end. They are used inside put_back.
CHANGES = {
    "warnings": {"catch_warnings", "filterwarnings", "simplefilter", "resetwarnings"},
    "torch": {
        *("device", "enable_grad", "inference_mode", "no_grad", "set_grad_enabled"),
        *("autocast", "manual_seed", "seed", "set_default_device", "set_default_dtype"),
        *("set_num_threads", "set_rng_state", "use_deterministic_algorithms"),
    },
    "torch.random": {"fork_rng"},
    "checkpoint": {"set_checkpoint_early_stop"},
    "torch.utils.checkpoint": {"set_checkpoint_early_stop"},
    "contextlib": {"ExitStack", "redirect_stderr", "redirect_stdout", "chdir"},
    "np": {"errstate", "seterr"},
    "numpy": {"errstate", "seterr"},
    "os": {"chdir", "putenv", "environ"},
    "random": {"seed", "setstate"},
    "signal": {"signal", "setitimer"},
    "sys": {"setrecursionlimit", "settrace", "setprofile"},
}


def changes_for_a_while(tree: ast.Module) -> set[str]:
    """What a file changes of Python, numpy or torch; values of os.environ may be read."""
    entered = {
        id(item.context_expr)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
    }
    changed = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & CHANGES.get(node.module or "", set())
            changed |= {f"{node.module}.{name}" for name in names}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            package, name = ast.unparse(node.func.value), node.func.attr
            if name in CHANGES.get(package, ()) and (name != "device" or id(node) in entered):
                changed.add(f"{package}.{name}")
            if name in ("setLevel", "set_verbosity"):
                changed.add(name)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        is_set = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete)
        for target in filter(None, targets if is_set else []):
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                text = "" if isinstance(each, ast.Name) else ast.unparse(each)
                changed |= {text} if re.match(r"(sys|os|warnings|torch)\.", text) else set()
    return changed


def calls_of_put_back(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", "") == "put_back"]


def without_an_end(tree: ast.Module) -> set[str]:
    """What is changed in a function that does not put it back, nor is part of ``put_back(...)``."""
    ends = " ".join(map(ast.unparse, calls_of_put_back(tree)))
    parts = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {
        change
        for part in parts
        if not calls_of_put_back(part) and not re.search(rf"\b{part.name}\b", ends)
        for change in changes_for_a_while(ast.Module([part], []))
    }


@pytest.mark.slow("many passes")
def test_what_is_changed_for_a_while_is_put_back() -> None:
    """After an interrupt too: see tests/system/test_every_context.py."""
    # Every pass is inside frozen_in_eval_mode, which puts the mode of gradients back.
    of_passes = {"enable_grad", "inference_mode", "no_grad", "set_grad_enabled"}
    allowed = {("passes", f"torch.{mode}") for mode in of_passes}
    allowed |= {("cli", "warnings.formatwarning")}  # to the end of the process
    found = {(folder_of(name), each) for name in TREES for each in without_an_end(TREES[name])}
    assert found == allowed


def decorated_with(name: str, tree: ast.Module) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = [{*".".join(map(ast.unparse, each.decorator_list)).split(".")} for each in functions]
    return [each for each, of_each in zip(functions, names, strict=True) if name in of_each]


def puts_back(function: ast.FunctionDef) -> bool:
    """Whether a function has an end after its ``yield`` that is always needed."""
    return any(
        isinstance(node, ast.With) or (isinstance(node, ast.Try) and bool(node.finalbody))
        for node in ast.walk(function)
        if any(isinstance(inner, ast.Yield) for inner in ast.walk(node))
    )


def test_contexts_of_contextlib_only_translate_errors() -> None:
    """Ctrl-C at the start of their ``__exit__`` skips their end; that of safe_context none can."""
    contexts = {
        f"{name}.{function.name}": puts_back(function)
        for name, tree in TREES.items()
        for function in decorated_with("contextmanager", tree)
    }
    assert not [name for name, is_needed in contexts.items() if is_needed]
    others = decorated_with("safe_context", TREES["system.hidden_warnings"])
    assert contexts and any(map(puts_back, others))


def test_every_context_that_puts_something_back_is_interrupted_by_a_test() -> None:
    tests = ROOT.parent / "tests"
    files = (tests / "system/test_every_context.py", tests / "models/test_interrupts.py")
    tested = "".join(file.read_text() for file in files)
    contexts = [each for tree in TREES.values() for each in decorated_with("safe_context", tree)]
    changing = {each.name for each in contexts if calls_of_put_back(each)}
    assert len(changing) > 9
    assert not {name for name in changing if not re.search(rf"\b{name}\b", tested)}


def holds_text(kind: ast.ClassDef) -> bool:
    """Whether an object of a class has a text of its own; those of a class are ours."""
    fields = [each.annotation for each in kind.body if isinstance(each, ast.AnnAssign)]
    names = [re.findall(r"\w+", ast.unparse(field)) for field in fields]
    return any("str" in each and "ClassVar" not in each for each in names)


def test_objects_with_texts_print_them_through_one_function() -> None:
    """Others print numbers, names of the package, and what another object prints."""
    without = {
        f"{name}.{kind.name}"
        for name, kind in CLASSES
        if holds_text(kind)
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
        and method.name in ("__repr__", "__str__")
        and "printable(" not in ast.unparse(method)
    }
    assert not without


def test_what_is_printed_leaves_in_few_files() -> None:
    """Warnings, logs, and the output of commands; each of them is printable there."""
    functions = {"warnings.warn", "logging.getLogger", "print", "typer.echo", "click.echo"}
    functions |= {"sys.stdout.write", "sys.stderr.write", "warnings.warn_explicit"}
    leaving = {
        (name, ast.unparse(call.func))
        for name, call in CALLS
        if ast.unparse(call.func) in functions
        and not (call.args and ast.unparse(call.args[0]).startswith("printable("))
    }
    # Loggers of other libraries are made quiet.
    of_libraries = ("models.quiet_libraries", "logging.getLogger")
    assert leaving - {of_libraries} == {("system.warn", "logging.getLogger")}


MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
MAKERS |= {"randperm", "tensor", "tril_indices", "triu_indices", "zeros"}


# What they make is of torch's default type; the others make whole numbers, or see it in values.
OF_DEFAULT_TYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}


@pytest.mark.parametrize(("makers", "named"), [(MAKERS, "device"), (OF_DEFAULT_TYPE, "dtype")])
def test_every_new_tensor_names_its_device_and_type(makers: set[str], named: str) -> None:
    """Otherwise they would be what ``torch.set_default_device`` and its like of the user say."""
    without = {
        f"{name}:{call.lineno}"
        for name, call in CALLS
        if ast.unparse(call.func) in {f"torch.{each}" for each in makers}
        and not any(keyword.arg == named for keyword in call.keywords)
    }
    assert not without


def test_no_file_asks_isinstance_of_a_protocol() -> None:
    """Its answer depends on the version of Python: see system/arguments.py."""
    protocols = {
        kind.name for _, kind in CLASSES if "Protocol" in [ast.unparse(base) for base in kind.bases]
    }
    assert {"Context", "HookedModel"} <= protocols
    asked = {
        (name, node.id)
        for name, call in CALLS
        if ast.unparse(call.func) == "isinstance"
        for node in ast.walk(call.args[1])
        if isinstance(node, ast.Name)
    }
    assert len(asked) > 50 and not {each for each in asked if each[1] in protocols}
