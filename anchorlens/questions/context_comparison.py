"""Contexts compared: what stands before a query, what it gives, and what it costs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import product
from math import nan
from statistics import median
from typing import Any, ClassVar

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..contexts.compressed import checked_selections, compressed_contexts
from ..contexts.placement import Placement, as_in_prompt
from ..contexts.protocol import (
    Context,
    QueryPass,
    bos_of,
    info_of,
    is_context,
    query_pass_of,
    refuse_another_model,
)
from ..contexts.selection import ByScore, Selection, random_and_format
from ..contexts.training import query_digests
from ..errors import MetricError, ModelError, PromptError
from ..metrics.accuracy import predicted_class, require_gold
from ..metrics.loyalties import loyalty_contributions, next_tokens
from ..metrics.question import Question
from ..models.hooked import HookedModel, hooks_by_layer, pattern_name
from ..passes.forward import run_pass
from ..prompts.batch import PromptBatch, only_set
from ..results import figures
from ..results.answer import Answer, cannot_tell, listed, speaks_of
from ..results.contributions import Contributions
from ..results.estimate import in_digits
from ..results.kinds import (
    derived,
    difference,
    mean,
    of_prompts,
    over_draws,
    share,
    statistic,
    table,
)
from ..results.record import Record
from ..results.text_frame import TextFrame
from ..runs.passes import Passes
from ..system.arguments import check_counts, checked, fitted
from ..system.processes import gather_from_processes
from ..system.rounding import rounding_of
from ..system.texts import name_of

MakeContext = Callable[[HookedModel, PromptBatch], Context]
# What each query contributes, after a context and after each random control.
_OF_QUERIES = ("label_kept", "word_overlap", "kl", "correct")


def _best_draw(of_set: Contributions) -> int | None:
    """The random control with the best label loyalty, of equal ones the first."""
    loyalties = of_set["random_label_kept"].mean(0).tolist()
    return loyalties.index(max(loyalties)) if loyalties else None


def _of_best_draw(name: str, of_set: Contributions) -> Float[Tensor, ""]:
    best, values = of_set.once(_best_draw), of_set[name]
    return values.new_full((), nan) if best is None else values.mean(0)[best]


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextsRecord(Record):
    """What several contexts give and cost, on the same queries; ``info["contexts"]`` names them.

    Random controls are given or drawn (``info["control"]``); without any, theirs are NaN or empty.

    Attributes:
        accuracy: Share of queries whose predicted label is true, from 0 to 1; high is good.
        whole_accuracy: Accuracy of whole prompts, that is of the demonstrations.
        gain_over_first: Accuracy minus that of the first context, paired by query, from -1 to 1.
        gain_over_demonstrations: The same minus that of whole prompts; below 0 these do more.
        gain_over_random: The same minus the mean of the random controls; above 0: it is these
            tokens that do it, and not that there are some.
        label_loyalty: Share of queries whose predicted label is that of the whole prompt, from 0 to
            1; high: the context predicts as the demonstrations do.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens to the whole prompt's.
        kl: Mean KL(whole prompt || context) of the next token, in nats, from 0 up; low: similar.
        bytes_stored: Bytes of the stored keys and values, mean over sets of demonstrations.
        seconds: Seconds a query takes after the context, which was made before; NaN if not timed.
        whole_seconds: The same with the whole prompt; over ``seconds`` it is Table 3's speed-up.
        stolen: Part of the target's attention that goes to the context, without BOS, mean over
            layers and heads, from 0 to 1; it can be more where label words are re-weighted.
        stolen_by_layer: The same in each layer, as a mean over heads.
        random_accuracy: Accuracy of each random control.
        random_label_loyalty: Label loyalty of each random control.
        random_word_loyalty: Word loyalty of each random control.
        random_kl: KL of each random control.
        top_accuracy: Accuracy of the control with the best label loyalty in each set (in all
            prompts, where sets are pooled), chosen on the same prompts (Table 2).
        top_label_loyalty: Label loyalty of this control.
        top_word_loyalty: Word loyalty of this control.
        label_gap: label_loyalty minus the mean of the controls, paired by query, from -1 to 1;
            above 0: the label words in particular carry what is needed.
        word_gap: The same for word loyalty.
        correct: 1 for each query whose predicted label is true, else 0.
        label_kept: The same for the predicted label of the whole prompt.
        word_overlap: Jaccard similarity of each query.
    """

    accuracy: Float[Tensor, " context"] = share("correct")
    whole_accuracy: Float[Tensor, ""] = share("whole_correct")
    gain_over_first: Float[Tensor, " context"] = difference("correct", minus=0)
    gain_over_demonstrations: Float[Tensor, " context"] = difference("correct", "whole_correct")
    gain_over_random: Float[Tensor, " context"] = mean(
        "correct", -1, 1, minus=over_draws("random_correct")
    )
    label_loyalty: Float[Tensor, " context"] = share("label_kept")
    word_loyalty: Float[Tensor, " context"] = mean("word_overlap", 0, 1)
    kl: Float[Tensor, " context"] = mean("kl", 0, unit="nats")
    bytes_stored: Float[Tensor, " context"] = mean("bytes_stored", unit="bytes")
    seconds: Float[Tensor, " context"] = table(unit="s")
    whole_seconds: Float[Tensor, ""] = table(unit="s")
    stolen: Float[Tensor, " context"] = derived(lambda record: record.stolen_by_layer.mean(1))
    stolen_by_layer: Float[Tensor, "context layer"] = mean("stolen")
    random_accuracy: Float[Tensor, " draw"] = share("random_correct")
    random_label_loyalty: Float[Tensor, " draw"] = share("random_label_kept")
    random_word_loyalty: Float[Tensor, " draw"] = mean("random_word_overlap", 0, 1)
    random_kl: Float[Tensor, " draw"] = mean("random_kl", 0, unit="nats")
    # The best of the draws is no mean over them: its interval is for these draws.
    top_accuracy: Float[Tensor, ""] = statistic(partial(_of_best_draw, "random_correct"))
    top_label_loyalty: Float[Tensor, ""] = statistic(partial(_of_best_draw, "random_label_kept"))
    top_word_loyalty: Float[Tensor, ""] = statistic(
        partial(_of_best_draw, "random_word_overlap"), 0, 1
    )
    label_gap: Float[Tensor, " context"] = difference("label_kept", over_draws("random_label_kept"))
    word_gap: Float[Tensor, " context"] = mean(
        "word_overlap", -1, 1, minus=over_draws("random_word_overlap")
    )
    correct: Float[Tensor, "prompt context"] = of_prompts("correct")
    label_kept: Float[Tensor, "prompt context"] = of_prompts("label_kept")
    word_overlap: Float[Tensor, "prompt context"] = of_prompts("word_overlap")

    caption: ClassVar[str] = (
        "The same queries after each context. Loyalty: to the answers from whole prompts, which "
        "have no point there. Stolen attention, in the table: the part of the target's attention "
        "that goes to the context, without BOS, mean over layers and heads. Random controls, if "
        "drawn, are as many random words or tokens: a high point beside low ones of theirs says "
        "that the chosen tokens in particular carry what is needed. In the paper (GPT2-XL) 79 % of "
        "the labels stay with label words and format alone, and 49 % with random words."
    )
    names_in_info: ClassVar[Mapping[str, str]] = {"context": "contexts"}

    @property
    def _names_of_draws(self) -> list[str]:
        control = str(self.info.get("control", "random control")).replace("_", " ")
        return [f"{control}, mean of draws", f"{control}, best draw"]

    def table(self) -> TextFrame:
        """The main numbers with intervals: a row for each context, then mean and best controls."""

        def texts(name: str) -> list[str]:
            contexts = range(len(self.accuracy))
            return [self._known(name, k) or str(self.estimate(name, k)) for k in contexts]

        def texts_of_draws(name: str) -> list[str]:
            if f"random_{name}" not in self.axes() or f"top_{name}" not in self.axes():
                return ["", ""]
            return [in_digits(getattr(self, of + name).mean()) for of in ("random_", "top_")]

        kilobytes, milliseconds = self.bytes_stored / 1000, 1000 * self.seconds
        columns = {
            "accuracy": texts("accuracy"),
            "gain over the first": texts("gain_over_first"),
            "gain over demonstrations": texts("gain_over_demonstrations"),
            "label loyalty": texts("label_loyalty"),
            "word loyalty": texts("word_loyalty"),
            "KL in nats": texts("kl"),
            "KB stored": [f"{value:.0f}" for value in kilobytes.tolist()],
            "ms a query": [f"{t:.1f}" if t == t else "not timed" for t in milliseconds.tolist()],
            "stolen attention": texts("stolen"),
        }
        if self.seconds.isnan().all():
            del columns["ms a query"]
        names = list(self.info["contexts"])
        if len(self.random_accuracy):
            columns["gain over random"] = texts("gain_over_random")
            columns["label gap"] = texts("label_gap")
            columns["word gap"] = texts("word_gap")
            names += self._names_of_draws
            for column, cells in columns.items():
                cells += texts_of_draws(column.replace(" ", "_"))
        return TextFrame(columns, index=pd.Index(names, name="context"))

    @checked
    def answer(self, unable: str) -> Answer:
        """What answers as many queries right as the demonstrations, and what fewer or more."""
        whole, names = self.estimate("whole_accuracy"), self.info["contexts"]
        limits = f"{speaks_of(self.info)} A trained context is one training, and no other."
        asked = "What can stand in place of the demonstrations?"
        if unable:
            return Answer(asked, cannot_tell(unable), limits)
        groups: dict[str, list[str]] = {"more": [], "fewer": [], "": []}
        for k, name in enumerate(names):
            gain = self.estimate("gain_over_demonstrations", k)
            if not self._is_whole(k):
                which = "more" * (gain.low > 0) or "fewer" * (gain.high < 0)
                groups[which].append(f"{name} ({gain.percent(unit='')})" if which else name)
        told = [f"After the demonstrations {whole.percent()} of the queries are answered right."]
        for which, group in groups.items():
            if group and which:
                told.append(f"In percentage points, {which} are after {listed(group)}.")
            elif group:
                told.append(f"No difference can be told after {listed(group, most=3)}.")
        return Answer(asked, " ".join(told), limits, whole)

    def _is_whole(self, context: int) -> bool:
        """Whether a context gives the same numbers as the demonstrations, as they themselves do."""
        is_same = self.word_overlap[:, context].eq(1).all() and self.label_kept[:, context].all()
        # Logits differ by rounding, and a KL by its square.
        rounding = rounding_of(getattr(torch, self.info.get("dtype", "float32")))
        return bool(is_same) and float(self.kl[context]) < rounding**2

    def _known(self, name: str, context: int) -> str:
        """A number that is known by its definition, as text; "" for others."""
        takes_nothing = name == "stolen" and not self.bytes_stored[context]
        if takes_nothing or (name == "gain_over_first" and context == 0):
            return "0"
        known = {"gain_over_demonstrations": "0", "label_loyalty": "1", "word_loyalty": "1"}
        return known.get(name, "") if self._is_whole(context) else ""

    def plot(self) -> go.Figure:
        """Accuracy after each context, and below it loyalties; random controls are small dots."""
        fields, groups = ("accuracy", "label_loyalty", "word_loyalty"), [*self.info["contexts"]]
        controls = torch.stack([getattr(self, f"random_{name}").double() for name in fields])
        groups += ["random"] * bool(controls.numel())
        shape = len(fields), len(groups)
        values, low, high = torch.full((3, *shape, 2), nan, dtype=torch.double, device="cpu")
        sizes = *shape, controls.shape[1]
        draws = torch.full(sizes, nan, dtype=torch.double, device="cpu")
        for (row, name), k in product(enumerate(fields), range(len(self.accuracy))):
            if name == "accuracy" or not self._is_whole(k):  # loyal to itself by definition
                number = self.estimate(name, k)
                values[row, k, 0], low[row, k, 0] = number.value, number.low
                high[row, k, 0] = number.high
        if controls.numel():
            values[:, -1, 1], draws[:, -1] = controls.mean(1), controls
        title = f"Contexts; accuracy of the demonstrations is {in_digits(self.whole_accuracy)}"
        panels, control = [name.replace("_", " ") for name in fields], self._names_of_draws[0]
        names = panels, groups, ("after the context", control)
        return figures.points(values, low, high, draws, *names, title=title)


@checked
@dataclass(frozen=True)
class ContextComparison(Question):
    r"""Answer the same queries after several contexts, and compare what these give and cost.

    Each context answers in place of the demonstrations of the prompts. Accuracy is compared with
    the first context and with the whole prompt, paired by query; [loyalty][anchorlens.Loyalty] is
    to the whole prompts. Times are of the pass over the queries of one batch, of middle length:
    contexts and whole prompts take turns, and each time is the median over ``repeats``. Their fair
    baseline is a cached prefix, ``al.compress`` with ``al.contexts.selection.everything``. Stolen
    attention goes to the keys P of the context, without BOS:

    $$
    \frac{1}{L H} \sum\limits_{\ell, h} \, \sum\limits_{j \in P} A_{h\ell}(q, j)
    $$

    The paper's Table 2 is this for ``al.compress`` with 20 draws, its Table 3 the times.

    Range:
        Accuracy, loyalties and stolen attention 0 to 1, gains and gaps -1 to 1, KL 0 or more.

    How to read:
        High loyalties and a low KL: the context answers as the demonstrations do, right or wrong.

    Pitfalls:
        One random draw is no control. The best of 20 (``top_``) is chosen on the prompts on which
        it is measured, so it is too good. Much stolen attention does not mean a good context.

    Source:
        The comparison is ours. Compressed contexts are section 3.2, re-weighted ones section 3.1.

    Args:
        contexts: What stands before the queries, by name: a context, or a function of the model and
            a batch to one, such as ``al.compress``, called once for each set of demonstrations.
        draws: Number of random controls: compressed contexts of random words or tokens (paper: 20).
        seed: Number of the first draw.
        control: Function of the number of a draw to a selection; see ``compress``.
        positions: Positions of the tokens of a control; see ``compress``.
        random: Controls of your own beside these, as those of ``al.contexts.hard_prompts.random``.
        repeats: Timed passes of each context in each call, after an untimed one; 0 for no times.

    Raises:
        PromptError: There are no ``contexts``, one was trained on these queries or does not fit
            them, or demonstrations are too short for a control.
        ModelError: A context was made with another model.
        MetricError: The prompts have no true labels, or ``draws`` or ``repeats`` is below 0.

    Examples:
        >>> contexts = {"none": al.contexts.NoContext(), "anchors only": al.compress}
        >>> results = al.run(model, batches, [al.ContextComparison(contexts)], progress=False)
        >>> results["contexts"].table().index.to_list()
        ['none', 'anchors only']
    """

    contexts: Mapping[str, Context | MakeContext]
    _: KW_ONLY
    draws: int = 0
    seed: int = 0
    control: Callable[[int], Selection | ByScore] = random_and_format
    positions: Placement = as_in_prompt
    random: Sequence[Context] = ()
    repeats: int = 5
    name: str = "contexts"
    record: ClassVar = ContextsRecord

    def __post_init__(self) -> None:
        _check_contexts(self.contexts)
        if self.random:
            _check_contexts(self._random)
        check_counts(MetricError, 0, draws=self.draws, repeats=self.repeats)

    @property
    def _random(self) -> dict[str, Context]:
        return {f"random control {number}": each for number, each in enumerate(self.random)}

    def stored_as(self) -> Any:
        """Without the number of timed passes, as times are measured again by each call."""
        return replace(self, repeats=0, seed=self.seed if self.draws else 0)

    def of_run(self, model: HookedModel, batches: Sequence[PromptBatch]) -> Question:
        """With the contexts of each set of demonstrations, made when they are needed."""
        digests = set(query_digests(batches))
        for batch in batches:
            require_gold(batch.gold, "accuracy")
        for name, context in {**self.contexts, **self._random}.items():
            if is_context(context):
                _check_fits(model, name, context, batches, digests)
            elif any(only_set(batch) is None for batch in batches):
                raise PromptError(
                    f"{name!r} makes a context for each set of demonstrations, but a batch has "
                    "several; call build_prompts for each set and join the lists"
                )
        controls = [self.control(number) for number in range(self.seed, self.seed + self.draws)]
        for batch in batches if controls else ():
            checked_selections(controls, batch, model)
        return _Comparison(self.name, self, controls, digests)

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """As it is asked of the model and the prompts of the run."""
        return self.of_run(passes.model, passes.batches).of_batch(passes, batch)


@dataclass(frozen=True, eq=False)
class _Comparison(Question):
    """The question as it is asked of a model and its prompts."""

    name: str
    given: ContextComparison
    controls: Sequence[Selection | ByScore]
    digests: set[int]  # of the queries
    # Contexts and random controls of a set of demonstrations; memory holds those of a single set.
    stored: dict[int | None, tuple[list[Context], Sequence[Context]]] = field(default_factory=dict)
    record: ClassVar = ContextsRecord

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        model = passes.model
        contexts, controls = self.contexts_for(model, batch)
        gold, whole_logits = require_gold(batch.gold, "accuracy"), passes.clean(batch)
        whole = next_tokens(whole_logits, batch.label_scores(whole_logits))

        def correct(scores: Tensor) -> Float[Tensor, " batch"]:
            return (predicted_class(scores.cpu()) == gold).double()

        def of_logits(logits: Tensor) -> dict[str, Tensor]:
            scores = batch.label_scores(logits)
            loyalties = loyalty_contributions(whole, next_tokens(logits, scores))
            return loyalties | {"correct": correct(scores)}

        collected: dict[str, list[Tensor]] = {f"random_{name}": [] for name in _OF_QUERIES}
        for context in contexts:
            bytes_stored = fitted(f"size of {type(context).__name__}", context.size, float)
            size = torch.full((len(batch),), bytes_stored, dtype=torch.double, device="cpu")
            logits, stolen = _logits_and_stolen(model, batch, query_pass_of(context, model, batch))
            numbers = of_logits(logits) | {"bytes_stored": size, "stolen": stolen}
            for name, values in numbers.items():
                collected.setdefault(name, []).append(values)
        for control in controls:
            numbers = of_logits(query_pass_of(control, model, batch).logits(model))
            for name in _OF_QUERIES:
                collected[f"random_{name}"].append(numbers[name])
        none = torch.zeros(len(batch), 0, dtype=torch.double, device="cpu")
        stacked = {name: torch.stack(all_, 1) if all_ else none for name, all_ in collected.items()}
        return stacked | {"whole_correct": correct(batch.label_scores(whole_logits))}

    def contexts_for(
        self, model: HookedModel, batch: PromptBatch
    ) -> tuple[list[Context], Sequence[Context]]:
        """The contexts, and the random controls, of the demonstrations of a batch."""
        set_id, given = only_set(batch), self.given
        if set_id not in self.stored:
            self.stored.clear()
            made = [_make(model, batch, *each, self.digests) for each in given.contexts.items()]
            drawn = [*given.random]
            if self.controls:
                drawn += compressed_contexts(model, batch, self.controls, positions=given.positions)
            self.stored[set_id] = made, drawn
        return self.stored[set_id]

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        given, model = self.given, passes.model
        seconds = torch.full((1 + len(given.contexts),), nan, dtype=torch.double, device="cpu")
        info: dict[str, Any] = {"contexts": list(given.contexts)}
        if given.repeats:
            by_length = sorted(passes.batches, key=lambda batch: batch.tokens.shape[1])
            timed = by_length[len(by_length) // 2]
            contexts, _ = self.contexts_for(model, timed)
            runs = [query_pass_of(context, model, timed) for context in contexts]
            runs.insert(0, QueryPass(timed, None))  # the whole prompts
            measured = _seconds_a_query(model, runs, given.repeats)
            seconds = gather_from_processes("times", measured)[0]
            info |= {"timed_batch": len(timed), "repeats": given.repeats}
        if self.controls:
            info |= {"control": name_of(given.control), "positions": name_of(given.positions)}
            info |= {"seed": given.seed}
        return {"info": info, "seconds": seconds[1:], "whole_seconds": seconds[0]}

    def result(self, contributions: Contributions, **seconds: Tensor) -> ContextsRecord:
        return ContextsRecord.of(contributions, **seconds)


def _check_contexts(contexts: Mapping[str, Context | MakeContext]) -> None:
    if not contexts:
        raise PromptError(
            "contexts are given by name, such as {'anchors only': al.compress}; got none"
        )
    for name, context in contexts.items():
        if not name.strip():
            raise PromptError(f"the name of a context must not be blank; got {name!r}")
        if isinstance(context, type) or not (is_context(context) or callable(context)):
            got = f"the class {context.__name__}" if isinstance(context, type) else repr(context)
            raise PromptError(
                f"{name!r} must be a context, which has size, query_pass and logits, or a function "
                f"of (model, batch) to one; got {got}"
            )


def _check_fits(
    model: HookedModel,
    name: str,
    context: Context,
    batches: Sequence[PromptBatch],
    digests: set[int],
) -> None:
    """Raise an error for prompts that a context cannot answer, before the model runs."""
    try:
        refuse_another_model(model, context)
        if both := digests.intersection(info_of(context).get("queries_in_training", ())):
            raise PromptError(
                f"{len(both)} of these queries were used to train or to choose it, so that its "
                "accuracy would be too high; compare on other queries"
            )
        for batch in batches:
            query_pass_of(context, model, batch)
    except (ModelError, PromptError) as error:
        raise type(error)(f"the context {name!r}: {error}") from error


def _make(
    model: HookedModel,
    batch: PromptBatch,
    name: str,
    given: Context | MakeContext,
    digests: set[int],
) -> Context:
    if is_context(given):
        return given
    made: Any = given(model, batch)  # type: ignore[operator]
    context: Context = fitted(f"what the function of {name!r} returns", made, Context)
    _check_fits(model, name, context, (), digests)
    return context


def _logits_and_stolen(
    model: HookedModel, batch: PromptBatch, query_pass: QueryPass
) -> tuple[Float[Tensor, "batch vocab"], Float[Tensor, "batch layer"]]:
    """The logits after a context, and the part of the targets' attention that goes to it."""
    queries = query_pass.batch
    in_context = queries.attention_mask & ~queries.from_query
    bos = bos_of(batch)
    if len(bos):  # no context needs a BOS
        in_context &= (queries.positions > 0) | (queries.tokens != bos)
    keys = in_context[:, None]
    prompts, targets = torch.arange(len(batch), device="cpu"), queries.target_rows
    stolen: list[Tensor] = []

    def observe(layer: int, pattern: Float[Tensor, "batch head query key"]) -> None:
        at_target = pattern[prompts, :, targets].detach().cpu().double()
        stolen.append((at_target * keys).sum(-1).mean(1))

    logits = run_pass(
        model,
        queries,
        hooks=query_pass.hooks,
        observers=hooks_by_layer(model, pattern_name, observe),
        prefix=query_pass.prefix,
    )
    return logits, torch.stack(stolen, dim=1)


def _seconds_a_query(
    model: HookedModel, passes: Sequence[QueryPass], repeats: int
) -> Float[Tensor, " context"]:
    """Median time of each pass for a query; the passes take turns."""
    seconds: list[list[float]] = [[] for _ in passes]
    for query_pass in passes:  # warmed up
        query_pass.logits(model)
    for _ in range(repeats):
        for query_pass, times in zip(passes, seconds, strict=True):
            begin = time.perf_counter()
            query_pass.logits(model).sum().item()  # waits for the device
            times.append((time.perf_counter() - begin) / len(query_pass.batch))
    return torch.tensor([median(times) for times in seconds], dtype=torch.double, device="cpu")
