"""``paper``: the paper's figures and tables for a model, as one long table of numbers."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from ..errors import AnchorlensError, ArgumentError, DataError, HookError, PromptError
from ..metrics.distances import AnchorDistances
from ..models.hooked import HookedModel, dtype_of, layer_numbers
from ..models.load import ensure_prepared
from ..models.model_identity import tokenizer_identity
from ..passes.forward import after_each_pass
from ..prompts.demonstration_sets import demonstrations_by_query, task_of_name
from ..prompts.examples import Example, sample_demonstrations, sample_queries
from ..prompts.tasks import Task
from ..runs.by_value import Known, identity_of
from ..runs.identity import fingerprint, warn_of_unknown
from ..runs.run import target_logits
from ..runs.store import Store, require_same
from ..system.arguments import check_counts, checked, fitted
from ..system.hidden_warnings import recorded_warnings, warnings_kept
from ..system.processes import fails_together, gather_from_processes, is_main, main_first
from ..system.put_back import each_call_inside
from ..system.steps import Bar, expect, planned, step
from ..system.warn import warn_user
from .paper_parts import PAPER_PARTS, SPEED_UP, PaperNumber, PaperSetting, Part
from .tables import AVERAGE, with_averages

COLUMNS = ["task", "seed", "part", "row", "column", "layer", "value"]
TRAINING = 4  # examples of each class for re-weighting

Todo = Sequence[tuple[str, PaperSetting, Part]]  # the name of each task, its setting and a part


@fails_together()
@each_call_inside(warnings_kept)
@checked
def paper(
    model: HookedModel,
    examples: Mapping[str, tuple[Sequence[Example], Sequence[Example]]],
    *,
    tasks: Mapping[str, Task] = MappingProxyType({}),
    queries: int = 40,
    seeds: Sequence[int] = (42, 43),
    parts: Sequence[Part] = PAPER_PARTS,
    depth: int = 5,
    draws: int = 10,
    keep: Callable[[pd.DataFrame], Any] = lambda frame: None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The paper's figures and tables for a model, over tasks and seeds.

    A part that fails gives a warning, and the other parts are computed: prompts with more shots
    may be too long, for example, and all other prompts fit.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        examples: For each task, by name, the examples for demonstrations and training, and those
            for queries. They may be the same list.
        tasks: Tasks of your own by these names; other names are in ``TASKS``.
        queries: Queries of each task and seed.
        seeds: Each draws demonstrations, training examples and queries.
        parts: What to compute; ``paper_tables`` and ``paper_figures`` show the parts that were. A
            part of your own is a function of a ``PaperSetting`` that yields each ``PaperNumber``.
        depth: Layers isolated at each end of the model.
        draws: Random controls of each isolation.
        keep: Called with all numbers so far after each part, in the main process.
        folder: Where the numbers of each part of a task and seed are stored; after an
            interruption the same call goes on from there. Parts that failed are computed again.
        progress: Show a progress bar of the passes. Their total is learned part by part.

    Returns:
        One row per number: task, seed, part, row, column, layer (-1 without a layer), value. After
        all tasks come R_l of Figure 5, which is that of the mean over seeds in the rows of each
        seed, and the means over tasks of Tables 1 and 3, as those of a task "Average".

    Raises:
        DataError: Before anything runs: a task does not exist, its examples are too few or have
            other classes, or seeds are equal.
        HookError: The model has fewer layers than ``depth``.
        StoreError: ``folder`` holds another run, or files cannot be written there.

    Examples:
        >>> examples = al.load_examples("questions", "train"), al.load_examples("questions", "test")
        >>> numbers = al.paper(model, {"questions": examples}, queries=12, seeds=[1], depth=1,
        ...     draws=1, parts=[al.replication.PAPER_PARTS[1]], progress=False)
        >>> "label words, first layer" in al.replication.paper_tables(numbers)
        True
    """
    ensure_prepared(model)
    check_counts(HookError, depth=depth, draws=draws)
    layer_numbers(model, range(depth))
    check_examples(examples, queries, seeds, tasks)
    settings = [
        (name, setting_of(model, name, examples[name], queries, seed, tasks, depth, draws))
        for name in examples
        for seed in seeds
    ]
    todo = [(name, setting, part) for name, setting in settings for part in parts]
    if not todo:
        raise DataError("nothing can be computed: expected a task, a seed and a part at least")
    store = None
    if folder is not None:
        expected = fingerprint(model, (), _description(todo))
        warn_of_unknown(folder, expected.unknown)
        opened = main_first(lambda: Store.open(folder, expected.facts))
        believed = frozenset[str]() if expected.unknown else frozenset({""})
        store = replace(opened, functions={"": ""}, believed=believed)
        _check_logits(store, len(todo), settings[0][1])
    stored = gather_from_processes(
        "stored parts", [{} if store is None else store.read(k) for k in range(len(todo))]
    )[0]
    outcomes = [_Outcome.of(rows) if rows else None for rows in stored]
    _check_number(folder, todo, outcomes)
    titles = [f"{name}, seed {setting.seed}, {_name(part)}" for name, setting, part in todo]
    names = [_name(part) for *_, part in todo]
    shown: dict[str, Any] = {"disable": not (progress and is_main()), "unit": " passes"}
    passes = dict[str, int]()
    with planned({t: _expected(names[k], passes) for k, t in enumerate(titles) if not outcomes[k]}):
        for k, (title, (_, setting, part)) in enumerate(zip(titles, todo, strict=True)):
            outcome, computed = outcomes[k], outcomes[k] is None
            if outcome is None:
                total, counted = (_PASSES | passes).get(names[k]), Counter[str]()
                with (
                    step(title),
                    Bar(title=title, total=total, **shown) as bar,
                    after_each_pass(partial(_advance, bar, counted, title)),
                ):
                    outcome = _outcome(part, setting)
                passes[names[k]], outcomes[k] = counted[title], outcome
                for later in range(k + 1, len(todo)):
                    expect(titles[later], _expected(names[later], passes))
            for warning in outcome.warnings:
                warn_user(f"{title}: {warning}")
            with fails_together():
                if is_main():
                    if store and computed and not outcome.failed:
                        store.write(k, outcome.rows())
                    if computed or k == len(todo) - 1:
                        keep(_frame(todo, outcomes))
    return _frame(todo, outcomes)


