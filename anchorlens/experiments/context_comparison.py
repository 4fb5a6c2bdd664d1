"""Contexts compared: what stands before a query, what it gives, and what it costs."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..contexts.context import refuse_another_model
from ..contexts.query_pass import Context, QueryPass, bos_of, is_context
from ..contexts.training import query_digests
from ..errors import MetricError, ModelError, PromptError
from ..metrics.aucroc import predicted_class
from ..metrics.loyalty import NextTokens, loyalty_contributions, next_tokens
from ..models.hooked import HookedModel, device_of, hooks_by_layer, pattern_name
from ..passes.forward import run_pass
from ..passes.shared_prefix import only_set
from ..prompts.batch import PromptBatch
from ..results import captions, figures
from ..results.contributions import Contributions
from ..results.record import Record, require_gold
from ..runs.study import Study
from ..system.arguments import checked
from ..system.processes import gather_from_processes

MakeContext = Callable[[HookedModel, PromptBatch], Context]


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextsRecord(Record):
    """What several contexts give and cost, on the same queries; ``info["contexts"]`` names them.

    Attributes:
        accuracy: Share of queries whose predicted label is true, from 0 to 1; high is good.
        whole_accuracy: Accuracy of whole prompts, that is of the demonstrations.
        gain_over_first: Accuracy minus that of the first context, paired by query, from -1 to 1;
            above 0 means better than the first context.
        gain_over_demonstrations: Accuracy minus that of whole prompts, paired by query, from -1 to
            1; below 0 means that the demonstrations do more.
        label_loyalty: Share of queries whose predicted label is that of the whole prompt, from 0 to
            1; high means that the context predicts as the demonstrations do.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens to those of the whole prompt,
            from 0 to 1; high as above.
        kl: Mean KL(whole prompt || context) of the next token, in nats, from 0 up; low means
            similar.
        bytes_stored: Bytes of the stored keys and values, mean over sets of demonstrations.
        seconds: Seconds a query takes after the context, which was made before.
        stolen: Part of the target's attention that goes to the context, without BOS, as a mean over
            layers and heads. It is from 0 to 1; where label words are re-weighted it can be more.
        stolen_by_layer: The same in each layer, as a mean over heads.
        correct: 1 for each query whose predicted label is true, else 0.
    """

    accuracy: Float[Tensor, " context"]
    whole_accuracy: Float[Tensor, ""]
    gain_over_first: Float[Tensor, " context"]
    gain_over_demonstrations: Float[Tensor, " context"]
    label_loyalty: Float[Tensor, " context"]
    word_loyalty: Float[Tensor, " context"]
    kl: Float[Tensor, " context"]
    bytes_stored: Float[Tensor, " context"]
    seconds: Float[Tensor, " context"]
    stolen: Float[Tensor, " context"]
    stolen_by_layer: Float[Tensor, "context layer"]
    correct: Float[Tensor, "prompt context"]

    caption: ClassVar[str] = captions.CONTEXTS
    differences: ClassVar[Collection[str]] = ("gain_over_first", "gain_over_demonstrations")
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "word_loyalty": (0.0, 1.0),
        "kl": (0.0, inf),
    }
    without_intervals: ClassVar[Collection[str]] = ("seconds",)

    def proportions(self) -> Mapping[str, int]:
        """Shares of queries."""
        return dict.fromkeys(("accuracy", "whole_accuracy", "label_loyalty"), 1)

    @checked
    def axis_names(self, axis: str) -> Sequence[str] | None:
        """The contexts by name."""
        return self.info["contexts"] if axis == "context" else super().axis_names(axis)

    def table(self) -> pd.DataFrame:
        """The main numbers as text, with intervals: a row for each context."""

        def texts(name: str, form: str = ".2f") -> list[str]:
            return [format(self.estimate(name, k), form) for k in range(len(self.accuracy))]

        kilobytes, milliseconds = self.bytes_stored / 1000, 1000 * self.seconds
        columns = {
            "accuracy": texts("accuracy"),
            "gain over the first": texts("gain_over_first", "+.2f"),
            "gain over demonstrations": texts("gain_over_demonstrations", "+.2f"),
            "label loyalty": texts("label_loyalty"),
            "word loyalty": texts("word_loyalty"),
            "KL in nats": texts("kl"),
            "KB stored": [f"{value:.0f}" for value in kilobytes.tolist()],
            "ms a query": [f"{value:.1f}" for value in milliseconds.tolist()],
            "stolen attention": texts("stolen"),
        }
        return pd.DataFrame(columns, index=pd.Index(self.info["contexts"], name="context"))

    def plot(self) -> go.Figure:
        """Accuracy, loyalties and stolen attention of each context, as bars with intervals."""
        names = ("accuracy", "label_loyalty", "word_loyalty", "stolen")
        values = torch.stack([getattr(self, name) for name in names], dim=1)
        known = [self.intervals[name] for name in names if name in self.intervals]
        low, high = torch.stack(known, dim=2) if known else (None, None)
        return figures.grouped_bars(
            values,
            self.info["contexts"],
            ["accuracy", "label loyalty", "word loyalty", "stolen attention"],
            title=f"Contexts; accuracy of the demonstrations is {float(self.whole_accuracy):.2f}",
            y_title="share",
            low=low,
            high=high,
        )


@checked
def compare_contexts(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    contexts: Mapping[str, Context | MakeContext],
    *,
    repeats: int = 5,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> ContextsRecord:
    """Answer the same queries after several contexts, and compare what these give and cost.

    Each context answers in place of the demonstrations of the prompts. Loyalty is to the whole
    prompts. The times are those of the pass over the queries of one batch, of middle length: the
    contexts take turns, and each time is the median over ``repeats``.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts`` with their true labels, not used in training.
        contexts: What stands before the queries, by name: a context, or a function of the model and
            a batch to one, such as ``al.compress``. A function is called once for each set of
            demonstrations. Accuracies are compared with that of the first.
        repeats: Number of timed passes of each context, after one that is not timed.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed; the same call after an interruption continues
            from there. Times are measured again.
        progress: Show a progress bar.

    Returns:
        Accuracy, gains, loyalties, KL, bytes, times and stolen attention of each context.

    Raises:
        PromptError: There are no contexts, a name is no text, a value is neither a context nor a
            function that gives one, a context was trained on queries of the prompts, or it does not
            fit the prompts.
        ModelError: A context was made with another model.
        MetricError: The prompts have no true labels, or ``repeats`` is below 1.
        StoreError: The folder is of another run.

    Examples:
        >>> contexts = {"none": al.NoContext(), "anchors only": al.compress}
        >>> record = al.compare_contexts(model, batches, contexts, progress=False)
        >>> record.table().index.to_list()
        ['none', 'anchors only']
        >>> bool(record.bytes_stored[1] > 0)
        True
    """
    _check_contexts(contexts)
    if repeats < 1:
        raise MetricError(f"repeats must be a whole number from 1; got {repeats}")
    settings: dict[str, Any] = {"experiment": "contexts", "contexts": list(contexts)}
    settings |= {f"context {name}": context for name, context in contexts.items()}
    with Study(
        model,
        batches,
        settings,
        folder=folder,
        resamples=resamples,
        progress=progress,
        title="contexts",
    ).entered() as study:
        _check_prompts(model, study.batches, contexts)
        digests = set(query_digests(study.batches))
        plan = study.plan()
        contexts_of_set: dict[int | None, list[Context]] = {}

        def contexts_for(batch: PromptBatch) -> list[Context]:
            name = only_set(batch)
            if name not in contexts_of_set:
                contexts_of_set.clear()  # memory holds the contexts of a single set
                contexts_of_set[name] = _made(model, batch, contexts, digests)
            return contexts_of_set[name]

        def contributions_of(batch: PromptBatch) -> dict[str, Tensor]:
            return _rows(model, batch, plan.logits(batch), contexts_for(batch))

        contributions = study.collect(contributions_of)
        timed = _of_middle_length(study.batches).to(device_of(model))
        passes = [context.query_pass(model, timed) for context in contexts_for(timed)]
        seconds = gather_from_processes("times", _seconds_a_query(model, passes, repeats))[0]
        info = {"contexts": list(contexts), "timed_batch": len(timed), "repeats": repeats}
        info["shared_prefix"] = plan.status
        record = study.record(partial(_record, seconds=seconds), contributions, info)
        for bounds in record.intervals.get("gain_over_first", ()):
            bounds[0] = 0  # the first context's gain over itself
        return record


def _check_contexts(contexts: Mapping[str, Context | MakeContext]) -> None:
    if not contexts:
        raise PromptError(
            "contexts are given by name, {'none': al.NoContext(), 'anchors only': al.compress}; "
            "got none"
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


def _check_prompts(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    contexts: Mapping[str, Context | MakeContext],
) -> None:
    """Raise an error for prompts that a context cannot answer, before the model runs."""
    digests = set(query_digests(batches))
    for batch in batches:
        require_gold(batch.gold, "accuracy")
    for name, context in contexts.items():
        if not is_context(context):
            if any(only_set(batch) is None for batch in batches):
                raise PromptError(
                    f"{name!r} makes a context for each set of demonstrations, but a batch has "
                    "several; call build_prompts for each set and join the lists"
                )
            continue
        with _named(name):
            if "weights" in getattr(context, "info", {}):
                refuse_another_model(model, context.info)  # type: ignore[attr-defined]
            _refuse_training_queries(context, digests)
            for batch in batches:
                context.query_pass(model, batch)


def _refuse_training_queries(context: Context, digests: Collection[int]) -> None:
    trained_on = getattr(context, "info", {}).get("queries_in_training", ())
    if both := set(trained_on) & set(digests):
        raise PromptError(
            f"{len(both)} of these queries were used to train or to choose it, so that its "
            "accuracy would be too high; compare contexts on other queries"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the name of a context before an error that it raises."""
    try:
        yield
    except (ModelError, PromptError) as error:
        raise type(error)(f"the context {name!r}: {error}") from error


