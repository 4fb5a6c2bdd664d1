"""Contexts at the positions 0, 1, ... before a query, and prefix tuning (Li and Liang, 2021).

Prefix tuning learns the keys and values of every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import PromptError
from ..models.hooked import HookedModel, vocabulary_of
from ..models.kv_cache import KeyValues
from ..models.media_tokens import without_media_tokens
from ..prompts.batch import PromptBatch
from ..results.estimate import in_digits
from ..system.arguments import check_counts, checked
from ..system.devices import wide
from ..system.processes import gather_from_processes
from ..system.torch_state import gradient_mode
from .compressed import CompressedContext, refuse_gaps
from .embedded import prefix_of_tokens
from .protocol import (
    QueryPass,
    bos_of,
    checked_queries_after_cache,
    queries_after,
    refuse_another_model,
)
from .stored import StoredContext, key_values_at_start
from .training import ADAM, Trainable, Training, TrainingRecord, TrainingRun


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PrefixContext(StoredContext):
    """Keys and values of every layer that stand before a query at the positions 0, 1, ...

    ``train_prefix`` learns them; of soft and hard prompts the model computes them.

    Attributes:
        prefix: The keys and values.
        tokens: Token ids at these positions. The first is the BOS of prompts that have one; in a
            prefix of peft (``context_from_peft``) it is the last. Others count in hard prompts.
        training: How it went; None if the context was not trained here.
        info: The model, its type and weights, the settings, the BOS, digests of training queries.
    """

    training: TrainingRecord | None = None

    def _summary(self) -> dict[str, str]:
        record = self.training
        accuracy = "not known" if record is None else in_digits(record.best_accuracy)
        summary = super()._summary()
        model = summary.pop("model")
        return summary | {"accuracy on held-out queries": accuracy, "model": model}

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``.

        Raises:
            PromptError: A query is too long, or the prompts begin with another BOS.
        """
        self.check_bos(batch)
        queries = checked_queries_after_cache(model, batch, self.tokens)
        return QueryPass(queries, self.prefix.beside(model))

    @checked
    def check_bos(self, batch: PromptBatch) -> None:
        """Raise an error if prompts begin with another BOS than those of this context."""
        both = self.info["bos"], bos_of(batch).tolist()
        if both[0] != both[1]:
            own, got = (f"the BOS {bos[0]}" if bos else "no BOS" for bos in both)
            raise PromptError(
                f"this context was made for prompts that begin with {own}, but these begin with "
                f"{got}; build them with the tokenizer of the context's model"
            )


@checked
def train_prefix(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    training: Training = Training(),  # noqa: B008 - a frozen record
    *,
    held_out: Sequence[PromptBatch],
    length: int | None = None,
    start: CompressedContext | PrefixContext | None = None,
) -> PrefixContext:
    """Learn keys and values that stand before a query in every layer.

    The BOS before them keeps its own keys and values. ``Training`` explains the other arguments and
    the errors of all trainers.

    Args:
        training: How to train; by default with Adam at learning rate 0.003.
        length: Number of positions that are learned, 10 by default; not with ``start``.
        start: A context whose keys and values are the start, of demonstrations or trained; by
            default those of random tokens after the BOS.

    Raises:
        PromptError: ``length`` is below 1 or given with ``start``, or the keys of ``start`` do not
            stand at 0, 1, ... after a BOS.
        ModelError: ``start`` was made with another model.

    Examples:
        >>> training = al.contexts.Training(steps=2, progress=False)
        >>> context = al.train_prefix(model, batches[:1], training, held_out=batches[1:], length=2)
    """
    if start is not None and length is not None:
        raise PromptError(
            f"start has its own number of positions; got length={length!r} too: leave one out"
        )
    length = 10 if length is None else length
    check_counts(PromptError, length=length)
    about, made_of = f"prefix of {length} positions from random tokens", list[KeyValues]()
    if start is not None:
        about, made_of = f"prefix from {start!r}", [start.prefix]
    run = TrainingRun.of(model, batches, held_out, training, ADAM, about, made_of)
    with run.study.entered():
        bos = run.bos
        if start is not None:
            _check_start(model, start, bos)
            length = len(start.prefix) - len(bos)
        tokens = torch.cat([bos, drawn_tokens(model, length, training.seed)])
        run.check(tokens)
        first = prefix_of_tokens(model, run.batches[0], tokens) if start is None else start.prefix
        trainable = TrainedKeys(bos, *_split(first.beside(model), len(bos)))
        best, record = run.take_steps(trainable)
        context = PrefixContext(
            prefix=_at_start(best), tokens=trainable.tokens, training=record, info=run.describe()
        )
        return gather_from_processes("prefix", context)[0]


def drawn_tokens(model: HookedModel, count: int, seed: int) -> Tensor:
    """Token ids drawn from the whole vocabulary, but for those that stand for images."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = torch.randint(vocabulary_of(model), (count,), generator=generator, device="cpu")
    return without_media_tokens(model, drawn)


@dataclass(frozen=True, eq=False)
class TrainedKeys(Trainable):
    """Keys and values that are learned, after those of the BOS, which are not."""

    bos: Int[Tensor, " _"]  # or no token
    fixed: list[Float[Tensor, "1 _ bos _"]]  # of each layer the keys, then of each the values
    learned: list[Float[Tensor, "1 _ position _"]]  # in the same order

    @property
    def parameters(self) -> list[Tensor]:
        return self.learned

    @property
    def tokens(self) -> Tensor:
        """The BOS, then a 0 for each learned position, which is no token."""
        return torch.cat([self.bos, self.bos.new_zeros(self.learned[0].shape[2])])

    def candidate(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self._joined()]

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        prefix = _at_start(self._joined())
        return QueryPass(queries_after(batch, self.tokens).after(len(prefix)), prefix)

    def _joined(self) -> list[Tensor]:
        pairs = zip(self.fixed, self.learned, strict=True)
        return [torch.cat([fixed, learned.to(fixed)], dim=2) for fixed, learned in pairs]


def _at_start(tensors: Sequence[Tensor]) -> KeyValues:
    """Of each layer the keys, then of each layer the values, as keys and values at 0, 1, ..."""
    half = len(tensors) // 2
    return key_values_at_start(tensors[:half], tensors[half:])


def _split(prefix: KeyValues, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """The keys and values of the first positions, and leaves of the others."""
    tensors = [*prefix.keys, *prefix.values]
    fixed = [tensor[:, :, :count].detach() for tensor in tensors]
    with gradient_mode(True):
        # The optimizer's steps would round to 0 in low precision.
        learned = [wide(tensor[:, :, count:]).detach().clone() for tensor in tensors]
        return fixed, [tensor.requires_grad_() for tensor in learned]


def _check_start(model: HookedModel, start: StoredContext, bos: Tensor) -> None:
    refuse_another_model(model, start)
    tokens = start.cached_tokens
    if not torch.equal(tokens[: len(bos)], bos):
        raise PromptError(
            "the prompts begin with a BOS, which a start must hold; select it, as "
            "al.contexts.selection does"
        )
    if len(tokens) == len(bos):
        raise PromptError("a start must hold more than the BOS, which is not trained; select more")
    refuse_gaps(start, "a start")
