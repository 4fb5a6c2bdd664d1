"""Contexts whose keys and values stand at the positions 0, 1, ... before a query."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar, get_type_hints

import torch
from jaxtyping import Float, Int, jaxtyped
from torch import Tensor

from ..errors import PromptError, StoreError
from ..models.hooked import HookedModel, device_of
from ..models.kv_cache import KeyValues
from ..models.load import ensure_prepared
from ..prompts.batch import PromptBatch
from ..results.html_tables import table, titled
from ..system.arguments import checked
from ..system.digest_file import read_with_digest, to_bytes_with_digest
from ..system.files import write_atomically
from ..system.texts import printable
from .context import refuse_another_kind, refuse_another_model
from .query_pass import (
    QueryPass,
    bos_of,
    checked_logits,
    checked_queries,
    checked_queries_after_cache,
)
from .training import TrainingRecord

_C = TypeVar("_C", bound="PrefixContext")


@checked
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

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``."""
        moved = batch.to(device_of(model))
        return QueryPass(checked_queries(model, moved, bos_of(moved)), None)

    @checked
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
        tokens: Token ids at these positions. The first is the BOS of prompts that have one; in a
            prefix that peft trained (``context_from_peft``) it is the last. Others mean something
            in a hard prompt only.
        training: How the loss and the accuracy changed; None if the context was not trained here.
        info: The model, its type and weights, the settings, the BOS with which prompts begin, and
            digests of the queries that were used in training.
    """

    prefix: KeyValues
    tokens: Int[Tensor, " position"]
    training: TrainingRecord | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def __init_subclass__(cls) -> None:
        # Without this, @dataclass writes a __repr__ for each subclass that shows whole tensors.
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """One line: the number of positions, bytes, the best accuracy and the model."""
        parts = "; ".join(f"{name} {text}" for name, text in self._summary().items())
        text = printable(f"{type(self).__name__}({parts})")
        return shorten(text, 200, placeholder=" …)")

    def _repr_html_(self) -> str:
        return titled(type(self).__name__, table(["what", "value"], self._summary().items()))

    def _summary(self) -> dict[str, str]:
        return {
            "positions": str(len(self.tokens)),
            "bytes": f"{self.size:,}",
            "accuracy on held-out queries": (
                "not known"
                if self.training is None
                else f"{float(self.training.best_accuracy):.3f}"
            ),
            "model": f"{self.info.get('model')}, {self.info.get('dtype')}",
        }

    @property
    def size(self) -> int:
        """Bytes of the stored keys and values."""
        return self.prefix.size

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``.

        Raises:
            PromptError: A query is too long, or the prompts begin with another BOS.
        """
        self.check_bos(batch)
        device = device_of(model)
        queries = checked_queries_after_cache(model, batch.to(device), self.tokens)
        return QueryPass(queries, self.prefix.beside(model))

    @checked
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

    @checked
    def check_bos(self, batch: PromptBatch) -> None:
        """Raise an error if prompts begin with another BOS than those of this context."""
        bos = bos_of(batch).tolist()
        if bos != self.info["bos"]:
            raise PromptError(
                f"this context was made for prompts that begin with {_bos_in_words(self.info)}, "
                f"but these begin with {_bos_in_words({'bos': bos})}; build them with the "
                "tokenizer of the context's model"
            )

    @checked
    def save(self, path: str | Path) -> Path:
        """Write the context into one safetensors file, with a digest of its contents.

        Returns:
            The path, for ``load_context``.

        Raises:
            StoreError: Json cannot hold ``info``, or the file cannot be written.
        """
        tensors = {f"key.{n}": keys for n, keys in enumerate(self.prefix.keys)}
        tensors |= {f"value.{n}": values for n, values in enumerate(self.prefix.values)}
        curves = {} if self.training is None else self.training.tensors()
        tensors |= {f"training.{name}": value for name, value in curves.items()}
        others = {name: getattr(self, name) for name in self._own_fields()}
        tensors |= {name: value for name, value in others.items() if isinstance(value, Tensor)}
        texts = {name: value for name, value in others.items() if isinstance(value, str)}
        if unknown := others.keys() - tensors.keys() - texts.keys():
            raise StoreError(
                f"{path} is not written: {', '.join(sorted(unknown))} must be tensors or strings; "
                "put other values into info"
            )
        header = {"class": type(self).__name__, "texts": texts, "info": self.info}
        write_atomically(Path(path), to_bytes_with_digest({"context": header}, tensors))
        return Path(path)

    @classmethod
    @checked
    def load(cls: type[_C], path: str | Path) -> _C:
        """Read a context of this class that ``save`` wrote; ``load_context`` reads any.

        Raises:
            StoreError: The file cannot be read, is damaged, or holds something else.
        """
        header, stored = read_with_digest(path)
        refuse_another_kind(path, header, cls.__name__)
        try:
            return cls._of_file(header["context"], stored)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StoreError(
                f"{path} does not hold what a {cls.__name__} of this version holds ({error!r}); "
                "train the context again and save that"
            ) from error

    @classmethod
    def _of_file(cls: type[_C], header: Mapping[str, Any], stored: Mapping[str, Tensor]) -> _C:
        layers = range(sum(name.startswith("key.") for name in stored))
        prefix = prefix_at_start(
            [stored[f"key.{n}"] for n in layers], [stored[f"value.{n}"] for n in layers]
        )
        curves: dict[str, Any] = {
            name.removeprefix("training."): value
            for name, value in stored.items()
            if name.startswith("training.")
        }
        training = TrainingRecord(**curves) if curves else None
        others = {
            name: stored[name] if name in stored else header["texts"][name]
            for name in cls._own_fields()
        }
        info = dict(header["info"])
        hints = get_type_hints(cls)
        with jaxtyped("context"):  # so that an axis is as long in all fields
            misfits = [name for name in others if not isinstance(others[name], hints[name])]
        if misfits or (training is not None and training._misfit()):
            raise ValueError(f"{', '.join(misfits) or 'training'} of another type or shape")
        _refuse_misfit(prefix, others["tokens"], info)
        return cls(prefix=prefix, training=training, info=info, **others)

    @classmethod
    def _own_fields(cls) -> list[str]:
        """The fields that a file holds under their names: tensors and strings."""
        names = [field.name for field in fields(cls)]
        return [name for name in names if name not in ("prefix", "training", "info")]


