"""What the commands do after their options were read; here PyTorch and the models are imported."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame

from ..errors import PromptError
from ..experiments.context_comparison import ContextsRecord, compare_contexts
from ..models.load import load_model
from ..models.quiet import quiet_libraries
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.draw import draws_of, task_of_name
from ..prompts.examples import Example
from ..prompts.sample import prompts_of_draws
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
from .analysis import Page, analysed, file_name, forget_analysis, make_folders, rows_folder
from .before_weights import check_depth, check_length, checked_tokenizer
from .command_data import examples_of
from .option_lists import is_given
from .output import Output, PrintedTable
from .own_task import TaskOptions, task_with_examples
from .summary import of_contexts
from .trained_contexts import (
    SplitPrompts,
    Training,
    forget_contexts,
    prompts_of,
    reweighted,
    split_of,
    texts_of,
    trained_contexts,
    training_records,
    untrained_contexts,
)


@fails_together()
@quiet_libraries()
def demo(
    *,
    model: str,
    tasks: Sequence[str],
    seed: Sequence[int],
    shots: int,
    queries: int,
    depth: int,
    draws: int,
    device: str | None,
    out: Path,
    fresh: bool,
    output: Output,
    settings: Mapping[str, Any],
) -> None:
    """Analyse a model on bundled tasks."""
    draws_of_tasks = {
        name: draws_of(TASKS[name], examples_of(name), shots, queries, seed) for name in tasks
    }
    make_folders(out, tasks)

    def prompts(tokenizer: Any) -> dict[str, list[PromptBatch]]:
        return {
            name: prompts_of_draws(tokenizer, drawn, batch_size=8)
            for name, drawn in draws_of_tasks.items()
        }

    tokenizer = checked_tokenizer(
        model, device, depth, lambda tokenizer: chain.from_iterable(prompts(tokenizer).values())
    )
    output.note(f"loading {model}")
    loaded = load_model(model, tokenizer=tokenizer, device=device, dtype=torch.float32)
    pages = {}
    for task, batches in prompts(loaded.tokenizer).items():
        check_depth(depth, loaded.cfg.n_layers)
        if fresh:
            forget_analysis(out / task)
        pages[task] = analysed(loaded, task, batches, out, depth, draws, output)
    after = f"another task or your own: anchorlens run --model {model} --help"
    _finish(pages, settings, out, output, after)


@fails_together()
@quiet_libraries()
def run(
    *,
    model: str,
    task: TaskOptions,
    seed: Sequence[int],
    shots: int,
    queries: int,
    depth: int,
    draws: int,
    batch_size: int,
    device: str | None,
    dtype: str | None,
    gradient_checkpointing: bool,
    out: Path,
    fresh: bool,
    output: Output,
    settings: Mapping[str, Any],
) -> None:
    """Analyse a model on a task."""
    chosen = task_with_examples(task)
    drawn = draws_of(chosen.task, chosen.examples, shots, queries, seed)
    make_folders(out, [chosen.name])

    def prompts(tokenizer: Any) -> list[PromptBatch]:
        return prompts_of_draws(tokenizer, drawn, batch_size)

    tokenizer = checked_tokenizer(model, device, depth, prompts)
    output.note(f"loading {model}")
    loaded = load_model(model, tokenizer=tokenizer, device=device, dtype=torch_type(dtype))
    batches = prompts(loaded.tokenizer)
    check_depth(depth, loaded.cfg.n_layers)
    if fresh:
        forget_analysis(out / chosen.name)
    page = analysed(loaded, chosen.name, batches, out, depth, draws, output, gradient_checkpointing)
    after = f"the paper's figures and tables for this model: anchorlens paper --model {model}"
    _finish({chosen.name: page}, {**settings, **chosen.settings}, out, output, after)


@fails_together()
@quiet_libraries()
def paper(
    *,
    model: str,
    tasks: Sequence[str],
    data: Path | None,
    seeds: Sequence[int],
    queries: int,
    depth: int,
    draws: int,
    appendix: bool,
    device: str | None,
    dtype: str | None,
    out: Path,
    fresh: bool,
    output: Output,
    settings: Mapping[str, Any],
) -> None:
    """Print the paper's figures and tables for a model."""
    for task in tasks:
        task_of_name(task)  # before examples are read
    examples = {task: examples_of(task, data) for task in tasks}
    check_examples(examples, queries, seeds)
    make_folders(out)

    def prompts(tokenizer: Any) -> list[PromptBatch]:
        return [batch for task in tasks for batch in _shortest_prompt(tokenizer, task)]

    # The parts build the other prompts. There one that is too long is a warning.
    tokenizer = checked_tokenizer(model, device, depth, prompts)
    output.note(f"loading {model}")
    loaded = load_model(model, tokenizer=tokenizer, device=device, dtype=torch_type(dtype))
    prompts(loaded.tokenizer)
    check_depth(depth, loaded.cfg.n_layers)
    if fresh:
        forget_run(out / "rows")

    def save(numbers: DataFrame) -> None:
        _save_settings(settings, out)
        write_text(out / "numbers.csv", numbers.to_csv(index=False))
        write_text(out / "tables.txt", f"{paper_tables(numbers)}\n")

    numbers = paper_numbers(
        loaded,
        examples,
        queries=queries,
        seeds=seeds,
        parts=PAPER_PARTS + (PAPER_APPENDIX if appendix else ()),
        depth=depth,
        draws=draws,
        keep=save,
        folder=out / "rows",
        progress=not output.quiet,
    )
    summary = paper_tables(numbers)
    drawn = [
        PrintedTable(section.table, section.title, note=section.note)
        for section in paper_sections(numbers)
    ]
    output.tables(drawn, text=summary)
    saved = _save_settings(settings, out)
    report = _report(
        {},
        out,
        title=f"The figures and tables of 'Label Words are Anchors' for {model}",
        settings=saved,
        figures=paper_figures(numbers),
        summary=summary,
    )
    output.document({"model": model, "numbers": numbers.to_dict("records"), "report": report})
    after = f"a task of your own: anchorlens run --model {model} --help"
    output.last_line(f"report: {report} (all numbers: numbers.csv beside it). Next: {after}")


