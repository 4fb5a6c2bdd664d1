"""A progress bar that moves with every pass of the model, over parts of unknown length."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from tqdm.auto import tqdm

from ..passes.forward import after_each_pass


class PassesBar:
    """The bar of ``paper``.

    How many passes a part takes is known when it has run once, for another task or seed. Until
    then the mean of the known parts is expected, and before the first part has ended no total.

    Args:
        names: The name of each part that will run, in order.
        quiet: Whether nothing is shown.
    """

    def __init__(self, names: Sequence[str], quiet: bool) -> None:
        self.left = list(names)
        self.bar = tqdm(total=None, disable=quiet, unit="pass")
        self.passes = 0
        self.passes_of: dict[str, int] = {}

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Count the passes of the next part."""
        name, before = self.left.pop(0), self.passes
        self.bar.set_description(title)
        with after_each_pass(self._advance):
            yield
        self.passes_of[name] = self.passes - before
        self._expect()

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()

    def clear(self) -> None:
        """Empty the line of the bar, so that other text can begin there."""
        self.bar.clear()

    def _advance(self) -> None:
        self.passes += 1
        if self.bar.total is not None:
            self.bar.total = max(self.bar.total, self.passes)
        self.bar.update()

    def _expect(self) -> None:
        mean = fmean(self.passes_of.values())
        expected = sum(self.passes_of.get(name, mean) for name in self.left)
        self.bar.total = self.passes + round(expected)
        self.bar.refresh()
