"""Heads that read the document that a query asks for: QRHead's score, with a null query."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import MetricError, PromptError
from ..hooks import Site
from ..metrics.accuracy import require_gold
from ..metrics.question import Metric
from ..metrics.reads import At, Reads, Seen
from ..models.hooked import HookedModel
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from ..questions.edge_sweep import EdgeSweep
from ..questions.sites import random_heads
from ..results import figures
from ..results.kinds import mean, share
from ..results.record import Record
from ..runs.passes import Passes
from ..runs.run import run
from ..runs.study import Study, checked_batches, order_of_queries
from ..system.arguments import check_counts, checked
from ..system.processes import fails_together


@dataclass(frozen=True, eq=False, kw_only=True)
class RetrievalHeadsRecord(Record):
    """How much the query reads the right documents by each head.

    Attributes:
        score: Mean score of the right documents, from -1 to 1; high: more than a null query.
        raw: Mean attention from the query to all tokens of right documents, from 0 to 1.
        found: Share of prompts in which a right document has the highest score, from 0 to 1.
    """

    score: Float[Tensor, "layer head"] = mean("score")
    raw: Float[Tensor, "layer head"] = mean("raw")
    found: Float[Tensor, "layer head"] = share("found")

    caption: ClassVar[str] = (
        "What the query reads of the right documents by each head, minus what a null query reads "
        "of them. The highest of many heads are partly highest by chance."
    )

    def plot(self) -> go.Figure:
        """The scores by layer and head."""
        title = "Heads that read the right documents"
        return figures.by_head(self.score, title, "attention above the null query")

    @checked
    def top(self, count: int = 16) -> Site:
        """The heads with the highest scores, as a site of hooks."""
        check_counts(MetricError, count=count)
        heads: dict[int, list[int]] = {}
        scores = self.score.nan_to_num(nan=-torch.inf)  # of layers without attention
        for number in scores.flatten().argsort(descending=True)[:count].tolist():
            layer, head = divmod(number, self.score.shape[1])
            heads.setdefault(layer, []).append(head)
        return Site(heads=heads)

    @checked
    def masking(
        self, top: int = 16, *, query: str = "query", draws: int = 5, seed: int = 0
    ) -> EdgeSweep:
        """The question what is lost if the query cannot read documents by the best heads.

        Ask it of other prompts than those of the scores. The control cuts the same edges in as many
        random heads of the same layers.
        """
        cut, where = partial(_to_documents, query), {f"top {top} heads": self.top(top)}
        options: dict[str, Any] = {"draws": draws, "seed": seed, "name": "retrieval_masking"}
        return EdgeSweep(cut, where, control=random_heads, **options)


@fails_together()
@checked
def retrieval_heads(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    null: Sequence[PromptBatch],
    *,
    right: Sequence[str | Sequence[str]] | None = None,
    query: str = "query",
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> RetrievalHeadsRecord:
    r"""Which heads read the document that a query asks for (QRHead's score).

    With Q the rows from the first token of the query to the target, A the attention of a head, and
    A' and Q' those of the same documents with a null query, a document D has

    $$
    s_j = \underset{i \in Q}{\text{mean}} \; A_{ij} - \underset{i \in Q'}{\text{mean}} \; A'_{ij}
    \qquad \text{score}(D) = \sum\limits_{j \in D, \; s_j > \mu - 2 \sigma} s_j ,
    $$

    with mu and sigma the mean and standard deviation (n - 1) of s over D. The head's score is the
    mean over prompts of the sum over their right documents.

    Range:
        Scores -1 to 1, ``raw`` and ``found`` 0 to 1.

    How to read:
        A head with a high score and ``found`` looks for what the query asks; ``raw`` is also high
        where a head always reads there. ``record.masking()`` asks what is lost without them.

    Pitfalls:
        The best of many heads are partly best by chance: test them on other prompts.

    Source:
        Zhang et al., *Query-Focused Retrieval Heads Improve Long-Context Reasoning and Re-ranking*
        (2025, [arXiv 2506.09944](https://arxiv.org/abs/2506.09944)) and its code, where a document
        of one token has the score 0. ``found`` and the masking are ours.

    Arguments and errors that are not named here are those of ``run``.

    Args:
        batches: Prompts of ``build_segments``, whose named segments but the query are documents, or
            of ``build_prompts``, whose demonstrations are.
        null: The same prompts in the same order with another query, such as "N/A".
        right: For each prompt the name of its right document, or several; by default the
            demonstrations of the query's class.
        query: The segment with which the query begins, in prompts of segments.

    Raises:
        PromptError: ``null`` has other documents or prompts, or a prompt has no query, right or
            other document, or one after the query.
        MetricError: Queries have no true labels. All this is raised before any pass.

    Examples:
        >>> queries = al.load_examples("questions")[-4:]
        >>> prompts = al.build_prompts(model.tokenizer, task, demos, queries)
        >>> null = al.build_prompts(model.tokenizer, task, demos, ["N/A"] * 4)
        >>> record = al.retrieval_heads(model, prompts, null, resamples=0, progress=False)
        >>> lost = al.run(model, batches, [record.masking(top=2)], resamples=0, progress=False)
    """
    given, of_null = (_in_order(checked_batches(model, each)) for each in (batches, null))
    prompts, nulls = (_alone(each) for each in (given, of_null))
    names = [None] * len(prompts) if right is None else right
    if not len(prompts) == len(nulls) == len(names):
        raise PromptError(
            f"each of {len(prompts)} prompts needs one in null, and in right if given; got "
            f"{len(nulls)} and {len(names)}"
        )
    each_one = enumerate(zip(prompts, nulls, names, strict=True))
    rights = [_right(query, *each, f"prompt {k}") for k, each in each_one]
    rows, null_rows = (max(int(_queries(query, p).sum()) for p in of) for of in (prompts, nulls))
    with Study(model, of_null, {}, resamples=0, progress=False).entered() as study:
        asked = _Heads(query, rows, of_null, rights, study.passes([_Heads(query, null_rows)]))
        options: dict[str, Any] = {"folder": folder, "resamples": resamples, "progress": progress}
        record: Any = run(model, given, [asked], **options)[asked.name]
    return record


@dataclass(frozen=True)
class _Heads(Metric):
    """The scores of prompts; without ``passes`` what the query reads."""

    query: str
    rows: int  # the most of any prompt; the last row of others is read several times
    nulls: Sequence[PromptBatch] = ()
    rights: Sequence[Bool[Tensor, " document"]] = ()
    passes: Passes | None = field(default=None, compare=False)  # over the null prompts
    _read: dict[int, Tensor] = field(default_factory=dict, compare=False)  # by nulls, until used
    name: ClassVar = "retrieval_heads"
    record: ClassVar = RetrievalHeadsRecord

    def reads(self, batch: PromptBatch) -> Reads:
        first = _queries(self.query, batch).long().argmax(1, keepdim=True)
        columns = first + torch.arange(self.rows, device="cpu")
        return {"rows": At("pattern", columns.minimum(batch.target_positions[:, None]))}

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        pairs = zip(seen["rows"], _queries(self.query, batch).sum(1).tolist(), strict=True)
        read = [of_prompt[:, :, :count].mean(2).double() for of_prompt, count in pairs]
        if self.passes is None:
            return {"read": torch.stack(read)}
        numbers = batch.index.tolist()
        of_null = list(map(self._of_null, numbers))
        prompts = [batch.prompt(k) for k in range(len(batch))]
        found = list(map(self._of_prompt, prompts, numbers, read, of_null))
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}

    def _of_null(self, number: int) -> Float[Tensor, "layer head key"]:
        """What a null query reads; its whole batch runs for the first of its prompts."""
        assert self.passes is not None
        if number not in self._read:
            [batch] = [each for each in self.nulls if number in each.index]
            read = self.passes.contributions(batch)[f"{self.name}/read"]
            self._read.update(zip(batch.index.tolist(), read, strict=True))
        return self._read.pop(number)

    def _of_prompt(
        self,
        prompt: PromptBatch,
        number: int,
        read: Float[Tensor, "layer head key"],
        null: Float[Tensor, "layer head null_key"],
    ) -> dict[str, Tensor]:
        start = int(_queries(self.query, prompt).long().argmax())
        s = read[..., :start] - null[..., :start]
        inside, right = _each_document(self.query, prompt)[1][0, :, :start], self.rights[number]
        scores = torch.stack([_score(s[..., tokens]) for tokens in inside], dim=-1)
        others = ~right & inside.any(1)
        return {
            "score": scores[..., right].sum(-1),
            "raw": read[..., :start][..., inside[right].any(0)].sum(-1),
            "found": scores[..., right].amax(-1) > scores[..., others].amax(-1),
        }


def _in_order(batches: Sequence[PromptBatch]) -> list[PromptBatch]:
    """The batches, padded at the right; their index is the place in the order of all queries."""
    places = order_of_queries(batches).argsort().split([len(batch) for batch in batches])
    return [
        replace(batch.padded_right(), index=of) for batch, of in zip(batches, places, strict=True)
    ]


def _alone(batches: Sequence[PromptBatch]) -> list[PromptBatch]:
    """The prompts, by their number, each as a batch."""
    prompts = [batch.prompt(k) for batch in batches for k in range(len(batch))]
    return sorted(prompts, key=lambda prompt: int(prompt.index))


def _queries(query: str, batch: PromptBatch) -> edges.Positions:
    """The positions from the first token of the query to the target."""
    if batch.has_label_words:
        return edges.query(batch)
    return batch.up_to_target & (edges.segment(batch, query).cumsum(1) > 0)


def _each_document(
    query: str, batch: PromptBatch
) -> tuple[list[str], Bool[Tensor, "batch document position"]]:
    """The names of the documents, and the positions of each."""
    found = {name: edges.segment(batch, name) for name in batch.segment_names if name != query}
    if batch.has_label_words:
        found = {name: of(batch) for name, of in edges.each_demonstration(batch).items()}
    return [*found], torch.stack([*found.values()], dim=1)


def _to_documents(query: str, batch: PromptBatch) -> EdgeSet:
    """All that the query reads of documents."""
    return edges.between(_queries(query, batch), _each_document(query, batch)[1].any(1))


def _score(s: Float[Tensor, "layer head token"]) -> Float[Tensor, "layer head"]:
    """The score of a document; one token has no standard deviation, and counts."""
    if s.shape[-1] > 1:
        limit = s.mean(-1, keepdim=True) - 2 * s.std(-1, keepdim=True)
        s = s.where(s > limit, 0)
    return s.sum(-1)


def _right(
    query: str,
    prompt: PromptBatch,
    null: PromptBatch,
    right: str | Sequence[str] | None,
    which: str,
) -> Bool[Tensor, " document"]:
    """Which documents of a prompt are right; an error where it has no score."""
    names, [inside] = _each_document(query, prompt)
    has, wanted = inside.any(1), {right} if isinstance(right, str) else set(right or ())
    is_right = torch.tensor([name in wanted for name in names], device="cpu")
    if right is None and prompt.has_label_words:
        is_right = prompt.label_classes[0] == require_gold(prompt.gold, "retrieval_heads")
    start, of_null = (int(_queries(query, each).long().argmax()) for each in (prompt, null))
    same = torch.equal(prompt.tokens[0, :start], null.tokens[0, :of_null])
    are_there = is_right.any() and not (is_right & ~has).any() and not wanted - {*names}
    for fits, expected in (
        (start and of_null, f"a segment {query!r} after a document, also in null"),
        (same, "in null the same tokens before the query (the query's piece begins with a space)"),
        (not inside[:, start:].any(), "no document after the query begins; name other text None"),
        (are_there, f"right documents among {names}, with tokens; got {right!r}"),
        ((has & ~is_right).any(), "a document that is not right"),
    ):
        if not fits:
            raise PromptError(f"{which} needs {expected}")
    return is_right