@fails_together()
@quiet_libraries()
def contexts(
    *,
    model: str,
    task: str,
    data: Path | None,
    queries: int,
    training: int,
    held_out: int,
    shots: int,
    seed: int,
    steps: int,
    length: int,
    draws: int,
    batch_size: int,
    device: str | None,
    dtype: str | None,
    out: Path,
    fresh: bool,
    output: Output,
    settings: Mapping[str, Any],
) -> None:
    """Train contexts, and compare them with demonstrations and their label words."""
    examples = examples_of(task, data)
    split = split_of(examples, shots, training, held_out, queries, seed)
    make_folders(out, [task])

    def prompts(tokenizer: Any) -> SplitPrompts:
        return prompts_of(tokenizer, TASKS[task], split, batch_size)

    tokenizer = checked_tokenizer(
        model, device, 1, lambda tokenizer: chain.from_iterable(prompts(tokenizer)), length=length
    )
    output.note(f"loading {model}")
    loaded = load_model(model, tokenizer=tokenizer, device=device, dtype=torch_type(dtype))
    parts = prompts(loaded.tokenizer)
    check_length(length, loaded.cfg.n_ctx, [*chain.from_iterable(parts)])
    rows = rows_folder(out, task)
    if fresh:
        forget_contexts(out / task)
    trained = trained_contexts(loaded, parts, Training(length, steps, seed, rows), output)
    compared = {
        **untrained_contexts(draws),
        "re-weighted": reweighted(loaded, parts, output),
        **trained,
    }
    output.note(f"{task}: {sum(map(len, parts.queries))} queries, {len(compared)} contexts")
    record = compare_contexts(
        loaded, parts.queries, compared, folder=rows / "contexts", progress=not output.quiet
    )
    if is_main():
        record.save(out / task / "contexts.safetensors")
        for name, context in trained.items():
            context.save(out / task / f"{file_name(name)}.safetensors")
    output.tables([_printed(record, task)])
    texts = texts_of(trained)
    for name, text in texts.items():
        output.note(f"{name}: {text!r}")
    saved = _save_settings(settings, out)
    results = {task: {"contexts": record, **training_records(trained)}}
    title = f"What stands before a query: contexts for {model}"
    report = _report(results, out, title=title, settings=saved)
    values = {"task": task, "contexts": of_contexts(record), "texts": texts}
    output.document({"model": model, **values, "report": report})
    after = f"the flows in the demonstrations: anchorlens run --model {model} --task {task}"
    output.last_line(f"report: {report} (open it in a browser). Next: {after}")


def _printed(record: ContextsRecord, task: str) -> PrintedTable:
    """The table of the contexts; numbers in brackets are 95 % intervals."""
    frame = record.table()
    rows = {("", str(name)): dict(texts) for name, texts in frame.iterrows()}
    return PrintedTable(rows, title=f"{task}, contexts [95 % intervals]", corner="context")


def torch_type(dtype: str | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype)


def _shortest_prompt(tokenizer: Any, name: str) -> list[PromptBatch]:
    """A prompt with a short demonstration of each class, for what all prompts of a task share."""
    task = TASKS[name]
    demonstrations = [Example("x", label) for label in range(len(task.labels))]
    try:
        return build_prompts(tokenizer, task, demonstrations, ["x"])
    except PromptError as error:
        raise PromptError(f"{error}. This is the task {name}; leave it out of --tasks") from error


def _finish(
    pages: Mapping[str, Page], settings: Mapping[str, Any], out: Path, output: Output, after: str
) -> None:
    """Write the report, and print the results as json and what to try after this."""
    saved = _save_settings(settings, out)
    results = {task: page.results for task, page in pages.items()}
    report = _report(results, out, settings=saved)
    values = [page.summary.values for page in pages.values()]
    output.document({"model": settings["model"], "tasks": values, "report": report})
    output.last_line(f"report: {report} (open it in a browser). Next: {after}")


def _report(
    results: dict[str, Any], out: Path, *, settings: Mapping[str, Any], **page: Any
) -> Path:
    """Write the report in the main process; return its path."""
    path = out / "report.html"
    if is_main():
        given = {name: value for name, value in settings.items() if is_given(value)}
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
