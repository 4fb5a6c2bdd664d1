"""The public names of the package are there, and each is imported when it is first used."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import anchorlens as al
from anchorlens.other_words import CALLS
from anchorlens.runs import identity
from anchorlens.system import package
from tests.support.made_up_records import made_up_record
from tests.support.tiny_models import questions

# In one process, because each process imports PyTorch again.
FIRST_USES = """
import random, sys
import anchorlens as al
names, task, error = dir(al), al.TASKS["sst2"], al.errors.DataError
print([each for each in {heavy!r} if each in sys.modules])
uses = al.run, al.subsets.lasso(), al.contexts.context_to_peft
print([each for each in ("torch", "sklearn", "peft") if each in sys.modules])
import numpy, torch
state = lambda: (random.getstate(), str(numpy.random.get_state()))
before, kept = state(), torch.eye(3).bool()
al.subsets.lasso(3).scores(kept, torch.arange(3.0).double())
print(state() == before)
from anchorlens import *
print(Task.__module__)
"""
HEAVY = ["torch", "pandas", "scipy", "numpy", "plotly", "transformers", "datasets", "peft"]
HEAVY += ["sklearn"]


@pytest.mark.slow("many passes")
def test_packages_are_imported_at_first_use_and_leave_random_states_as_they_are() -> None:
    """Scikit-learn is imported at the first lasso, and draws from the random state of Python."""
    command = [sys.executable, "-c", FIRST_USES.format(heavy=HEAVY)]
    printed = subprocess.check_output(command, text=True).splitlines()
    assert printed == ["[]", "['torch']", "True", "anchorlens.prompts.tasks"]


MODULES = ("records", "contexts", "replication", "metrics", "prompts")  # that list their names


@pytest.mark.parametrize("module", [al, *(getattr(al, name) for name in MODULES)])
def test_every_public_name_is_listed_and_can_be_imported(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [alias.name for node in block.body for alias in getattr(node, "names", ())]
    assert imported == module.__all__
    assert set(imported) <= set(dir(module))
    assert all(hasattr(module, name) for name in imported)
    # Otherwise the file would stand in the place of what it defines as soon as it is imported.
    files = {path.stem for path in Path(module.__file__).parent.glob("*.py")}
    objects = {name for name in imported if not isinstance(getattr(module, name), ModuleType)}
    assert module in (al, al.records) or not files & objects


def test_few_names_stand_at_the_top_and_none_in_two_places() -> None:
    assert len(al.__all__) <= 86
    names = [name for module in (al, *(getattr(al, n) for n in MODULES)) for name in module.__all__]
    assert len(names) == len(set(names)) > 140


@pytest.mark.parametrize(
    ("name", "home"),
    [
        *(("AccuracyRecord", "records"), ("KeyValues", "contexts"), ("rollout", "metrics")),
        *(("paper_tables", "replication"), ("EdgeSet", "prompts"), ("isolate_random", "hooks")),
        *(("relabel", "relabeling"), ("pq", "edges"), ("sweep", "")),
    ],
)
def test_the_error_for_a_name_says_where_it_is(name: str, home: str) -> None:
    where = f"; it is anchorlens.{home}.{name}" if home else ""
    text = f"module 'anchorlens' has no attribute '{name}'{where}"
    with pytest.raises(AttributeError, match=f"^{re.escape(text)}$"):
        getattr(al, name)


GIVEN = ("model", "batch", "batches", "shuffled", "tested", "models", "results", "path", "key")


@pytest.mark.parametrize("word", sorted(CALLS))
def test_a_word_of_other_tools_leads_to_a_call_that_is_right(word: str) -> None:
    owner, _, name = word.rpartition(".")
    owners = {"": al, "edges": al.edges, "record": made_up_record(al.records.AccuracyRecord)}
    with pytest.raises((AttributeError, TypeError), match=f"; write {re.escape(CALLS[word])}$"):
        getattr(owners[owner], name)(1, a=2)  # of the module report the call is the error
    names: dict[str, Any] = {"al": al, **dict.fromkeys(GIVEN, "given"), **owners}
    calls = [each for each in ast.walk(ast.parse(CALLS[word])) if isinstance(each, ast.Call)]
    for call in calls:
        function = eval(ast.unparse(call.func), names)
        arguments = {str(each.arg): each.value for each in call.keywords}
        inspect.signature(function).bind(*call.args, **arguments)
    assert calls


def test_an_unknown_field_is_told_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no .flow.; its fields are acc"):
        made_up_record(al.records.AccuracyRecord).flow  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute .HookedModel.$"):  # of another module
        al.HookedModel  # noqa: B018


def test_the_package_has_its_version() -> None:
    installed = importlib.metadata.version("anchorlens")
    assert al.__version__ == installed == identity.versions()["anchorlens"]


@pytest.mark.slow("many passes")
def test_a_checkout_without_metadata_runs(
    gpt2: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_others(name: str) -> str:
        if name == "anchorlens":
            raise importlib.metadata.PackageNotFoundError(name)
        return importlib.metadata.version(name)

    monkeypatch.setattr(package, "version", of_others)
    monkeypatch.setattr(identity, "_installed", package.installed_version)
    options: dict[str, Any] = {"folder": tmp_path, "resamples": 0, "progress": False}
    for _ in range(2):  # the second run reads what the first one stored
        record = al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], **options)["accuracy"]
        assert record.info["versions"]["anchorlens"] == "unknown"
