"""What the commands do after their options were read; here PyTorch and the models are imported."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from textwrap import indent
from typing import Any, TypeVar

import torch

from ..errors import AnchorlensError, ModelError, PromptError, RunError
from ..experiments import faithfulness as scores
from ..experiments import removal
from ..experiments.analysis import DEPTH, depth_of
from ..experiments.context_comparison import ContextComparison
from ..metrics.accuracy import Accuracy
from ..metrics.question import Question
from ..models.load import load_model
from ..models.quiet_libraries import quiet_libraries
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts, build_segments
from ..prompts.demonstration_sets import Draw, draws_of
from ..prompts.documents import ANSWER, QUESTION, Pieces
from ..prompts.examples import Example
from ..prompts.own_data import in_toml, repetitions, words_of, words_that_say_nothing
from ..prompts.sampled import prompts_of_draws
from ..replication.beside_published import paper_sections, paper_tables
from ..replication.models_compared import TITLE, across_models
from ..replication.paper import APPENDIX, MAIN, TRAINING, drawn_of
from ..replication.paper import paper as paper_records
from ..report.answer import answer_of
from ..report.page import write_report
from ..results.answer import Answer
from ..results.record import Record
from ..results.text_tables import Section
from ..runs.identity import versions
from ..runs.run import run as answer
from ..runs.store import forget_run
from ..system.files import kind_of, write_text
from ..system.processes import fails_together, is_main
from ..system.put_back import each_call_inside
from ..system.steps import planned, step
from ..system.warn import warn_user
from .analysis import (
    PAPER_RECORDS,
    analysed,
    file_name,
    forget_analysis,
    forget_files,
    forget_rows,
    make_folders,
    pictures,
    steps_of,
)
from .before_weights import check_depth, check_length, checked_tokenizer
from .options import (
    PAPER_TASKS,
    Across,
    Contexts,
    Demo,
    Dtype,
    Faithfulness,
    OfTask,
    Paper,
    Run,
)
from .summary import Summary, entries_of, summarised, values_of_answer
from .tasks import ChosenTask, chosen_tasks, documents_of, queries_that_fit
from .trained_contexts import (
    COMPARED,
    OTHER_TOKENS,
    Parts,
    check_other_tokens,
    draws_without_overlap,
    forget_contexts,
    other_tokens,
    reweighted,
    texts_of,
    trained_contexts,
    training_records,
    untrained_contexts,
)
from .written_answers import written_answer

Options = TypeVar("Options", Run, Paper, Contexts, Faithfulness)


@fails_together()
@each_call_inside(quiet_libraries)
def demo(options: Demo) -> None:
    """Analyse a model on two bundled tasks."""
    of_run = Run(**vars(options), dtype=Dtype.float32)
    _analyse(of_run, chosen_tasks(["questions", "sentiment"], of_run))


@fails_together()
@each_call_inside(quiet_libraries)
def run(options: Run) -> None:
    """Analyse a model on a task."""
    chosen = chosen_tasks(options.task and [options.task], options, options.shots)
    _analyse(options, [each.for_images(options.model) for each in chosen])


def _analyse(options: Run, chosen: Sequence[ChosenTask]) -> None:
    """Analyse a model on tasks, and write the report."""
    model, out, output = options.model, options.out, options.output
    counts = [
        queries_that_fit(each, options.shots * len(each.task.labels), options.queries, 100)
        for each in chosen
    ]
    draws = {
        each.name: draws_of(each.task, each.examples, options.shots, count, options.seed)
        for each, count in zip(chosen, counts, strict=True)
    }
    make_folders(out, draws)
    loaded, batches = _loaded(options, partial(_prompts_of, chosen, draws, options.batch_size))
    options, chosen = _settled("run", options, chosen, loaded, min(counts))
    pages = {}
    with planned(steps_of(loaded, batches, options)):
        for name in draws:
            if options.fresh:
                forget_analysis(out / name)
            pages[name] = analysed(loaded, name, batches[name], options)
    settings = _settings(options, chosen)
    paper = f"the paper's figures and tables for this model:\n  {_as_command('paper', model)}"
    steps = {each.name: _next(options, each, pages[each.name].summary) for each in chosen}
    answers = {
        name: replace(page.summary.answer, next=steps[name] or paper)
        for name, page in pages.items()
    }
    results = {name: page.results for name, page in pages.items()}
    report = _report(results, out, settings, answers=answers)
    values = [
        {**page.summary.values, "answer": values_of_answer(answers[name])}
        for name, page in pages.items()
    ]
    output.document({"model": model, "tasks": values, "report": report})
    output.last_line(next(filter(None, steps.values()), paper), report)


def _as_command(name: str, model: str, *words: str) -> str:
    return shlex.join(["anchorlens", name, *words, "--model", model])


def _next(options: Run, chosen: ChosenTask, summary: Summary) -> str:
    """What to do where verdicts are missing, with a command; "" where they are not."""
    if summary.is_able and summary.is_sure:
        return ""
    queries, classes = options.queries or 1, len(chosen.task.labels)
    more, changed = 4 * options.shots, dict[str, Any]()
    if not summary.is_able:
        words = "other label words"
        rows = Counter(example.label for example in chosen.examples.pool)
        if more < min(rows.values()):
            words = f"more demonstrations, or {words}"
            fitting = queries_that_fit(chosen, more * classes, None, queries)
            changed = {"shots": more, "queries": fitting}
        where = f" (in {chosen.source(options.out)})" if chosen.is_proposed else ""
        why = f"the model does not clearly do the task {chosen.name}; try {words}{where}"
    elif queries_that_fit(chosen, options.shots * classes, None, 4 * queries) == 4 * queries:
        why = f"{chosen.name} with 4 times as many queries, so that intervals are half as wide"
        changed = {"queries": 4 * queries}
    else:
        why = f"{chosen.name} with several sets of demonstrations, as there are no more queries"
        changed = {"seed": [*options.seed, *range(max(options.seed) + 1, max(options.seed) + 3)]}
    here = options.out if options.out.name else options.out.resolve()  # "." has no name
    again = replace(options, **changed, out=Path(f"{here}-2"))
    return f"{why}:\n  {chosen.command('run', again, options.out)}"


@fails_together()
@each_call_inside(quiet_libraries)
def paper(options: Paper) -> None:
    """Print the paper's figures and tables for a model."""
    out, output = options.out, options.output
    is_folder = options.data is None or kind_of(options.data) == "folder"
    chosen = chosen_tasks(options.tasks or (PAPER_TASKS if is_folder else None), options)
    examples = {each.name: each.examples for each in chosen}
    counts = [
        queries_that_fit(each, (1 + TRAINING) * len(each.task.labels), options.queries, 40)
        for each in chosen
    ]
    queries = min(counts)
    drawn_of(examples, {each.name: each.task for each in chosen}, queries, options.seeds)
    make_folders(out, examples)

    def prompts(tokenizer: Any) -> dict[str, list[PromptBatch]]:
        return {each.name: _shortest_prompt(tokenizer, each) for each in chosen}

    # The parts build the other prompts. One that is too long is a warning at the end.
    loaded, _ = _loaded(options, prompts)
    options, chosen = _settled("paper", options, chosen, loaded, queries)
    if options.fresh:
        forget_rows(out / "rows")
        for task, part in product(examples, ("", *(f" ({part})" for part in APPENDIX))):
            forget_files(out / f"{task}{part}", PAPER_RECORDS)
    output.note("fewer of --task, --seed, --queries and --draws take less time")

    def save(task: str, name: str, record: Record) -> None:
        make_folders(out, [task])
        record.save(out / task / f"{file_name(name)}.safetensors")

    tasks = {each.name: each.task for each in chosen}
    try:
        found = paper_records(
            loaded,
            examples,
            tasks=tasks,
            queries=queries,
            seeds=options.seeds,
            parts=MAIN + (APPENDIX if options.appendix else ()),
            depth=options.depth,
            draws=options.draws,
            keep=save,
            folder=out / "rows",
            progress=not options.quiet,
        )
    except RunError as error:
        if not any(error.results.values()):
            raise
        warn_user(str(error))
        found = {task: results for task, results in error.results.items() if results}
    summaries = {task: summarised(task, results) for task, results in found.items()}
    said = [[each.answer.section(task), *each.tables] for task, each in summaries.items()]
    output.tables([*chain.from_iterable(said), *paper_sections(found)])
    if is_main():
        write_text(out / "tables.txt", f"{paper_tables(found)}\n")
    shown: dict[str, Any] = {**found}
    for task, (first, *_) in drawn_of(examples, tasks, queries, options.seeds).items():
        figure_1 = pictures(loaded, first.prompts(loaded)[:1], 1, options.quiet)
        shown[task] = {**figure_1, **found.get(task, {})}
    named = chosen[0].is_proposed or options.data is None
    words = ["--task", chosen[0].source(out)] if named else ["YOURS.csv"]
    after = f"one task with more queries:\n  {_as_command('run', options.model, *words)}"
    answers = {task: replace(each.answer, next=after) for task, each in summaries.items()}
    report = _report(
        shown,
        out,
        _settings(options, chosen),
        title="The figures and tables of 'Label Words are Anchors'",
        summary=paper_tables(found),
        answers=answers,
    )
    values = [
        {**summary.values, "answer": values_of_answer(answers[task])}
        for task, summary in summaries.items()
    ]
    output.document({"model": options.model, "tasks": values, "report": report})
    output.last_line(after, report)


