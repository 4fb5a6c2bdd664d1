"""What gets the numbers of one read in one pass: hooks, or a function of rows of A and dL/dA.

``provide.py`` makes one for each read of a metric. A pass runs the columns of whole prompts from
``first`` on; those before it ran once for all prompts of a set, with observers of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics import weights
from ..metrics.edge_sums import EdgeSums, row_pieces
from ..metrics.reads import KEYS, PATTERN, QUERIES, SLOPE, VALUES, At, Block, Blocks, Hooks, Sums
from ..metrics.weights import Pattern, Values
from ..models.facts import Operands, facts_of, hooks_on_operands
from ..models.head_outputs import of_one_width, transformed_values
from ..models.hooked import (
    Hook,
    HookedModel,
    pattern_name,
    values_name,
)
from ..models.tiny_pass import logits_of, tiny_passes, tiny_tokens
from ..prompts.batch import PromptBatch
from ..system.arguments import called
from ..system.checksum import row_sums
from ..system.devices import holds_numbers, on_one_device, sent, wide
from ..system.texts import described
from .forward import edited

Shared = Float[Tensor, "_ head query key"]  # one pattern for the gradients of several prompts
Use = Callable[[int, Shared, Pattern], None]


@dataclass(frozen=True)
class Layers:
    """The layers whose tensors are read: those of a model, or as many as a cache has."""

    count: int
    n_heads: int
    model: HookedModel | None = None

    @classmethod
    def of(cls, model: HookedModel) -> "Layers":
        return cls(int(model.cfg.n_layers), int(model.cfg.n_heads), model)

    @cached_property
    def patterns(self) -> list[str]:
        """The hook point of the pattern in every layer."""
        return [pattern_name(layer) for layer in range(self.count)]

    def hooks_at(self, points: Sequence[str], observe: Callable[[int, Tensor], Any]) -> list[Hook]:
        """A hook at the point of every layer that passes its number and tensor to ``observe``."""

        def act(layer: int, tensor: Tensor, hook: Any) -> None:
            observe(layer, tensor)

        return [(point, partial(act, layer)) for layer, point in enumerate(points)]

    def operands(self, owner: str) -> list[Operands]:
        """The hook points of the queries and keys that each layer multiplies."""
        model = self.needed(owner)
        of_layers = facts_of(model).operands
        missing = [layer for layer, operands in enumerate(of_layers) if operands is None]
        if missing:
            raise MetricError(
                f"in layers {missing} of {model.cfg.model_name} the queries and keys that "
                "attention multiplies stand at no hook point, or a soft cap is saturated, so that "
                f"this cannot be verified: {owner} might read other vectors; leave it out"
            )
        return [operands for operands in of_layers if operands is not None]

    def require_alike(self, point: str, owner: str) -> None:
        """Raise an error, before a run, for a hook point with other shapes in some layers."""
        model, shapes = self.needed(owner), dict[int, tuple[int, ...]]()
        points = [point.format(layer) for layer in range(self.count)]
        if not model.hook_dict.keys() >= {*points}:
            return  # an error of its own names it
        hooks = self.hooks_at(points, lambda n, tensor: shapes.update({n: (*tensor.shape[:-1],)}))
        with tiny_passes(model, hooks):
            logits_of(model, tiny_tokens(model))
        refuse_unlike(owner, [*shapes.values()])

    def needed(self, owner: str) -> HookedModel:
        """The model, for what a cache does not show."""
        if self.model is None:
            raise needs_model(owner)
        return self.model


def needs_model(owner: str) -> MetricError:
    """The error for a metric that needs more than a cache shows."""
    return MetricError(
        f"{owner} needs the prepared model of the passes, and not only their caches; give it: "
        "al.caches.from_caches(..., model=model)"
    )


def product_hooks(
    layers: Layers, use: Use, *, free_later: bool = False
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that pass A and dL/dA of each layer to ``use`` when the gradient reaches the layer.

    A pattern is freed after the backward pass of its layer, or with the hooks if ``free_later``.
    """
    patterns: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor) -> None:
        patterns[layer] = pattern.detach()

    def multiply(layer: int, gradient: Tensor) -> None:
        use(layer, patterns[layer] if free_later else patterns.pop(layer), gradient)

    return layers.hooks_at(layers.patterns, store), layers.hooks_at(layers.patterns, multiply)