def _made(
    model: HookedModel,
    batch: PromptBatch,
    contexts: Mapping[str, Context | MakeContext],
    digests: Collection[int],
) -> list[Context]:
    """All contexts for the demonstrations of a batch."""
    made: list[Context] = []
    for name, given in contexts.items():
        context: Any = given if is_context(given) else given(model, batch)  # type: ignore[operator]
        if not is_context(context):
            raise PromptError(
                f"the function of {name!r} must return a context, which has size, query_pass and "
                f"logits; it returned a {type(context).__name__}"
            )
        with _named(name):
            _refuse_training_queries(context, digests)
        made.append(context)
    return made


def _rows(
    model: HookedModel,
    batch: PromptBatch,
    whole_logits: Float[Tensor, "batch vocab"],
    contexts: Sequence[Context],
) -> dict[str, Tensor]:
    """What each query contributes: every context, compared with the whole prompt."""
    whole = next_tokens(whole_logits, batch.label_scores(whole_logits))
    of_contexts = [_rows_of_context(model, batch, whole, context) for context in contexts]
    return {
        **{
            name: torch.stack([values[name] for values in of_contexts], 1)
            for name in of_contexts[0]
        },
        "whole_correct": _correct(whole_logits, batch),
    }


def _rows_of_context(
    model: HookedModel, batch: PromptBatch, whole: NextTokens, context: Context
) -> dict[str, Tensor]:
    query_pass = context.query_pass(model, batch)
    queries = query_pass.batch
    in_context = _keys_of_context(queries, batch)
    prompts = torch.arange(len(batch), device="cpu")
    stolen: list[Tensor] = []

    def observe(layer: int, pattern: Float[Tensor, "batch head query key"]) -> None:
        at_target = pattern[prompts, :, queries.target_rows.cpu()].detach().cpu().double()
        stolen.append((at_target * in_context[:, None]).sum(-1).mean(1))

    logits = run_pass(
        model,
        queries,
        hooks=query_pass.hooks,
        observers=hooks_by_layer(model, pattern_name, observe),
        prefix=query_pass.prefix,
    )
    return {
        **loyalty_contributions(whole, next_tokens(logits, batch.label_scores(logits))),
        "correct": _correct(logits, batch),
        "bytes_stored": torch.full(
            (len(batch),), float(context.size), dtype=torch.double, device="cpu"
        ),
        "stolen": torch.stack(stolen, dim=1),
    }


