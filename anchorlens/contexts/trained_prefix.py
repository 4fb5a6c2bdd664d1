"""Prefix tuning: keys and values of every layer that are learned (Li and Liang, 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import PromptError
from ..models.hooked import HookedModel, device_of, vocabulary_of
from ..models.kv_cache import KeyValues
from ..passes.descent import mean_loss_with_gradient
from ..passes.losses import Loss, label_cross_entropy
from ..prompts.batch import PromptBatch
from ..system.arguments import check_from_1, checked
from ..system.processes import gather_from_processes
from .context import CompressedContext, refuse_another_model, refuse_gaps
from .embedded import prefix_of_tokens
from .prefix_context import PrefixContext, prefix_at_start
from .query_pass import QueryPass, bos_of, check_queries, queries_after
from .training import (
    MakeOptimizer,
    Settings,
    check_training,
    describe_training,
    prepared_study,
    train,
)

ADAM = partial(torch.optim.Adam, lr=0.003)


@checked
def train_prefix(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    *,
    held_out: Sequence[PromptBatch],
    length: int | None = None,
    start: CompressedContext | PrefixContext | None = None,
    steps: int = 300,
    optimizer: MakeOptimizer = ADAM,
    clip: float = 1.0,
    check_every: int = 25,
    seed: int = 0,
    loss: Loss = label_cross_entropy,
    folder: str | Path | None = None,
    progress: bool = True,
) -> PrefixContext:
    """Learn keys and values that stand before a query in every layer; the model is frozen.

    They take the place of the demonstrations, which are not run: only the queries of ``batches``
    are. A BOS stays before them, with its own keys and values. Each batch is a step. The context
    that answers most held-out queries right is returned.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Training prompts with their true labels.
        held_out: Other prompts, by which the best context is chosen.
        length: Number of positions that are learned, 10 by default; not with ``start``, which has
            its own number.
        start: A context whose keys and values are the start: demonstrations, what is selected of
            them, or a context that was trained. By default they are those of random tokens after
            the BOS.
        steps: Number of optimizer steps; 0 returns the start.
        optimizer: Function from the parameters to their optimizer of ``torch.optim``.
        clip: Largest norm of the gradient.
        check_every: Steps from one check on held-out queries to the next.
        seed: Seeds the start and the order of the batches; the global random state is not touched.
        loss: Function of (logits, batch) to a number for each prompt.
        folder: Where the state is stored at every check; the same call after an interruption
            continues from there.
        progress: Show a progress bar.

    Returns:
        The context with its training record. If training diverges, it stops with a warning.

    Raises:
        PromptError: There are no training or held-out prompts, both have the same query, a prompt
            has no true label or does not fit the model, ``length`` is below 1 or given with
            ``start``, or the keys of ``start`` do not stand at 0, 1, ... after a BOS.
        MetricError: A setting is out of its range.
        ModelError: The model's hooks do not act, its value biases are folded, it takes no
            key-value cache, or ``start`` was made with another model.
        StoreError: The folder is of another training.

    Examples:
        >>> context = al.train_prefix(model, batches[:1], held_out=batches[1:], length=2, steps=2,
        ...     progress=False)
        >>> context.logits(model, batches[1]).shape[0] == len(batches[1])
        True
    """
    if start is not None and length is not None:
        raise PromptError(
            f"start has its own number of positions; got length={length!r} too: leave one of the "
            "two out"
        )
    length = 10 if length is None else length
    check_length(length)
    if start is None:
        about = f"prefix of {length} positions from random tokens"
    else:
        about = f"prefix from {start!r}"
    made_of = () if start is None else (start.prefix,)
    settings = Settings(
        steps, optimizer, clip, check_every, seed, loss, folder, progress, about, made_of
    )
    with prepared_study(model, batches, held_out, settings).entered() as study:
        training, others = study.batches[: len(batches)], study.batches[len(batches) :]
        bos = bos_of(training[0]).to(device_of(model))
        count = len(bos) + length
        if start is not None:
            _check_start(model, start, bos)
            count = len(start.prefix)
        check_queries(model, study.batches, count)
        tokens = torch.cat([bos, random_tokens(model, count - len(bos), seed)])
        check_training(model, training, others, settings, tokens)
        first = random_prefix(model, training[0], length, seed) if start is None else start.prefix
        trainable = _TrainedKeys(model, bos, *_split(first.beside(model), len(bos)))
        best, record = train(model, trainable, training, others, settings)
        half = len(best) // 2
        context = PrefixContext(
            prefix=prefix_at_start(best[:half], best[half:]),
            tokens=trainable.tokens,
            training=record,
            info=describe_training(study, training, settings),
        )
        return gather_from_processes("prefix", context)[0]


def check_length(length: int) -> None:
    """Raise an error for a context without positions."""
    check_from_1(PromptError, length=length)


def random_tokens(model: HookedModel, count: int, seed: int) -> Tensor:
    """Token ids drawn from the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = torch.randint(vocabulary_of(model), (count,), generator=generator, device="cpu")
    return drawn.to(device_of(model))


