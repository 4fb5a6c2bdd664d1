"""What each command asks, and what it makes of the records; ``path.py`` does the rest."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..ablation import removal
from ..errors import ModelError, PromptError, RunError
from ..experiments.generation import written_tokens
from ..metrics.accuracy import Accuracy
from ..metrics.question import Question
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts, build_segments
from ..prompts.demonstration_sets import Draw, draws_of
from ..prompts.documents import ANSWER, QUESTION, Pieces
from ..prompts.examples import Example
from ..prompts.sampled import prompts_of_draws
from ..questions import faithfulness as scores
from ..questions.context_comparison import ContextComparison
from ..replication.beside_published import paper_sections
from ..replication.models_compared import TITLE, across_models
from ..replication.paper import APPENDIX, MAIN, TRAINING, drawn_of
from ..replication.paper import paper as paper_records
from ..report.ability import Advice, ability_of
from ..report.answer import answer_of
from ..results.answer import Answer
from ..results.record import Record
from ..results.text_tables import Section
from ..runs.run import run as answer
from ..system.files import kind_of
from ..system.steps import planned, step
from ..system.warn import warn_user
from .analysis import analysed, file_name, make_folders, pictures, steps_of
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
    command_of,
)
from .path import Asked, Prompts, Tasks, dtype_wanted
from .summary import Found, entries_in, is_sure, summarised
from .tasks import ChosenTask, chosen_tasks, documents_of, queries_that_fit
from .trained_contexts import (
    COMPARED,
    OTHER_TOKENS,
    TRAINED,
    UNTRAINED,
    check_other_tokens,
    draws_without_overlap,
    other_tokens,
    reweighted,
    steps_of_parts,
    texts_of,
    trained_contexts,
    training_records,
)

LONGEST_WRITTEN = 24  # tokens
_OF_ANALYSIS = "saliency_flows|attention_aucroc|anchor_distances|accuracy|isolation"
_OF_PAPER = rf"{_OF_ANALYSIS}|diagnosis|accuracies|contexts|times|\d+_directions"


def demo(options: Demo) -> Asked:
    of_run = Run(**vars(options), dtype=Dtype.float32)
    return _analyses(of_run, chosen_tasks(["questions", "sentiment"], of_run))


def run(options: Run) -> Asked:
    chosen = chosen_tasks(options.task and [options.task], options, options.shots)
    return _analyses(options, [each.for_images(options.model) for each in chosen])


def _analyses(options: Run, chosen: Tasks) -> Asked:
    """What ``analyse`` asks of each task."""
    drawn = [_drawn_for(each, options, 100) for each in chosen]
    queries = min(count for _, count, _ in drawn)
    draws = {name: of_task for name, _, of_task in drawn}

    def ask(model: Any, batches: Prompts, options: Run, chosen: Tasks) -> Iterator[Found]:
        of_paper = command_of("paper", "--model", options.model)
        paper = f"the paper's figures and tables for this model:\n  {of_paper}"
        with planned(steps_of(model, batches, options)):
            for each in chosen:
                shown, records = analysed(model, each.name, batches[each.name], options)
                yield summarised(each.name, records, _next(options, each, records) or paper, shown)

    prompts = partial(_prompts_of, chosen, draws, options.batch_size)
    return Asked(options, chosen, queries, [*draws], _OF_ANALYSIS, prompts, ask)


def _next(options: Run, chosen: ChosenTask, records: Mapping[str, Record]) -> str:
    """What to do where verdicts are missing, with a command; "" where they are not."""
    if is_sure(records):
        return ""
    queries, classes = options.queries or 1, len(chosen.task.labels)
    more, changed, ability = 4 * options.shots, dict[str, Any](), ability_of(records.values())
    fitting = partial(queries_that_fit, chosen, wanted=None, even=options.even)
    advice = Advice.MORE if ability is None or ability.is_clear else ability.advice
    if advice == Advice.EVEN:
        evenly = queries_that_fit(chosen, options.shots * classes, None, queries, True)
        why, changed = f"{chosen.name}: {advice}", {"even": True, "queries": evenly}
    elif advice == Advice.OTHERS:
        words = "other label words"
        rows = Counter(example.label for example in chosen.examples.pool)
        if more < min(rows.values()):
            words = f"more demonstrations, or {words}"
            changed = {"shots": more, "queries": fitting(more * classes, most=queries)}
        where = f" (in {chosen.source(options.out)})" if chosen.is_proposed else ""
        why = f"the model does not clearly do the task {chosen.name}; try {words}{where}"
    elif fitting(options.shots * classes, most=4 * queries) == 4 * queries:
        why = f"{chosen.name} with 4 times as many queries, so that intervals are half as wide"
        changed = {"queries": 4 * queries}
    else:
        why = f"{chosen.name} with several sets of demonstrations, as there are no more queries"
        changed = {"seed": [*options.seed, *range(max(options.seed) + 1, max(options.seed) + 3)]}
    here = options.out if options.out.name else options.out.resolve()  # "." has no name
    again = replace(options, **changed, out=Path(f"{here}-2"))
    return f"{why}:\n  {chosen.command('run', again, options.out)}"


def paper(options: Paper) -> Asked:
    out = options.out
    is_folder = options.data is None or kind_of(options.data) == "folder"
    chosen = chosen_tasks(options.tasks or (PAPER_TASKS if is_folder else None), options)
    examples = {each.name: each.examples for each in chosen}
    counts = [
        queries_that_fit(each, (1 + TRAINING) * len(each.task.labels), options.queries, 40, False)
        for each in chosen
    ]
    queries = min(counts)
    drawn_of(examples, {each.name: each.task for each in chosen}, queries, options.seeds)

    def prompts(tokenizer: Any) -> Prompts:
        """Of each task its shortest. The parts build the others; a longer one is a warning then."""
        return {each.name: _shortest_prompt(tokenizer, each) for each in chosen}

    def save(task: str, name: str, record: Record) -> None:
        make_folders(out, [task])
        record.save(out / task / f"{file_name(name)}.safetensors")

    def ask(model: Any, batches: Prompts, options: Paper, chosen: Tasks) -> Iterator[Found]:
        options.output.note("fewer of --task, --seed, --queries and --draws take less time")
        tasks = {each.name: each.task for each in chosen}
        try:
            found = paper_records(
                model,
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
        named = chosen[0].is_proposed or options.data is None
        words = ["--task", chosen[0].source(out)] if named else ["YOURS.csv"]
        of_run = command_of("run", *words, "--model", options.model)
        drawn = drawn_of(examples, tasks, queries, options.seeds)
        after = f"one task with more queries:\n  {of_run}"
        for task, records in found.items():
            # The appendix has chapters of its own, without a picture.
            first = drawn[task][0].prompts(model)[:1] if task in drawn else []
            figure_1 = pictures(model, first, 1, options.quiet)
            yield summarised(task, records, after, figure_1)

    title = "The figures and tables of 'Label Words are Anchors'"
    return Asked(
        options, chosen, queries, ["", *examples], _OF_PAPER, prompts, ask, title, paper_sections
    )


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


def contexts(options: Contexts) -> Asked:
    [chosen] = chosen_tasks(options.task and [options.task], options, options.shots)
    task = chosen.name
    used = options.shots * len(chosen.task.labels) + options.training + options.held_out
    queries = queries_that_fit(chosen, used, options.queries, 40, options.even)
    draws = draws_without_overlap(chosen.task, chosen.examples, options, queries)

    def prompts(tokenizer: Any) -> Prompts:
        built = _prompts_of([chosen] * len(draws), draws, options.batch_size, tokenizer)
        if options.other_tokens:
            check_other_tokens(built["queries"][0])
        return built

    def ask(model: Any, batches: Prompts, options: Contexts, chosen: Tasks) -> Iterator[Found]:
        rows = options.out / task / "rows"
        with planned(steps_of_parts(batches, options)):
            trained = trained_contexts(model, batches, options, rows)
            factors = reweighted(model, batches, options, rows)
            compared = {**UNTRAINED, "re-weighted": factors, **trained}
            options.output.note(f"{task}, {queries} queries, {len(compared)} contexts")
            question = ContextComparison(compared, draws=options.draws)
            asked: dict[str, list[Question]] = {COMPARED: [question, Accuracy()]}
            if options.other_tokens:
                asked[OTHER_TOKENS] = [other_tokens(options.draws)]
            answers, progress = dict[str, Any](), not options.quiet
            for name, questions in asked.items():
                of_question = rows / questions[0].name
                with step(name):
                    answers |= answer(
                        model, batches["queries"], questions, folder=of_question, progress=progress
                    )
        records = {questions[0].name: answers[questions[0].name] for questions in asked.values()}
        texts = texts_of(trained)
        for name, text in texts.items():
            options.output.note(f"{name}: {text!r}")
        after, shown = _flows_next(options, chosen[0], [options.seed]), training_records(trained)
        found = _found(task, after, records, answers | shown, {"texts": texts})
        yield found._replace(files={**records, **trained})

    title = "What can stand before a query"
    names = "|".join(map(file_name, ("contexts", OTHER_TOKENS, *TRAINED)))
    return Asked(
        options, [chosen], queries, [task], names, prompts, ask, title, length=options.length
    )


def _flows_next(
    options: Contexts | Faithfulness | Across, chosen: ChosenTask, seeds: list[int], **changes: Any
) -> str:
    """What to try next: the flows of the task, with the command."""
    shared = {each.name: getattr(options, each.name) for each in fields(OfTask)}
    of_run = Run(**shared | {"out": Run.out} | changes, shots=options.shots, seed=seeds)
    return f"the flows of the task:\n  {chosen.command('run', of_run, options.out)}"


def _found(
    task: str,
    after: str,
    records: Mapping[str, Any],
    results: Mapping[str, Record],
    values: dict[str, Any],
) -> Found:
    """What is found in records, with a table of each; all results give the answer."""
    tables = [_table_of(f"{task}, {name}", record) for name, record in records.items()]
    numbers: dict[str, Any] = {file_name(name): entries_in(each) for name, each in records.items()}
    return Found(task, _answer(results, after), tables, numbers | values, results, records)


def _answer(records: Mapping[str, Record], after: str) -> Answer:
    """What the records of a command say first, and what to try next."""
    found = answer_of(records.values(), [])
    assert found is not None
    return replace(found, next=after)


def faithfulness(options: Faithfulness) -> Asked:
    written, chosen, output = documents_of(options), list[ChosenTask](), options.output
    compared: dict[str, Any] = {"subsets": options.subsets, "top": options.top}
    documents = list[str]()
    prompts: Callable[[Any], Prompts]
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
    scores.check_sizes(segments, options.subsets, options.top)
    if segments < scores.FEWEST:
        shots = "--shots 2 gives two demonstrations of each class"
        output.note(
            f"there are {segments} segments, and a rank correlation (LDS) needs {scores.FEWEST}: "
            f"only drops are computed; {shots if chosen else 'give more documents'}"
        )

    def ask(model: Any, batches: Prompts, options: Faithfulness, chosen: Tasks) -> Iterator[Found]:
        of_documents: dict[str, Any] = {}
        if written:
            of_documents = {"segments": documents, "answer": ANSWER}
            texts, batches = _with_answers(model, written, batches, options)
        remove = removal.text if options.remove_text else removal.edges
        asked = scores.Faithfulness(**compared, **of_documents, remove=remove)
        questions, rows = [asked, *([Accuracy()] if chosen else [])], options.out / name / "rows"
        answers = answer(model, batches[name], questions, folder=rows, progress=not options.quiet)
        of_run = command_of("run", "YOURS.csv", "--model", options.model)
        after = f"the flows of a task of your own:\n  {of_run}"
        if chosen:
            after = _flows_next(options, chosen[0], options.seed)
        values = {"answers": texts} if written else {}
        values["rests_on"] = answers[asked.name].rests_on().reset_index().to_dict("records")
        yield _found(name, after, {asked.name: answers[asked.name]}, answers, values)

    title = "What scores of segments are worth"
    return Asked(options, chosen, queries, [name], "faithfulness", prompts, ask, title)


def _with_answers(
    model: Any, written: Sequence[Pieces], batches: Prompts, options: Faithfulness
) -> tuple[list[str], Prompts]:
    """The answers to questions with documents, which else the model writes, and their prompts."""
    if written[0][-1][0] == ANSWER:
        return [pieces[-1][1] for pieces in written], batches
    texts = [_written_answer(model, pieces) for pieces in written]
    options.output.note(
        f"the model writes the answers, which are then explained: {texts[0]!r}, ..."
    )
    whole = [[*pieces, (ANSWER, text)] for pieces, text in zip(written, texts, strict=True)]
    return texts, _segments(whole, options.batch_size, model.tokenizer)


def _written_answer(model: Any, pieces: Pieces) -> str:
    """What the model writes after a prompt: its likeliest tokens, up to the end of the line."""
    [prompt] = build_segments(model.tokenizer, [pieces])
    tokens, _ = written_tokens(model, prompt, LONGEST_WRITTEN, 0, {})
    before, text = (model.tokenizer.decode(each[0].tolist()) for each in (prompt.tokens, tokens))
    answer, _, _ = text[len(before) :].partition("\n")
    if not answer.strip():
        raise PromptError(f"the model writes no answer after {pieces[-1][1]!r}; give answers")
    return answer


def across(options: Across) -> Asked:
    [chosen] = chosen_tasks(options.task and [options.task], options, options.shots)
    name, queries, draws = _drawn_for(chosen, options, 100)
    prompts = partial(_prompts_of, [chosen], {name: draws}, options.batch_size)

    def ask(model: None, batches: Prompts, options: Across, chosen: Tasks) -> Iterator[Found]:
        record = across_models(
            options.model,
            lambda tokenizer: prompts(tokenizer)[name],
            device=options.device,
            dtype=dtype_wanted(options),
            **options.of_analysis,
            gradient_checkpointing=options.gradient_checkpointing,
            keep=lambda record: record.save(options.out / "claims.safetensors"),
            folder=options.out / "rows",
            progress=not options.quiet,
        )
        after = _flows_next(options, chosen[0], options.seed, model=options.model[0])
        found, values = _answer({"claims": record}, after), record.to_frame().to_dict("records")
        tables = [_table_of(TITLE, record)]
        yield Found(name, found, tables, {"claims": values}, {"claims": record})
        if record.number.isnan().all():
            raise ModelError("no model could be analysed; the table says why")

    title = f"The paper's claims in {len(options.model)} models"
    return Asked(options, [chosen], queries, [""], "claims", prompts, ask, title)


def _drawn_for(chosen: ChosenTask, options: Any, most: int) -> tuple[str, int, list[Draw]]:
    """The name of a task, the number of queries, and the draw of each seed."""
    shots, even = options.shots, options.even
    used = shots * len(chosen.task.labels)
    queries = queries_that_fit(chosen, used, options.queries, most, even)
    draws = draws_of(chosen.task, chosen.examples, shots, queries, options.seed, even)
    return chosen.name, queries, draws


def _segments(written: Sequence[Pieces], batch_size: int, tokenizer: Any) -> Prompts:
    return {"documents": build_segments(tokenizer, written, batch_size=batch_size)}


def _table_of(title: str, record: Any) -> Section:
    frame = record.table()
    return Section(f"{title} [95 % intervals]", frame.by_row(), corner=frame.index.name)


def _prompts_of(
    chosen: Tasks, draws: Mapping[str, Sequence[Draw]], batch_size: int, tokenizer: Any
) -> Prompts:
    """The prompts of draws by name; each is of the chosen task at its place."""
    prompts = {}
    for each, (name, drawn) in zip(chosen, draws.items(), strict=True):
        task = each.for_tokenizer(tokenizer).task
        of_task = [draw._replace(task=task) for draw in drawn]
        prompts[name] = prompts_of_draws(tokenizer, of_task, batch_size, each.processor)
    return prompts