def value_product_hooks(
    layers: Layers, owner: str, use: Callable[[int, Pattern, Pattern, Values], None]
) -> tuple[list[Hook], list[Hook]]:
    """As ``product_hooks``, but ``use`` also gets the values, as ``WithValues`` describes them."""
    values: dict[int, Tensor] = {}
    model = layers.needed(owner)

    def store(layer: int, of_layer: Tensor) -> None:
        values[layer] = of_layer.detach()

    def use_with_values(layer: int, pattern: Pattern, gradient: Pattern) -> None:
        use(layer, pattern, gradient, transformed_values(model, layer, values.pop(layer)))

    hooks, backward_hooks = product_hooks(layers, use_with_values)
    points = [values_name(layer) for layer in range(layers.count)]
    return [*hooks, *layers.hooks_at(points, store)], backward_hooks


class Observer:
    """The observer of a read that needs nothing of a pass; of shared tokens also ``begin``."""

    hooks: Sequence[Hook] = ()
    backward_hooks: Sequence[Hook] = ()
    runs_user_code = False  # which may edit what it gets

    def begin(self, read: Any) -> None:
        """Of shared tokens: what is read of the batch whose gradients come next."""

    def use_rows(self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern) -> None:
        """Get rows of A and dL/dA, in float32 or wider, where no pattern is formed."""

    def found(self) -> Any:
        """What was observed in the pass."""
        return None

    def after(self, shared: "Observer", count: int) -> Any:
        """What was observed in shared tokens and after them, for ``count`` prompts."""
        before, after = shared.found(), self.found()
        if before is None or after is None:
            return after if before is None else before.expand(count, *before.shape[1:])
        return before.expand(count, *before.shape[1:]).double() + after.double()

    def dtype(self) -> torch.dtype | None:
        """The type in which the model had the numbers; of several the coarsest."""
        return None


class HooksObserver(Observer):
    """Hooks of the user."""

    runs_user_code = True

    def __init__(self, read: Hooks) -> None:
        self._found, self.hooks, self.backward_hooks = read.found, read.hooks, read.backward_hooks

    def found(self) -> Any:
        return self._found


class SumsObserver(Observer):
    """Sums of a weight over sets of edges."""

    def __init__(self, layers: Layers, read: Sums, owner: str, first: int, shared: bool) -> None:
        self._owner, self._first = owner, first
        self.runs_user_code = read.weight.__module__ != weights.__name__
        self.begin(read)
        if VALUES in read.needs:
            self.hooks, self.backward_hooks = value_product_hooks(layers, owner, self._add)
        elif SLOPE in read.needs:
            self.hooks, self.backward_hooks = product_hooks(layers, self._add, free_later=shared)
        else:
            self.hooks = layers.hooks_at(layers.patterns, self._add_pattern)

    def begin(self, read: Any) -> None:
        self._sums = EdgeSums(read.sets, read.weight)

    def _add(self, layer: int, pattern: Shared, slope: Pattern, *values: Values) -> None:
        version = pattern._version
        self._sums.add(layer, pattern, slope, *values, first=self._first)
        _refuse_edit(self._owner, pattern, version)

    def _add_pattern(self, layer: int, pattern: Tensor) -> None:
        self._add(layer, pattern.detach(), pattern.detach())  # the weight uses the first alone

    def use_rows(self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern) -> None:
        self._sums.add_rows(layer, rows, keys, a, slope)

    def use_kernel(self, layer: int, sums_of: Callable[[Tensor, int, Any], Tensor]) -> None:
        """Get sums of a layer, from a function of classes of keys, their number and the weight."""
        classes = self._sums.sets.key_classes()
        assert classes is not None  # see ``why_no_kernel``
        self._sums.add_key_classes(layer, sums_of(*classes, self._sums.weight))

    def found(self) -> Tensor:
        return self._sums.total()


