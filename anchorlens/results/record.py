"""Records of results, one or several by name: numbers with named axes and their intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import jaxtyped
from torch import Tensor

from ..errors import MetricError
from ..other_words import instead_of
from ..printable import printable
from ..prompts.segment_names import SEGMENTS
from ..system.arguments import checked
from ..system.devices import holds_numbers, with_numbers
from ..system.digest_file import Sealed
from ..system.texts import KeepsRepr, described
from .answer import Answer
from .contributions import Contributions
from .estimate import Estimate, axes_in_short, values_in_short
from .kind import Derived, Kind, Mean, kinds_of, mean_over_sets, number_of_draws
from .saved import Saved
from .text_frame import folded, note, table, titled

_R = TypeVar("_R", bound="Record")
_BOUNDS = "intervals."  # before the name of a field, in a file
# In ``info``: numbers of models of the same architecture with random weights, a list by field.
RANDOM_MODELS = "of_random_models"
_LINE, _NAME = 200, 80  # characters of a repr, and of the name of a model in it
_MAIN_NUMBERS = 3  # of a record, in the table of several


@dataclass(frozen=True, eq=False, kw_only=True)
class Record(KeepsRepr, Saved):
    """Numbers of one analysis. Tensor fields name their axes in their annotations.

    Attributes:
        intervals: 95 % intervals over resampled prompts or sets, by the name of the field: (low,
            high) as a first axis, then the axes of the field. NaN for a single prompt or set.
        info: Where the numbers come from: model, prompts, versions, and what was resampled.
    """

    intervals: Mapping[str, Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    # What the figure of the record shows, how to read it, and what the paper found.
    caption: ClassVar[str] = ""
    # Names of the entries along an axis ("flow": ("wp", "pq", "ww")).
    names: ClassVar[Mapping[str, Sequence[str]]] = {}
    # The key in ``info`` of the names along an axis ("flow": "flows"), which come before ``names``.
    names_in_info: ClassVar[Mapping[str, str]] = {}
    # Fields whose number is that of a layer.
    numbers_of_layers: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        kinds = dict.fromkeys(self.axes(), Tensor) | {"intervals": Mapping, "info": Mapping}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                expected = "a dict" if kind is Mapping else "a tensor"
                raise MetricError(
                    f"{name} of {type(self).__name__} must be {expected}; got {described(value)}"
                )

    def __getattr__(self, name: str) -> Any:
        """An error, which says what to write for a name of pandas; of type Any, as in ``run``."""
        cure = instead_of(f"record.{name}") or f"; its fields are {', '.join(self.axes())}"
        raise AttributeError(f"{type(self).__name__} has no {name!r}{cure}", name=name, obj=self)

    def __repr__(self) -> str:
        """One line: the class, fields with their axes, the number of prompts and the model."""
        fields = []
        for name, axes in self.axes().items():
            sizes, values = self._in_short(name, axes)
            fields.append(f"{name} [{sizes}]" if sizes else f"{name} {values}")
        for count in range(len(fields), -1, -1):
            rest = [f"{len(fields) - count} more"] if count < len(fields) else []
            parts = [", ".join(fields[:count] + rest), self._source()]
            line = printable(f"{type(self).__name__}({'; '.join(part for part in parts if part)})")
            if len(line) <= _LINE:
                break
        return line

    def _repr_html_(self) -> str:
        """Each field in short, with its interval, and where the numbers come from."""
        rows = []
        for name, axes in self.axes().items():
            kind = self.kinds().get(name)
            quantity = f"{name} ({kind.unit})" if kind and kind.unit else name
            rows.append((quantity, *self._in_short(name, axes)))
        source = self._source()
        return titled(
            f"{type(self).__name__}: {source}" if source else type(self).__name__,
            note(meaning_of(type(self))),
            table(["quantity", "axes", "values [95 % interval]"], rows),
            folded("info", table(["name", "value"], [(k, str(v)) for k, v in self.info.items()])),
            note("to_frame() has all numbers" + ", plot() draws them" * has_plot(self)),
        )

    def _in_short(self, name: str, axes: Sequence[str]) -> tuple[str, str]:
        """The axes and the values of a field; no axes for what does not fit the annotation."""
        value = getattr(self, name)
        if value.ndim != len(axes):
            return "", described(value)
        return axes_in_short(value, axes), values_in_short(value, *self.intervals.get(name, ()))

    def _source(self) -> str:
        """The number of prompts and the model, as far as they are known."""
        count, model = self.info.get("prompts"), self.info.get("model")
        known = [] if count is None else [f"{count} prompt{'' if count == 1 else 's'}"]
        # The end of a long name, because names of local models are paths.
        known += [] if model is None else [" ".join(str(model).split())[-_NAME:]]
        return ", ".join(known)

    @classmethod
    @cache
    def axes(cls) -> dict[str, tuple[str, ...]]:
        """The axis words of each tensor field, in order.

        Examples:
            >>> al.records.SaliencyFlowsRecord.axes()["flows"]
            ('layer', 'flow')
        """
        hints = get_type_hints(cls)
        named = {f.name: getattr(hints[f.name], "dim_str", None) for f in fields(cls)}
        return {name: tuple(dims.split()) for name, dims in named.items() if dims is not None}

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        return {name: getattr(self, name) for name in self.axes()}

    @classmethod
    @cache
    def kinds(cls) -> dict[str, Kind]:
        """What each field is that declares it (see ``al.kinds``), derived fields last."""
        return kinds_of(cls)

    @classmethod
    @checked
    def of(cls: type[_R], contributions: Contributions, **given: Any) -> _R:
        """The record of all contributions: each field from each set, then the mean over sets.

        Args:
            contributions: What each prompt contributes, by the names that the fields declare.
            given: Fields that declare no kind or one without a function, and ``info``.

        Raises:
            MetricError: A contribution or a given field is missing, or there is no such field.

        Examples:
            >>> right = al.Contributions({"correct": torch.tensor([1., 0., 1., 1.])})
            >>> al.records.AccuracyRecord.of(right).accuracy
            tensor(0.7500)
        """
        unknown = given.keys() - {each.name for each in fields(cls)}
        missing = cls.axes().keys() - given.keys() - cls.kinds().keys()
        if unknown or missing:
            wrong = f"{sorted(unknown)} are no fields" if unknown else f"give {sorted(missing)}"
            raise MetricError(
                f"{cls.__name__}.of computes the fields that declare a kind and is given all "
                f"others by name: {wrong}"
            )
        values, kinds, sets = dict(given), cls.kinds(), contributions.of_sets()
        for name, kind in kinds.items():
            if isinstance(kind, Derived):
                values[name] = kind.of_fields(values, contributions)
            elif name not in given:
                parts = [contributions] if kind.pooled else sets
                values[name] = mean_over_sets(kind.of_set, parts)
                if isinstance(kind, Mean) and name not in contributions.of_fields:
                    contributions.of_fields[name] = kind.of_prompts(contributions)
        if (draws := number_of_draws(kinds.values(), contributions)) is not None:
            values["info"] = {"draws": draws, **values.get("info", {})}
        return cls(**values)

    @checked
    def estimate(self, name: str, *index: Any) -> Estimate:
        """A number of the record with its 95 % interval, whose text has both.

        Args:
            index: The position on each of its axes, a whole number.

        Raises:
            MetricError: There is no such number.

        Examples:
            >>> record = al.run(model, batches, [al.Accuracy()], progress=False)["accuracy"]
            >>> f"accuracy {record.estimate('accuracy')}"
            'accuracy ... [..., ...]'
        """
        axes = self.axes().get(name)
        are_numbers = all(hasattr(number, "__index__") for number in index)
        if axes is None or len(index) != len(axes) or not are_numbers:
            call = f"estimate({', '.join((repr(name), *(axes or ())))})"
            expected = f"one of {', '.join(self.axes())}" if axes is None else call
            raise MetricError(
                f"a number of a {type(self).__name__} has the name of a field and an index of each "
                f"of its axes: expected {expected}; got {', '.join(map(repr, (name, *index)))}"
            )
        bounds = self.intervals.get(name)
        ends = () if bounds is None else (float(bound[index]) for bound in bounds)
        number, kind = Estimate(float(getattr(self, name)[index]), *ends), self.kinds().get(name)
        return replace(number, is_difference=kind is not None and kind.is_difference)

    @checked
    def answer(self, unable: str) -> Answer | None:
        """What a report says before all numbers; None where it has no one answer.

        Args:
            unable: Why the numbers say nothing of how the model answers; "" if it does the task.
        """
        return None

    @checked
    def of_random_models(self, name: str) -> np.ndarray:
        """A field of models of the same architecture with random weights, along a first axis."""
        return np.array(self.info.get(RANDOM_MODELS, {}).get(name, ()), dtype=float)

    @checked
    def axis_names(self, axis: str) -> Sequence[str] | None:
        """Names along an axis: those of classes, segments or others in ``info``, or ``names``."""
        if axis.startswith("class"):
            return self.info.get("labels")
        if axis == "segment":  # those asked for, or those of the prompts
            names = self.info.get("segment_names") or self.info.get("segments") or SEGMENTS
        else:
            names = self.info.get(self.names_in_info.get(axis, "")) or self.names.get(axis)
        return names and tuple(names)

    def to_frame(self) -> pd.DataFrame:
        """All numbers as one long table.

        Returns:
            One row for each number: ``quantity``, a column for each axis word (a second axis of
            the same word is ``class_2``), ``value``, and ``low`` and ``high`` of the interval.
            Numbers of models with random weights are rows such as ``share of random weights``.
        """
        frames = []
        for name, axes in self.axes().items():
            numbers = {"value": getattr(self, name)}
            if name in self.intervals:
                numbers |= dict(zip(("low", "high"), self.intervals[name], strict=True))
            frames.append(self._rows(name, axes, numbers))
            of_random = torch.from_numpy(self.of_random_models(name))
            if len(of_random):
                of_draws = f"{name} of random weights"
                frames.append(self._rows(of_draws, ("draw", *axes), {"value": of_random}))
        return pd.concat(frames or [pd.DataFrame(columns=["quantity", "value"])], ignore_index=True)

    def _rows(
        self, quantity: str, axes: Sequence[str], numbers: Mapping[str, Tensor]
    ) -> pd.DataFrame:
        """A row for each number of a quantity; ``numbers`` has the columns that are no axes."""
        shape = next(iter(numbers.values())).shape
        columns = [f"{axis}_2" if axis in axes[:k] else axis for k, axis in enumerate(axes)]
        entries = [self.axis_names(axis) or range(n) for axis, n in zip(axes, shape)]  # noqa: B905
        frame = pd.DataFrame(list(product(*entries)), columns=columns)
        numbered = [name for name, of in zip(columns, entries) if isinstance(of, range)]  # noqa: B905
        # They are integers also beside fields without this axis.
        frame = frame.astype(dict.fromkeys(numbered, "Int64"))
        frame.insert(0, "quantity", quantity)
        for column, of_column in numbers.items():
            frame[column] = of_column.flatten().double().tolist()
        return frame

    def plot(self) -> go.Figure:
        """The record as a figure; every record of this package has one."""
        raise MetricError(f"{type(self).__name__} has no plot; define one, or use to_frame()")

    def _parts(self) -> Sealed:
        if reason := self.misfit():
            raise ValueError(reason)
        bounds = {f"{_BOUNDS}{name}": bound for name, bound in self.intervals.items()}
        return {"info": dict(self.info)}, self.tensors() | bounds

    @classmethod
    def _of_parts(cls: type[_R], given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _R:
        values: dict[str, Any] = {n: tensors[n] for n in tensors if not n.startswith(_BOUNDS)}
        bounds = {n.removeprefix(_BOUNDS): tensors[n] for n in tensors if n not in values}
        info = given.get("info")
        if not isinstance(info, dict):
            reason = f"its info is a {type(info).__name__}, not a dict"
        elif not isinstance(info.get("labels") or [], list):  # None in prompts without label words
            reason = f"the labels in its info are {info['labels']!r}, not a list"
        elif values.keys() != cls.axes().keys():
            reason = f"it has the fields {sorted(values)}, not {sorted(cls.axes())}"
        else:
            record = cls(**values, intervals=bounds, info=info)
            if not (reason := record.misfit()):
                return record
        raise ValueError(reason)

    def misfit(self) -> str:
        """Which tensor does not fit the annotation of its field, and how; "" if all fit."""
        hints = get_type_hints(type(self))
        tensors = self.tensors()
        of_numbers = with_numbers(tensors)
        with jaxtyped("context"):  # so that an axis is as long in all fields
            for name, value in tensors.items():
                if name not in of_numbers or not isinstance(value, hints[name]):
                    return f"{name} is {described(value)}, but expected {hints[name].__name__}"
        for name, bounds in self.intervals.items():
            if name not in tensors:
                return f"there is an interval of {name}, which is no field of numbers"
            expected = (2, *tensors[name].shape)
            is_float = holds_numbers(bounds) and bounds.is_floating_point()
            if not is_float or tuple(bounds.shape) != expected:
                got = described(bounds)
                return f"the interval of {name} is {got}, but expected floats {expected}"
        return ""


def meaning_of(kind: type[Record]) -> str:
    """The first line of the docstring of a record's class; "" if it has none."""
    doc = vars(kind).get("__doc__") or ""
    # dataclass gives a class without a docstring its signature.
    return "" if doc.startswith(f"{kind.__name__}(") else doc.strip().partition("\n")[0]


