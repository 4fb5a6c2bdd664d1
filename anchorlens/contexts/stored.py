"""The one form in which keys and values before a query are stored and shown.

A file holds the keys and values of each layer, the tensors of the other fields, the tensors of
records in them, and as json the class, numbers, texts and ``info``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import isclass
from textwrap import shorten
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from jaxtyping import Int, jaxtyped
from torch import Tensor

from ..models.kv_cache import KeyValues
from ..printable import printable
from ..results.record import Record
from ..results.saved import Saved
from ..results.text_frame import table, titled
from ..system.digest_file import Sealed
from ..system.texts import KeepsRepr
from .protocol import Context

_C = TypeVar("_C", bound="StoredContext")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StoredContext(KeepsRepr, Saved, Context):
    """Keys and values before a query; the fields of subclasses are stored with them."""

    prefix: KeyValues
    tokens: Int[Tensor, " position"]
    info: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: the number of positions, bytes, the model, and what a subclass adds."""
        parts = "; ".join(f"{name} {text}" for name, text in self._summary().items())
        text = printable(f"{type(self).__name__}({parts})")
        return shorten(text, 200, placeholder=" …)")

    def _repr_html_(self) -> str:
        return titled(type(self).__name__, table(["what", "value"], self._summary().items()))

    def _summary(self) -> dict[str, str]:
        """What people are shown, by name."""
        return {
            "positions": str(len(self.tokens)),
            "bytes": f"{self.size:,}",
            "model": f"{self.info.get('model')}, {self.info.get('dtype')}",
        }

    @property
    def size(self) -> int:
        """Bytes of the stored keys and values."""
        return self.prefix.size

    @property
    def cached_tokens(self) -> Int[Tensor, " cached"]:
        """The tokens that a query can read."""
        return self.tokens

    @property
    def has_no_gap(self) -> bool:
        """Whether the keys stand at the positions 0, 1, ... and the query after them."""
        return True

    def _parts(self) -> Sealed:
        tensors = {f"key.{n}": keys for n, keys in enumerate(self.prefix.keys)}
        tensors |= {f"value.{n}": values for n, values in enumerate(self.prefix.values)}
        header: dict[str, Any] = {"info": self.info}
        for name in self._own_fields():
            match getattr(self, name):
                case Tensor() as value:
                    tensors[name] = value
                case Record() as record:
                    tensors |= {f"{name}.{key}": value for key, value in record.tensors().items()}
                case str() | int() as value:
                    header[name] = value
                case None:
                    pass
                case _:
                    kinds = "a tensor, record, text or whole number"
                    raise ValueError(f"{name} must be {kinds}; put others into info")
        return header, tensors

    @classmethod
    def _of_parts(cls: type[_C], given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _C:
        rest = dict(tensors)
        layers = range(sum(name.startswith("key.") for name in tensors))
        keys, values = ([rest.pop(f"{kind}.{n}") for n in layers] for kind in ("key", "value"))
        hints = get_type_hints(cls)
        own: dict[str, Any] = {}
        for name in cls._own_fields():
            # A record, or what may be one, such as TrainingRecord | None.
            classes = [each for each in (hints[name], *get_args(hints[name])) if isclass(each)]
            kinds = [each for each in classes if issubclass(each, Record)]
            if kinds:
                begin = f"{name}."
                names = [each for each in rest if each.startswith(begin)]
                parts: dict[str, Any] = {n.removeprefix(begin): rest.pop(n) for n in names}
                own[name] = kinds[0](**parts) if parts else None
            else:
                own[name] = rest.pop(name) if name in rest else given[name]
        if rest:
            raise ValueError(f"it has no fields for the tensors {sorted(rest)}")
        with jaxtyped("context"):  # so that an axis is as long in all fields
            misfits = [name for name in own if not _has_type(own[name], hints[name])]
        if misfits:
            raise ValueError(f"{', '.join(misfits)} of another type or shape")
        states = [*keys, *values]
        shapes = {(state.dtype, state.ndim, state.shape[0], state.shape[2]) for state in states}
        same = {(states[0].dtype, 4, 1, keys[0].shape[2])}
        if shapes != same or not states[0].is_floating_point():
            raise ValueError("keys and values of several types or shapes")
        context = cls(prefix=cls._key_values(keys, values, own), info=dict(given["info"]), **own)
        context._check_loaded()
        return context

    @classmethod
    def _own_fields(cls) -> list[str]:
        """The fields that a file holds under their names."""
        return [each.name for each in fields(cls) if each.name not in ("prefix", "info")]

    @classmethod
    def _key_values(
        cls, keys: Sequence[Tensor], values: Sequence[Tensor], own: Mapping[str, Any]
    ) -> KeyValues:
        """The keys and values of a file, where they stand in the model."""
        return key_values_at_start(keys, values)

    def _check_loaded(self) -> None:
        """Raise a ValueError for tokens or a BOS that do not fit the keys and values."""
        if self.tokens.dtype != torch.long or self.tokens.shape != (len(self.prefix),):
            raise ValueError("the tokens are not those of the keys")
        bos = self.info["bos"]
        if not isinstance(bos, list) or not all(type(token) is int for token in bos):
            raise ValueError(f"the BOS {bos!r} is no list of tokens")


def key_values_at_start(keys: Sequence[Tensor], values: Sequence[Tensor]) -> KeyValues:
    """Keys and values [1, head, position, d_head] of each layer, at the positions 0, 1, ..."""
    count = keys[0].shape[2]
    return KeyValues(
        keys=tuple(keys),
        values=tuple(values),
        attention_mask=torch.ones(1, count, dtype=torch.bool, device="cpu"),
        next_position=torch.full((1,), count, device="cpu"),
        text_length=count,
    )


def _has_type(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):  # which is an int, too
        return hint is bool
    return isinstance(value, hint) and not (isinstance(value, Record) and value.misfit())
