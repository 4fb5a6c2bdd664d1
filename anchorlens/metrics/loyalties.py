"""How much of the model's output stays the same under a change of its attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import MetricError
from ..prompts.batch import PromptBatch, holds_integers
from ..prompts.verbalizer import Verbalizer, label_scores, tied, warn_of_ties
from ..results import figures
from ..results.contributions import Contributions
from ..results.figure_parts import with_ends
from ..results.kinds import mean, of_prompts, share
from ..results.record import Record
from ..system.arguments import checked
from ..system.devices import holds_numbers, widest
from ..system.texts import described
from .accuracy import predicted_class
from .question import Metric
from .reads import Seen


@dataclass(frozen=True, eq=False, kw_only=True)
class LoyaltyRecord(Record):
    """Loyalty of a changed run to the clean one.

    Attributes:
        label_loyalty: Share of prompts whose predicted label (without label words, the likeliest
            token) is unchanged, from 0 to 1; high means that the change matters little.
        word_loyalty: Mean Jaccard similarity of the most likely next tokens, from 0 to 1; 1 means
            that the same tokens are the most likely.
        kl: Mean KL(clean || changed) of the next-token distributions, in nats, from 0 up; low means
            that the change matters little.
        label_kept: 1 for each prompt whose label is unchanged, else 0.
        word_overlap: Jaccard similarity of each prompt.
        kl_per_prompt: KL divergence of each prompt, in nats.
    """

    label_loyalty: Float[Tensor, ""] = share("label_kept")
    word_loyalty: Float[Tensor, ""] = mean("word_overlap", 0, 1)
    kl: Float[Tensor, ""] = mean("kl", 0, unit="nats")
    label_kept: Float[Tensor, " prompt"] = of_prompts("label_kept")
    word_overlap: Float[Tensor, " prompt"] = of_prompts("word_overlap")
    kl_per_prompt: Float[Tensor, " prompt"] = of_prompts("kl")

    caption: ClassVar[str] = (
        "Label loyalty: share of predicted labels that stay in the changed run. Word loyalty: "
        "overlap (Jaccard) of the likeliest next words. Both are 1 where the change matters to "
        "no answer. In the paper they are lowest where label words are isolated in the first "
        "layers."
    )

    def plot(self) -> go.Figure:
        """Label loyalty and word loyalty as bars (the paper's Figure 4)."""
        return figures.bars(
            **with_ends(self, "label_loyalty", "word_loyalty", shaped=lambda of: of[None, :, None]),
            panels=["loyalty"],
            groups=["label loyalty", "word loyalty"],
            series=["changed run"],
            title="What the change leaves as it was",
        )


@checked
@dataclass(frozen=True)
class Loyalty(Metric):
    r"""Label loyalty, word loyalty and KL of a run with hooks against the clean run (section 2.2).

    Label loyalty is the share of prompts whose predicted label is unchanged. With T and T' the 5
    most likely next tokens of a prompt in the clean and the changed run, and p and p' the
    distributions of its next token, word loyalty and KL are the means over prompts of

    $$
    \frac{|T \cap T'|}{|T \cup T'|} \qquad \text{and} \qquad
    \text{KL}(p \,\|\, p') = \sum\limits_t p(t) \log \frac{p(t)}{p'(t)} .
    $$

    Range:
        Both loyalties 0 to 1; KL 0 or more, in nats.

    How to read:
        A high loyalty and a low KL mean that the answers are unchanged. Of word loyalty, 5 common
        words of 5 are 1, 4 are 0.67, 3 are 0.43, 1 is 0.11.

    Pitfalls:
        If a model predicts one class for every query, label loyalty says little: read word loyalty
        and KL too. A run can be loyal to wrong answers.

    Source:
        Section 2.2. The published code takes the 10 most likely words, the paper 5.

    Args:
        top: Number of most likely next tokens that word loyalty compares (the paper's 5).

    Examples:
        >>> results = al.run(model, batches, [al.Loyalty()], progress=False,
        ...     hooks=lambda batch: al.isolate_labels(model, batch, range(3)))
        >>> bool(0 <= results["loyalty"].word_loyalty <= 1)
        True
    """

    top: int = 5
    name: str = "loyalty"
    record = LoyaltyRecord

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        if not changed:
            raise MetricError(
                "loyalty compares a changed run with the clean one, but nothing changes this run; "
                "give al.run(..., hooks=lambda batch: ...), or for two passes of your own their "
                "logits to al.metrics.loyalty(reference_logits, logits, label_token_ids)"
            )

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        assert seen.clean is not None
        tokens = [tokens_of(batch, run, self.top) for run in (seen.clean, seen.logits)]
        return loyalty_contributions(*tokens)


@checked
def loyalty(
    reference_logits: Float[Tensor, "batch vocab"],
    logits: Float[Tensor, "batch vocab"],
    label_token_ids: Int[Tensor, " class"] | Verbalizer,
    *,
    top: int = 5,
) -> LoyaltyRecord:
    """Loyalty of ``logits`` to ``reference_logits``: a pure function of two runs.

    Args:
        reference_logits: Next-token logits of the clean run.
        logits: Next-token logits of the changed run, of the same prompts.
        label_token_ids: First token of each class's label word, or the ``verbalizer`` of a batch.
        top: As of ``al.Loyalty``.

    Raises:
        MetricError: The two runs have different shapes, no prompt, or fewer tokens than ``top``;
            logits are not finite; or an id is not among their tokens.

    Examples:
        >>> same = torch.eye(3, 8)
        >>> float(loyalty(same, same, torch.tensor([0, 1])).word_loyalty)
        1.0
    """
    tokens, ties = [], []
    for run in (reference_logits, logits):
        _check_run(run, label_token_ids)
        scores = label_scores(run, label_token_ids)
        tokens.append(next_tokens(run, scores, top))
        ties.append(tied(scores).cpu())
    contributions = Contributions(loyalty_contributions(*tokens))
    return LoyaltyRecord.of(contributions, info=warn_of_ties(torch.stack(ties).any(0)))


def _check_run(
    logits: Float[Tensor, "batch vocab"], label_token_ids: Int[Tensor, " class"] | Verbalizer
) -> None:
    if not holds_numbers(logits) or logits.ndim != 2 or not len(logits):
        raise MetricError(
            f"logits are of (batch, vocab), one row a prompt; got {described(logits)}"
        )
    if not logits.isfinite().all():
        raise MetricError(
            "logits must be finite, but some are NaN or infinite; al.target_logits refuses these"
        )
    ids, count = label_token_ids, logits.shape[1]
    if isinstance(ids, Verbalizer):
        ids = torch.tensor([token for row in ids.token_ids for token in row], device="cpu")
    is_row = holds_numbers(ids) and ids.ndim == 1 and 0 < len(ids) == len(set(ids.tolist()))
    if not is_row or not holds_integers(ids) or not ((ids >= 0) & (ids < count)).all():
        got = ids.tolist() if holds_numbers(ids) else described(ids)
        raise MetricError(
            f"label_token_ids must be a row of different whole numbers from 0 to {count - 1}, the "
            f"tokens of the logits, as PromptBatch.label_token_ids is; got {got}"
        )


@dataclass(frozen=True, eq=False)
class NextTokens:
    """Predictions of a run, computed once for all runs that are compared with it."""

    label: Int[Tensor, " batch"]
    top: Int[Tensor, "batch rank"]
    logits: Float[Tensor, "batch vocab"]

    @cached_property
    def log_total(self) -> Float[Tensor, " batch"]:
        """Log of the sum of exponentials: ``log p = logits - log_total``, in float64."""
        return torch.stack([row.double().logsumexp(-1) for row in self.logits])

    @cached_property
    def probs(self) -> Float[Tensor, "batch vocab"]:
        return torch.stack([row.double().softmax(-1) for row in self.logits])


def next_tokens(
    logits: Float[Tensor, "batch vocab"], label_scores: Float[Tensor, "batch class"], top: int = 5
) -> NextTokens:
    """The predicted label, the most likely tokens, and the logits that log probabilities need."""
    if not 1 <= top <= logits.shape[-1]:
        raise MetricError(
            f"`top` is from 1 to the {logits.shape[-1]} tokens of the vocabulary; got {top}"
        )
    return NextTokens(
        label=predicted_class(label_scores),
        top=logits.topk(top).indices,
        logits=logits if widest(logits.device) == torch.double else logits.cpu(),
    )


def tokens_of(batch: PromptBatch, logits: Float[Tensor, "batch vocab"], top: int = 5) -> NextTokens:
    """``next_tokens`` of prompts; without label words the likeliest token is the label."""
    scores = batch.label_scores(logits) if batch.has_label_words else logits
    return next_tokens(logits, scores, top)


def loyalty_contributions(
    reference: NextTokens, changed: NextTokens
) -> dict[str, Float[Tensor, " batch"]]:
    """What each prompt contributes to loyalty, on the CPU."""
    shapes = tuple(reference.logits.shape), tuple(changed.logits.shape)
    if shapes[0] != shapes[1]:
        got = " and ".join(map(str, shapes))
        raise MetricError(f"both runs must have the shape (batch, vocab); got {got}")
    common = (reference.top[:, :, None] == changed.top[:, None, :]).sum((1, 2))
    # Row by row: float64 copies of a batch with 262,144 tokens take longer than the sum.
    rows = zip(reference.probs, reference.logits, changed.logits, strict=True)
    differences = [p @ (before.double() - after.double()) for p, before, after in rows]
    kl = torch.stack(differences) - reference.log_total + changed.log_total
    values = (reference.label == changed.label, common, kl)
    # One copy to the CPU, because Python waits for a GPU at each.
    together = torch.stack([of_prompts.to(kl.device).to(kl.dtype) for of_prompts in values]).cpu()
    label_kept, common, kl = together.unbind()
    return {
        "label_kept": label_kept,
        "word_overlap": common / (2 * changed.top.shape[1] - common),
        "kl": kl,
    }
