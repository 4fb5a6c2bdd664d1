"""How label words give the score of their class. PyTorch is not imported, as it takes seconds."""

from collections.abc import Callable
from typing import Any

Score = Callable[[Any, int], Any]
"""From the log probabilities of a class's words, Float[batch, word], and the axis of the words (-1)
to the score of the class, Float[batch].

``mean`` of this file, ``torch.mean``, ``torch.sum``, ``torch.amax`` and ``torch.logsumexp`` are
such functions.
"""


def mean(log_probs: Any, axis: int) -> Any:
    """The mean of the log probabilities: the score of a class if nothing else is said."""
    return log_probs.mean(axis)
