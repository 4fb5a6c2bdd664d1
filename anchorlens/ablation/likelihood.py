"""How likely the answer of each prompt is with only some segments of the prompt.

y = log p - log(1 - p), in float64, where p is the probability of the whole answer: the product of
p_t over its tokens, each after the earlier ones. From the log-odds o_t of the tokens,
y = -log sum_t exp(-o_t) / (p_1 ... p_(t-1)), whose terms are all above 0, so that it is exact
also where p is 0 or 1 in float64. For one token y = o_1, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import MetricError
from ..metrics.accuracy import predicted_class
from ..metrics.question import Further, HooksOfBatch
from ..models.hooked import Hook, HookedModel, check_fits, dtype_of
from ..passes.forward import unedited
from ..passes.losses import before_segment
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_prompts
from ..prompts.positions import NamedSegments, SegmentsOfBatch
from ..prompts.random_edges import draw_generator
from ..runs.passes import Passes
from ..runs.study import require_batches
from ..system.arguments import called
from ..system.devices import in_float64
from ..system.processes import is_main
from ..system.rounding import rounding_of
from ..system.texts import described, name_of
from ..system.warn import warn_user
from .removal import Removal
from .subsets import DrawSubsets

_LOGITS = 8  # of logits that are computed at a time, because all in float64 may not fit into memory


class Likelihood(NamedTuple):
    """How likely the whole answer of each prompt is; NaN for another answer."""

    log_odds: Float[Tensor, "batch *subset"]  # log p - log(1 - p)
    log_prob: Float[Tensor, "batch *subset"]  # log p, the sum over its tokens


@dataclass(frozen=True, eq=False)
class Ablation:
    """Which segments are removed, how, and what is measured."""

    segments: NamedSegments
    answer: str | None  # the segment of a written answer; None for the predicted label word
    remove: Removal

    @classmethod
    def of(
        cls,
        batches: Sequence[PromptBatch],
        segments: SegmentsOfBatch | None,
        answer: str | None,
        remove: Removal,
    ) -> "Ablation":
        """The segments that were asked for, or demonstrations, or all but the answer."""
        require_batches(batches)
        if segments is None and batches[0].has_label_words:
            segments = edges.each_demonstration(batches[0])
            counts = {batch.label_ends.shape[1] for batch in batches}
            if len(counts) > 1:
                raise MetricError(
                    "every prompt must have equally many demonstrations, which are the segments; "
                    f"got {sorted(counts)}; run them apart, or give segments"
                )
        elif segments is None:
            segments = [name for name in batches[0].segment_names if name != answer]
        return cls(NamedSegments.of(batches[0], segments), answer, remove)

    def check(self, model: HookedModel, batches: Sequence[PromptBatch]) -> None:
        """Raise an error if answer, segments or removal do not fit the prompts; no model runs."""
        for batch in batches:
            if self.answer is None and not batch.has_label_words:
                raise MetricError(
                    "these prompts have no label words: name the answer's segment, "
                    f"answer={batch.segment_names[-1]!r}"
                )
            predicting = self.predicting(batch)
            tokens = predicting if self.answer is None else edges.segment(batch, self.answer)
            wrong = ~tokens.any(1) | (tokens.sum(1) > predicting.sum(1))
            if wrong.any():
                raise MetricError(
                    f"the answer, segment {self.answer!r}, is empty in prompt "
                    f"{int(batch.index[wrong][0])}, or holds its first token, which is predicted "
                    "from nothing; leave it out, or write a text before the answer"
                )
            removable = self.removable(batch)
            late = (removable * batch.positions).amax(-1) > predicting.long().argmax(1)[:, None]
            wrong = late | ~removable.any(-1)
            if wrong.any():
                row, number = wrong.nonzero()[0].tolist()
                empty = "is empty, but for the token at which the answer is predicted, which stays"
                after = "goes on after the answer has begun, and what follows it changes nothing"
                raise MetricError(
                    f"segment {self.segments.names[number]!r} of prompt "
                    f"{int(batch.index[row])} {after if late[row, number] else empty}; segments "
                    "need tokens in each prompt, all before the answer (segments=)"
                )
            for removed in (removable[:, 0], removable.any(1)):
                changed, hooks = self.changed(model, batch, removed)
                if changed is batch and not hooks:
                    raise MetricError(
                        f"remove={name_of(self.remove)} removes nothing: it returned the given "
                        "batch without hooks; return another batch, or hooks"
                    )

    def further(self, model: HookedModel) -> Further:
        """Passes such as the one with the first segment removed; ``check`` comes before it."""
        kept = torch.arange(len(self.segments.names), device="cpu") > 0
        return Further(hooks=[partial(self.hooks_of, model, kept)])

    def predicting(self, batch: PromptBatch) -> edges.Positions:
        """The positions at which the tokens of the answer are predicted."""
        if self.answer is None:
            return edges.target(batch)
        return before_segment(batch, self.answer)

    def removable(self, batch: PromptBatch) -> Bool[Tensor, "batch segment position"]:
        """The tokens of each segment without those at which the answer is predicted."""
        return self.segments.positions(batch) & ~self.predicting(batch)[:, None]

    def removed(self, batch: PromptBatch, kept: Bool[Tensor, "_ segment"]) -> edges.Positions:
        """The tokens of the segments that are not kept, by prompt or by one row for all."""
        return (self.removable(batch) & ~kept[..., None]).any(1)

    def hooks_of(
        self, model: HookedModel, kept: Bool[Tensor, " segment"], batch: PromptBatch
    ) -> Sequence[Hook]:
        """The hooks of a removal from every prompt."""
        changed, hooks = self.changed(model, batch, self.removed(batch, kept[None]))
        return hooks if changed is batch else ()

    def changed(
        self, model: HookedModel, batch: PromptBatch, removed: edges.Positions
    ) -> tuple[PromptBatch, Sequence[Hook]]:
        """What the removal gives; an error if it gives something else than prompts and hooks."""
        owner, of_prompts = f"remove={name_of(self.remove)}", (batch.tokens, batch.attention_mask)
        with unedited(owner, "tokens that it was given", *of_prompts, removed):
            names = "(model, batch, removed)"
            given: Any = called("remove", self.remove, names, model, batch, removed)
        is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Sequence)
        if not is_pair or not isinstance(given[0], PromptBatch):
            raise MetricError(
                f"remove={name_of(self.remove)} must return the batch that runs and a list of "
                f"hooks, as al.removal.edges does; got {described(given)}"
            )
        changed, hooks = given
        if changed is batch:
            return changed, hooks
        check_prompts(changed.whole())
        check_fits(model, changed.whole())
        are_same = torch.equal(changed.index, batch.index)
        if not are_same or self.tokens(changed) != self.tokens(batch):
            raise MetricError(
                f"{owner} must keep the prompts (index) and the tokens of their answers, but "
                "returned others"
            )
        return changed, hooks

    def tokens(self, batch: PromptBatch) -> list[list[int]]:
        """The tokens of the written answer of each prompt; none for label words."""
        if self.answer is None:
            return []
        answer = self.predicting(batch).roll(1, dims=1)
        return [row[inside].tolist() for row, inside in zip(batch.tokens, answer, strict=True)]


@dataclass(frozen=True, eq=False)
class Answers:
    """The answer of each prompt of a batch, and how likely it is with some segments only."""

    ablation: Ablation
    passes: Passes
    batch: PromptBatch
    tokens: Sequence[Sequence[int]]  # of the answer, by prompt
    is_given: Bool[Tensor, " batch"]  # whether the model gives this answer
    clean: Likelihood
    rounding: Float[Tensor, " batch"]  # by how much equal log-odds may differ
    _known: dict[bytes, Likelihood] = field(default_factory=dict)  # by what is kept of each prompt

    @classmethod
    def of(cls, ablation: Ablation, passes: Passes, batch: PromptBatch) -> "Answers":
        """The clean run of a batch."""
        share = rounding_of(dtype_of(passes.model))
        if ablation.answer is None:
            rows = list(passes.clean(batch)[:, None])
            tokens = predicted_words(batch, torch.cat(rows))
            is_given = torch.ones(len(batch), dtype=torch.bool, device="cpu")
        else:
            rows = passes.logits_at(batch, ablation.predicting(batch))
            tokens = ablation.tokens(batch)
            pairs = zip(rows, tokens, strict=True)
            is_given = torch.tensor([are_likeliest(*pair, share) for pair in pairs], device="cpu")
        clean = _outcome(rows, tokens, is_given)
        # Each token's log-odds are off by as much as the logits, and y by no more than their sum.
        sizes = [float(logits.abs().max()) * len(logits) for logits in rows]
        rounding = share * torch.tensor(sizes, device="cpu").double()
        return cls(ablation, passes, batch, tokens, is_given, clean, rounding)

    def of_kept(self, kept: Bool[Tensor, "batch segment"]) -> Likelihood:
        """How likely the answers are with the kept segments only; all of them are the clean run."""
        if kept.all() or not self.is_given.any():
            return self.clean
        ablation, batch, passes = self.ablation, self.batch, self.passes
        changed, hooks = ablation.changed(passes.model, batch, ablation.removed(batch, kept))
        acting: HooksOfBatch = lambda _: hooks  # noqa: E731
        key = None
        if changed is batch and (kept == kept[0]).all():
            acting = partial(ablation.hooks_of, passes.model, kept[0])
            key = tuple(kept[0].tolist())
        if ablation.answer is None and changed is batch:
            rows = list(passes.logits(batch, acting, key)[:, None])
        else:  # whole prompts, also where they are new ones
            rows = passes.logits_at(changed, ablation.predicting(changed), acting)
        return _outcome(rows, self.tokens, self.is_given)

    def of_subsets(self, subsets: Bool[Tensor, "batch subset segment"]) -> Likelihood:
        """The same for several subsets, [batch, subset]; one that repeats runs once."""
        outcomes = []
        for kept in subsets.unbind(1):
            key = kept.numpy().tobytes()
            if key not in self._known:
                self._known[key] = self.of_kept(kept)
            outcomes.append(self._known[key])
        return Likelihood(*(torch.stack(each, dim=1) for each in zip(*outcomes, strict=True)))

    @property
    def count(self) -> int:
        """How many passes there were: the clean one, and one for each removal."""
        return 1 + sum(0 in kept for kept in self._known)


def subsets_of(
    draw: DrawSubsets, batch: PromptBatch, segments: int, seed: int
) -> Bool[Tensor, "batch subset segment"]:
    """The subsets of each prompt, the same after the same demonstrations."""
    numbers = batch.demonstrations_id.tolist()
    of_sets = {each: draw(segments, draw_generator(seed, each)) for each in set(numbers)}
    return torch.stack([of_sets[number] for number in numbers])


def info_of_answers(ablation: Ablation, is_given: Bool[Tensor, " prompt"]) -> dict[str, Any]:
    """What a record says of the answers; a warning if some are not what the model gives."""
    info: dict[str, Any] = {"answer": ablation.answer, "remove": name_of(ablation.remove)}
    if is_given.all():
        return info
    count = f"{int((~is_given).sum())} of {len(is_given)} prompts"
    reason = f"the model does not give the answer {ablation.answer!r} of {count}"
    if not is_given.any():
        raise MetricError(
            f"{reason}: some token of it is not the likeliest, so that scores would explain what "
            "the model does not say; let it write the answers"
        )
    if is_main():
        warn_user(f"{reason}, which count for nothing (NaN): some token is not the likeliest there")
    return info | {"left_out": reason}


def are_likeliest(
    logits: Float[Tensor, "token vocab"], tokens: Sequence[int], rounding: float
) -> bool:
    """Whether no other token is likelier by more than rounding, which depends on the batch."""
    given = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    likeliest = logits.amax(1, keepdim=True)
    return bool((given >= likeliest - rounding * likeliest.abs()).all())


def log_odds_of(
    logits: Float[Tensor, "token vocab"], tokens: Sequence[int]
) -> Float[Tensor, " token"]:
    """log p - log(1 - p) of a token in each row, in float64; exact also where p is near 0 or 1."""
    odds = []
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    for rows, of_rows in zip(logits.split(_LOGITS), ids.split(_LOGITS), strict=True):
        exact = in_float64(rows)
        at = of_rows.to(exact.device)
        odds.append(exact.gather(1, at)[:, 0] - exact.scatter(1, at, -torch.inf).logsumexp(1))
    return torch.cat(odds)


def _outcome(
    rows: Sequence[Float[Tensor, "_ vocab"]],
    tokens: Sequence[Sequence[int]],
    is_given: Bool[Tensor, " batch"],
) -> Likelihood:
    of_prompts = []
    for logits, ids in zip(rows, tokens, strict=True):
        odds = log_odds_of(logits, ids)
        log_p = logsigmoid(odds)
        y = -(log_p - log_p.cumsum(0) - odds).logsumexp(0)
        of_prompts.append(torch.stack([y, log_p.sum()]))
    values = torch.stack(of_prompts).cpu().masked_fill(~is_given[:, None], torch.nan)
    return Likelihood(*values.unbind(1))


def predicted_words(batch: PromptBatch, logits: Float[Tensor, "batch vocab"]) -> list[list[int]]:
    """The first token of the label word that the model predicts; the likeliest of its class."""
    verbalizer = batch.verbalizer
    assert verbalizer is not None
    classes = predicted_class(batch.label_scores(logits)).tolist()
    words = [verbalizer.token_ids[k] for k in classes]
    pairs = zip(words, logits, strict=True)
    return [[ids[int(of_prompt[list(ids)].argmax())]] for ids, of_prompt in pairs]
