"""What each prompt contributes to a result, and how a mean over prompts is made."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from textwrap import shorten
from typing import Any, TypeVar

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ..errors import MetricError
from ..printable import printable
from ..system.arguments import checked
from ..system.devices import holds_numbers
from ..system.texts import described, name_of

_T = TypeVar("_T")


@checked
class Contributions(Mapping[str, Tensor]):
    """What each prompt contributes to a result: tensors by name, with an entry for each prompt.

    Args:
        tensors: Tensor["prompt ..."] by name.
        sets: The number of the set of each prompt over which a result is averaged; by default one.
        demonstrations: The number of the demonstrations of each prompt; by default as ``sets``.

    Examples:
        >>> given = al.Contributions({"loss": torch.tensor([1., 2., 6.])}, torch.tensor([0, 0, 1]))
        >>> given.mean(given["loss"])  # of each set, then over sets
        tensor(3.7500)
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        sets: Int[Tensor, " prompt"] | None = None,
        demonstrations: Int[Tensor, " prompt"] | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        if sets is None:
            count = len(next(iter(self._tensors.values())))
            sets = torch.zeros(count, dtype=torch.long, device="cpu")
        self.sets, self.demonstrations = sets, sets if demonstrations is None else demonstrations
        self.draw_left_out: int | None = None
        self._of: tuple[Contributions, Tensor] | None = None  # whose prompts these are, and which
        self._made: dict[Any, Any] = {}
        self.means: dict[Any, Tensor] = {}  # over all prompts, by what they are of
        self.of_prompts: dict[Any, Tensor] = {}  # the numbers of which they are means
        self.of_fields: dict[str, Tensor] = {}  # [prompt, ...] by field: that of which it is a mean

    def __getitem__(self, name: str) -> Tensor:
        if self._of is not None and name not in self._tensors:  # chosen when it is asked for
            whole, chosen = self._of
            self._tensors[name] = _at(whole[name], chosen)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors if self._of is None else self._of[0])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """One line: the names, and the numbers of prompts and of sets."""
        count, sets = len(self.sets), len(self.sets.unique())
        names = printable(shorten(", ".join(self), 80))
        return f"Contributions({names}; {count} prompts, {sets} sets)"

    @checked
    def prompts(self, chosen: Shaped[Tensor, " _"]) -> "Contributions":
        """The contributions of some prompts, in the order of ``chosen``."""
        return self._at(chosen)

    @checked
    def replaced(self, tensors: Mapping[str, Tensor]) -> "Contributions":
        """The contributions with other tensors in place of those of the same names."""
        return self._like({**self, **tensors}, self.sets, self.demonstrations)

    @checked
    def without_draw(self, draw: int) -> "Contributions":
        """The contributions without a random draw, which means over draws then leave out."""
        others = self._like(dict(self), self.sets, self.demonstrations)
        others.draw_left_out = draw
        return others

    @cached_property
    def has_repeats(self) -> bool:
        """Whether a prompt is there several times, as in a resample."""
        return self._of is not None and int(torch.bincount(self._of[1]).max()) > 1

    @checked
    def once(self, function: Callable[["Contributions"], _T]) -> _T:
        """What a function makes of these contributions; it is called the first time only."""
        if function not in self._made:
            self._made[function] = function(self)
        return self._made[function]

    @checked
    def of_each(self, function: Callable[["Contributions"], Tensor]) -> Tensor:
        """What a function makes of each prompt, [prompt, ...]; of resamples it is chosen from that.

        It is called once for all prompts, so that one prompt must not depend on the others.

        Raises:
            MetricError: It gives no tensor with an entry for each prompt.
        """
        key = "of each prompt", function
        if key not in self._made:
            if self._of is None:
                self._made[key] = self._checked(function)
            else:
                whole, chosen = self._of
                self._made[key] = _at(whole.of_each(function), chosen)
        return self._made[key]

    @checked
    def with_each(
        self, function: Callable[["Contributions"], Mapping[str, Tensor]]
    ) -> "Contributions":
        """These and what a function, called as in ``of_each``, makes of each prompt, by name."""
        whole, chosen = (self, None) if self._of is None else self._of
        key = "with each prompt", function
        if key not in whole._made:
            whole._made[key] = whole.replaced(function(whole))
        made: Contributions = whole._made[key]
        return made if chosen is None else made._at(chosen)

    def of_sets(self) -> list["Contributions"]:
        """The contributions of each set."""
        return self._sets

    @cached_property
    def _sets(self) -> list["Contributions"]:
        numbers, sizes = self.sets.unique(return_counts=True)
        if len(numbers) == 1:
            return [self]
        by_set = self.sets.argsort(stable=True).split(sizes.tolist())
        return [self._at(prompts) for prompts in by_set]

    def of_demonstrations(self) -> list["Contributions"]:
        """The contributions after each set of demonstrations, also where results pool them."""
        numbers = self.demonstrations.unique().tolist()
        return [self.prompts(self.demonstrations == number) for number in numbers]

    @checked
    def mean(self, values: Shaped[Tensor, "prompt *axes"]) -> Shaped[Tensor, "*axes"]:
        """The mean over the prompts of each set, then over sets; both without NaN."""
        numbers = self.sets.unique().tolist()
        of_sets = [values[self.sets == number].nanmean(0) for number in numbers]
        return torch.stack(of_sets).nanmean(0)

    def _checked(self, function: Callable[["Contributions"], Tensor]) -> Tensor:
        values: Any = function(self)
        if not holds_numbers(values) or values.shape[:1] != self.sets.shape:
            raise MetricError(
                "a function of what each prompt contributes gives a tensor [prompt, ...] for "
                f"{len(self.sets)} prompts; {name_of(function)} gave {described(values)}; declare "
                "a number of all of them as a statistic"
            )
        return values

    def _at(self, chosen: Tensor) -> "Contributions":
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero().flatten()
        if self._of is not None:  # so that numbers are chosen once
            whole, before = self._of
            return whole._at(before[chosen])
        others = self._like({}, _at(self.sets, chosen), _at(self.demonstrations, chosen))
        others._of = self, chosen
        return others

    def _like(
        self,
        tensors: dict[str, Tensor],
        sets: Int[Tensor, " prompt"],
        demonstrations: Int[Tensor, " prompt"],
    ) -> "Contributions":
        others = object.__new__(Contributions)  # for each set of each resample: without checks
        others._tensors, others.sets, others.demonstrations = tensors, sets, demonstrations
        others.draw_left_out, others._of, others._made = self.draw_left_out, None, {}
        others.of_fields, others.means, others.of_prompts = self.of_fields, {}, {}
        return others


def _at(values: Tensor, chosen: Int[Tensor, " _"]) -> Tensor:
    """``values[chosen]``, in half the time."""
    return values.index_select(0, chosen.to(values.device))