@fails_together()
@each_call_inside(quiet_libraries)
def contexts(options: Contexts) -> None:
    """Train contexts, and compare them with demonstrations and their label words."""
    out, output = options.out, options.output
    [chosen] = chosen_tasks(options.task and [options.task], options, options.shots)
    task, classes = chosen.name, len(chosen.task.labels)
    used = options.shots * classes + options.training + options.held_out
    queries = queries_that_fit(chosen, used, options.queries, 40)
    draws = draws_without_overlap(chosen.task, chosen.examples, options, queries)
    make_folders(out, [task])

    def prompts(tokenizer: Any) -> dict[str, list[PromptBatch]]:
        built = _prompts_of([chosen] * len(draws), draws, options.batch_size, tokenizer)
        if options.other_tokens:
            check_other_tokens(built["queries"][0])
        return built

    loaded, batches = _loaded(options, prompts, length=options.length)
    options, [chosen] = _settled("contexts", options, [chosen], loaded, queries)
    rows = out / task / "rows"
    if options.fresh:
        forget_contexts(out / task)
    parts = Parts.of(loaded, batches, options)
    with planned(parts.steps):
        trained = trained_contexts(loaded, batches, parts, rows)
        factors = reweighted(loaded, batches, parts, rows)
        compared = {**untrained_contexts(options.draws), "re-weighted": factors, **trained}
        output.note(f"{task}, {queries} queries, {len(compared)} contexts")
        asked: dict[str, list[Question]] = {COMPARED: [ContextComparison(compared), Accuracy()]}
        if options.other_tokens:
            asked[OTHER_TOKENS] = [other_tokens(options.draws)]
        answers, progress = dict[str, Any](), not options.quiet
        for name, questions in asked.items():
            folder = rows / questions[0].name
            with step(name):
                answers |= answer(
                    loaded, batches["queries"], questions, folder=folder, progress=progress
                )
    records = {questions[0].name: answers[questions[0].name] for questions in asked.values()}
    if is_main():
        for name, record in records.items():
            record.save(out / task / f"{file_name(name)}.safetensors")
        for name, context in trained.items():
            context.save(out / task / f"{file_name(name)}.safetensors")
    found = _answer(answers, _flows_next(options, chosen, [options.seed]))
    tables = [_table_of(f"{task}, {name}", record) for name, record in records.items()]
    output.answer(task, found, tables)
    texts = texts_of(trained)
    for name, text in texts.items():
        output.note(f"{name}: {text!r}")
    results = {task: {**answers, **training_records(trained)}}
    title = "What can stand before a query"
    numbers = {file_name(name): entries_of(record) for name, record in records.items()}
    values = {"task": task, **numbers, "texts": texts}
    _end(options, [chosen], {task: found}, results, title, values)


