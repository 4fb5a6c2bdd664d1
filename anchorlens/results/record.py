"""The base record of every result: numbers with named axes, their intervals, saved and loaded."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import pandas as pd
from jaxtyping import jaxtyped
from torch import Tensor

from ..errors import MetricError, StoreError
from ..system.files import write_whole
from ..system.sealed import sealed, unsealed

Rows = Mapping[str, Tensor]
_R = TypeVar("_R", bound="Record")
_BOUNDS = "intervals."  # before the name of a field, in a file


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
    # Proportions that are taken of each given set of demonstrations, then averaged ("aucroc").
    means_over_sets: ClassVar[Collection[str]] = ()

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

        The file holds a digest of all of it. Files of equal records are equal byte for byte.

        Returns:
            The path.

        Raises:
            StoreError: Json cannot hold ``info``, the tensors are not as the record's fields say,
                or the file cannot be written.

        Examples:
            >>> result = al.isolation_loyalty(model, batches, 0, draws=1, progress=False)
            >>> same = al.IsolationRecord.load(result.save(folder / "result.safetensors"))
            >>> bool(same.word_loyalty == result.word_loyalty)
            True
        """
        path = Path(path)
        if reason := self._misfit():
            raise StoreError(f"{path} is not written, as no {type(self).__name__} is so: {reason}")
        bounds = {f"{_BOUNDS}{name}": bound for name, bound in self.intervals.items()}
        header = {"record": type(self).__name__, "info": dict(self.info)}
        write_whole(path, sealed(header, self.tensors() | bounds))
        return path

    @classmethod
    def load(cls: type[_R], path: str | Path) -> _R:
        """Read a record that :meth:`save` wrote.

        Raises:
            StoreError: The file cannot be read, is damaged, is none of a record, holds another
                kind of record, or was saved by an earlier version.
        """
        header, stored = unsealed(path)
        if header.get("record") != cls.__name__:
            raise StoreError(
                f"{path} holds a {header.get('record')}, not a {cls.__name__}; load it with that"
            )
        cut = len(_BOUNDS)
        bounds = {name[cut:]: value for name, value in stored.items() if name[:cut] == _BOUNDS}
        values = {name: value for name, value in stored.items() if name[:cut] != _BOUNDS}
        info = header.get("info")
        if not isinstance(info, dict):
            reason = f"its info is a {type(info).__name__}, not a dict"
        elif values.keys() != cls.axes().keys():
            reason = f"it has the fields {sorted(values)}, not {sorted(cls.axes())}"
        else:
            record = cls(**values, intervals=bounds, info=info)
            reason = record._misfit()
            if not reason:
                return record
        raise StoreError(
            f"{path} does not hold what a {cls.__name__} of this version holds: {reason}; compute "
            "the result again and save it"
        )

    def _misfit(self) -> str:
        """What of the tensors is not as the annotations of the fields say; "" where all is."""
        hints = get_type_hints(type(self))
        tensors = self.tensors()
        with jaxtyped("context"):  # so that an axis is as long in all fields
            for name, value in tensors.items():
                if not isinstance(value, hints[name]):
                    return f"{name} is {_shape(value)}, but expected {hints[name].__name__}"
        for name, bounds in self.intervals.items():
            if name not in tensors:
                return f"there is an interval of {name}, which is no field of numbers"
            expected = (2, *tensors[name].shape)
            if not bounds.is_floating_point() or tuple(bounds.shape) != expected:
                return f"the interval of {name} is {_shape(bounds)}, but expected floats {expected}"
        return ""


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


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
