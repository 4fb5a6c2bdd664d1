"""Optimizers that torch does not have."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Adafactor:
    """Makes the Adafactor of transformers with a constant learning rate (Shazeer and Stern, 2018).

    Its steps are not scaled by the parameters, and the learning rate does not warm up. These are
    the settings of prompt tuning (Lester et al., 2021, section 2) and of PEZ. torch has another
    rule under this name.

    Attributes:
        lr: Learning rate: about the size of a step in each coordinate, whatever the size of the
            gradient is.
    """

    lr: float = 0.3

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        """The optimizer of these parameters."""
        from transformers.optimization import Adafactor as OfTransformers

        optimizer: Optimizer = OfTransformers(
            parameters, lr=self.lr, relative_step=False, scale_parameter=False, warmup_init=False
        )
        return optimizer