def _flows_next(
    options: Contexts | Faithfulness | Across, chosen: ChosenTask, seeds: list[int], **changes: Any
) -> str:
    """What to try next: the flows of the task, with the command."""
    shared = {each.name: getattr(options, each.name) for each in fields(OfTask)}
    of_run = Run(**shared | {"out": Run.out} | changes, shots=options.shots, seed=seeds)
    return f"the flows of the task:\n  {chosen.command('run', of_run, options.out)}"


def _end(
    options: Contexts | Faithfulness | Across,
    chosen: Sequence[ChosenTask],
    answers: Mapping[str, Answer],
    results: dict[str, Any],
    title: str,
    values: Mapping[str, Any],
) -> None:
    """Write the report of an answer, print its document, and say what is next."""
    [answer], output = answers.values(), options.output
    report = _report(results, options.out, _settings(options, chosen), title=title, answers=answers)
    known = {"model": options.model, **values, "answer": values_of_answer(answer)}
    output.document({**known, "report": report})
    output.last_line(answer.next, report)


def _answer(records: Mapping[str, Record], after: str) -> Answer:
    """What the records of a command say first, and what to try next."""
    found = answer_of(records.values(), [])
    assert found is not None
    return replace(found, next=after)


@fails_together()
@each_call_inside(quiet_libraries)
def faithfulness(options: Faithfulness) -> None:
    """Compare scores of segments with what the removal of segments does."""
    out, output = options.out, options.output
    written, chosen = documents_of(options), list[ChosenTask]()
    compared: dict[str, Any] = {"subsets": options.subsets, "top": options.top}
    documents = list[str]()
    if written:
        documents = [str(piece) for piece, _ in written[0] if piece not in (QUESTION, ANSWER)]
        name, queries = "documents", min(options.queries or 60, len(written))
        written = written[:queries]
        prompts = partial(_segments, written, options.batch_size)
    else:
        chosen = chosen_tasks(options.task and [options.task], options, options.shots)
        name, queries, draws = _drawn_for(chosen[0], options, 60)
        prompts = partial(_prompts_of, chosen, {name: draws}, options.batch_size)
    segments = options.shots * len(chosen[0].task.labels) if chosen else len(documents)
    scores.Comparison(segments, options.subsets, options.top, seed=0).check()
    if segments < scores.FEWEST:
        shots = "--shots 2 gives two demonstrations of each class"
        output.note(
            f"there are {segments} segments, and a rank correlation (LDS) needs {scores.FEWEST}: "
            f"only drops are computed; {shots if chosen else 'give more documents'}"
        )
    make_folders(out, [name])
    loaded, batches = _loaded(options, prompts)
    options, chosen = _settled("faithfulness", options, chosen, loaded, queries)
    if written:
        compared |= {"segments": documents, "answer": ANSWER}
        if written[0][-1][0] != ANSWER:
            texts = [written_answer(loaded, pieces) for pieces in written]
            output.note(
                f"the model writes the answers, which are then explained: {texts[0]!r}, ..."
            )
            written = [
                [*pieces, (ANSWER, text)] for pieces, text in zip(written, texts, strict=True)
            ]
            batches = _segments(written, options.batch_size, loaded.tokenizer)
    rows = out / name / "rows"
    if options.fresh:
        forget_run(rows)
    remove = removal.text if options.remove_text else removal.edges
    asked = scores.Faithfulness(**compared, remove=remove)
    questions = [asked, *([Accuracy()] if chosen else [])]
    answers = answer(loaded, batches[name], questions, folder=rows, progress=not options.quiet)
    record = answers[asked.name]
    if is_main():
        record.save(out / name / "faithfulness.safetensors")
    after = f"the flows of a task of your own:\n  {_as_command('run', options.model, 'YOURS.csv')}"
    if chosen:
        after = _flows_next(options, chosen[0], options.seed)
    found = _answer(answers, after)
    output.answer(name, found, [_table_of(f"{name}, what scores are worth", record)])
    title = "What scores of segments are worth"
    values = {"task": name, "faithfulness": entries_of(record)}
    if written:
        values["answers"] = [pieces[-1][1] for pieces in written]
    _end(options, chosen, {name: found}, {name: answers}, title, values)


