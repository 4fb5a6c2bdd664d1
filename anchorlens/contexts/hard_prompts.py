"""Hard prompts of given tokens, of a text and of random tokens; methods that search for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import MetricError, PromptError
from ..models.hooked import HookedModel, vocabulary_of
from ..models.optimizers import Adafactor as Adafactor
from ..models.optimizers import RelativeAdafactor as RelativeAdafactor
from ..passes.loss_checks import check_loss
from ..passes.losses import LossOfBatch, label_cross_entropy
from ..prompts.batch import PromptBatch
from ..prompts.control_tokens import control_tokens
from ..prompts.label_positions import refuse_control_tokens
from ..prompts.token_texts import plain_tokens, tokenizer_of
from ..runs.study import Study
from ..system.arguments import check_counts, checked
from ..system.processes import gather_from_processes
from .compressed import cache_of_tokens
from .embedded import start_tokens
from .hard_prompt import HardPrompt, after_tokens, made_of_tokens
from .protocol import bos_of, check_queries, model_identity
from .training import MakeOptimizer, TrainingRecord, answers, query_digests

Noise = Callable[[int, int], float]
"""Function of (step, steps) to the standard deviation of the noise of a step; see ``Descent``."""


@checked
@dataclass(frozen=True)
class Langevin:
    r"""Noise that becomes smaller: ``sqrt(2 rate beta_i)``, beta from first to last geometrically.

    Attributes:
        rate: Learning rate of the ``RelativeAdafactor`` to which the noise belongs.
        first: ``beta`` of the first step.
        last: ``beta`` after the last step.

    Examples:
        >>> round(al.contexts.hard_prompts.Langevin(rate=0.5)(0, 100), 4)
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
    r"""How a hard prompt is searched: steps of an optimizer on embeddings P, with projections.

    Each step takes the gradient at P', the embeddings of the tokens nearest to P (by cosine; of
    equally near ones the lowest id), and applies it to P, so that short steps add up:

    $$
    P' = \mathrm{Proj}(P), \qquad
    g = \nabla_{P'} \left[ (1 - \lambda) L_{\mathrm{task}}(P')
    + \lambda L_{\mathrm{fluency}}(P') \right], \qquad P \leftarrow \mathrm{step}(P, g)
    $$

    Adafactor moves each coordinate by about its learning rate, whatever the size of the gradient.
    So the rates of the presets are in units of s, the root mean square of the embeddings at the
    start. The noise of FluentPrompt is s sqrt(2 * 10 beta_i): sqrt(s) times the published one with
    the rate 10 s, because ours has the unit of the steps. For ``torch.optim.SGD`` the rate must be
    found for each model and loss.

    Pitfalls:
        The best candidate is chosen on the held-out queries: measure it on others. Compare with the
        start, with no tokens (``NoContext``) and with all of ``al.contexts.hard_prompts.random``.

    Source:
        PEZ: Wen et al. (NeurIPS 2023), algorithm 1, as in its script for images (that for language
        models: ``PEZ_AS_PUBLISHED``). FluentPrompt: Shi et al. (2022).

    Attributes:
        optimizer: Function from [P] to its optimizer.
        keep_continuous: Whether P stays where the step led. Otherwise it is projected after each
            step, and one too short to reach another token is lost.
        noise: Function of (step, steps) to the standard deviation, in units of s, of the normal
            noise that is added to P after a step; or None.
        fluency: Weight lambda, from 0 to 1, of L_fluency, the mean next-token cross entropy of the
            prompt's tokens in nats; high means unlikely text.

    Examples:
        PEZ that prefers likely text:

        >>> method = dataclasses.replace(al.contexts.hard_prompts.PEZ, fluency=0.003)
    """

    optimizer: MakeOptimizer
    keep_continuous: bool = True
    noise: Noise | None = None
    fluency: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.fluency <= 1:
            raise MetricError(f"fluency must be a weight from 0 to 1; got {self.fluency!r}")


PEZ = Descent(RelativeAdafactor(3.0))
"""PEZ (Wen et al., 2023, algorithm 1) at a rate of 3 s; the published 0.3 is for GPT-2 Large."""

