"""Contexts whose keys and values stand at the positions 0, 1, ... before a query."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import PromptError, StoreError
from ..models.hooked import HookedModel, check_fits, device_of
from ..models.kv_cache import Prefix
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts.batch import PromptBatch, check_batch
from ..results.html_tables import table, titled
from ..system.digest_file import read_with_digest, to_bytes_with_digest
from ..system.files import write_atomically
from .context import refuse_another_model
from .query_pass import QueryPass, queries_after
from .training import TrainingRecord

_KIND = "prefix context"  # the entry in the header of a file


@dataclass(frozen=True)
class NoContext:
    """Nothing before the query, apart from the BOS of tokenizers that add one.

    The baseline of every context.

    Examples:
        >>> al.NoContext().logits(model, batch).shape[0] == len(batch)
        True
    """

    @property
    def size(self) -> int:
        """No keys and values are stored: 0 bytes."""
        return 0

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``."""
        queries = queries_after(batch.to(device_of(model)), bos_of(batch))
        check_fits(model, queries)
        return QueryPass(queries, None)

    def logits(self, model: HookedModel, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """Next-token logits at the targets of the queries of a batch."""
        return checked_logits(self, model, batch)


@dataclass(frozen=True, eq=False)
class PrefixContext:
    """Keys and values of every layer that stand before a query at the positions 0, 1, ...

    ``train_prefix`` learns them directly. Soft prompts and hard prompts are kinds of it, whose
    keys and values the model computes from embeddings or tokens.

    Attributes:
        prefix: The keys and values.
        tokens: Token ids at these positions. The first is the BOS of prompts that have one. Others
            mean something in a hard prompt only.
        training: How the loss and the accuracy changed.
        info: The model, its type and weights, the settings, and digests of the queries that were
            used in training.
    """

    prefix: Prefix
    tokens: Int[Tensor, " position"]
    training: TrainingRecord
    info: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: the number of positions, bytes, the best accuracy and the model."""
        parts = "; ".join(f"{name} {text}" for name, text in self._summary().items())
        return shorten(f"{type(self).__name__}({parts})", 200, placeholder=" …)")

    def _repr_html_(self) -> str:
        return titled(type(self).__name__, table(["what", "value"], self._summary().items()))

    def _summary(self) -> dict[str, str]:
        return {
            "positions": str(len(self.tokens)),
            "bytes": f"{self.size:,}",
            "accuracy on held-out queries": f"{float(self.training.best_accuracy):.3f}",
            "model": f"{self.info.get('model')}, {self.info.get('dtype')}",
        }

    @property
    def size(self) -> int:
        """Bytes of the stored keys and values."""
        return self.prefix.size

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``.

        Raises:
            PromptError: A query is too long, or the prompts begin with another BOS.
        """
        device = device_of(model)
        self.check_bos(batch)
        queries = queries_after(batch.to(device), self.tokens)
        check_fits(model, queries)
        return QueryPass(queries.after(len(self.tokens)), self.prefix.to(device))

    def logits(self, model: HookedModel, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """Next-token logits at the targets of the queries of a batch.

        Only the queries are run.

        Args:
            model: The model with which the context was made.
            batch: Prompts from ``build_prompts``; this context stands in place of their
                demonstrations.

        Raises:
            ModelError: The context was made with another model, type or weights.
            PromptError: A query is too long, or the prompts begin with another BOS.
        """
        ensure_prepared(model)
        refuse_another_model(model, self.info)
        return checked_logits(self, model, batch)

    def check_bos(self, batch: PromptBatch) -> None:
        """Raise an error if prompts begin with another BOS than those of this context."""
        bos = bos_of(batch)
        if not torch.equal(bos.cpu(), self.tokens[: len(bos)].cpu()) or len(bos) != self.n_bos:
            raise PromptError(
                f"this context was made for prompts that begin with {self._bos_in_words()}, but "
                "these do not; build them with the tokenizer of the context's model"
            )

    @property
    def n_bos(self) -> int:
        """The number of BOS tokens at the beginning: 1, or 0 where tokenizers add none."""
        return int(self.info["begins_with_bos"])

    def _bos_in_words(self) -> str:
        return f"the BOS {int(self.tokens[0])}" if self.n_bos else "no BOS"

    def save(self, path: str | Path) -> Path:
        """Write the context into one safetensors file, with a digest of its contents.

        Returns:
            The path, for ``load_context``.

        Raises:
            StoreError: Json cannot hold ``info``, or the file cannot be written.
        """
        tensors = {f"key.{n}": keys for n, keys in enumerate(self.prefix.keys)}
        tensors |= {f"value.{n}": values for n, values in enumerate(self.prefix.values)}
        tensors |= {f"training.{name}": value for name, value in self.training.tensors().items()}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prefix"}
        tensors |= {name: value for name, value in own.items() if isinstance(value, Tensor)}
        texts = {name: value for name, value in own.items() if isinstance(value, str)}
        header = {"class": type(self).__name__, "texts": texts, "info": self.info}
        write_atomically(Path(path), to_bytes_with_digest({_KIND: header}, tensors))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a context of this class that ``save`` wrote; ``load_context`` reads any.

        Raises:
            StoreError: The file cannot be read, is damaged, or holds something else.
        """
        header, stored = read_with_digest(path)
        found = header.get(_KIND, {}).get("class", header.get("record", "CompressedContext"))
        if found != cls.__name__:
            raise StoreError(f"{path} holds a {found}, not a {cls.__name__}; use al.load_context")
        return cls.of_file(header[_KIND], stored)

    @classmethod
    def of_file(cls, header: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Self:
        """The context that a file holds."""
        layers = range(sum(name.startswith("key.") for name in stored))
        tokens = stored["tokens"]
        prefix = prefix_at_start(
            [stored[f"key.{n}"] for n in layers], [stored[f"value.{n}"] for n in layers]
        )
        curves: dict[str, Any] = {
            name: stored[f"training.{name}"] for name in TrainingRecord.axes()
        }
        training = TrainingRecord(**curves)
        names = {f.name for f in fields(cls)} - {"prefix", "tokens", "training", "info"}
        own = {name: stored[name] if name in stored else header["texts"][name] for name in names}
        return cls(prefix=prefix, tokens=tokens, training=training, info=header["info"], **own)


def prefix_at_start(
    keys: list[Float[Tensor, "1 _ position _"]], values: list[Float[Tensor, "1 _ position _"]]
) -> Prefix:
    """Keys and values of the positions 0, 1, ... as a prefix."""
    count, device = keys[0].shape[2], keys[0].device
    return Prefix(
        keys=tuple(keys),
        values=tuple(values),
        attention_mask=torch.ones(1, count, dtype=torch.bool, device=device),
        next_position=torch.tensor([count], device=device),
    )


def bos_of(batch: PromptBatch) -> Int[Tensor, " position"]:
    """The BOS with which the prompts begin, or no token."""
    first = batch.padded_right().tokens[0, :1]
    return first if batch.begins_with_bos else first[:0]


def checked_logits(
    context: Any, model: HookedModel, batch: PromptBatch
) -> Float[Tensor, "batch vocab"]:
    """The logits of a context for a checked batch, from the frozen model."""
    ensure_prepared(model)
    check_batch(batch)
    with frozen_in_eval_mode(model):
        logits: Tensor = context.query_pass(model, batch).logits(model)
        return logits
