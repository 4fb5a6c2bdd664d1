"""Task vectors: the state of one layer after demonstrations, written into prompts without them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..contexts.protocol import NoContext
from ..contexts.training import query_digests
from ..errors import HookError, PromptError
from ..hooks import where_written
from ..metrics.accuracy import Accuracy, predicted_class, require_gold
from ..models.batch_hooks import TargetHook
from ..models.hooked import Hook, HookedModel, check_fits, layer_numbers
from ..models.load import ensure_prepared
from ..passes.forward import run_pass
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_label_words
from ..results import figures
from ..results.figure_parts import with_ends
from ..results.kinds import difference, of_prompts, share, table
from ..results.record import Record
from ..runs.run import run
from ..runs.study import Study, checked_batches, order_of_queries
from ..system.arguments import checked
from ..system.devices import beside
from ..system.processes import fails_together
from ..system.texts import described, name_of
from .mean_states import mean_states, positions_in, warn_of_same_queries


def residual_name(layer: int) -> str:
    """Hook point of the residual stream after a layer, Float["batch position d_model"]."""
    return f"blocks.{layer}.hook_resid_post"


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskVectorsRecord(Record):
    """Task vectors of all layers, and how often the right label is predicted with each of them.

    Attributes:
        vectors: Mean residual stream after each layer, at the target or at each label word.
        accuracy: Share of prompts whose predicted label is true with the vector of a layer, from 0
            to 1; high: this state carries the task.
        unchanged: The same where nothing is written: zero-shot, for queries alone.
        demonstrations: The same after the demonstrations, which the vector replaces.
        gain: ``accuracy`` minus ``unchanged``, paired by prompt, from -1 to 1; above 0 it helps.
        correct: 1 for each prompt whose predicted label is true with the vector, else 0.
    """

    vectors: Float[Tensor, "layer anchor d_model"] = table()
    accuracy: Float[Tensor, " layer"] = share("correct")
    unchanged: Float[Tensor, ""] = share("unchanged")
    demonstrations: Float[Tensor, ""] = share("demonstrations")
    gain: Float[Tensor, " layer"] = difference("correct", "unchanged")
    correct: Float[Tensor, "prompt layer"] = of_prompts("correct")

    caption: ClassVar[str] = (
        "Share of queries whose predicted label is true, with the state after one layer of prompts "
        "with demonstrations. Dashed: nothing written, and after the demonstrations. Where the "
        "lines meet, this state carries the task."
    )

    def plot(self) -> go.Figure:
        """Accuracy with the vector of each layer, without it, and after demonstrations."""
        names = ["with the vector", str(self.info.get("written_into", "unchanged"))]
        names += ["after demonstrations"]
        return figures.lines_by_layer(
            **with_ends(self, "accuracy", "unchanged", "demonstrations"),
            names=names,
            title="Accuracy with the task vector of each layer",
            y_title="share of prompts",
            dashed=names[1:],
        )

    @checked
    def hooks(
        self,
        model: HookedModel,
        batch: PromptBatch,
        layer: int,
        positions: edges.PositionsOfBatch = edges.target,
    ) -> list[Hook]:
        """Hooks that write the vectors of a layer in place of the residual stream after it.

        ``positions`` are those of ``task_vectors``; a negative ``layer`` counts from the end.

        Raises:
            HookError: The layer does not exist, or the vectors are of another model.
            MetricError: There are not as many positions in a prompt as vectors of a layer.
            PromptError: The prompts do not fit the model.
        """
        ensure_prepared(model)
        [number] = layer_numbers(model, layer)
        check_fits(model, batch)
        expected = (model.cfg.n_layers, model.cfg.d_model)
        if (self.vectors.shape[0], self.vectors.shape[2]) != expected:
            raise HookError(
                f"vectors must have (layer, d_model) = {expected}; got {described(self.vectors)}"
            )
        chosen = positions_in(batch, positions, self.vectors.shape[1])
        return write_states(batch, chosen, self.vectors, number)


@fails_together()
@checked
def task_vectors(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    tested: Sequence[PromptBatch],
    *,
    into: Sequence[PromptBatch] | None = None,
    positions: edges.PositionsOfBatch = edges.target,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> TaskVectorsRecord:
    r"""At which depth one state carries the task: accuracy with the task vector of each layer.

    The task vector of layer l is the mean, over prompts with demonstrations and other queries, of
    the residual stream h after it at the target q,

    $$
    \theta_\ell = \underset{\text{prompts}}{\text{mean}} \; h_\ell(q) .
    $$

    It replaces h at the target of a query that stands alone, and nothing else.

    Range:
        0 to 1; gain -1 to 1.

    How to read:
        At the target, the vector works from the layer on in which the target has read the task, and
        as long as later layers still read the query; in the last layers it holds the answer to
        another query. At label words (``into``), accuracy begins at that of the demonstrations, and
        falls to that of shuffled labels where the target has read the label words.

    Pitfalls:
        The best of all layers is partly best by chance: choose it on other prompts. The mean over
        several queries mixes their answers, and a single query leaves its own. Vectors of label
        words of several sets mix classes: use one set.

    Cost:
        One pass over each batch of the mean and of ``tested``, and for each layer one over the
        queries alone (or over ``into``).

    Source:
        Hendel, Geva and Globerson, *In-Context Learning Creates Task Vectors* (EMNLP 2023 Findings,
        [arXiv 2310.15916](https://arxiv.org/abs/2310.15916)), with one dummy query. The mean over
        several, label words and intervals are ours.

    Arguments and errors that are not named here are those of ``run``.

    Args:
        batches: Prompts with demonstrations and other queries, from which vectors are read.
        tested: Prompts from ``build_prompts`` with the queries; demonstrations are for comparison.
        into: Where vectors are written: prompts with the same queries in order, such as after
            demonstrations with shuffled labels. None: the queries alone, after a BOS.
        positions: What is read and written, as many positions in each prompt: ``al.edges.target``,
            or with ``into`` also label words, ``al.edges.anchors``.
        folder: It gets the folders ``vectors``, ``demonstrations`` and ``written``.

    Raises:
        MetricError: Queries have no true labels, or ``positions`` are not as many in each prompt.
        PromptError: Prompts do not fit the model, lack label words, or ``into`` has other queries.

    Warns:
        UserWarning: A query is in ``batches`` and in ``tested``.

    Examples:
        >>> queries = al.load_examples("questions")[:3]
        >>> tested = al.build_prompts(model.tokenizer, task, demos, queries)
        >>> vectors = al.task_vectors(model, batches, tested, resamples=0, progress=False)
        >>> alone = al.contexts.NoContext().query_pass(model, batch).batch  # the query alone
        >>> hooks = vectors.hooks(model, alone, layer=1)
        >>> logits = model.run_with_hooks(alone.tokens.to(model.cfg.device), fwd_hooks=hooks)
    """
    ensure_prepared(model)
    names = ("vectors", "demonstrations", "written")
    folders = [None if folder is None else Path(folder) / name for name in names]
    settings: dict[str, Any] = {"experiment": "task vectors", "positions": positions}
    settings["into"] = "queries alone" if into is None else "prompts"
    receivers = tested if into is None else into
    study = Study(
        model, receivers, settings, folder=folders[2], resamples=resamples, progress=progress
    )
    read, answered = checked_batches(model, batches), checked_batches(model, tested)
    with study.entered():
        check_label_words([*answered, *study.batches])
        _require_same_queries(answered, study.batches)

        def prompts_of(batch: PromptBatch) -> PromptBatch:
            return NoContext().query_pass(model, batch).batch if into is None else batch

        count = int(positions_in(read[0], positions)[0].sum())
        for batch in (*read, *map(prompts_of, study.batches)):
            positions_in(batch, positions, count)
        warn_of_same_queries(read, answered)
        options: dict[str, Any] = {"folder": folders[0], "progress": progress}
        vectors = mean_states(model, batches, residual_name, positions, **options)
        options |= {"folder": folders[1], "resamples": 0}
        after_demonstrations: Any = run(model, tested, [Accuracy()], **options)["accuracy"]

        def contributions_of(batch: PromptBatch) -> dict[str, Tensor]:
            prompts, gold = prompts_of(batch), require_gold(batch.gold, "task_vectors")
            chosen = positions_in(prompts, positions)

            def correct(hooks: Sequence[Hook] = ()) -> Float[Tensor, " batch"]:
                scores = prompts.label_scores(run_pass(model, prompts, hooks=hooks))
                return (predicted_class(scores.cpu()) == gold).double()

            by_layer = [
                correct(write_states(prompts, chosen, vectors, layer))
                for layer in range(model.cfg.n_layers)
            ]
            return {"unchanged": correct(), "correct": torch.stack(by_layer, dim=1)}

        contributions = study.collect(contributions_of)
        contributions["demonstrations"] = after_demonstrations.correct
        info = {
            "written_into": "zero-shot" if into is None else "without the vector",
            "positions": name_of(positions),
            "prompts_of_mean": sum(map(len, batches)),
        }
        return study.record(partial(TaskVectorsRecord.of, vectors=vectors), contributions, info)


def write_states(
    batch: PromptBatch,
    positions: edges.Positions,
    vectors: Float[Tensor, "layer anchor d_model"],
    layer: int,
) -> list[Hook]:
    """Hooks that write the vectors of a layer at checked positions of each prompt."""
    rows, columns = where_written(batch, positions)

    def write(resid: Tensor, hook: Any) -> Tensor:
        row, column = beside(resid, rows, columns)
        changed = resid.clone()
        changed[row, column] = vectors[layer].to(resid).repeat(len(batch), 1)
        return changed

    at_target = torch.equal(columns, batch.target_rows)
    return [(residual_name(layer), TargetHook(write, batch.tokens) if at_target else write)]


def _require_same_queries(*lists: Sequence[PromptBatch]) -> None:
    """Raise an error unless the lists have the same queries, classes and label words in order."""
    keys = []
    for batches in lists:
        gold = torch.cat([require_gold(batch.gold, "task_vectors") for batch in batches])
        of_prompts = list(zip(query_digests(batches), gold.tolist(), strict=True))
        order = order_of_queries(batches).tolist()
        keys.append([batches[0].verbalizer, *(of_prompts[number] for number in order)])
    if keys[0] != keys[-1]:
        raise PromptError(
            "into must have the queries, classes and label words of tested, in the same order; "
            "build both with the same queries: build_prompts(tokenizer, "
            "*al.relabeling.relabel(...), queries)"
        )