PEZ_AS_PUBLISHED = Descent(Adafactor(lr=0.3), keep_continuous=False)
"""What the published script for language models does: it projects twice, so that P is lost."""

AUTOPROMPT = Descent(RelativeAdafactor(10.0), keep_continuous=False)
"""AutoPrompt: P <- Proj(P - step), with steps that are long enough to reach another token."""

FLUENT_PROMPT = replace(AUTOPROMPT, noise=Langevin(10.0), fluency=0.003)
"""FluentPrompt (Shi et al., 2022): AutoPrompt with Langevin noise and the fluency loss."""


@checked
def class_words(batches: Sequence[PromptBatch]) -> list[int]:
    """Token ids of the label words, by class: the published start of a search.

    Raises:
        PromptError: A label word has several tokens.

    Examples:
        >>> start = al.contexts.hard_prompts.class_words(batches)
    """
    if any((batch.label_ends != batch.label_positions).any() for batch in batches):
        raise PromptError(
            "a label word has several tokens, which are no start; pass start=... of token ids"
        )
    return [int(token) for token in batches[0].label_token_ids]


@checked
def of_tokens(
    model: HookedModel,
    tokens: Sequence[int],
    *,
    held_out: Sequence[PromptBatch],
    tokenizer: Any = None,
    loss: LossOfBatch = label_cross_entropy,
) -> HardPrompt:
    """A hard prompt of given tokens, without a search.

    Args:
        tokens: Token ids without the BOS; any are allowed.
        held_out: Prompts with their true labels, on which the accuracy is measured.
        tokenizer: The tokenizer of the prompts; ``model.tokenizer`` by default.
        loss: Function of (logits, batch) to a number for each prompt.

    Raises:
        PromptError: ``tokens`` are no token ids, a true label is missing, or a query is too long.
        ModelError: The model's hooks do not act, or it takes no key-value cache.

    Examples:
        >>> prompt = al.contexts.hard_prompts.of_tokens(model, [300, 301], held_out=batches)
    """
    return _prompts_of_model(model, held_out, tokenizer, loss, lambda _: [list(tokens)])[0]


@checked
def of_text(
    model: HookedModel,
    text: str | HardPrompt,
    *,
    held_out: Sequence[PromptBatch],
    tokenizer: Any = None,
    loss: LossOfBatch = label_cross_entropy,
) -> HardPrompt:
    """A hard prompt of a text: yours, or that of a prompt which was found with another model.

    ``al.ContextComparison`` compares it with nothing and random tokens (Wen et al., 2023: transfer
    between models). Other arguments are as in ``of_tokens``.

    Args:
        text: The text, or a hard prompt, of which the text is used, and the queries of its training
            are refused (a model with its tokenizer can tell them).

    Raises:
        PromptError: As ``of_tokens``; the tokens do not give the text, or it holds a control token.
            Of a hard prompt: its task has other labels, a label word has several tokens here, or
            its training used queries of ``held_out``.

    Examples:
        >>> prompt = al.contexts.hard_prompts.of_text(model, " What", held_out=batches)
        >>> prompt.text, prompt.encodes_back
        (' What', True)
    """

    def encoded(tokenizer: Any) -> list[list[int]]:
        if isinstance(text, HardPrompt):
            _check_other_prompt(text, held_out)
            return [_ids_of(tokenizer, text.text)]
        return [_ids_of(tokenizer, text)]

    [prompt] = _prompts_of_model(model, held_out, tokenizer, loss, encoded)
    if not isinstance(text, HardPrompt):
        return prompt
    used = text.info.get("queries_in_training", [])
    return replace(prompt, info={**prompt.info, "queries_in_training": used})


def _check_other_prompt(prompt: HardPrompt, batches: Sequence[PromptBatch]) -> None:
    """Raise an error if the accuracy of a prompt's text on these queries could not be compared."""
    known, labels = prompt.info.get("labels"), [label.strip() for label in batches[0].labels]
    if known is not None and [*known] != labels:
        raise PromptError(
            f"the hard prompt is of a task with the labels {known}, and these queries have "
            f"{labels}; give the task with which it was made"
        )
    if any((batch.label_ends != batch.label_positions).any() for batch in batches):
        raise PromptError(
            "a label word has several tokens in this model, of which only the first would count; "
            "use a task of single tokens in all models"
        )
    if used := {*prompt.info.get("queries_in_training", [])} & {*query_digests(batches)}:
        raise PromptError(
            f"{len(used)} of these queries trained or chose the hard prompt; give others"
        )