def setting_of(
    model: HookedModel,
    name: str,
    examples: tuple[Sequence[Example], Sequence[Example]],
    queries: int,
    seed: int,
    tasks: Mapping[str, Task],
    depth: int = 1,
    draws: int = 1,
) -> PaperSetting:
    """The setting of a task and seed."""
    drawn = _drawn(name, *examples, queries, seed, tasks)
    return PaperSetting(model, *drawn, depth, draws, seed)


def _check_logits(store: Store, number: int, setting: PaperSetting) -> None:
    """Compare the model's logits of a few prompts with the stored ones, or store them."""
    # A fingerprint does not show everything, such as hooks that were left on the model.
    try:
        batches = setting.prompts(queries=setting.queries[:4])
        logits = target_logits(setting.model, batches, progress=False)
    except PromptError:  # a prompt is too long; each part gives that as a warning
        return
    rows = {"logits": batches[0].label_scores(logits)}
    with fails_together():
        if is_main():
            stored = store.read(number)
            if not stored:
                store.write(number, rows)
            else:
                require_same(
                    stored,
                    rows,
                    dtype=dtype_of(setting.model),
                    told="the model gives other logits than when the numbers in "
                    f"{store.folder} were computed",
                    reason="so its hooks or its way of computing are not the same",
                )


def _check_number(
    folder: str | Path | None, todo: Todo, outcomes: "Sequence[_Outcome | None]"
) -> None:
    """Compute the first stored number again: logits alone do not tell what a pass does."""
    for (name, setting, part), outcome in zip(todo, outcomes, strict=True):
        if outcome is None or not outcome.numbers or outcome.numbers[0].column == SPEED_UP:
            continue
        first, stored = partial(_first_number, part), outcome.numbers[0]
        for now in _outcome(first, setting).numbers:  # none if it fails, such as without memory
            values = [
                {"number": torch.tensor([each.value], device="cpu")} for each in (stored, now)
            ]
            is_named = replace(now, value=stored.value) == stored
            require_same(
                *(values if is_named else (*values[:1], {})),
                dtype=dtype_of(setting.model),
                told=f"{name}, seed {setting.seed}, {_name(part)}: its first number is {now} and "
                f"was {stored} when {folder} was written",
                reason="so the model or the part does not compute as it did then",
            )
        return


def _first_number(part: Part, setting: PaperSetting) -> Iterator[PaperNumber]:
    return islice(part(setting), 1)


