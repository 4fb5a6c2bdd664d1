"""The analyses of one task for a command: records that are saved at once, and a summary."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..errors import AnchorlensError, StoreError
from ..experiments.analysis import analyse, costs_of
from ..passes.memory import is_out_of_memory
from ..prompts.batch import PromptBatch, count_tokens
from ..report.prompt_flows import PromptFlows, plot_prompt
from ..results.record import Record, Results
from ..runs.store import forget_files, forget_run
from ..system.files import kind_of, paths_in
from ..system.processes import is_main
from ..system.steps import Bar, step
from .options import Run
from .output import say

PICTURES = 4  # of single prompts, in a report


def make_folders(out: Path, tasks: Iterable[str]) -> None:
    """Make the folder of ``--out`` and those of tasks in it, before anything is computed."""
    for folder in (out, *(out / task for task in tasks)):
        failed = "be a folder"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            failed = "be written into"
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise StoreError(f"--out {folder} cannot {failed}: {error.strerror}") from error
    for name in ("report.html", "settings.json"):
        if kind_of(out / name) == "folder":
            raise StoreError(f"{out / name} is a folder, so that no file can have this name")


def forget_results(out: Path, tasks: Iterable[str], names: str) -> None:
    """Delete rows, trainings and records of these names, also of chapters "task (two shots)"."""
    for task in tasks:
        for folder in (out / task, *paths_in(out)):
            if folder == out / task or folder.name.startswith(f"{task} ("):
                forget_rows(folder / "rows")
                forget_files(folder, re.compile(rf"({names})\.safetensors"))


def forget_rows(folder: Path) -> None:
    """Delete the rows of runs and the states of trainings in a folder and in all folders in it."""
    for inner in paths_in(folder):
        if kind_of(inner) == "folder":
            forget_rows(inner)
    forget_run(folder)
    forget_files(folder, re.compile(r"training\.safetensors"))


def file_name(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def analysed(
    model: Any, task: str, batches: list[PromptBatch], options: Run
) -> tuple[dict[str, PromptFlows], Results]:
    """Pictures of a task, and its records, each of which is saved as soon as it is computed."""
    folder, output = options.out / task, options.output
    output.note(f"{task}: {sum(map(len, batches))} prompts, {model.cfg.model_name}")

    def save(name: str, record: Record) -> None:
        if is_main():
            record.save(folder / f"{name}.safetensors")

    with step(task):
        records = analyse(
            model,
            batches,
            **options.of_analysis,
            gradient_checkpointing=options.gradient_checkpointing,
            keep=save,
            folder=folder / "rows",
            progress=not options.quiet,
        )
    with step(f"{task}, figures"):
        saving = options.gradient_checkpointing
        prompts = pictures(model, batches, PICTURES, options.quiet, gradient_checkpointing=saving)
    return prompts, records


def steps_of(
    model: Any, batches: Mapping[str, list[PromptBatch]], options: Run
) -> dict[str, int | float]:
    """What each task and its figures cost, in tokens."""
    costs = dict[str, int | float]()
    for name, of_task in batches.items():
        costs[name] = sum(costs_of(model, of_task, **options.of_analysis).values())
        costs[f"{name}, figures"] = PICTURES * count_tokens(of_task) / sum(map(len, of_task))
    return costs


def pictures(
    model: Any,
    batches: list[PromptBatch],
    most: int,
    quiet: bool,
    gradient_checkpointing: bool = False,
) -> dict[str, PromptFlows]:
    """Pictures of the first prompts; a warning where one fails, as all else is computed."""
    first = [(batch, number) for batch in batches for number in range(len(batch))][:most]
    drawn: dict[str, PromptFlows] = {}
    disable = quiet or not is_main()
    with Bar(title="figures", total=len(first), unit=" prompts", disable=disable) as bar:
        for count, (batch, number) in enumerate(first):
            try:
                picture = plot_prompt(
                    model, batch, number, gradient_checkpointing=gradient_checkpointing
                )
                # Its number is that among all prompts, as in its heading, and not that in a batch.
                picture = replace(picture, source=f"{picture.source.rpartition(' ')[0]} {count}")
            except Exception as error:
                if not isinstance(error, AnchorlensError) and not is_out_of_memory(error):
                    raise
                text = str(error).partition("\n")[0]
                say(f"warning: no picture of prompt {count}: {text}", err=True)
                break
            drawn[f"prompt {count}"] = picture
            bar.update()
    return drawn
