"""What each prompt contributes to a result, and how a mean over prompts is made."""

from collections.abc import Iterator, Mapping
from textwrap import shorten

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ..system.arguments import checked


@checked
class Contributions(Mapping[str, Tensor]):
    """What each prompt contributes to a result: tensors by name, with an entry for each prompt.

    Args:
        tensors: Tensor["prompt ..."] by name.
        sets: The number of the set of each prompt over which a result is averaged; by default all
            prompts are of one set, as they are where small sets are pooled.
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

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        """One line: the names, and the numbers of prompts and of sets."""
        count, sets = len(self.sets), len(self.sets.unique())
        return f"Contributions({shorten(', '.join(self), 80)}; {count} prompts, {sets} sets)"

    @checked
    def prompts(self, chosen: Shaped[Tensor, " _"]) -> "Contributions":
        """The contributions of some prompts, in the order of ``chosen``."""
        tensors = {name: values[chosen] for name, values in self._tensors.items()}
        return Contributions(tensors, self.sets[chosen], self.demonstrations[chosen])

    @checked
    def replaced(self, tensors: Mapping[str, Tensor]) -> "Contributions":
        """The contributions with other tensors in place of those of the same names."""
        return Contributions({**self._tensors, **tensors}, self.sets, self.demonstrations)

    def of_sets(self) -> list["Contributions"]:
        """The contributions of each set."""
        return [self.prompts(self.sets == number) for number in self.sets.unique().tolist()]

    def of_demonstrations(self) -> list["Contributions"]:
        """The contributions after each set of demonstrations, also where results pool them."""
        numbers = self.demonstrations.unique().tolist()
        return [self.prompts(self.demonstrations == number) for number in numbers]

    @checked
    def means_of_sets(self, values: Shaped[Tensor, "prompt *axes"]) -> Shaped[Tensor, "set *axes"]:
        """The mean over the prompts of each set, without NaN.

        Args:
            values: Computed from these contributions.

        Returns:
            The means; NaN where no prompt of a set has a number.
        """
        numbers = self.sets.unique().tolist()
        return torch.stack([values[self.sets == number].nanmean(0) for number in numbers])

    @checked
    def mean(self, values: Shaped[Tensor, "prompt *axes"]) -> Shaped[Tensor, "*axes"]:
        """The mean over the prompts of each set, then over sets; both without NaN."""
        return self.means_of_sets(values).nanmean(0)
