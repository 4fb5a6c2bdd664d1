"""A progress bar that moves with every pass of the model, over parts of unknown length."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from tqdm.auto import tqdm

from ..passes.forward import after_each_pass


class PassesBar:
    """The bar of ``paper``.

    How many passes a part takes is known when it has run once, for another task or seed. Until
    then the mean of the known parts is expected, or more if it took more already. Before the first
    part has ended there is no total.

    Args:
        names: The name of each part that will run, in order.
        quiet: Whether nothing is shown.
    """

    def __init__(self, names: Sequence[str], quiet: bool) -> None:
        self.left = list(names)
        self.bar = tqdm(total=None, disable=quiet, unit=" passes")
        self.passes = 0
        self.passes_of: dict[str, int] = {}

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Count the passes of the next part."""
        name, before = self.left.pop(0), self.passes

        def advance() -> None:
            self.passes += 1
            self._set_total(name, before)
            self.bar.update()

        self.bar.set_description_str(title)
        self._set_total(name, before)
        with after_each_pass(advance):
            yield
        self.passes_of[name] = self.passes - before

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()

    def clear(self) -> None:
        """Empty the line of the bar, so that other text can begin there."""
        self.bar.clear()

    def _set_total(self, name: str, before: int) -> None:
        """Expect a number of passes, of which ``before`` were those of the parts before this."""
        if not self.passes_of:
            return
        mean = fmean(self.passes_of.values())
        of_part = max(self.passes_of.get(name, mean), self.passes - before)
        later = sum(self.passes_of.get(later, mean) for later in self.left)
        self.bar.total = before + round(of_part + later)
