"""The one way through a command: load, ask, answer, write, and say what is next.

Here PyTorch and the models are imported. What each command asks stands in ``work.py``.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

from ..contexts.protocol import bos_of, longest_query
from ..errors import AnchorlensError, HookError, ModelError, PromptError
from ..experiments.analysis import DEPTH, depth_of
from ..models.hooked import attention_layers, refuse_longer_than
from ..models.load import load_model, refuse_encoder_decoder
from ..models.quiet_libraries import quiet_libraries
from ..models.read_weights import read_model_files, refuse_device, refuse_no_file
from ..prompts.batch import PromptBatch, longest_prompt
from ..prompts.own_data import in_toml, repetitions, words_of, words_that_say_nothing
from ..report.page import write_report
from ..results.text_tables import Section
from ..runs.identity import versions
from ..system.files import write_text
from ..system.processes import fails_together, is_main
from ..system.put_back import each_call_inside
from ..system.warn import warn_user
from .analysis import file_name, forget_results, make_folders
from .options import OfTask, command_of
from .summary import Found, values_of_answer
from .tasks import ChosenTask

Prompts = dict[str, list[PromptBatch]]
Tasks = Sequence[ChosenTask]


@dataclass(frozen=True)
class Asked:
    """What a command asks, understood before any weights are loaded."""

    options: Any
    chosen: Tasks  # none where the data are documents
    queries: int  # the number that is used
    folders: Sequence[str]  # where in ``--out`` it stores; "" for the folder itself
    records: str  # a pattern of the names of its records there, which ``--fresh`` deletes
    prompts: Callable[[Any], Prompts]  # by name, of a tokenizer
    # What is found, task by task: of the model (None where the command has several), of the
    # prompts, and of options and tasks as they are used.
    ask: Callable[[Any, Prompts, Any, Tasks], Iterable[Found]]
    title: str = "How the model learns from the examples in its prompt"  # of the page
    tables: Callable[[dict[str, Any]], Sequence[Section]] = lambda results: ()  # further ones
    length: int = 0  # how many positions a trained context puts before each query


@fails_together()
@each_call_inside(quiet_libraries)
def answered(command: str, understand: Callable[[Any], Asked], options: Any) -> None:
    """Do the work of a command, of which ``understand`` says what it asks."""
    asked, output = understand(options), options.output
    make_folders(options.out, asked.folders)
    model, tokenizer = _loaded(asked)
    batches = asked.prompts(tokenizer) if model is not None else {}
    if asked.length:
        _check_length(asked.length, model.cfg.n_ctx, [*chain.from_iterable(batches.values())])
    options, chosen = _settled(command, asked, model, tokenizer)
    if options.fresh:
        forget_results(options.out, asked.folders, asked.records)
    found, failed = list[Found](), None
    try:
        for each in asked.ask(model, batches, options, chosen):
            output.tables([each.answer.section(each.task), *each.tables])
            for name, made in each.files.items() if is_main() else ():
                made.save(options.out / each.task / f"{file_name(name)}.safetensors")
            found.append(each)
    except AnchorlensError as error:
        if not found:
            raise
        failed = error  # once what was found is written
    entries = chosen[0].entries if len(chosen) == 1 else {"tasks": [task.name for task in chosen]}
    results = {each.task: each.results for each in found}
    if further := asked.tables(results):
        output.tables(further)
    page = {
        "title": asked.title,
        "answers": {each.task: each.answer for each in found},
        "summary": "\n\n".join(table.text() for table in further),
    }
    report = _report(options, entries, results, page)
    tasks = [
        {"task": each.task, **each.values, "answer": values_of_answer(each.answer)}
        for each in found
    ]
    output.document({"model": options.model, "tasks": tasks, "report": report})
    output.last_line(found[0].answer.next, report)
    if failed is not None:
        raise failed


def _loaded(asked: Asked) -> tuple[Any, Any]:
    """The model and its tokenizer; of several models none, and the tokenizer of the first."""
    options, tokenizers, problems = asked.options, list[Any](), list[str]()
    several = isinstance(options.model, list)
    for model in options.model if several else [options.model]:
        try:
            tokenizers.append(_checked_tokenizer(model, asked))
        except AnchorlensError as error:
            if not several:
                raise
            problems.append(f"{model}: {error}")
    if problems:
        count = f"{len(problems)} of {len(options.model)} models cannot be analysed"
        raise ModelError("\n  - ".join([f"{count}; mend them, or leave them out:", *problems]))
    if several:
        return None, tokenizers[0]
    options.output.note(f"loading {options.model}")
    loaded = load_model(
        options.model, tokenizer=tokenizers[0], device=options.device, dtype=dtype_wanted(options)
    )
    _check_depth(options, len(attention_layers(loaded)))
    return loaded, loaded.tokenizer


def _checked_tokenizer(model: str, asked: Asked) -> Any:
    """The tokenizer of a model, after all checks that need no weights.

    None for a .gguf file, which takes as long to read without them: its checks come later.
    """
    if asked.options.device is not None:
        refuse_device(asked.options.device)
    if model.endswith(".gguf"):
        refuse_no_file(model)
        return None
    config, tokenizer = read_model_files(model)
    refuse_encoder_decoder(model, config)
    text_config = config.get_text_config()
    layers = getattr(text_config, "num_hidden_layers", None)
    if layers is not None:
        _check_depth(asked.options, layers)
    context = getattr(text_config, "max_position_embeddings", None)
    batches = [*chain.from_iterable(asked.prompts(tokenizer).values())]
    if context is not None:
        refuse_longer_than(context, longest_prompt(*batches))
        _check_length(asked.length, context, batches)
    return tokenizer


def _check_depth(options: Any, layers: int) -> None:
    depth = getattr(options, "depth", None)
    if depth is not None and depth > layers:
        raise HookError(f"--depth {depth} is more than the {layers} layers of the model; lower it")


def _check_length(length: int, context: int, batches: Sequence[PromptBatch]) -> None:
    longest = max(len(bos_of(batch)) + longest_query(batch) for batch in batches)
    if length + longest > context:
        raise PromptError(
            f"--length {length} is too long: the model's context is {context} tokens, and the "
            f"longest query takes {longest}; use at most --length {context - longest}"
        )


def dtype_wanted(options: OfTask) -> torch.dtype | None:
    return getattr(torch, options.dtype) if options.dtype else None


def _settled(command: str, asked: Asked, model: Any, tokenizer: Any) -> tuple[Any, Tasks]:
    """The options and tasks as they are used; what was not given is said, and a task is stored."""
    options, found = asked.options, {"queries": asked.queries}
    output = options.output
    if model is not None and hasattr(options, "depth"):
        layers = len(attention_layers(model))
        found["depth"] = depth_of(options.depth, layers)
        if options.depth is None and found["depth"] < DEPTH:
            output.note(
                f"the model has {layers} layers: --depth {found['depth']}, the layers that are "
                "isolated at each end"
            )
    settled = replace(options, **found)
    final = [each.for_tokenizer(tokenizer) if tokenizer else each for each in asked.chosen]
    for each in final:
        if each.is_proposed:
            path = each.source(options.out)
            columns = f"{each.columns[:1].upper()}{each.columns[1:]}"
            each.store(Path(path), options.fresh)
            output.note(
                f"{options.data}: {len(each.examples.pool)} rows, understood as\n"
                + indent(in_toml(each.entries), "  ")
                + words_of(each.entries)
                + f"{columns}.\n" * (not each.is_unsure)
                + f"This is {path}; change it there, and run\n"
                + f"  {each.command(command, settled, options.out)}"
            )
            if each.is_unsure:
                warn_user(f"{columns}; if another is meant, give it")
            if twice := repetitions(each.examples.pool):
                warn_user(f"{options.data}: {twice}")
            if empty := words_that_say_nothing(each.entries):
                named = ", ".join(map(repr, empty[:5])) + ", ..." * (len(empty) > 5)
                warn_user(
                    f"the label words {named} begin with a word that says nothing of their class, "
                    f"and is what the model predicts; write others into labels of {path}"
                )
    return settled, final


def _report(
    options: OfTask, entries: Mapping[str, Any], results: dict[str, Any], page: dict[str, Any]
) -> Path:
    """Save the settings and write the report in the main process; return its path."""
    # What decides the numbers: the options, and the entries of a single task.
    saved, out = {**options.settings(), **entries, "versions": versions()}, options.out
    if is_main():
        text = json.dumps(saved, indent=1, default=str)  # a path as text
        write_text(out / "settings.json", f"{text}\n")
        if page["summary"]:
            write_text(out / "tables.txt", f"{page['summary']}\n")
        # What was not set is not shown. Records say of which models random weights were drawn.
        given = {k: v for k, v in saved.items() if v is not False and v not in (None, [], ())}
        command = command_of(*sys.argv[1:])
        write_report(results, out / "report.html", settings=given, command=command, **page)
    return (out / "report.html").resolve()
