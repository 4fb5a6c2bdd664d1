"""Optimizers that torch does not have."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from ..system.devices import in_float64


@dataclass(frozen=True)
class Adafactor:
    """Makes the Adafactor of transformers with a constant learning rate (Shazeer and Stern, 2018).

    Its steps are not scaled by the parameters, and the learning rate does not warm up, as in prompt
    tuning (Lester et al., 2021, section 2) and PEZ. torch has another rule under this name.

    Attributes:
        lr: About the size of a step in each coordinate, whatever the size of the gradient is.
    """

    lr: float = 0.3

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        from transformers.optimization import Adafactor as OfTransformers

        return OfTransformers(
            parameters, lr=self.lr, relative_step=False, scale_parameter=False, warmup_init=False
        )


@dataclass(frozen=True)
class RelativeAdafactor:
    """Makes ``Adafactor`` with a learning rate relative to the size of the parameters.

    The size is the root mean square of all parameters at the start, in which embeddings differ from
    model to model.

    Attributes:
        rate: Learning rate over that size.
    """

    rate: float

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        return Adafactor(self.rate * float(root_mean_square(values)))(parameters)


def root_mean_square(values: Tensor) -> Float[Tensor, ""]:
    """The square root of the mean of the squares, in float64."""
    return in_float64(values.detach()).square().mean().sqrt()