class _Outcome(NamedTuple):
    """What a part of a task and seed gave."""

    numbers: list[PaperNumber]
    warnings: list[str]
    failed: bool

    def rows(self) -> dict[str, Tensor]:
        """Rows for a store: JSON, as most fields of a number are texts."""
        text = json.dumps([[*map(astuple, self.numbers)], self.warnings]).encode()
        return {"numbers": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> "_Outcome":
        numbers, messages = json.loads(bytes(rows["numbers"].tolist()))
        return cls([PaperNumber(*fields) for fields in numbers], messages, failed=False)


def _outcome(part: Part, setting: PaperSetting) -> _Outcome:
    """Run a part. If it fails, that is a warning, and the numbers before it are there."""
    numbers: list[PaperNumber] = []
    failed = False
    with recorded_warnings() as recorded:
        try:
            with fails_together():
                for number in fitted("what it returns", part(setting), Iterable[Any]):
                    numbers.append(fitted("what it yields", number, PaperNumber))
        except ArgumentError as error:  # a mistake in its code
            raise ArgumentError(f"the part {_name(part)!r}: {error}") from error
        except (AnchorlensError, torch.OutOfMemoryError) as error:
            failed = True
            warn_user(str(error))
    return _Outcome(numbers, [str(warning.message) for warning in recorded], failed)


def _description(todo: Todo) -> dict[str, Any]:
    """What was computed, so that a folder with the numbers of something else is not continued."""
    _, first, _ = todo[0]
    known = Known(**{"the model": first.model})
    examples = identity_of([(name, vars(setting)) for name, setting, _ in todo], known)
    return {
        "tasks": ", ".join(dict.fromkeys(name for name, _, _ in todo)),
        "seeds": ", ".join(dict.fromkeys(str(setting.seed) for _, setting, _ in todo)),
        "parts": [part for _, setting, part in todo if setting is first],
        "isolated": f"{first.depth} layers, {first.draws} draws",
        "queries": str(len(first.queries)),
        "examples": examples.digest,
        "tokenizer": tokenizer_identity(first.tokenizer),
    }


def _frame(todo: Todo, outcomes: Sequence[_Outcome | None]) -> pd.DataFrame:
    """All numbers so far, in the order of the parts."""
    numbers = [
        replace(number, task=name, seed=setting.seed)
        for (name, setting, _), outcome in zip(todo, outcomes, strict=True)
        if outcome is not None
        for number in outcome.numbers
    ]
    return with_averages(pd.DataFrame(numbers, columns=COLUMNS))


def _name(part: Part) -> str:
    return str(getattr(part, "__name__", type(part).__name__)).replace("_", " ")


def check_examples(
    examples: Mapping[str, tuple[Sequence[Example], Sequence[Example]]],
    queries: int,
    seeds: Sequence[int],
    tasks: Mapping[str, Task],
) -> None:
    """Raise an error for wrong tasks, examples, queries or seeds, before anything runs."""
    if queries <= AnchorDistances().directions:
        raise DataError(
            f"Figure 6 needs more queries than its {AnchorDistances().directions} directions; got "
            f"{queries}"
        )
    if len(set(seeds)) < len(seeds):
        raise DataError(f"seeds must differ, as equal seeds have no spread; got {list(seeds)}")
    if AVERAGE in examples:
        raise DataError(f"a task may not be named {AVERAGE}, which is the mean over tasks")
    for name, both in examples.items():
        for seed in seeds:
            _drawn(name, *both, queries, seed, tasks)


def _drawn(
    name: str,
    pool: Sequence[Example],
    tests: Sequence[Example],
    queries: int,
    seed: int,
    tasks: Mapping[str, Task],
) -> tuple[Task, list[Example], list[Example], list[Example], list[Example]]:
    """Task, demonstrations, training examples, queries, and the pool without the queries."""

    def without(excluded: Sequence[Example]) -> list[Example]:
        texts = {example.text for example in excluded}
        return [example for example in pool if example.text not in texts]

    task = tasks[name] if name in tasks else task_of_name(name)
    try:
        demos = sample_demonstrations(pool, 1, seed)
        if len(demos) != len(task.labels):
            raise DataError(f"there are {len(task.labels)} classes, but {len(demos)} in the data")
        training = sample_demonstrations(without(demos), TRAINING, seed)
        chosen = sample_queries(tests, queries, seed, exclude=[*demos, *training])
    except DataError as error:
        raise DataError(
            f"{name}: {error} (a demonstration and {TRAINING} training examples of each class, and "
            f"{queries} other examples as queries)"
        ) from error
    demonstrations_by_query(task, demos, chosen)
    return task, demos, training, chosen, without(chosen)


# How many passes a part takes with the defaults, until it has run once.
_PASSES = {"figures 3 5 6": 8, "figure 4": 122, "table 1": 250, "table 2": 170, "table 3": 120}


def _expected(name: str, passes: dict[str, int]) -> int | float:
    """How many passes a part takes: as many as it took, by default, or as the others on average."""
    return (_PASSES | passes).get(name) or fmean((passes or _PASSES).values())


def _advance(bar: Bar, counted: Counter[str], name: str) -> None:
    counted[name] += 1
    bar.update()