def _keys_of_context(queries: PromptBatch, batch: PromptBatch) -> Bool[Tensor, "batch key"]:
    """The keys of the context before each query, without a BOS, which no context needs."""
    positions = torch.arange(queries.tokens.shape[1], device=queries.tokens.device)
    before = queries.attention_mask & (positions < queries.query_start[:, None])
    bos = bos_of(batch).to(positions.device)
    if len(bos):
        before &= (positions > 0) | (queries.tokens != bos)
    return before.cpu()


def _correct(logits: Float[Tensor, "batch vocab"], batch: PromptBatch) -> Float[Tensor, " batch"]:
    gold = require_gold(batch.gold, "accuracy")
    return (predicted_class(batch.label_scores(logits)) == gold).cpu().double()


def _of_middle_length(batches: Sequence[PromptBatch]) -> PromptBatch:
    return sorted(batches, key=lambda batch: batch.tokens.shape[1])[len(batches) // 2]


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


def _record(contributions: Contributions, seconds: Float[Tensor, " context"]) -> ContextsRecord:
    accuracy, whole = contributions["correct"].mean(0), contributions["whole_correct"].mean()
    by_layer = contributions["stolen"].mean(0)
    return ContextsRecord(
        accuracy=accuracy,
        whole_accuracy=whole,
        gain_over_first=accuracy - accuracy[0],
        gain_over_demonstrations=accuracy - whole,
        label_loyalty=contributions["label_kept"].mean(0),
        word_loyalty=contributions["word_overlap"].mean(0),
        kl=contributions["kl"].mean(0),
        bytes_stored=contributions["bytes_stored"].mean(0),
        seconds=seconds,
        stolen=by_layer.mean(1),
        stolen_by_layer=by_layer,
        correct=contributions["correct"],
    )