class BlocksObserver(Observer):
    """What a function of the user makes of blocks, added over those of a layer."""

    runs_user_code = True

    def __init__(
        self, layers: Layers, read: Blocks, owner: str, batch: PromptBatch, first: int, shared: bool
    ) -> None:
        self._owner, self._first = owner, first
        padding = ~batch.attention_mask
        self._padding = padding if (~batch.on_cpu.attention_mask).any() else None
        self.begin(read)
        if read.slope:
            self.hooks, self.backward_hooks = product_hooks(layers, self._add, free_later=shared)
        else:
            self.hooks = layers.hooks_at(layers.patterns, self._add_pattern)

    def begin(self, read: Any) -> None:
        self._read: Blocks = read
        self._of_layers: dict[int, Tensor] = {}

    def _add(self, layer: int, pattern: Shared, slope: Pattern) -> None:
        version = pattern._version
        for rows, a, of_rows in row_pieces(pattern.expand_as(slope), slope):
            queries = slice(self._first + rows.start, self._first + rows.stop)
            self.use_rows(layer, queries, slice(0, a.shape[3]), a, of_rows)
        _refuse_edit(self._owner, pattern, version)

    def _add_pattern(self, layer: int, pattern: Tensor) -> None:
        a = pattern.detach()
        if not self._read.whole:
            self._add(layer, a, a)
            return
        end = self._first + a.shape[2]
        self.use_rows(layer, slice(self._first, end), slice(0, a.shape[3]), wide(a), wide(a))

    def use_rows(self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern) -> None:
        if self._padding is not None:
            padding = self._padding[:, None, rows, None].to(a.device)
            a, slope = (each.masked_fill(padding, 0) for each in (a, slope))
        copies = [] if self._padding is None else [a, slope]  # which no hook watches
        before = [row_sums(each.detach()) for each in copies]
        block = Block(layer, rows, keys, a, slope if self._read.slope else None)
        made: Any = called(f"a function of {self._owner}", self._read.of, "a block", block)
        if not all(map(np.array_equal, [row_sums(each.detach()) for each in copies], before)):
            raise edited(f"metric {self._owner!r}", "A or dL/dA")
        first = next(iter(self._of_layers.values()), made)
        if not holds_numbers(made) or made.shape[:1] != a.shape[:1] or made.shape != first.shape:
            raise MetricError(
                f"a function of blocks gives a tensor [batch, ...] for {len(a)} prompts, always of "
                f"one shape; that of {self._owner} gave {described(made)}"
            )
        others = self._of_layers.get(layer)
        self._of_layers[layer] = made.detach() if others is None else others + made.detach()

    def found(self) -> Tensor:
        return _by_layer(self._owner, self._of_layers)


