"""Methods that search for hard prompts: PEZ, AutoPrompt and FluentPrompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import MetricError, PromptError
from ..models.optimizers import Adafactor as Adafactor
from ..models.optimizers import RelativeAdafactor as RelativeAdafactor
from ..prompts.batch import PromptBatch
from ..system.arguments import checked
from .training import MakeOptimizer

Noise = Callable[[int, int], float]
"""Function of a step's number and the number of steps to the standard deviation of its noise.

The unit is the root mean square of the embeddings at the start, as in ``RelativeAdafactor``.
"""


@checked
@dataclass(frozen=True)
class Langevin:
    r"""Noise that becomes smaller: ``sqrt(2 rate beta_i)``, beta from first to last geometrically.

    Attributes:
        rate: Learning rate of the ``RelativeAdafactor`` to which the noise belongs.
        first: ``beta`` of the first step.
        last: ``beta`` after the last step.

    Examples:
        >>> round(al.hard_prompts.Langevin(rate=0.5)(0, 100), 4)
        1.0
    """

    rate: float
    first: float = 1.0
    last: float = 1e-4

    def __call__(self, step: int, steps: int) -> float:
        """Standard deviation of the noise after a step, from 0."""
        beta = self.first * (self.last / self.first) ** (step / steps)
        return float((2 * self.rate * beta) ** 0.5)


@checked
@dataclass(frozen=True)
class Descent:
    """How a hard prompt is searched: steps of an optimizer on embeddings P, with projections.

    Each step takes the gradient at P', the embeddings of the tokens nearest to P. The optimizer
    applies it to P.

    Attributes:
        optimizer: Function from [P] to its optimizer.
        keep_continuous: Whether P stays where the step led. Otherwise it is projected after each
            step, so that a step too short to reach another token is lost.
        noise: Standard deviation of the normal noise that is added to P after a step, as a function
            of (step, steps), in units of the root mean square of P at the start; or None.
        fluency: Weight l of the prompt's own loss, from 0 to 1, in the objective
            (1 - l) L_task + l L_fluency. L_fluency is the mean next-token cross entropy of the
            prompt's tokens, in nats; high means unlikely text.

    Examples:
        PEZ that prefers likely text:

        >>> from dataclasses import replace
        >>> replace(al.hard_prompts.PEZ, fluency=0.003).keep_continuous
        True
    """

    optimizer: MakeOptimizer
    keep_continuous: bool = True
    noise: Noise | None = None
    fluency: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.fluency <= 1:
            raise MetricError(f"fluency must be a weight from 0 to 1; got {self.fluency!r}")


PEZ = Descent(RelativeAdafactor(3.0))
"""PEZ (Wen et al., 2023, algorithm 1), with a learning rate of three times the size of embeddings.

The published rate, 0.3, is for GPT-2 Large. Steps of 0.3 are short in a model whose embeddings are
larger.
"""

PEZ_AS_PUBLISHED = Descent(Adafactor(lr=0.3), keep_continuous=False)
"""What the published script for language models does: it projects twice a step, so that P is lost.

Its baseline AutoPrompt, with the same optimizer, makes the same steps.
"""

AUTOPROMPT = Descent(RelativeAdafactor(10.0), keep_continuous=False)
"""AutoPrompt: P <- Proj(P - step), with steps that are long enough to reach another token."""

FLUENT_PROMPT = replace(AUTOPROMPT, noise=Langevin(10.0), fluency=0.003)
"""FluentPrompt (Shi et al., 2022): AutoPrompt with Langevin noise and the fluency loss."""


@checked
def class_words(batches: Sequence[PromptBatch]) -> list[int]:
    """Token ids of the label words, by class: the published start of a search.

    Args:
        batches: Prompts with their demonstrations.

    Raises:
        PromptError: A label word has several tokens.

    Examples:
        >>> len(al.hard_prompts.class_words(batches)) == len(task.labels)
        True
    """
    if any((batch.label_ends != batch.label_positions).any() for batch in batches):
        raise PromptError(
            "a label word has several tokens, of which a start would hold only the first; pass "
            "start=... with the token ids of your choice"
        )
    return [int(token) for token in batches[0].label_token_ids]
