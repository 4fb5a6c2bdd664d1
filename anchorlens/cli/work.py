"""What the commands do after their options were read; here PyTorch and the models are imported."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame

from ..errors import PromptError
from ..experiments.context_comparison import ContextsRecord, compare_contexts
from ..models.load import load_model
from ..models.quiet_libraries import quiet_libraries
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.demonstration_sets import Draw, draws_of, task_of_name
from ..prompts.examples import Example
from ..prompts.sample_prompts import prompts_of_draws
from ..prompts.tasks import TASKS
from ..replication.paper import check_examples
from ..replication.paper import paper as paper_numbers
from ..replication.paper_figures import paper_figures
from ..replication.paper_parts import PAPER_APPENDIX, PAPER_PARTS
from ..replication.paper_tables import paper_sections, paper_tables
from ..report.page import write_report
from ..runs.fingerprint import versions
from ..runs.store import forget_run
from ..system.files import write_text
from ..system.processes import fails_together, is_main
from .analysis import analysed, file_name, forget_analysis, make_folders, rows_folder
from .before_weights import check_depth, check_length, checked_tokenizer
from .options import Contexts, Demo, Dtype, Paper, Run
from .output import PrintedTable
from .summary import numbers_of
from .tasks import ChosenTask, chosen_task, examples_of_package
from .trained_contexts import (
    draws_without_overlap,
    forget_contexts,
    reweighted,
    texts_of,
    trained_contexts,
    training_records,
    untrained_contexts,
)


@fails_together()
@quiet_libraries()
def demo(options: Demo) -> None:
    """Analyse a model on two bundled tasks."""
    names = ["questions", "sentiment"]
    of_run = Run(**vars(options), dtype=Dtype.float32)
    chosen = [chosen_task(replace(of_run, task=name)) for name in names]
    after = f"another task or your own: anchorlens run --model {options.model} --help"
    _analyse(of_run, chosen, {**of_run.settings(), "tasks": names}, after)


@fails_together()
@quiet_libraries()
def run(options: Run) -> None:
    """Analyse a model on a task."""
    chosen = chosen_task(options)
    after = (
        f"the paper's figures and tables for this model: anchorlens paper --model {options.model}"
    )
    _analyse(options, [chosen], {**options.settings(), **chosen.settings}, after)


def _analyse(
    options: Run, chosen: Sequence[ChosenTask], settings: Mapping[str, Any], after: str
) -> None:
    """Analyse a model on tasks, and write the report; ``after`` is what to try next."""
    model, out, output = options.model, options.out, options.output
    draws = {
        name: draws_of(task, examples, options.shots, options.queries, options.seed)
        for name, task, examples, _ in chosen
    }
    make_folders(out, draws)

    prompts = partial(_prompts, draws, options.batch_size)
    loaded, batches = _loaded(options, options.depth, prompts)
    pages = {}
    for name in draws:
        if options.fresh:
            forget_analysis(out / name)
        pages[name] = analysed(loaded, name, batches[name], options)
    report = _report({name: page.results for name, page in pages.items()}, out, settings)
    values = [page.summary.values for page in pages.values()]
    output.document({"model": model, "tasks": values, "report": report})
    output.last_line(f"report: {report} (open it in a browser). Next: {after}")


@fails_together()
@quiet_libraries()
def paper(options: Paper) -> None:
    """Print the paper's figures and tables for a model."""
    out, output = options.out, options.output
    for task in options.tasks:
        task_of_name(task)  # before examples are read
    examples = {task: examples_of_package(task, options.data) for task in options.tasks}
    check_examples(examples, options.queries, options.seeds)
    make_folders(out)

    def prompts(tokenizer: Any) -> dict[str, list[PromptBatch]]:
        return {task: _shortest_prompt(tokenizer, task) for task in options.tasks}

    # The parts build the other prompts. There one that is too long is a warning.
    loaded, _ = _loaded(options, options.depth, prompts)
    if options.fresh:
        forget_run(out / "rows")

    def save(numbers: DataFrame) -> None:
        _save_settings(options.settings(), out)
        write_text(out / "numbers.csv", numbers.to_csv(index=False))
        write_text(out / "tables.txt", f"{paper_tables(numbers)}\n")

    numbers = paper_numbers(
        loaded,
        examples,
        queries=options.queries,
        seeds=options.seeds,
        parts=PAPER_PARTS + (PAPER_APPENDIX if options.appendix else ()),
        depth=options.depth,
        draws=options.draws,
        keep=save,
        folder=out / "rows",
        progress=not options.quiet,
    )
    summary = paper_tables(numbers)
    drawn = [
        PrintedTable(section.table, section.title, note=section.note)
        for section in paper_sections(numbers)
    ]
    output.tables(drawn, text=summary)
    report = _report(
        {},
        out,
        options.settings(),
        title=f"The figures and tables of 'Label Words are Anchors' for {options.model}",
        figures=paper_figures(numbers),
        summary=summary,
    )
    values = {"model": options.model, "numbers": numbers.to_dict("records"), "report": report}
    output.document(values)
    after = f"a task of your own: anchorlens run --model {options.model} --help"
    output.last_line(f"report: {report} (all numbers: numbers.csv beside it). Next: {after}")


