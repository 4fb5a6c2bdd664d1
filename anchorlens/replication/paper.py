"""The paper's figures and tables for the model at hand, as one long table of numbers."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import AnchorlensError, DataError, PromptError, StoreError
from ..metrics.distances import AnchorDistances
from ..models.hooked import HookedModel, layer_numbers
from ..models.load import ensure_prepared
from ..prompts.checks import one_set_per_query
from ..prompts.tasks import BUNDLED, TASKS, Example, Task, sample_demonstrations, sample_queries
from ..runs.fingerprint import fingerprint, tokenizer_identity
from ..runs.run import target_logits
from ..runs.store import Store, same_rows
from ..system.processes import gathered, is_main, main_first, together
from .paper_parts import PAPER_PARTS, Number, Part, Setting

COLUMNS = ("task", "seed", "part", "row", "column", "layer", "value")
TRAINING = 4  # examples of each class


@together()
def paper(
    model: HookedModel,
    examples: Mapping[str, tuple[Sequence[Example], Sequence[Example]]],
    *,
    queries: int = 40,
    seeds: Sequence[int] = (42, 43),
    parts: Sequence[Part] = PAPER_PARTS,
    layers: int = 5,
    draws: int = 10,
    keep: Callable[[pd.DataFrame], Any] = lambda frame: None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The paper's figures and tables for a model, over tasks and seeds.

    A part that fails is a warning, and the others go on: an isolation, say, is possible where the
    prompts with more shots are too long.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        examples: For each task by name (of ``TASKS`` or bundled) the examples for demonstrations
            and training, and those for queries; they may be the same list.
        queries: Queries of each task and seed.
        seeds: Each draws demonstrations, training examples and queries.
        parts: What to compute; ``paper_tables`` and ``paper_figures`` show what is there.
        layers: Layers isolated at each end.
        draws: Random controls of each isolation.
        keep: Called with all numbers so far after each part, in the main process.
        folder: Keeps the numbers of each part of a task and seed; the same call after an
            interruption goes on from there. Parts that failed are computed again.
        progress: Show a progress bar.

    Returns:
        One row a number: task, seed, part, row, column, layer (-1 where there is none), value.

    Raises:
        DataError: There is no such task, or its examples are too few or of other classes, or seeds
            are equal: before anything runs.
        HookError: The model has fewer layers than are to be isolated.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Examples:
        >>> examples = al.load_examples("questions", "train"), al.load_examples("questions", "test")
        >>> numbers = al.paper(model, {"questions": examples}, queries=12, seeds=[1], layers=1,
        ...     draws=1, parts=[al.PAPER_PARTS[1]], progress=False)
        >>> "label words, first layer" in al.paper_tables(numbers)
        True
    """
    ensure_prepared(model)
    layer_numbers(model, range(layers))
    check_examples(examples, queries, seeds)
    settings = [
        (name, _setting(model, name, *both, queries, seed, layers, draws))
        for name, both in examples.items()
        for seed in seeds
    ]
    todo = [(name, setting, part) for name, setting in settings for part in parts]
    if not todo:
        raise DataError("there is nothing to do: expected a task, a seed and a part at least")
    store = None
    if folder is not None:
        expected = fingerprint(model, (), _said(todo))
        store = main_first(lambda: Store.open(folder, expected))
        _check_answers(store, len(todo), settings[0][1])
    stored = gathered(
        "stored parts", [None if store is None else store.read(k) for k in range(len(todo))]
    )[0]
    known = [None if rows is None else _Done.of(rows) for rows in stored]
    bar = tqdm(todo, disable=not (progress and is_main()))
    for k, (name, setting, part) in enumerate(bar):
        what = f"{name}, seed {setting.seed}, {_title(part)}"
        bar.set_description(what)
        fresh = known[k] is None
        known[k] = done = known[k] or _computed(part, setting)
        if done.warnings:
            bar.clear()  # a warning has a line of its own
        for warning in done.warnings:
            warnings.warn(f"{what}: {warning}", stacklevel=3)
        with together():
            if is_main():
                if store and fresh and not done.failed:
                    store.write(k, done.rows())
                if fresh or k == len(todo) - 1:
                    keep(_frame(todo, known))
    return _frame(todo, known)


def _check_answers(store: Store, number: int, setting: Setting) -> None:
    """Refuse stored numbers of a model that answers otherwise; store its answers where none are.

    Hooks that somebody left on a model, say, are in no fingerprint.
    """
    try:
        batches = setting.prompts(queries=setting.queries[:4])
        logits = target_logits(setting.model, batches, progress=False)
    except PromptError:  # too long; each part says so
        return
    answers = {"logits": logits[:, batches[0].label_token_ids]}
    with together():
        if is_main():
            stored = store.read(number)
            if stored is None:
                store.write(number, answers)
            elif not same_rows(stored, answers):
                raise StoreError(
                    f"the model gives other logits than when the numbers in {store.folder} were "
                    "computed: hooks on it, or what it computes with, are not the same; use "
                    "another folder, or start over in this one (al.forget_rows, --fresh)"
                )


