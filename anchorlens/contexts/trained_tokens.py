"""Searches for tokens before a query by gradients: PEZ and its baselines."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import NotFiniteError, PromptError
from ..models.hooked import HookedModel, device_of, vocabulary_of
from ..models.optimizers import root_mean_square
from ..passes.descent import mean_loss_with_gradient
from ..passes.losses import Loss, label_cross_entropy
from ..prompts.batch import PromptBatch
from ..prompts.plain_tokens import plain_tokens
from ..runs.fingerprint import in_words
from ..system.arguments import checked
from ..system.processes import gather_from_processes
from ..system.texts import described
from .embedded import (
    embeddings_of,
    moved_embeddings,
    prefix_of_tokens,
    start_tokens,
)
from .hard_prompts import PEZ, Descent, class_words
from .nearest_tokens import NearestTokens, check_embeds_by_table
from .query_pass import QueryPass, bos_of, check_queries, queries_after
from .token_prompt import HardPrompt, made_of_tokens, tokenizer_of
from .trained_prefix import check_length
from .training import Settings, check_training, describe_training, prepared_study, train


@checked
def train_hard_prompt(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    *,
    held_out: Sequence[PromptBatch],
    length: int = 10,
    method: Descent = PEZ,
    start: Sequence[int] | None = None,
    allowed: Bool[Tensor, " vocab"] | None = None,
    tokenizer: Any = None,
    steps: int = 300,
    clip: float = 1.0,
    check_every: int = 25,
    seed: int = 0,
    loss: Loss = label_cross_entropy,
    folder: str | Path | None = None,
    progress: bool = True,
) -> HardPrompt:
    """Search for tokens that stand before a query, by gradients (PEZ); the model is frozen.

    They take the place of the demonstrations, which are not run: only the queries of ``batches``
    are. A BOS stays before them. Each batch is a step: the tokens nearest to the embeddings P are
    run, and the gradient at their embeddings changes P (Wen et al., 2023, algorithm 1). The tokens
    that answer most held-out queries right are returned.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Training prompts with their true labels; the paper takes 16 in a batch.
        held_out: Other prompts, by which the best tokens are chosen.
        length: Number of tokens.
        method: How P moves: one of ``al.hard_prompts``, or your own ``Descent``.
        start: Token ids at the start, repeated or cut to ``length``; those of the label words by
            default.
        allowed: True for each token that may be found. Special, unused and byte tokens, and those
            that do not survive decoding and encoding, are left out in any case.
        tokenizer: The tokenizer of the prompts; ``model.tokenizer`` by default.
        steps: Number of optimizer steps; 0 returns the start. The paper takes 5000.
        clip: Largest norm of the gradient.
        check_every: Steps from one check on held-out queries to the next.
        seed: Seeds the order of the batches and the noise; the global random state is not touched.
        loss: Function of (logits, batch) to a number for each prompt.
        folder: Where the state is stored at every check; the same call after an interruption
            continues from there.
        progress: Show a progress bar.

    Returns:
        The hard prompt with its text and training record. If training diverges, it stops with a
        warning.

    Raises:
        PromptError: There are no training or held-out prompts, both have the same query, a prompt
            has no true label or does not fit the model, ``length`` is below 1, no token is allowed,
            a token of the start is not allowed, or a label word has several tokens and no start is
            given.
        MetricError: A setting is out of its range.
        ModelError: The model's hooks do not act, it takes no key-value cache, or its embeddings are
            no multiple of ``W_E``.
        StoreError: The folder is of another training.

    Examples:
        >>> prompt = al.train_hard_prompt(model, batches[:1], held_out=batches[1:], length=2,
        ...     start=[300], steps=2, progress=False)
        >>> len(prompt.ids), prompt.text == model.tokenizer.decode(prompt.ids)
        (2, True)
    """
    check_length(length)
    tokenizer = tokenizer_of(model, tokenizer)
    chosen = "all plain tokens" if allowed is None else "given tokens"
    begin = "label words" if start is None else f"tokens {list(start)}"
    about = f"hard prompt of {length} tokens from {begin} by {in_words(method)}; allowed: {chosen}"
    settings = Settings(
        steps,
        method.optimizer,
        clip,
        check_every,
        seed,
        loss,
        folder,
        progress,
        about,
        (method, start, allowed, tokenizer),
    )
    with prepared_study(model, batches, held_out, settings).entered() as study:
        training, others = study.batches[: len(batches)], study.batches[len(batches) :]
        ids = start_tokens(model, class_words(training) if start is None else start, length)
        nearest = NearestTokens.of(model, _allowed(model, tokenizer, allowed))
        _check_start(nearest, ids)
        bos = bos_of(training[0]).to(device_of(model))
        tokens = torch.cat([bos, ids])
        _check_fluency(method, tokens)
        check_queries(model, study.batches, len(tokens))
        check_training(model, training, others, settings, tokens)
        check_embeds_by_table(model, training[0], tokens)
        with torch.inference_mode(False):
            embeddings = embeddings_of(model, training[0], tokens)[len(bos) :].requires_grad_()
        unit = float(root_mean_square(embeddings))
        trainable = SearchedTokens(
            model, bos, embeddings, unit, nearest, method, steps, seed, training[0].prompt(0)
        )
        (best,), record = train(model, trainable, training, others, settings)
        info = describe_training(study, training, settings)
        prompt = made_of_tokens(
            model,
            torch.cat([bos, best]),
            others,
            tokenizer,
            loss=loss,
            training=record,
            info=info,
        )
        return gather_from_processes("hard prompt", prompt)[0]


@dataclass(frozen=True, eq=False)
class SearchedTokens:
    """Embeddings P that are moved, after the BOS, and the tokens nearest to them, which are run.

    Attributes:
        model: The model.
        bos: The BOS, or no token.
        embeddings: P.
        unit: Their root mean square at the start, the unit of the noise.
        nearest: The projection.
        method: How P moves.
        steps: Number of steps, from which the noise follows.
        seed: Seeds the noise.
        example: A prompt of the task.
    """

    model: HookedModel
    bos: Int[Tensor, " _"]
    embeddings: Float[Tensor, "length d_model"]
    unit: float
    nearest: NearestTokens
    method: Descent
    steps: int
    seed: int
    example: PromptBatch

    @property
    def parameters(self) -> list[Tensor]:
        return [self.embeddings]

    @property
    def tokens(self) -> Int[Tensor, " position"]:
        """The BOS, then the tokens nearest to P."""
        return torch.cat([self.bos, self.nearest.ids(self.embeddings.detach())])

    def backward(self, batch: PromptBatch, loss: Loss) -> float:
        try:
            tokens, weight = self.tokens, self.method.fluency
        except NotFiniteError:  # the last step was too large
            return nan
        offset = torch.zeros_like(self.embeddings, requires_grad=True)

        def weighted(logits: Tensor, batch: PromptBatch) -> Tensor:
            return (1 - weight) * loss(logits, batch)

        def mean_loss(batch: PromptBatch, loss: Loss) -> float:
            hooks = [moved_embeddings(offset, len(self.bos))]
            return mean_loss_with_gradient(self.model, batch, loss, [offset], hooks=hooks)

        objective = mean_loss(queries_after(batch, tokens), weighted)
        if weight:
            objective += mean_loss(
                prompts_of_next_tokens(batch, tokens),
                lambda logits, batch: weight * next_token_loss(logits, tokens),
            )
        self.embeddings.grad = offset.grad
        return objective

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.method.noise is not None:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
            noise = torch.randn(self.embeddings.shape, generator=generator, device="cpu")
            deviation = self.unit * self.method.noise(step, self.steps)
            self.embeddings.add_(deviation * noise.to(self.embeddings))
        if not self.method.keep_continuous:
            with suppress(NotFiniteError):  # the next gradient stops the search
                projected = embeddings_of(self.model, self.example, self.tokens)
                self.embeddings.copy_(projected[len(self.bos) :])

    def candidate(self) -> list[Tensor]:
        return [self.tokens[len(self.bos) :]]

    def query_pass(self, batch: PromptBatch) -> QueryPass:
        tokens = self.tokens
        prefix = prefix_of_tokens(self.model, batch, tokens)
        return QueryPass(queries_after(batch, tokens).after(len(tokens)), prefix)


def prompts_of_next_tokens(batch: PromptBatch, tokens: Int[Tensor, " position"]) -> PromptBatch:
    """A prompt of these tokens for each token but the first, with the target before it.

    Args:
        batch: Prompts from which everything else is taken.
        tokens: At least two tokens.
    """
    count = len(tokens) - 1
    prompt = queries_after(batch.prompts(0, 1), tokens).before(len(tokens))
    rows: dict[str, Any] = {
        name: value.expand(count, *value.shape[1:])
        for name, value in vars(prompt).items()
        if isinstance(value, Tensor) and name != "gold"
    }
    targets = torch.arange(count, device=tokens.device)
    return replace(prompt, **(rows | {"gold": None, "target_positions": targets}))


def next_token_loss(
    logits: Float[Tensor, "batch vocab"], tokens: Int[Tensor, " position"]
) -> Float[Tensor, " batch"]:
    """Cross entropy of each token but the first, in nats, from the logits before it."""
    return torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")


def _allowed(
    model: HookedModel, tokenizer: Any, allowed: Bool[Tensor, " vocab"] | None
) -> Bool[Tensor, " vocab"]:
    """The plain tokens among those that the user allows."""
    plain = plain_tokens(tokenizer, vocabulary_of(model))
    if allowed is None:
        return plain
    if allowed.shape != plain.shape or allowed.dtype != torch.bool:
        raise PromptError(
            f"allowed must be True or False for each of the {len(plain)} tokens of the model; got "
            f"{described(allowed)}"
        )
    return plain & allowed.to(plain.device)


def _check_start(nearest: NearestTokens, ids: Int[Tensor, " length"]) -> None:
    refused = sorted(set(ids[~nearest.allowed[ids]].tolist()))
    if refused:
        raise PromptError(
            f"the tokens {refused} of the start are not allowed: they are special, unused, bytes, "
            "changed by decoding and encoding, or not in allowed=...; pass another start=..."
        )


def _check_fluency(method: Descent, tokens: Int[Tensor, " position"]) -> None:
    if method.fluency and len(tokens) < 2:
        raise PromptError(
            "a single token without a BOS before it has no fluency; use a length from 2, or a "
            "method with fluency=0"
        )
