"""Searches for tokens before a query by gradients: PEZ and its baselines."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import MetricError, ModelError, NotFiniteError, PromptError
from ..models.hooked import HookedModel, vocabulary_of
from ..models.optimizers import root_mean_square
from ..passes.forward import mean_loss_with_gradient
from ..passes.losses import LossOfBatch
from ..prompts.batch import PromptBatch
from ..prompts.token_texts import plain_tokens, tokenizer_of
from ..runs.identity import as_words
from ..system.arguments import check_counts, checked
from ..system.devices import in_float64, sent, wide
from ..system.processes import gather_from_processes
from ..system.put_back import each_call_inside
from ..system.texts import described
from ..system.torch_state import gradient_mode
from .embedded import embeddings_of, prefix_of_tokens, put_embeddings, start_tokens
from .hard_prompt import HardPrompt, made_of_tokens
from .hard_prompts import PEZ, Descent, class_words
from .protocol import QueryPass, queries_after
from .training import Trainable, Training, TrainingRun

_TOKENS_AT_ONCE = 2**15  # tokens whose embeddings are converted to another type at a time


@checked
def train_hard_prompt(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    training: Training = Training(),  # noqa: B008 - a frozen record
    *,
    held_out: Sequence[PromptBatch],
    length: int = 10,
    method: Descent = PEZ,
    start: Sequence[int] | None = None,
    allowed: Bool[Tensor, " vocab"] | None = None,
    tokenizer: Any = None,
) -> HardPrompt:
    """Search for tokens that stand before a query, by gradients (PEZ).

    In each step the tokens nearest to the embeddings P are run, and the gradient at them changes P
    (Wen et al., 2023). ``Training`` explains the other arguments and the errors of all trainers.

    Args:
        training: How to train, without an optimizer. Paper: 5000 steps, 16 prompts in a batch.
        length: Number of tokens.
        method: How P moves: one of ``al.contexts.hard_prompts``, or your own ``Descent``.
        start: Token ids at the start, repeated or cut to ``length``; by default of label words.
        allowed: True for each token that may be found. Never found are special, unused and byte
            tokens, and those that do not survive decoding and encoding.
        tokenizer: The tokenizer of the prompts; ``model.tokenizer`` by default.

    Raises:
        PromptError: ``length`` is below 1, no token is allowed, one of the start is not, or a label
            word has several tokens and there is no start.
        MetricError: ``training`` has an optimizer.
        ModelError: The model's embeddings are no multiple of ``W_E``.

    Examples:
        >>> training = al.contexts.Training(steps=2, progress=False)
        >>> prompt = al.train_hard_prompt(model, batches[:1], training, held_out=batches[1:],
        ...     length=2, start=[300])
    """
    check_counts(PromptError, length=length)
    if training.optimizer is not None:
        raise MetricError(
            "the optimizer of a search is that of its method; pass "
            "method=replace(al.contexts.hard_prompts.PEZ, optimizer=...)"
        )
    tokenizer = tokenizer_of(model if tokenizer is None else tokenizer)
    chosen = "all plain tokens" if allowed is None else "given tokens"
    begin = "label words" if start is None else f"tokens {list(start)}"
    about = f"hard prompt of {length} tokens from {begin} by {as_words(method)}; allowed: {chosen}"
    made_of = (method, start, allowed, tokenizer)
    run = TrainingRun.of(model, batches, held_out, training, method.optimizer, about, made_of)
    with run.study.entered():
        bos, batch = run.bos, run.batches[0]
        ids = start_tokens(model, class_words(run.batches) if start is None else start, length)
        plain = plain_tokens(tokenizer, vocabulary_of(model))
        if allowed is not None:
            if allowed.shape != plain.shape or allowed.dtype != torch.bool:
                raise PromptError(
                    f"allowed must be True or False for each of the {len(plain)} tokens of the "
                    f"model; got {described(allowed)}"
                )
            plain = plain & allowed.to(plain.device)
        nearest = NearestTokens.of(model, plain)
        if refused := sorted(set(ids[~nearest.allowed[ids].cpu()].tolist())):
            raise PromptError(
                f"the tokens {refused} of the start are special, unused, bytes, changed by "
                "decoding and encoding, or not in allowed=...; pass another start=..."
            )
        tokens = torch.cat([bos, ids])
        if method.fluency and len(tokens) < 2:
            raise PromptError(
                "a single token without a BOS has no fluency; use a length from 2, or fluency=0"
            )
        run.check(tokens)
        with gradient_mode(True):
            embedded = embeddings_of(model, batch, tokens)
            _check_embeds_by_table(model, tokens, embedded)
            embeddings = embedded[len(bos) :].requires_grad_()
        unit, example = float(root_mean_square(embeddings)), batch.prompt(0)
        trainable = SearchedTokens(
            model, bos, embeddings, unit, nearest, method, run.steps, training.seed, example
        )
        (best,), record = run.take_steps(trainable)
        found = torch.cat([bos, best])
        prompt = made_of_tokens(
            model, found, run.held_out, tokenizer, training.loss, record, run.describe()
        )
        return gather_from_processes("hard prompt", prompt)[0]


@dataclass(frozen=True, eq=False)
class NearestTokens:
    """Finds the nearest allowed token by cosine."""

    table: Float[Tensor, "vocab d_model"]  # embeddings of all tokens, up to a factor
    norms: Float[Tensor, " vocab"]  # take less memory than a normalised copy of the embeddings
    allowed: Bool[Tensor, " vocab"]  # True for the tokens that may be found

    @classmethod
    def of(cls, model: HookedModel, allowed: Bool[Tensor, " vocab"]) -> "NearestTokens":
        table = model.W_E.detach()
        # Norms of low precision would be wrong by more than what two tokens differ in.
        norms = torch.cat([wide(rows).norm(dim=1) for rows in table.split(_TOKENS_AT_ONCE)])
        allowed = allowed.to(table.device) & (norms > 0)
        if not allowed.any():
            raise PromptError(
                "no token is allowed: each is special, unused, a byte, changed by decoding and "
                "encoding, or not in allowed=...; allow more, and pass the model's tokenizer"
            )
        return cls(table, norms, allowed)

    def ids(self, embeddings: Float[Tensor, "length d_model"]) -> Int[Tensor, " length"]:
        """The nearest tokens; of equally near ones the lowest id."""
        lengths = embeddings.norm(dim=1, keepdim=True)
        if not (lengths.isfinite() & (lengths > 0)).all():
            raise NotFiniteError(
                "an embedding is zero, infinite or NaN: none is nearest; use a lower learning rate"
            )
        units = embeddings / lengths
        products = [units @ rows.to(units).T for rows in self.table.split(_TOKENS_AT_ONCE)]
        cosines = torch.cat(products, dim=1) / self.norms
        cosines[:, ~self.allowed] = -torch.inf
        # The rounding of a matrix product depends on the column. It must not decide between equal
        # embeddings, nor between almost equal ones.
        tolerance = 64 * torch.finfo(cosines.dtype).eps
        near = cosines >= cosines.max(1, keepdim=True).values - tolerance
        pairs = zip(units, near, strict=True)
        return torch.stack([self._nearest(unit, row.nonzero()[:, 0]) for unit, row in pairs]).cpu()

    def _nearest(
        self, unit: Float[Tensor, " d_model"], candidates: Int[Tensor, " near"]
    ) -> Int[Tensor, ""]:
        rows = in_float64(self.table[candidates])
        cosines = (rows * in_float64(unit)).sum(1) / rows.norm(dim=1)
        return candidates[cosines.argmax()]


def _check_embeds_by_table(
    model: HookedModel, tokens: Int[Tensor, " position"], embeddings: Float[Tensor, "position _"]
) -> None:
    """Raise an error if embeddings do not point in the direction of the rows of ``W_E``."""
    rows = model.W_E[tokens].detach()
    if embeddings.shape == rows.shape:
        cosines = torch.cosine_similarity(embeddings, rows.to(embeddings), dim=1)
        if cosines.min() > 0.999:
            return
    raise ModelError(
        f"the output of hook_embed in {model.cfg.model_name} is no multiple of the rows of W_E "
        f"(shapes {tuple(embeddings.shape)} and {tuple(rows.shape)}), so that the nearest token is "
        "not known (factorised embeddings, or a norm); train a prefix or a soft prompt"
    )


@dataclass(frozen=True, eq=False)
class SearchedTokens(Trainable):
    """Embeddings P that are moved, after the BOS, and the tokens nearest to them, which are run."""

    model: HookedModel
    bos: Int[Tensor, " _"]  # or no token
    embeddings: Float[Tensor, "length d_model"]  # P
    unit: float  # the root mean square of P at the start, the unit of the noise
    nearest: NearestTokens
    method: Descent
    steps: int  # from which the noise follows
    seed: int  # of the noise
    example: PromptBatch  # a prompt of the task

    @property
    def parameters(self) -> list[Tensor]:
        return [self.embeddings]

    @property
    def tokens(self) -> Int[Tensor, " position"]:
        """The BOS, then the tokens nearest to P."""
        return torch.cat([self.bos, self.nearest.ids(self.embeddings.detach())])

    def backward(self, model: HookedModel, batch: PromptBatch, loss: LossOfBatch) -> float:
        try:
            tokens, weight = self.tokens, self.method.fluency
        except NotFiniteError:  # the last step was too large
            return nan
        offset = torch.zeros_like(self.embeddings, requires_grad=True)

        def weighted(logits: Tensor, batch: PromptBatch) -> Tensor:
            return (1 - weight) * loss(logits, batch)

        def mean_loss(batch: PromptBatch, loss: LossOfBatch) -> float:
            hooks = [put_embeddings(offset, len(self.bos), add=True)]
            return mean_loss_with_gradient(model, batch, loss, [offset], hooks=hooks)

        objective = mean_loss(queries_after(batch, tokens), weighted)
        if weight:
            objective += mean_loss(
                prompts_of_next_tokens(batch, tokens),
                lambda logits, batch: weight * next_token_loss(logits, tokens),
            )
        self.embeddings.grad = offset.grad
        return objective

    @each_call_inside(gradient_mode, False)
    def after_step(self, step: int) -> None:
        if self.method.noise is not None:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
            noise = torch.randn(
                self.embeddings.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            deviation = self.unit * self.method.noise(step, self.steps)
            self.embeddings.add_(deviation * noise.to(self.embeddings))
        if not self.method.keep_continuous:
            with suppress(NotFiniteError):  # the next gradient stops the search
                projected = embeddings_of(self.model, self.example, self.tokens)
                self.embeddings.copy_(projected[len(self.bos) :])

    def candidate(self) -> list[Tensor]:
        return [self.tokens[len(self.bos) :]]

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        tokens = self.tokens
        prefix = prefix_of_tokens(model, batch, tokens)
        return QueryPass(queries_after(batch, tokens).after(len(tokens)), prefix)


def prompts_of_next_tokens(batch: PromptBatch, tokens: Int[Tensor, " position"]) -> PromptBatch:
    """A prompt of these tokens for each token but the first, with the target before it."""
    count = len(tokens) - 1
    prompt = queries_after(batch.prompts(0, 1), tokens).before(len(tokens))
    rows: dict[str, Any] = {
        name: value.expand(count, *value.shape[1:])
        for name, value in vars(prompt).items()
        if isinstance(value, Tensor) and name != "gold"
    }
    targets = torch.arange(count, device="cpu")
    return replace(prompt, **(rows | {"gold": None, "target_positions": targets}))


def next_token_loss(
    logits: Float[Tensor, "batch vocab"], tokens: Int[Tensor, " position"]
) -> Float[Tensor, " batch"]:
    """Cross entropy of each token but the first, in nats, from the logits before it."""
    following = sent(tokens[1:], logits.device)
    return torch.nn.functional.cross_entropy(logits, following, reduction="none")