@fails_together()
@quiet_libraries()
def contexts(options: Contexts) -> None:
    """Train contexts, and compare them with demonstrations and their label words."""
    task, out, output = options.task, options.out, options.output
    examples = examples_of_package(task, options.data)
    draws = draws_without_overlap(TASKS[task], examples, options)
    make_folders(out, [task])
    prompts = partial(_prompts, draws, options.batch_size)
    loaded, batches = _loaded(options, 1, prompts, length=options.length)
    rows = rows_folder(out, task)
    if options.fresh:
        forget_contexts(out / task)
    trained = trained_contexts(loaded, batches, options, rows)
    compared = {
        **untrained_contexts(options.draws),
        "re-weighted": reweighted(loaded, batches, output),
        **trained,
    }
    queries, folder = batches["queries"], rows / "contexts"
    output.note(f"{task}: {sum(map(len, queries))} queries, {len(compared)} contexts")
    record = compare_contexts(loaded, queries, compared, folder=folder, progress=not options.quiet)
    if is_main():
        record.save(out / task / "contexts.safetensors")
        for name, context in trained.items():
            context.save(out / task / f"{file_name(name)}.safetensors")
    output.tables([_printed(record, task)])
    texts = texts_of(trained)
    for name, text in texts.items():
        output.note(f"{name}: {text!r}")
    results = {task: {"contexts": record, **training_records(trained)}}
    title = f"What stands before a query: contexts for {options.model}"
    report = _report(results, out, options.settings(), title=title)
    values = {"task": task, "contexts": numbers_of(record), "texts": texts}
    output.document({"model": options.model, **values, "report": report})
    after = f"the flows in the demonstrations: anchorlens run --model {options.model} --task {task}"
    output.last_line(f"report: {report} (open it in a browser). Next: {after}")


def _prompts(
    draws: Mapping[str, Sequence[Draw]], batch_size: int, tokenizer: Any
) -> dict[str, list[PromptBatch]]:
    """The prompts of draws by name."""
    return {name: prompts_of_draws(tokenizer, drawn, batch_size) for name, drawn in draws.items()}


def _loaded(
    options: Run | Paper | Contexts,
    depth: int,
    prompts: Callable[[Any], dict[str, list[PromptBatch]]],
    length: int = 0,
) -> tuple[Any, dict[str, list[PromptBatch]]]:
    """The model of a command and its prompts, after all that can be refused before weights."""

    def build(tokenizer: Any) -> Iterable[PromptBatch]:
        return chain.from_iterable(prompts(tokenizer).values())

    tokenizer = checked_tokenizer(options.model, options.device, depth, build, length=length)
    options.output.note(f"loading {options.model}")
    loaded = load_model(
        options.model,
        tokenizer=tokenizer,
        device=options.device,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
    )
    batches = prompts(loaded.tokenizer)
    check_depth(depth, loaded.cfg.n_layers)
    if length:
        check_length(length, loaded.cfg.n_ctx, [*chain.from_iterable(batches.values())])
    return loaded, batches


def _printed(record: ContextsRecord, task: str) -> PrintedTable:
    """The table of the contexts; numbers in brackets are 95 % intervals."""
    frame = record.table()
    rows = {("", str(name)): dict(texts) for name, texts in frame.iterrows()}
    return PrintedTable(rows, title=f"{task}, contexts [95 % intervals]", corner="context")


def _shortest_prompt(tokenizer: Any, name: str) -> list[PromptBatch]:
    """A prompt with a short demonstration of each class, for what all prompts of a task share."""
    task = TASKS[name]
    demonstrations = [Example("x", label) for label in range(len(task.labels))]
    try:
        return build_prompts(tokenizer, task, demonstrations, ["x"])
    except PromptError as error:
        raise PromptError(f"{error}. This is the task {name}; leave it out of --tasks") from error


def _report(results: dict[str, Any], out: Path, settings: Mapping[str, Any], **page: Any) -> Path:
    """Save the settings and write the report in the main process; return its path."""
    saved, path = _save_settings(settings, out), out / "report.html"
    if is_main():
        given = {name: value for name, value in saved.items() if value not in (None, [], ())}
        command = shlex.join(["anchorlens", *sys.argv[1:]])
        write_report(results, path, settings=given, command=command, **page)
    return path.resolve()


def _save_settings(settings: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Save settings and versions beside the results."""
    saved = {**settings, "versions": versions()}
    if is_main():
        text = json.dumps(saved, indent=1, default=str)  # a path as text
        write_text(out / "settings.json", f"{text}\n")
    return saved
