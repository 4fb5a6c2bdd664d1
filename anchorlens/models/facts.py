"""What is known of a model, found once: no run tries it again.

1. ``prepare_model`` finds in tiny passes what every run needs, and keeps it here (``Facts``). All
   else is a function of the model alone, marked with ``fact``, which runs once.
2. A model that was moved to another type or got other modules is prepared again, and its facts are
   found again. One of the same architecture with other weights takes them over (``take_over``),
   but for what holds modules (``own_fact``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from ..errors import ModelError
from .kinds import modules_of

_T = TypeVar("_T")


class OfAttention(NamedTuple):
    """In the place of a hook point: a hook gets queries or keys as the attention gets them."""

    name: str


@dataclass(frozen=True)
class Operands:
    """The hook points of the queries and keys that a layer's attention multiplies."""

    query: str
    key: str
    heads_first: bool  # (batch, head, position, d_head), else (batch, position, head, d_head)
    scale: float  # queries at the hook point are as many times as large as those multiplied
    key_heads: int  # that are stored; the hook point may have a copy for each query head

    def multiplied(self, tensor: Tensor, hook: Any, *, of_keys: bool) -> Tensor:
        """What attention multiplies, (batch, head, position, d_head), of what a hook gets."""
        if isinstance(hook, OfAttention):
            return tensor
        heads = tensor if self.heads_first else tensor.transpose(1, 2)
        if of_keys:
            return heads[:, :: heads.shape[1] // self.key_heads]
        return heads if self.scale == 1 else heads / self.scale


def hooks_on_operands(
    of_layers: Sequence[Operands | None], use: Callable[[int, Tensor], Any], *, of_keys: bool
) -> list[tuple[str, Callable[..., None]]]:
    """Hooks that pass each layer's number, and what it multiplies in every pass, to ``use``."""

    def act(layer: int, operands: Operands, tensor: Tensor, hook: Any) -> None:
        use(layer, operands.multiplied(tensor, hook, of_keys=of_keys))

    return [
        (each.key if of_keys else each.query, partial(act, layer, each))
        for layer, each in enumerate(of_layers)
        if each is not None
    ]


@dataclass(frozen=True, eq=False)
class Facts:
    """What ``prepare_model`` found."""

    operands: tuple[Operands | None, ...]  # of each layer; None if no hook point holds them
    why_no_cache: str = ""  # why the model does not continue from a key-value cache; "" if it does
    entries: tuple[int, ...] = ()  # the number of the cache entry that each layer reads
    found: dict[Any, Any] = field(default_factory=dict)  # by the functions marked with ``fact``
    parts: dict[Any, Any] = field(default_factory=dict)  # by those marked with ``own_fact``
    state: tuple[Any, ...] = ()  # of the model when they were found


# Of prepared models. Weak references, so that the models can be freed.
known_facts: WeakKeyDictionary[Any, Facts] = WeakKeyDictionary()


def facts_of(model: Any) -> Facts:
    """The facts of a model; an error if its attention hooks were not verified."""
    if model not in known_facts:
        raise ModelError(
            "the attention hooks of this model have not been verified; call "
            "al.prepare_model(model) once (al.load_model does it)"
        )
    return known_facts[model]


def state_of(model: Any) -> tuple[Any, ...]:
    """On what facts depend, and what may change: the type, the device and the modules."""
    parameter = next(iter(model.parameters()))
    return parameter.dtype, parameter.device.type, len(modules_of(model))


def take_over(model: Any, other: Any) -> None:
    """Take over the facts of another model, unless its type, device or modules differ."""
    if facts_of(model).state == facts_of(other).state:
        facts_of(model).found.update(facts_of(other).found)


def fact(find: Callable[[Any], _T], kept_in: str = "found") -> Callable[[Any], _T]:
    """A function of the architecture of a prepared model, which runs once for each model."""

    @wraps(find)
    def found(model: Any) -> _T:
        known = getattr(facts_of(model), kept_in)
        if found not in known:
            known[found] = find(model)
        return known[found]

    return found


def own_fact(find: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """The same for what holds modules of the model, so that no other model can take it over."""
    return fact(find, "parts")