@fails_together()
@each_call_inside(quiet_libraries)
def across(options: Across) -> None:
    """Compare the claims of the paper with several models."""
    out, output = options.out, options.output
    [chosen] = chosen_tasks(options.task and [options.task], options, options.shots)
    name, queries, draws = _drawn_for(chosen, options, 100)
    make_folders(out)
    by_task = partial(_prompts_of, [chosen], {name: draws}, options.batch_size)
    _refuse_models(options, lambda tokenizer: by_task(tokenizer)[name])
    if options.fresh:
        forget_rows(out / "rows")
    record = across_models(
        options.model,
        lambda tokenizer: by_task(tokenizer)[name],
        device=options.device,
        dtype=_dtype(options),
        **options.of_analysis,
        gradient_checkpointing=options.gradient_checkpointing,
        keep=lambda record: record.save(out / "claims.safetensors"),
        folder=out / "rows",
        progress=not options.quiet,
    )
    after = _flows_next(options, chosen, options.seed, model=options.model[0])
    found = _answer({"claims": record}, after)
    output.answer(name, found, [_table_of(TITLE, record)])
    title = f"The paper's claims in {len(options.model)} models"
    values = {"claims": record.to_frame().to_dict("records")}
    used = replace(options, queries=queries)
    _end(used, [chosen], {"": found}, {"claims": record}, title, values)
    if record.number.isnan().all():
        raise ModelError("no model could be analysed; the table says why")


