"""Which positions of the demonstrations a compressed context stores.

A selection is a function from the demonstrations, as a batch of one prompt, to these positions.
Your own functions work as those here. What must ask the model is a ``ByScore``.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from ..errors import MetricError, PromptError
from ..metrics.reads import Block, Blocks, Reads, Seen
from ..models.hooked import Hook, HookedModel, check_fits
from ..models.kv_cache import KeyValues
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_prefix
from ..passes.provide import Observation
from ..prompts.batch import PromptBatch
from ..prompts.random_edges import draw_generator
from ..prompts.segment_names import FORMAT, LABEL, OTHER, SEGMENTS, TEXT
from ..system.arguments import called, checked
from ..system.devices import holds_numbers, wide
from ..system.texts import InOneLine, described, name_of
from .protocol import demonstrations_of, selected_by

Selection = Callable[[PromptBatch], Bool[Tensor, " position"]]
Keep = Selection | int | float
ScoreName = Literal["small keys", "large values", "heavy hitters", "most read"]
SCORE_NAMES: tuple[ScoreName, ...] = get_args(ScoreName)
ONE_SET = "one set for all layers and heads"  # in the names of what is selected by a score


@checked
def everything(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """All positions: the whole demonstrations as a cached prefix."""
    return demonstrations.attention_mask[0]


@checked
def anchors_and_format(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """BOS, instructions, and every template, separator and label token (Hidden_anchor)."""
    return _in_segments(demonstrations, OTHER, LABEL, FORMAT)


@checked
def label_words(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """BOS, instructions and the label words.

    Examples:
        >>> context = al.compress(model, batch, select=al.contexts.selection.label_words)
    """
    return _in_segments(demonstrations, OTHER, LABEL)


@checked
def random_and_format(seed: int) -> Selection:
    """The control of ``anchors_and_format`` (Hidden_random).

    In place of each label word it selects as many random text tokens of the same demonstration as
    the word has; a PromptError if there are fewer. The draw depends on ``seed`` and demonstrations.

    Examples:
        >>> context = al.compress(model, batch, al.contexts.selection.random_and_format(seed=0))
    """

    def select(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
        selected = _in_segments(demonstrations, OTHER, FORMAT)
        generator = draw_generator(seed, int(demonstrations.demonstrations_id[0]))
        texts = (demonstrations.segments[0] == TEXT).nonzero().flatten()
        begin, ends = 0, demonstrations.label_ends[0].tolist()
        for first, last in zip(demonstrations.label_positions[0].tolist(), ends, strict=True):
            candidates = texts[(texts >= begin) & (texts < first)]
            count, begin = last - first + 1, last + 1
            if len(candidates) < count:
                raise PromptError(
                    f"the demonstration before position {first} has {len(candidates)} text tokens "
                    f"to replace {count} of its label word; use longer demonstrations"
                )
            order = torch.randperm(len(candidates), generator=generator, device="cpu")
            selected[candidates[order[:count]]] = True
        return selected

    return select


@checked
@dataclass(frozen=True, eq=False)
class ByScore(InOneLine):
    """The positions with the highest score in one pass over the demonstrations.

    The score is a mean over layers and heads: there is **one set for all of them**. Of equal scores
    the lower position is stored. BOS and instructions always are, and count.

    Attributes:
        score: Function of keys and values (``al.contexts.KeyValues``) and of what was read
            (``al.reads.Seen``) to finite scores, whose last axis is the position.
        keep: How many positions: those of another selection, a whole number, or a share.
        reads: Function of the demonstrations to what is read besides, as in a metric; no gradient.
        last: So many of the last positions are always stored too.
        name: What ``info["scored"]`` of the context names.

    Raises:
        PromptError: ``keep`` or scores do not fit, or label words and format are not known.
        MetricError: It reads a gradient.

    Examples:
        >>> score = lambda cache, seen: cache.keys[1].norm(dim=-1)
        >>> context = al.compress(model, batch, al.contexts.selection.ByScore(score, keep=60))
    """

    score: Callable[[KeyValues, Seen], Float[Tensor, "*axes position"]]
    keep: Keep = anchors_and_format
    _: KW_ONLY
    reads: Callable[[PromptBatch], Reads] = lambda demonstrations: {}
    last: int = 0
    name: str = "own score"

    @checked
    def budget(self, demonstrations: PromptBatch) -> tuple[int, Bool[Tensor, " position"]]:
        """How many positions are stored, and which always are; it asks no model."""
        return _budget(demonstrations_of(demonstrations), self.keep, self.last)

    @checked
    def of(
        self, model: HookedModel, demonstrations: PromptBatch, hooks: Sequence[Hook] = ()
    ) -> Bool[Tensor, " position"]:
        """The selected positions of a batch's demonstrations, in a pass with these hooks."""
        shared = demonstrations_of(demonstrations)
        count, always = self.budget(shared)
        length = len(always)
        ensure_prepared(model)
        check_fits(model, shared)
        observed = Observation(model, self, shared)
        observed.check()
        if observed.needs_gradient:
            raise MetricError(f"{self.name} reads a gradient, but demonstrations have no loss")
        with frozen_in_eval_mode(model):
            cache = run_prefix(model, shared, hooks=hooks, observers=observed.hooks)
        seen = observed.seen(torch.empty(1, 0, dtype=torch.float32, device="cpu"), None)
        scores = called("score", self.score, "keys and values, and what was read", cache, seen)
        fits = holds_numbers(scores) and scores.numel() and scores.shape[-1:] == (length,)
        if not fits or not scores.isfinite().all():
            raise PromptError(
                f"score must give finite numbers with the {length} positions of demonstrations as "
                f"last axis; {self.name} gave {described(scores)}"
            )
        mean = scores.detach().cpu().double().reshape(-1, length).mean(0)
        return _highest(mean, count, always)


