"""A number of prompts without its bias of first order, by leaving out each prompt in turn."""

from collections.abc import Callable

import torch
from torch import Tensor


def jackknife(number: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    count = len(rows)
    others = [number(rows[torch.arange(count) != each]) for each in range(count)]
    return count * number(rows) - (count - 1) * torch.stack(others).mean(0)