class AtObserver(Observer):
    """Numbers at the chosen positions that lie in the columns of a pass."""

    def __init__(
        self, layers: Layers, read: At, owner: str, batch: PromptBatch, columns: slice
    ) -> None:
        self._read, self._owner, self._length = read, owner, batch.tokens.shape[1]
        self._of_layers: dict[int, Tensor] = {}
        self._attended: dict[int, Tensor] = {}  # keys of slopes, where the pattern is not 0
        self._sent: dict[torch.device, tuple[Tensor, Tensor | None]] = {}
        self._places: dict[Any, _Places] = {}  # the same for all layers of a device
        self._dtypes: set[torch.dtype] = set()
        queries, keys = read.columns(batch, owner)
        inside = (queries >= columns.start) & (queries < columns.stop)
        self.places = inside[0].nonzero().flatten()  # the same in all prompts, see ``begins_as``
        if not len(self.places):
            return
        self._first, self._stop = columns.start, columns.stop
        self._queries = queries[:, self.places]
        self._keys = keys[:, self.places] if read.pairs and keys is not None else keys
        if read.what == SLOPE:
            self.hooks = layers.hooks_at(layers.patterns, self._add_attended)
            self.backward_hooks = layers.hooks_at(layers.patterns, self._add_rows)
        elif read.what == PATTERN:
            self.hooks = layers.hooks_at(layers.patterns, self._add_rows)
        elif read.what in (QUERIES, KEYS):
            operands, of_keys = layers.operands(owner), read.what == KEYS
            self._key_heads = lcm(*(each.key_heads for each in operands))
            self.hooks = hooks_on_operands(operands, self._add_heads, of_keys=of_keys)
        else:
            points = [read.what.format(layer) for layer in range(layers.count)]
            self.hooks = layers.hooks_at(points, self._add_states)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The rows of the pass and the keys, which go to a device once for all layers there."""
        if device not in self._sent:
            keys = None if self._keys is None else sent(self._keys, device)
            self._sent[device] = sent(self._queries - self._first, device), keys
        return self._sent[device]

    def _add_attended(self, layer: int, pattern: Tensor) -> None:
        self._attended[layer] = self._chosen(pattern) != 0

    def _chosen(self, table: Tensor) -> Tensor:
        key = table.device, len(table), table.shape[3]
        if key not in self._places:
            self._places[key] = _Places.of(table, *self._on(table.device))
        return self._places[key].numbers(table.detach(), self._read.pairs)

    def _add_rows(self, layer: int, table: Tensor) -> None:
        self._dtypes.add(table.dtype)
        numbers = self._chosen(table)
        if self._read.what == SLOPE:
            numbers = numbers * self._attended[layer]
        if self._keys is None:
            numbers = _padded(numbers, 0, self._length - numbers.shape[-1])
        self._of_layers[layer] = numbers

    def _add_heads(self, layer: int, heads: Tensor) -> None:
        self._add_states(layer, heads.transpose(1, 2))
        chosen = self._of_layers[layer].transpose(1, 2)
        if self._read.what == KEYS:  # of which layers may have different numbers
            chosen = chosen.repeat_interleave(self._key_heads // chosen.shape[1], dim=1)
        self._of_layers[layer] = chosen

    def _add_states(self, layer: int, states: Tensor) -> None:
        self._dtypes.add(states.dtype)
        # Keys of a cache may stand before those of the columns that run.
        rows = self._on(states.device)[0] + self._first - self._stop + states.shape[1]
        prompts = torch.arange(len(rows), device=rows.device)[:, None]
        self._of_layers[layer] = states.detach()[prompts, rows]

    def use_rows(self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern) -> None:
        table = slope if self._read.what == SLOPE else a
        if not ((self._queries >= rows.start) & (self._queries < rows.stop)).any():
            return
        self._dtypes.add(table.dtype)
        of_pass, columns = self._on(table.device)
        row = of_pass + self._first - rows.start
        inside = (row >= 0) & (row < table.shape[2])
        row = row.clamp(0, table.shape[2] - 1)
        columns = None if columns is None else columns - keys.start
        places = _Places.of(table, row, columns)
        numbers = places.numbers(table, self._read.pairs)
        if table is slope:
            numbers = numbers * (places.numbers(a, self._read.pairs) != 0)
        if columns is None:
            numbers = _padded(numbers, keys.start, self._length - keys.start - table.shape[3])
        shape = (len(inside), 1, inside.shape[1], *[1] * (numbers.ndim - 3))
        numbers = numbers * inside.view(shape)
        before = self._of_layers.get(layer)
        self._of_layers[layer] = numbers if before is None else before + numbers

    def found(self) -> Tensor | None:
        return wide(_by_layer(self._owner, self._of_layers)) if len(self.places) else None

    def after(self, shared: Observer, count: int) -> Any:
        before, after = shared.found(), self.found()
        if before is not None and self._read.what in (PATTERN, SLOPE) and self._read.keys is None:
            # The prompt whose columns they were may be shorter or longer than those here.
            wider = self._length - before.shape[-1]
            before = torch.nn.functional.pad(before, (0, wider))
        if before is None or after is None:
            return after if before is None else before.expand(count, *before.shape[1:])
        # Shared columns are before all others of a prompt, but may be named in any order.
        assert isinstance(shared, AtObserver)
        order = torch.cat([shared.places, self.places]).argsort()
        both = torch.cat([before.expand(count, *before.shape[1:]), after], dim=self._axis)
        return both.index_select(self._axis, order)

    @property
    def _axis(self) -> int:
        """Where the chosen positions are: [batch, layer, (head,) chosen, ...]."""
        return 3 if self._read.needs else 2

    def dtype(self) -> torch.dtype | None:
        return max(self._dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _refuse_edit(owner: str, pattern: Tensor, version: int) -> None:
    """Raise an error if a weight or a function of blocks edited the pattern.

    The hook that calls it is watched too, but gets the slope alone.
    """
    if pattern._version != version:
        raise edited(f"metric {owner!r}", "A or dL/dA")


@dataclass(frozen=True, eq=False)
class _Places:
    """Chosen places of tables of the same shape."""

    prompts: Tensor
    rows: Tensor
    keys: Tensor | None  # None for all
    has: Tensor | None  # False for keys that the tables have not

    @classmethod
    def of(cls, table: Tensor, rows: Tensor, keys: Tensor | None) -> "_Places":
        # Shared tokens ran for one prompt, but have slopes of all.
        rows = rows.expand(len(table), -1)
        prompts = torch.arange(len(rows), device=rows.device)[:, None]
        if keys is None:
            return cls(prompts, rows, None, None)
        keys = keys.expand(len(table), -1)
        has = (keys >= 0) & (keys < table.shape[3])
        return cls(prompts, rows, keys.clamp(0, table.shape[3] - 1), has)

    def numbers(self, table: Tensor, pairs: bool) -> Tensor:
        """Numbers of a pattern or slope: [batch, head, chosen(, key)]; 0 at keys that it lacks."""
        if self.keys is None or self.has is None:
            return table[self.prompts, :, self.rows].transpose(1, 2)
        if pairs:
            chosen = table[self.prompts, :, self.rows, self.keys] * self.has[..., None]
            return chosen.transpose(1, 2)
        rows, keys = self.rows[:, :, None], self.keys[:, None]
        chosen = table[self.prompts[..., None], :, rows, keys]  # [batch, n, key, head]
        return (chosen * self.has[:, None, :, None]).movedim(3, 1)


def _padded(numbers: Tensor, before: int, after: int) -> Tensor:
    """The numbers between zeros for the keys before and after them."""
    if not before and not after:
        return numbers
    return torch.nn.functional.pad(numbers, (before, after))


def _by_layer(owner: str, of_layers: dict[int, Tensor]) -> Float[Tensor, "batch layer *axes"]:
    """The numbers of all layers on the CPU, so that a GPU waits for one copy."""
    layers = on_one_device([of_layers[layer] for layer in sorted(of_layers)])
    refuse_unlike(owner, [tuple(each.shape[:-1]) for each in layers])
    return torch.stack(of_one_width(layers), dim=1).cpu()


def refuse_unlike(owner: str, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise an error for layers of other shapes, but for their last axis, which gets zeros."""
    if unlike := [layer for layer, shape in enumerate(shapes) if shape != shapes[0]]:
        raise MetricError(
            f"what {owner} reads has other shapes in some layers than in others: {shapes[0]} in "
            f"layer 0 and {shapes[unlike[0]]} in layer {unlike[0]} (without the last axis), so "
            "that no tensor of all layers holds it; read each kind of layer by itself "
            "(al.reads.Hooks)"
        )
