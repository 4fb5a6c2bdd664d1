"""``paper``: the paper's figures and tables for a model, as the records of questions.

1. Draw demonstrations, training examples and queries of each task and seed, and check them.
2. Ask the questions of each part, of the prompts of all seeds.
3. A part that fails is in the error at the end, which has the records of all others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from jaxtyping import Int
from torch import Tensor

from ..contexts.compressed import compress
from ..contexts.hard_prompt import after_tokens
from ..contexts.protocol import Context, demonstrations_of
from ..contexts.reweighted import train_reweighting
from ..contexts.selection import everything, label_words
from ..contexts.training import Training
from ..errors import AnchorlensError, DataError, HookError, PromptError, RunError, StoreError
from ..experiments.analysis import analyse, depth_of
from ..experiments.diagnosis import diagnose
from ..hooks import reweight_anchors
from ..metrics.accuracy import Accuracy, compare_accuracies
from ..metrics.distances import AnchorDistances
from ..metrics.question import HooksOfBatch, Question
from ..models.hooked import HookedModel, attention_layers
from ..models.load import ensure_prepared
from ..prompts.batch import PromptBatch, only_set
from ..prompts.build import build_prompts, text_anchor_prompts
from ..prompts.demonstration_sets import demonstrations_by_query, task_of_name
from ..prompts.examples import Example, sample_demonstrations, sample_queries
from ..prompts.tasks import Task
from ..questions.context_comparison import ContextComparison
from ..questions.edge_sweep import EdgeSweep
from ..questions.sites import first_and_last
from ..results.population import check_resamples
from ..results.record import Record, Results
from ..runs.run import run
from ..runs.study import Study, checked_batches
from ..system.arguments import check_counts, checked
from ..system.hidden_warnings import recorded_warnings, warnings_kept
from ..system.processes import fails_together, is_main
from ..system.put_back import each_call_inside
from ..system.steps import planned, step
from ..system.warn import warn_user

TRAINING = 4  # examples of each class for re-weighting
RANDOM_CONTEXTS = 20  # the paper's number of random controls in Table 2
TIMED, TIMED_PASSES = 8, 24  # queries of Table 3, and passes of each method
DEPTHS, DIRECTIONS, LETTER_SHOTS = (1, 3, 5, 7), (5, 10, 20, 50, 100, 200), 8  # of the appendix
MAIN = ("figures", "table 1", "table 2", "table 3")
APPENDIX = ("two shots", "letters as labels", "other settings")

Pools = Mapping[str, tuple[Sequence[Example], Sequence[Example]]]


@checked
@fails_together()
@each_call_inside(warnings_kept)
def paper(
    model: HookedModel,
    examples: Pools,
    *,
    tasks: Mapping[str, Task] = MappingProxyType({}),
    queries: int = 40,
    seeds: Sequence[int] = (42, 43),
    parts: Sequence[str] = MAIN,
    depth: int | None = None,
    draws: int = 10,
    random_weights: bool | None = None,
    resamples: int = 200,
    keep: Callable[[str, str, Record], Any] = lambda task, name, record: None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Results]:
    """The paper's figures and tables for a model, as records of each task over all seeds.

    Arguments that are not listed are those of ``analyse``.

    - ``figures``: the records of ``analyse`` (Figures 3 to 5) and ``diagnosis`` (Figure 6);
    - ``table 1``: ``accuracies`` with one demonstration a class ("vanilla"), with the training
      examples as further ones, as many of each class as fit ("more shots"), with label words
      re-weighted by a beta that is trained on these, and of naming the commonest class;
    - ``table 2``: ``contexts``, the loyalty to whole prompts of label words and format alone
      (Hidden_anchor), also with each demonstration cached by itself, of label words alone, of
      prompts without the demonstrations' texts (Text_anchor), and of 20 draws of random words;
    - ``table 3``: ``times`` of a query after whole and after compressed demonstrations;
    - of the appendix, each under a name of its own such as "trec (two shots)": ``two shots`` and
      ``letters as labels`` (A, B, ..., eight demonstrations a class), both as ``figures``; and
      ``other settings``, isolation in 1 to 7 layers and 5 to 200 directions of Figure 6.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        examples: By task the list for demonstrations and training, and for queries (or the same).
        tasks: Tasks of your own by these names; other names are in ``TASKS``.
        queries: Queries of each task and seed.
        seeds: Each draws demonstrations, 4 training examples a class, and queries.
        parts: What to compute, of the names above; by default all but the appendix.
        keep: Called with task, name and record after each part, in the main process.
        folder: Stores contributions and trainings; after an interruption the same call goes on.

    Returns:
        The records of each task by name. ``paper_tables`` shows them beside the paper's numbers,
        ``write_report`` draws all, and ``claims`` judges those of a task.

    Raises:
        DataError: Before anything runs: a task or part does not exist, examples are too few or
            have other classes, or seeds are equal.
        HookError: The model has fewer layers than ``depth``.
        StoreError: ``folder`` holds another run, or files cannot be written there.
        RunError: A part has no result. It is raised after all others, which are its ``results``.

    Examples:
        >>> examples = al.load_examples("questions", "train"), al.load_examples("questions", "test")
        >>> found = al.paper(model, {"questions": examples}, queries=12, seeds=[1],
        ...     parts=["table 3"], progress=False)
        >>> found["questions"]["times"].info["contexts"]
        ['cached', 'compressed']
    """
    ensure_prepared(model)
    check_counts(HookError, depth=depth, draws=draws)
    check_resamples(resamples)
    first_and_last(model, [depth_of(depth, len(attention_layers(model)))])
    known = (*MAIN, *APPENDIX)
    if not parts or len(set(parts)) < len(parts) or not set(parts) <= {*known}:
        raise DataError(f"parts are different ones of {', '.join(known)}; got {list(parts)}")
    drawn = drawn_of(examples, tasks, queries, seeds)
    steps = [*product(drawn, parts)]
    costs = {"figures": 130, "table 1": 80, "table 2": 45, "table 3": 20}  # seconds of Gemma 3 270M
    settings = {"depth": depth, "draws": draws, "random_weights": random_weights}
    options: dict[str, Any] = {"resamples": resamples, "progress": progress}
    found, failed = dict[str, Results](), dict[str, str]()
    with planned({f"{task}, {part}": costs.get(part, 130) for task, part in steps}):
        for task, part in steps:
            title = f"{task}, {part}"
            store = None if folder is None else Path(folder) / quote(task, safe=" ") / part
            asked = _PartsOfTask(model, drawn[task], settings, options, store)
            chapter, records = task if part in MAIN else f"{task} ({part})", Results()
            with step(title), recorded_warnings() as recorded:
                try:
                    with fails_together():
                        records = getattr(asked, part.replace(" ", "_"))()
                except StoreError:  # of another run, or a full disk: so it would be for all parts
                    raise
                except (AnchorlensError, torch.OutOfMemoryError) as error:
                    failed[title], records = str(error), Results(getattr(error, "results", {}))
            for text in dict.fromkeys(str(warning.message) for warning in recorded):
                warn_user(f"{title}: {text}")
            found.setdefault(chapter, Results()).update(records)
            with fails_together():
                for name, record in records.items() if is_main() else ():
                    keep(chapter, name, record)
    if failed:
        listed = "; ".join(f"{title}: {reason}" for title, reason in failed.items())
        raise RunError(f"no result, or not all, for {listed}", found)
    return found


class DrawnTask(NamedTuple):
    """What a seed draws of a task: no text of one list is in another, but for ``rest``."""

    task: Task
    demonstrations: Sequence[Example]  # one of each class
    training: Sequence[Example]  # equally many of each class
    queries: Sequence[Example]
    rest: Sequence[Example]  # the examples for demonstrations without the queries
    seed: int

    def prompts(self, model: Any, queries: Any = None, size: int = 8) -> list[PromptBatch]:
        """The prompts of the queries, or of those that are given, up to ``size`` in a batch."""
        given = self.task, self.demonstrations, self.queries if queries is None else queries
        return build_prompts(model.tokenizer, *given, batch_size=size)


def drawn_of(
    examples: Pools, tasks: Mapping[str, Task], queries: int, seeds: Sequence[int]
) -> dict[str, list[DrawnTask]]:
    """What each seed draws of each task, or an error for wrong tasks, examples or seeds."""
    directions = AnchorDistances().directions
    if queries <= directions:
        raise DataError(
            f"Figure 6 needs more queries than its {directions} directions; got {queries}"
        )
    if not examples or not seeds or len(set(seeds)) < len(seeds):
        raise DataError(
            "expected the examples of a task at least, and different seeds, at least one; got "
            f"examples of {', '.join(examples) or 'no task'}, and seeds {list(seeds)}"
        )
    drawn = dict[str, list[DrawnTask]]()
    for name, (pool, tests) in examples.items():
        task = tasks[name] if name in tasks else task_of_name(name)
        try:
            drawn[name] = [_draw(task, pool, tests, queries, seed) for seed in seeds]
        except DataError as error:
            raise DataError(
                f"{name}: {error} (a demonstration and {TRAINING} training examples of each class, "
                f"and {queries} other examples as queries)"
            ) from error
    return drawn


def _draw(
    task: Task, pool: Sequence[Example], tests: Sequence[Example], queries: int, seed: int
) -> DrawnTask:
    def without(excluded: Sequence[Example]) -> list[Example]:
        texts = {example.text for example in excluded}
        return [example for example in pool if example.text not in texts]

    demos = sample_demonstrations(pool, 1, seed)
    if len(demos) != len(task.labels):
        raise DataError(f"there are {len(task.labels)} classes, but {len(demos)} in the data")
    training = sample_demonstrations(without(demos), TRAINING, seed)
    chosen = sample_queries(tests, queries, seed, exclude=[*demos, *training])
    demonstrations_by_query(task, demos, chosen)
    return DrawnTask(task, demos, training, chosen, without(chosen), seed)


@dataclass(frozen=True)
class _PartsOfTask:
    """A task as it is asked of a model: the method of its name gives the records of a part."""

    model: HookedModel
    seeds: Sequence[DrawnTask]
    settings: Mapping[str, Any]  # of the analysis
    options: Mapping[str, Any]  # of each run
    folder: Path | None

    def prompts(self, count: int | None = None, size: int = 8) -> list[PromptBatch]:
        """The prompts of all seeds, or of the first queries of each."""
        of_seeds = [each.prompts(self.model, each.queries[:count], size) for each in self.seeds]
        return [*chain.from_iterable(of_seeds)]

    def figures(self) -> Mapping[str, Record]:
        """Figures 3 to 6."""
        given = {**self.settings, **self.options}
        records = analyse(self.model, self.prompts(), **given, folder=self.folder)
        if distances := records.get("anchor_distances"):
            records["diagnosis"] = diagnose(distances)
        return records

    def table_1(self) -> Mapping[str, Record]:
        """Accuracies of the same queries, paired over all seeds."""
        more = [_more_shots(self.model, each) for each in self.seeds]
        costs = {"training": 6 * TRAINING, "vanilla": 5, "more shots": 40, "re-weighted": 7}
        steps = product(self.seeds, costs.items())
        with planned({f"seed {each.seed}, {name}": cost for each, (name, cost) in steps}):
            of_seeds = [self._right(*each) for each in zip(self.seeds, more, strict=True)]
        correct = {name: torch.cat([each[name] for each in of_seeds]) for name in of_seeds[0]}
        sets = [torch.full_like(each["vanilla"], k).long() for k, each in enumerate(of_seeds)]
        shots = [batches[0].label_positions.shape[1] // len(batches[0].labels) for batches in more]
        with Study(self.model, self.prompts(), {}).entered() as study:
            info = study.describe() | {"more_shots": shots}
        info["seeds"], resamples = [each.seed for each in self.seeds], self.options["resamples"]
        record = compare_accuracies(correct, sets=torch.cat(sets), resamples=resamples, info=info)
        return {"accuracies": record}

    def _right(self, drawn: DrawnTask, more: list[PromptBatch]) -> dict[str, Tensor]:
        """Which queries of a seed each method gets right."""
        title, options = f"seed {drawn.seed}, {{}}".format, {**self.options, "resamples": 0}
        with step(title("training")):
            folder = self.folder and self.folder / title("training")
            training = Training(seed=drawn.seed, folder=folder, progress=options["progress"])
            steps = drawn.prompts(self.model, drawn.training, size=1)
            beta = train_reweighting(self.model, steps, training)
        batches, right = drawn.prompts(self.model), dict[str, Tensor]()
        runs: dict[str, tuple[list[PromptBatch], HooksOfBatch | None]] = {
            "vanilla": (batches, None),
            "more shots": (more, None),
            "re-weighted": (batches, lambda batch: reweight_anchors(self.model, batch, beta)),
        }
        for name, (prompts, hooks) in runs.items():
            options["folder"] = self.folder and self.folder / title(name)
            with step(title(name)):
                results = run(self.model, prompts, [Accuracy()], hooks=hooks, **options)
            right[name] = results["accuracy"].correct
        labels = [query.label for query in drawn.queries]
        is_commonest = [float(label == max(labels, key=labels.count)) for label in labels]
        return right | {
            "always the commonest class": torch.tensor(
                is_commonest, dtype=torch.float32, device="cpu"
            )
        }

    def table_2(self) -> Mapping[str, Record]:
        """What compressed demonstrations keep, beside prompts without texts, and random words."""
        contexts: dict[str, Any] = {
            "ICL": partial(compress, select=everything),
            "Hidden_anchor": compress,
            "Hidden_anchor, separately": partial(compress, separately=True),
            "label words alone": partial(compress, select=label_words),
            "Text_anchor": partial(_without_texts, dict(map(self._bare, self.seeds))),
        }
        draws: dict[str, Any] = {"draws": RANDOM_CONTEXTS, "seed": self.seeds[0].seed}
        return self._run(self.prompts(), [ContextComparison(contexts, repeats=0, **draws)])

    def _bare(self, drawn: DrawnTask) -> tuple[int | None, Tensor]:
        """The set of demonstrations of a seed, and their tokens without the texts."""
        first, tokenizer = drawn.queries[:1], self.model.tokenizer  # type: ignore[attr-defined]
        bare = text_anchor_prompts(tokenizer, drawn.task, drawn.demonstrations, first)[0]
        return only_set(drawn.prompts(self.model, first)[0]), demonstrations_of(bare).tokens[0]

    def table_3(self) -> Mapping[str, Record]:
        """The time of one query: the one of middle length of the first queries of each seed."""
        contexts: Any = {"cached": partial(compress, select=everything), "compressed": compress}
        asked = ContextComparison(contexts, repeats=TIMED_PASSES, name="times")
        return self._run(self.prompts(TIMED, size=1), [asked], resamples=0)

    def two_shots(self) -> Mapping[str, Record]:
        """Figures 3 to 6 with two demonstrations a class."""
        return self._with_shots(2).figures()

    def letters_as_labels(self) -> Mapping[str, Record]:
        """Figures 3 to 6 with A, B, ... as label words and eight demonstrations a class."""
        words = [f" {letter}" for letter in ascii_uppercase[: len(self.seeds[0].task.labels)]]
        return self._with_shots(LETTER_SHOTS, labels=words).figures()

    def _with_shots(self, shots: int, **changes: Any) -> "_PartsOfTask":
        """The same with more demonstrations, and another task."""
        changed = [
            each._replace(
                task=replace(each.task, **changes),
                demonstrations=sample_demonstrations(each.rest, shots, each.seed),
            )
            for each in self.seeds
        ]
        return replace(self, seeds=changed)

    def other_settings(self) -> Mapping[str, Record]:
        """Isolation in more and fewer layers, and Figure 6 with more and fewer directions."""
        depths = [depth for depth in DEPTHS if depth <= len(attention_layers(self.model))]
        sites, draws = first_and_last(self.model, depths), self.settings["draws"]
        counts = [count for count in DIRECTIONS if count < len(self.seeds[0].queries)]
        questions: list[Question] = [EdgeSweep.isolation(sites, draws=draws)]
        questions += [AnchorDistances(count, name=f"{count} directions") for count in counts]
        return self._run(self.prompts(), questions)

    def _run(
        self, batches: Sequence[PromptBatch], questions: Sequence[Question], **options: Any
    ) -> Results:
        options = {**self.options, **options}
        return run(self.model, batches, questions, folder=self.folder, **options)


def _without_texts(
    bare: Mapping[int | None, Int[Tensor, " position"]], model: HookedModel, batch: PromptBatch
) -> Context:
    """Text_anchor: the demonstrations of a batch without their texts, run before the query."""
    return after_tokens(model, bare[only_set(batch)], batch)


def _more_shots(model: HookedModel, drawn: DrawnTask) -> list[PromptBatch]:
    """Prompts with the training examples as demonstrations, as many of each class as fit."""
    labels = [example.label for example in drawn.training]
    for shots in range(TRAINING, 0, -1):
        first = [
            example
            for number, example in enumerate(drawn.training)
            if labels[:number].count(example.label) < shots
        ]
        longer = drawn._replace(demonstrations=[*drawn.demonstrations, *first])
        try:
            batches = longer.prompts(model)
            checked_batches(model, batches)
        except PromptError:  # too long for the tokenizer, or for the model
            continue
        return batches
    raise DataError(f"not even two demonstrations a class fit the context of {model.cfg.n_ctx}")
