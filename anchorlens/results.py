"""The base record of every result: numbers with named axes, their intervals, saved and loaded."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .errors import MetricError, StoreError
from .files import write_whole

Rows = Mapping[str, Tensor]
_R = TypeVar("_R", bound="Record")


@dataclass(frozen=True, eq=False, kw_only=True)
class Record:
    """Numbers of one analysis. Tensor fields name their axes in their annotations.

    Attributes:
        intervals: For each tensor field that has one, its 95 % interval over resampled prompts or
            sets of demonstrations, stacked as (low, high) in front of the field's own axes. NaN
            where a single prompt or set allows none.
        info: What the numbers are of: model, class names, number of prompts, versions, and what
            the intervals draw.
    """

    intervals: Mapping[str, Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    # Names along an axis, where it has some ("flow": ("wp", "pq", "ww")).
    names: ClassVar[Mapping[str, Sequence[str]]] = {}
    # Fields that are the mean over prompts of a difference of two zeros or ones ("gain").
    differences: ClassVar[Collection[str]] = ()

    @classmethod
    @cache
    def axes(cls) -> dict[str, tuple[str, ...]]:
        """The axis words of each tensor field, in order.

        Examples:
            >>> al.SaliencyFlowsRecord.axes()["flows"]
            ('layer', 'flow')
        """
        hints = get_type_hints(cls)
        named = {f.name: getattr(hints[f.name], "dim_str", None) for f in fields(cls)}
        return {name: tuple(dims.split()) for name, dims in named.items() if dims is not None}

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        return {name: getattr(self, name) for name in self.axes()}

    def proportions(self) -> Mapping[str, int]:
        """Fields that are shares of cases, and how many prompts make a case.

        1 where each prompt is a case ("accuracy", a mean of zeros and ones), 2 for pairs of prompts
        (AUC-ROC: a share of pairs), the number of classes for pairs from two of them. Their
        intervals are Wilson's, because resamples of zeros alone do not differ.
        """
        return {}

    def axis_names(self, axis: str) -> Sequence[str] | None:
        """Names along an axis: the record's own, or the class names that ``info`` holds."""
        if axis in self.names:
            return self.names[axis]
        return self.info.get("labels") if axis.startswith("class") else None

    def to_frame(self) -> pd.DataFrame:
        """All numbers as one long table.

        Returns:
            One row a number: ``quantity``, a column for each axis word (a second axis of the same
            word is ``class_2``), ``value``, and ``low`` and ``high`` where there is an interval.
        """
        return pd.concat(
            [self._frame_of(name, axes) for name, axes in self.axes().items()], ignore_index=True
        )

    def _frame_of(self, name: str, axes: tuple[str, ...]) -> pd.DataFrame:
        values = getattr(self, name)
        columns = [f"{axis}_2" if axis in axes[:k] else axis for k, axis in enumerate(axes)]
        places = [self.axis_names(axis) or range(n) for axis, n in zip(axes, values.shape)]  # noqa: B905
        frame = pd.DataFrame(list(product(*places)), columns=columns)
        frame.insert(0, "quantity", name)
        frame["value"] = values.flatten().double().tolist()
        if name in self.intervals:
            for column, bound in zip(("low", "high"), self.intervals[name], strict=True):
                frame[column] = bound.flatten().double().tolist()
        return frame

    def save(self, path: str | Path) -> Path:
        """Write the record into one safetensors file, its ``info`` as json in the header.

        Returns:
            The path.

        Examples:
            >>> result = al.isolation_loyalty(model, batches, 0, draws=1, progress=False)
            >>> same = al.IsolationRecord.load(result.save(folder / "result.safetensors"))
            >>> bool(same.word_loyalty == result.word_loyalty)
            True
        """
        path = Path(path)
        bounds = {f"intervals.{name}": bound for name, bound in self.intervals.items()}
        own = self.tensors() | bounds
        header = {"record": type(self).__name__, "info": json.dumps(dict(self.info))}
        # Copies, as safetensors takes no two tensors that share memory.
        copies = {name: tensor.contiguous().clone() for name, tensor in own.items()}
        write_whole(path, save(copies, metadata=header))
        return path

    @classmethod
    def load(cls: type[_R], path: str | Path) -> _R:
        """Read a record that :meth:`save` wrote.

        Raises:
            StoreError: The file is not one, or holds another kind of record.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path} cannot be read as a saved record: {error}") from error
        if header.get("record") != cls.__name__:
            raise StoreError(
                f"{path} holds a {header.get('record')}, not a {cls.__name__}; load it with that"
            )
        bounds = {name[10:]: value for name, value in stored.items() if name[:10] == "intervals."}
        values = {name: value for name, value in stored.items() if name[:10] != "intervals."}
        return cls(**values, intervals=bounds, info=json.loads(header["info"]))


def by_set(rows: Rows) -> list[dict[str, Tensor]]:
    """The rows of each set of demonstrations."""
    sets = rows["demonstrations_id"]
    return [
        {name: values[sets == one] for name, values in rows.items()}
        for one in sets.unique().tolist()
    ]


def require_gold(gold: Tensor | None, what: str) -> Tensor:
    """The true labels, or an error that says which quantity needs them."""
    if gold is None:
        raise MetricError(f"{what} needs the true label of each query; give queries with labels")
    return gold