def random_prefix(model: HookedModel, batch: PromptBatch, length: int, seed: int) -> KeyValues:
    """Keys and values of the BOS and of random tokens after it."""
    bos = bos_of(batch).to(device_of(model))
    tokens = torch.cat([bos, random_tokens(model, length, seed)])
    return prefix_of_tokens(model, batch, tokens)


@dataclass(frozen=True, eq=False)
class _TrainedKeys:
    """Keys and values that are learned, after those of the BOS, which are not.

    Attributes:
        model: The model.
        bos: The BOS, or no token.
        fixed: Keys and values of the BOS: of each layer the keys, then of each layer the values.
        parameters: The keys and values that are learned, in the same order.
    """

    model: HookedModel
    bos: Tensor
    fixed: list[Float[Tensor, "1 _ position _"]]
    parameters: list[Tensor]

    @property
    def tokens(self) -> Tensor:
        """The BOS, then a 0 for each learned position, which is no token."""
        count = self.parameters[0].shape[2]
        return torch.cat([self.bos, self.bos.new_zeros(count)]).cpu()

    def backward(self, batch: PromptBatch, loss: Loss) -> float:
        with torch.enable_grad():
            run = self.query_pass(batch)
        return mean_loss_with_gradient(
            self.model, run.batch, loss, self.parameters, prefix=run.prefix
        )

    def after_step(self, step: int) -> None:
        """Nothing follows the optimizer's step."""

    def candidate(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self._joined()]

    def query_pass(self, batch: PromptBatch) -> QueryPass:
        joined = self._joined()
        half = len(joined) // 2
        prefix = prefix_at_start(joined[:half], joined[half:])
        return QueryPass(queries_after(batch, self.tokens).after(len(prefix)), prefix)

    def _joined(self) -> list[Tensor]:
        pairs = zip(self.fixed, self.parameters, strict=True)
        return [torch.cat([fixed, learned.to(fixed)], dim=2) for fixed, learned in pairs]


def _split(prefix: KeyValues, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """The keys and values of the first positions, and leaves of the others."""
    tensors = [*prefix.keys, *prefix.values]
    fixed = [tensor[:, :, :count].detach() for tensor in tensors]
    with torch.inference_mode(False):
        # The optimizer's steps would round to 0 in low precision.
        leaves = [
            tensor[:, :, count:]
            .to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            .detach()
            .requires_grad_()
            for tensor in tensors
        ]
    return fixed, leaves


def _check_start(model: HookedModel, start: CompressedContext | PrefixContext, bos: Tensor) -> None:
    refuse_another_model(model, start.info)
    tokens = start.tokens[start.kept] if isinstance(start, CompressedContext) else start.tokens
    if not torch.equal(tokens[: len(bos)].cpu(), bos.cpu()):
        raise PromptError(
            "the prompts begin with a BOS, which a start must hold too, before all else; let keep "
            "select it, as the functions of al.selection do"
        )
    if len(tokens) == len(bos):
        raise PromptError(
            "a start must hold more than the BOS, whose keys and values are not trained; select "
            "more of the demonstrations"
        )
    if isinstance(start, CompressedContext):
        refuse_gaps(start, "a start")