def _ids_of(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without BOS; an error if they are not the whole text."""
    cure = ", by a search with allowed=... of tokens that both tokenizers know"
    refuse_control_tokens(tokenizer, control_tokens(tokenizer, cure=cure), text)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    back = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if back != text or not ids:
        raise PromptError(
            f"the tokenizer of this model cannot encode the text {text!r}: its tokens give "
            f"{back!r} (unknown characters, or a text that is empty, cut or normalised); search "
            "with allowed=... of tokens of both"
        )
    return ids


@checked
def random(
    model: HookedModel,
    *,
    held_out: Sequence[PromptBatch],
    length: int = 10,
    draws: int = 20,
    seed: int = 0,
    tokenizer: Any = None,
    loss: LossOfBatch = label_cross_entropy,
) -> list[HardPrompt]:
    """Hard prompts of random plain tokens: the baseline of a search.

    Compare a search with all of them, not with the best, which is chosen on the measured queries.
    Other arguments are as in ``of_tokens``.

    Args:
        length: Number of tokens of each prompt.
        draws: Number of prompts.
        seed: Seeds the tokens; the global random state is not touched.

    Raises:
        PromptError: As ``of_tokens``, or ``length`` or ``draws`` is below 1.

    Examples:
        >>> prompts = al.contexts.hard_prompts.random(model, held_out=batches, length=2, draws=3)
        >>> accuracies = [float(prompt.training.best_accuracy) for prompt in prompts]
    """
    check_counts(PromptError, length=length, draws=draws)

    def drawn(tokenizer: Any) -> list[list[int]]:
        plain = plain_tokens(tokenizer, vocabulary_of(model)).nonzero()[:, 0]
        if not len(plain):
            raise PromptError("the tokenizer has no plain token that the model embeds")
        generator = torch.Generator().manual_seed(seed % 2**63)
        indices = torch.randint(len(plain), (draws, length), generator=generator, device="cpu")
        return plain[indices].tolist()

    return _prompts_of_model(model, held_out, tokenizer, loss, drawn)


def _prompts_of_model(
    model: HookedModel,
    held_out: Sequence[PromptBatch],
    tokenizer: Any,
    loss: LossOfBatch,
    choose: Callable[[Any], Sequence[Sequence[int]]],
) -> list[HardPrompt]:
    """The hard prompts of the token ids that ``choose`` gives for a tokenizer."""
    study = Study(model, held_out, {"experiment": "hard prompts"}, resamples=0, progress=False)
    with study.entered():
        if any(batch.gold is None for batch in study.batches):
            raise PromptError("accuracy needs the true label of each query; give queries with them")
        check_loss(loss, study.batches, model)
        tokenizer = tokenizer_of(model if tokenizer is None else tokenizer)
        bos = bos_of(study.batches[0])
        chosen = [start_tokens(model, ids, len(ids)) for ids in choose(tokenizer)]
        prompts = [torch.cat([bos, ids]) for ids in chosen]
        check_queries(model, study.batches, max(map(len, prompts)))
        cache_of_tokens(model, study.batches[0], prompts[0])
        info = study.describe() | model_identity(model)
        info |= {"bos": bos.tolist(), "queries_in_training": []}
        made = []
        for tokens in prompts:
            context = after_tokens(model, tokens, study.batches[0])
            accuracy, mean_loss = answers(model, context, study.batches, loss)
            record = TrainingRecord(
                losses=torch.zeros(0, dtype=torch.float32, device="cpu"),
                checked_steps=torch.tensor([0], device="cpu"),
                held_out_accuracy=torch.tensor([accuracy], dtype=torch.float32, device="cpu"),
                held_out_loss=torch.tensor([mean_loss], dtype=torch.float32, device="cpu"),
            )
            made.append(made_of_tokens(model, tokens, study.batches, tokenizer, loss, record, info))
        return gather_from_processes("hard prompts", made)[0]