def _refuse_models(options: Across, prompts: Callable[[Any], list[PromptBatch]]) -> None:
    """Raise one error for all models that can be refused before the weights of any are loaded."""
    problems = []
    for model in options.model:
        try:
            checked_tokenizer(model, options.device, options.depth, prompts)
        except AnchorlensError as error:
            problems.append(f"{model}: {error}")
    if problems:
        count = f"{len(problems)} of {len(options.model)} models cannot be analysed"
        raise ModelError("\n  - ".join([f"{count}; mend them, or leave them out:", *problems]))


def _drawn_for(chosen: ChosenTask, options: Any, most: int) -> tuple[str, int, list[Draw]]:
    """The name of a task, the number of queries, and the draw of each seed."""
    used, wanted = options.shots * len(chosen.task.labels), options.queries
    queries = queries_that_fit(chosen, used, wanted, most)
    draws = draws_of(chosen.task, chosen.examples, options.shots, queries, options.seed)
    return chosen.name, queries, draws


def _segments(
    written: Sequence[Pieces], batch_size: int, tokenizer: Any
) -> dict[str, list[PromptBatch]]:
    """The prompts of questions with documents."""
    return {"documents": build_segments(tokenizer, written, batch_size=batch_size)}


def _table_of(title: str, record: Any) -> Section:
    """The table of a record as text."""
    frame = record.table()
    return Section(f"{title} [95 % intervals]", frame.by_row(), corner=frame.index.name)


