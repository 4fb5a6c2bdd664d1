"""Several records by name, which a notebook shows as a table."""

import pandas as pd

from ..printable import printable
from .estimate import values_in_short
from .html_tables import note, table, titled
from .record import Record, meaning_of

_NUMBERS = 3  # numbers of a record that the table shows


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
    single = [
        name for name, value in tensors.items() if not value.ndim and value.is_floating_point()
    ]
    return "; ".join(
        f"{name} {values_in_short(tensors[name], *intervals.get(name, ()))}"
        for name in (single or [*tensors])[:_NUMBERS]
    )
