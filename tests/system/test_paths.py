"""Paths that the system refuses to look at end in our errors, in every function that takes one."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import anchorlens as al
from anchorlens.errors import DataError
from anchorlens.system.files import bytes_of, kind_of, paths_in
from tests.attack.attack_scene import QUICK, QUIET, scene
from tests.test_arguments import _parameters, public_functions

FUNCTIONS, FLIPPED = public_functions(), al.prompts.relabeling.flipped()
# Each public function that takes a path, called with it.
CALLS: dict[str, Any] = {
    "Record.save": lambda s, p: s.results["saliency_flows"].save(p),
    "StoredContext.load": lambda s, p: al.contexts.StoredContext.load(p),
    "StoredContext.save": lambda s, p: s.prefix.save(p),
    "Training": lambda s, p: al.train_prefix(
        s.model,
        s.batches[:1],
        al.contexts.Training(steps=0, folder=p, **QUIET),
        length=2,
        held_out=s.batches[1:],
    ),
    "across_models": lambda s, p: al.replication.across_models(
        {"m": s.model}, "questions", queries=12, depth=1, draws=1, folder=p, **QUICK
    ),
    "analyse": lambda s, p: al.analyse(s.model, s.batches, depth=1, folder=p, **QUICK),
    "context_from_peft": lambda s, p: al.contexts.context_from_peft(p, s.model, s.batch),
    "context_to_peft": lambda s, p: al.contexts.context_to_peft(s.prefix, s.model, p),
    "forget_run": lambda s, p: al.forget_run(p),
    "head_effects": lambda s, p: al.head_effects(s.model, s.batches, s.batches, folder=p, **QUICK),
    "label_dependence": lambda s, p: al.label_dependence(
        s.model, s.task, s.demos, s.queries, {"all": FLIPPED}, folder=p, **QUICK
    ),
    "load_examples": lambda s, p: al.load_examples(p),
    "load_model": lambda s, p: al.load_model(str(p)),
    "Record.load": lambda s, p: al.Record.load(p),
    "paper": lambda s, p: al.paper(
        s.model, {"questions": (s.examples, s.examples)}, queries=12, depth=1, folder=p, **QUIET
    ),
    "read_task": lambda s, p: al.prompts.read_task(p),
    "retrieval_heads": lambda s, p: al.retrieval_heads(
        s.model, s.batches, s.batches, folder=p, **QUICK
    ),
    "run": lambda s, p: al.run(s.model, s.batches, [al.Accuracy()], folder=p, **QUICK),
    "task_vectors": lambda s, p: al.task_vectors(s.model, s.batches, s.batches, folder=p, **QUICK),
    "write_report": lambda s, p: al.write_report(s.results, p),
}


def test_every_public_function_that_takes_a_path_is_listed() -> None:
    taking = {
        name
        for name, function in FUNCTIONS.items()
        if any("Path" in str(hint) for hint in _parameters(function).values())
    }
    # The source of a model is a path among others.
    assert taking | {"load_model"} == CALLS.keys()


@pytest.mark.slow_cases("many passes", "Record.load", "paper", "write_report")
@pytest.mark.filterwarnings("ignore")  # of numbers of few prompts
@pytest.mark.parametrize("name", CALLS)
def test_paths_that_cannot_be_looked_at_end_in_our_errors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for path in (Path("x" * 5000), Path("a\0b"), tmp_path / "file" / "x"):
        if name == "forget_run" and path.parent.is_file():
            continue  # where nothing is, nothing is forgotten
        with pytest.raises(al.AnchorlensError, match=r"x|a.{1,4}b"):
            CALLS[name](scene(), path)
    closed, found = tmp_path / "closed", os.stat

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(closed) in str(path):
            raise PermissionError(13, "Permission denied")
        return found(path, *args, **options)

    monkeypatch.setattr("os.stat", stat)
    with suppress(al.AnchorlensError):  # what only writes needs to ask nothing
        CALLS[name](scene(), closed / "x")


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if "folder" in _parameters(f)])
def test_a_folder_without_a_name_is_an_error(name: str) -> None:
    for folder in ("", " ", Path()):
        with pytest.raises(al.errors.ArgumentError, match="folder of"):
            CALLS[name](scene(), folder)


def test_what_is_at_a_path_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(al.AnchorlensError, match=r"xxx\.\.\. cannot be read: File name too long"):
        al.replication.across_models("x" * 5000, "questions")
    (tmp_path / "b.txt").write_text("b")
    os.mkfifo(tmp_path / "a.pipe")
    kinds = {"b.txt": "file", "a.pipe": "device", ".": "folder", "no": "", "b.txt/c": ""}
    assert {name: kind_of(tmp_path / name) for name in kinds} == kinds
    assert paths_in(tmp_path) == [tmp_path / "a.pipe", tmp_path / "b.txt"]
    assert paths_in(tmp_path, "*.txt") == paths_in(tmp_path)[1:]
    assert paths_in(tmp_path / "no") == paths_in(tmp_path / "b.txt") == []
    with pytest.raises(DataError, match=r"/dev/zero cannot be read: it is a pipe or a device"):
        bytes_of("/dev/zero", DataError)
    with pytest.raises(DataError, match=r"^x{60}\.\.\. cannot be read: File name too long; give"):
        kind_of("x" * 5000, DataError)

    def listdir(path: Any) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", listdir)
    with pytest.raises(DataError, match=r"cannot be read: Permission denied; give a path"):
        paths_in(tmp_path, error=DataError)