def has_plot(record: Record) -> bool:
    """Whether the class of a record defines a plot."""
    return type(record).plot is not Record.plot


class Results(dict[str, Record]):
    """Records by name, as ``al.run`` returns them: a dict that prints a line for each record.

    Examples:
        >>> results = al.run(model, batches, [al.Accuracy()], progress=False)
        >>> results
        Results of 1 record
          accuracy: AccuracyRecord(accuracy ...; 14 prompts, ...)
    """

    def __missing__(self, name: object) -> Record:
        raise KeyError(f"there is no result {name!r}; the results are {', '.join(self)}")

    def to_frame(self) -> pd.DataFrame:
        """All numbers as one long table: that of each record, after a column ``result``, its name.

        Examples:
            >>> results = al.run(model, batches, [al.Accuracy()], progress=False)
            >>> list(results.to_frame().columns[:2])
            ['result', 'quantity']
        """
        frames = [record.to_frame() for record in self.values()]
        for name, frame in zip(self, frames, strict=True):
            frame.insert(0, "result", name)
        return pd.concat(frames or [pd.DataFrame(columns=["result"])], ignore_index=True)

    def __repr__(self) -> str:
        lines = [f"  {printable(name)}: {self[name]!r}" for name in self]
        return "\n".join([self._heading(), *lines])

    def _repr_html_(self) -> str:
        rows = [(name, meaning_of(type(self[name])), _main_numbers(self[name])) for name in self]
        return titled(
            self._heading(),
            table(["name", "what it is", "main numbers, with 95 % intervals"], rows),
            note("to_frame() has all numbers, and each record has plot()"),
        )

    def _heading(self) -> str:
        return f"{type(self).__name__} of {len(self)} record{'' if len(self) == 1 else 's'}"


def _main_numbers(record: Record) -> str:
    """The first single numbers of a record; its first fields in short if it has none."""
    tensors, intervals = record.tensors(), record.intervals
    single = [name for name, each in tensors.items() if not each.ndim and each.is_floating_point()]
    return "; ".join(
        f"{name} {values_in_short(tensors[name], *intervals.get(name, ()))}"
        for name in (single or [*tensors])[:_MAIN_NUMBERS]
    )