class _Done(NamedTuple):
    """What came of a part of a task and seed."""

    numbers: list[Number]
    warnings: list[str]
    failed: bool

    def rows(self) -> dict[str, Tensor]:
        """As a store keeps them: text, because most of a number says what it is of."""
        text = json.dumps(self[:2]).encode()
        return {"numbers": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> "_Done":
        numbers, said = json.loads(bytes(rows["numbers"].tolist()))
        return cls([Number(*one) for one in numbers], said, failed=False)


def _computed(part: Part, setting: Setting) -> _Done:
    """The numbers of a part, up to where it fails: that is a warning, as the others go on."""
    numbers: list[Number] = []
    failed = False
    with warnings.catch_warnings(record=True) as caught:
        try:
            with together():
                for number in part(setting):
                    numbers.append(number)
        except (AnchorlensError, torch.OutOfMemoryError) as error:
            failed = True
            warnings.warn(str(error), stacklevel=2)
    return _Done(numbers, [str(one.message) for one in caught], failed)


def _said(todo: Sequence[tuple[str, Setting, Part]]) -> dict[str, str]:
    """What the stored numbers are of."""
    texts = hashlib.sha256()
    for name, setting, _ in todo:
        own = {key: value for key, value in vars(setting).items() if key != "model"}
        texts.update(f"{name} {own}".encode())
    # With their options, which a title leaves out.
    parts = dict.fromkeys(repr(part) for _, _, part in todo)
    _, setting, _ = todo[0]
    return {
        "tasks": ", ".join(dict.fromkeys(name for name, _, _ in todo)),
        "seeds": ", ".join(dict.fromkeys(str(one.seed) for _, one, _ in todo)),
        "parts": ", ".join(parts),
        "isolated": f"{setting.layers} layers, {setting.draws} draws",
        "queries": str(len(setting.queries)),
        "examples": texts.hexdigest(),
        "tokenizer": tokenizer_identity(setting.tokenizer),
    }


def _frame(
    todo: Sequence[tuple[str, Setting, Part]], known: Sequence[_Done | None]
) -> pd.DataFrame:
    """All that is known, in order."""
    numbers = [
        one._replace(task=name, seed=setting.seed)
        for (name, setting, _), done in zip(todo, known, strict=True)
        if done is not None
        for one in done.numbers
    ]
    return pd.DataFrame(numbers, columns=Number._fields)[[*COLUMNS]]


def _title(part: Part) -> str:
    return str(getattr(part, "__name__", type(part).__name__)).replace("_", " ")


def check_examples(
    examples: Mapping[str, tuple[Sequence[Example], Sequence[Example]]],
    queries: int,
    seeds: Sequence[int],
) -> None:
    """Refuse tasks, examples, queries and seeds of which no numbers can come.

    Raises:
        DataError: As :func:`paper`.
        PromptError: The labels of queries are not those of the task.
    """
    if queries <= AnchorDistances().directions:
        raise DataError(
            f"Figure 6 needs more queries than its {AnchorDistances().directions} directions; got "
            f"{queries}"
        )
    if len(set(seeds)) < len(seeds):
        raise DataError(f"seeds must differ, or their spread says nothing; got {list(seeds)}")
    for name, both in examples.items():
        for seed in seeds:
            _drawn(name, *both, queries, seed)


class _Drawn(NamedTuple):
    task: Task
    demonstrations: list[Example]
    training: list[Example]
    queries: list[Example]


def _drawn(
    name: str, pool: Sequence[Example], tests: Sequence[Example], queries: int, seed: int
) -> _Drawn:
    key = BUNDLED.get(name, name)
    if key not in TASKS:
        raise DataError(f"there is no task {name!r}; choose of {', '.join((*TASKS, *BUNDLED))}")
    task = TASKS[key]
    try:
        demos = sample_demonstrations(pool, 1, seed)
        if len(demos) != len(task.labels):
            raise DataError(f"there are {len(task.labels)} classes, but {len(demos)} in the data")
        training = sample_demonstrations(_without(pool, demos), TRAINING, seed)
        asked = sample_queries(tests, queries, seed, exclude=[*demos, *training])
    except DataError as error:
        raise DataError(
            f"{name}: {error} (a demonstration and {TRAINING} training examples of each class, and "
            f"{queries} queries that are none of them)"
        ) from error
    one_set_per_query(task, demos, asked)
    return _Drawn(task, demos, training, asked)


def _setting(
    model: HookedModel,
    name: str,
    pool: Sequence[Example],
    tests: Sequence[Example],
    queries: int,
    seed: int,
    layers: int,
    draws: int,
) -> Setting:
    drawn = _drawn(name, pool, tests, queries, seed)
    rest = _without(pool, drawn.queries)
    return Setting(model, *drawn, rest, layers, draws, seed)


def _without(examples: Sequence[Example], taken: Sequence[Example]) -> list[Example]:
    texts = {one.text for one in taken}
    return [one for one in examples if one.text not in texts]