def prefix_at_start(
    keys: list[Float[Tensor, "1 _ position _"]], values: list[Float[Tensor, "1 _ position _"]]
) -> KeyValues:
    """Keys and values of the positions 0, 1, ... as a prefix."""
    count, device = keys[0].shape[2], keys[0].device
    return KeyValues(
        keys=tuple(keys),
        values=tuple(values),
        attention_mask=torch.ones(1, count, dtype=torch.bool, device=device),
        next_position=torch.full((1,), count, device=device),
        text_length=count,
    )


def _refuse_misfit(prefix: KeyValues, tokens: Tensor, info: Mapping[str, Any]) -> None:
    """Raise a ValueError for states, tokens or a BOS that do not fit each other."""
    states = [*prefix.keys, *prefix.values]
    shapes = {(state.dtype, state.ndim, state.shape[0], state.shape[2]) for state in states}
    if shapes != {(states[0].dtype, 4, 1, len(prefix))} or not states[0].is_floating_point():
        raise ValueError("keys and values of several types or shapes")
    if tokens.dtype != torch.long or tokens.shape != (len(prefix),):
        raise ValueError("the tokens are not those of the keys")
    bos = info["bos"]
    if not isinstance(bos, list) or not all(type(token) is int for token in bos):
        raise ValueError(f"the BOS {bos!r} is no list of tokens")


def _bos_in_words(info: Mapping[str, Any]) -> str:
    return f"the BOS {info['bos'][0]}" if info["bos"] else "no BOS"