@checked
def by_score(score: ScoreName, keep: Keep = anchors_and_format, *, window: int = 8) -> ByScore:
    r"""The positions of the highest score, by a formula of other methods, and not as they do it.

    These methods store a set for each head, and some drop tokens after each new one. Here one set
    is chosen for all layers and heads, once, after n tokens of demonstrations:

    - ``small keys``: $-\lVert k_j \rVert_2$ (2406.11430; ``KnormPress`` of kvpress);
    - ``large values``: $\lVert v_j \rVert_2$; this plain score is ours;
    - ``heavy hitters``: what j and later positions read of it, $\sum_{i \ge j} A_{ij} / (n - j)$
      (``ObservedAttentionPress``). H2O (2306.14048) does not divide, and half of its budget are the
      last tokens (``dataclasses.replace``: ``score=lambda cache, seen: seen["received"][0]``,
      ``last=32`` of 64);
    - ``most read``: the mean $A_{ij}$ of the last ``window`` tokens, which are always stored,
      averaged over the 5 positions around j. SnapKV (2404.14469; ``SnapKVPress``, window 64) has
      the question for its window, here it is the end of the demonstrations.

    Examples:
        >>> context = al.compress(model, batch, al.contexts.selection.by_score("small keys"))
    """
    if window < 1:
        raise PromptError(f"window must be a number of tokens from 1; got {window}")
    asked: dict[str, Any] = {
        "small keys": {"score": lambda cache, seen: -_norms(cache.keys)},
        "large values": {"score": lambda cache, seen: _norms(cache.values)},
        "heavy hitters": {"score": _of_each_row, "reads": partial(_received, None)},
        "most read": {"score": partial(_smoothed, window), "reads": partial(_received, window)},
    }
    last = window if score == "most read" else 0
    return ByScore(**asked[score], keep=keep, last=last, name=score)


@checked
def random_tokens(seed: int, keep: Keep = anchors_and_format) -> Selection:
    """Random tokens of any segment: the control of scores, which asks no model.

    Examples:
        >>> control = al.contexts.selection.random_tokens
        >>> asked = al.ContextComparison({"anchors only": al.compress}, draws=20, control=control)
    """

    def select(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
        count, always = _budget(demonstrations, keep)
        generator = draw_generator(seed, int(demonstrations.demonstrations_id[0]))
        scores = torch.rand(len(always), generator=generator, dtype=torch.float32, device="cpu")
        return _highest(scores, count, always)

    return select


def _norms(entries: Sequence[Tensor]) -> Float[Tensor, "layer position"]:
    return torch.stack([wide(each).norm(dim=-1).mean((0, 1)).cpu() for each in entries])


def _of_each_row(cache: KeyValues, seen: Seen) -> Float[Tensor, "layer position"]:
    """What a row that can read a position reads of it, as a mean."""
    return seen["received"][0] / torch.arange(len(cache), 0, -1, device="cpu")


def _smoothed(window: int, cache: KeyValues, seen: Seen) -> Float[Tensor, "layer position"]:
    """What the last rows read around each position before them, as a mean."""
    before = seen["received"][0, :, :-window] / window
    return functional.pad(functional.avg_pool1d(before, 5, 1, padding=2), (0, window))


def _received(window: int | None, demonstrations: PromptBatch) -> Reads:
    """What the last rows, by default all, read of each position: a sum, as a mean over heads."""
    first = 0 if window is None else demonstrations.tokens.shape[1] - window

    def received(block: Block) -> Tensor:
        return block.pattern[:, :, max(0, first - block.rows.start) :].sum(2).mean(1)

    return {"received": Blocks(received)}


def _budget(batch: PromptBatch, keep: Keep, last: int = 0) -> tuple[int, Bool[Tensor, " position"]]:
    """How many positions are stored, and which always are."""
    length = batch.tokens.shape[1]
    if callable(keep):
        count = int(selected_by("keep", keep, batch).sum())
    else:
        count = keep if isinstance(keep, int) else round(keep * length) if 0 < keep <= 1 else 0
    positions = torch.arange(length, device="cpu")
    is_bos = (positions == 0) & batch.begins_with_bos
    first = batch.segments[0] == OTHER if _has_texts(batch) else is_bos
    always = first | (positions >= length - last)
    least = max(1, int(always.sum()))
    if not 0 <= last < length or not least <= count <= length:
        raise PromptError(
            f"keep must be from {least} (BOS, instructions and the last {last} are always stored) "
            f"to {length}, the positions of the demonstrations, or a share above 0 and up to 1; a "
            f"window must be shorter; got keep={name_of(keep) if callable(keep) else keep}, that "
            f"is {count} positions"
        )
    return count, always


def _highest(
    scores: Float[Tensor, " position"], count: int, always: Bool[Tensor, " position"]
) -> Bool[Tensor, " position"]:
    order = scores.masked_fill(always, torch.inf).argsort(descending=True, stable=True)
    return torch.zeros_like(always).index_fill(0, order[:count], True)


def _has_texts(demonstrations: PromptBatch) -> bool:
    """Whether it is known which tokens are texts of demonstrations."""
    is_text = demonstrations.segments == TEXT
    return demonstrations.segment_names == SEGMENTS and bool(is_text.any())


def _in_segments(demonstrations: PromptBatch, *segments: int) -> Bool[Tensor, " position"]:
    if not _has_texts(demonstrations):
        raise PromptError(
            "it is not known which tokens of these prompts are texts and which are format; build "
            "them with build_prompts, or pass your own select; by score, a number such as keep=64"
        )
    return torch.isin(demonstrations.segments[0], torch.tensor(segments, device="cpu"))