def _prompts_of(
    chosen: Sequence[ChosenTask],
    draws: Mapping[str, Sequence[Draw]],
    batch_size: int,
    tokenizer: Any,
) -> dict[str, list[PromptBatch]]:
    """The prompts of draws by name; each is of the chosen task at its place."""
    prompts = {}
    for each, (name, drawn) in zip(chosen, draws.items(), strict=True):
        task = each.for_tokenizer(tokenizer).task
        of_task = [draw._replace(task=task) for draw in drawn]
        prompts[name] = prompts_of_draws(tokenizer, of_task, batch_size, each.processor)
    return prompts


def _loaded(
    options: Run | Paper | Contexts | Faithfulness,
    prompts: Callable[[Any], dict[str, list[PromptBatch]]],
    length: int = 0,
) -> tuple[Any, dict[str, list[PromptBatch]]]:
    """The model of a command and its prompts, after all that can be refused before weights."""

    def build(tokenizer: Any) -> Iterable[PromptBatch]:
        return chain.from_iterable(prompts(tokenizer).values())

    depth: int | None = getattr(options, "depth", None)
    tokenizer = checked_tokenizer(options.model, options.device, depth, build, length=length)
    options.output.note(f"loading {options.model}")
    loaded = load_model(
        options.model, tokenizer=tokenizer, device=options.device, dtype=_dtype(options)
    )
    batches = prompts(loaded.tokenizer)
    check_depth(depth, loaded.cfg.n_layers)
    if length:
        check_length(length, loaded.cfg.n_ctx, [*chain.from_iterable(batches.values())])
    return loaded, batches


def _dtype(options: OfTask) -> torch.dtype | None:
    return getattr(torch, options.dtype) if options.dtype else None


def _settled(
    command: str, options: Options, chosen: Sequence[ChosenTask], loaded: Any, queries: int
) -> tuple[Options, list[ChosenTask]]:
    """The options and tasks as they are used; what was not given is said, and a task is stored."""
    output, layers = options.output, loaded.cfg.n_layers
    found: dict[str, Any] = {"queries": queries}
    if not isinstance(options, Contexts | Faithfulness):
        found["depth"] = depth_of(options.depth, layers)
        if options.depth is None and found["depth"] < DEPTH:
            output.note(
                f"the model has {layers} layers: --depth {found['depth']}, the layers that are "
                "isolated at each end"
            )
    settled = replace(options, **found)
    final = [each.for_tokenizer(loaded.tokenizer) for each in chosen]
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
                    f"the label words {named} begin with a word that says "
                    f"nothing of their class, and this word is what the model predicts; write "
                    f"others into labels of {path}"
                )
    return settled, final


def _shortest_prompt(tokenizer: Any, chosen: ChosenTask) -> list[PromptBatch]:
    """A prompt with a short demonstration of each class, for what all prompts of a task share."""
    task = chosen.for_tokenizer(tokenizer).task
    demonstrations = [Example("x", label) for label in range(len(task.labels))]
    try:
        return build_prompts(tokenizer, task, demonstrations, ["x"])
    except PromptError as error:
        raise PromptError(
            f"{error}. This is the task {chosen.name}; leave it out of --task"
        ) from error


def _settings(options: OfTask, chosen: Sequence[ChosenTask]) -> dict[str, Any]:
    """What decides the numbers: the options, and the entries of a single task."""
    entries = chosen[0].entries if len(chosen) == 1 else {"tasks": [each.name for each in chosen]}
    return {**options.settings(), **entries}


def _report(results: dict[str, Any], out: Path, settings: Mapping[str, Any], **page: Any) -> Path:
    """Save the settings and write the report in the main process; return its path."""
    saved, path = _save_settings(settings, out), out / "report.html"
    if is_main():
        # What was not set is not shown. Records say of which models random weights were drawn.
        given = {k: v for k, v in saved.items() if v is not False and v not in (None, [], ())}
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
