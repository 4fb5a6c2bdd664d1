"""What gets the numbers of one read in one pass.

1. ``provide.py`` makes an observer for each read of a metric. A pass runs certain columns of whole
   prompts; those before them ran once for all prompts of a set, with observers of their own.
2. A and dL/dA come a few query rows at a time (``use``): where the attention forms no pattern, and
   also of whole patterns (``row_hooks``). All else is observed at its hook points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import compress
from math import lcm
from threading import Event
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics import weights
from ..metrics.edge_sums import EdgeSums, try_weight
from ..metrics.reads import KEYS, PATTERN, QUERIES, SLOPE, VALUES, At, Block, Blocks, Hooks, Sums
from ..metrics.weights import Pattern, Values, WithValues
from ..models.facts import Operands, facts_of, hooks_on_operands
from ..models.head_outputs import of_one_width, require_transformed_values, transformed_values
from ..models.hooked import Hook, HookedModel, pattern_name, values_name
from ..models.tiny_pass import logits_of, tiny_passes, tiny_tokens
from ..prompts.batch import PromptBatch
from ..system.arguments import called
from ..system.checksum import row_sums
from ..system.devices import holds_numbers, on_one_device, sent, wide
from ..system.row_pieces import row_slices
from ..system.texts import described, name_of
from .forward import Watched, edited, unedited

Shared = Float[Tensor, "_ head query key"]  # one pattern for the gradients of several prompts
Use = Callable[[int, Shared, Pattern], None]


@dataclass(frozen=True)
class Layers:
    """The layers whose tensors are read: those of a model, or as many as a cache has."""

    count: int
    n_heads: int
    model: HookedModel | None = None
    # Set when a batch has shown that no code of a user edits what it gets.
    trusted: Event = field(default_factory=Event)

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


class Observer:
    """The observer of a read: what gets numbers of a pass, and what was found in the end."""

    takes_rows = True  # of A and dL/dA
    is_whole = False  # those of a layer come at once
    runs_user_code = False  # which may edit what it gets
    hooks: Sequence[Hook] = ()  # at other hook points
    backward_hooks: Sequence[Hook] = ()

    def __init__(
        self, layers: Layers, read: Any, owner: str, batch: PromptBatch, columns: slice
    ) -> None:
        self.layers, self.owner, self.needs = layers, owner, read.needs
        self.begin(read)

    @staticmethod
    def check(layers: Layers, read: Any, owner: str, batch: PromptBatch) -> None:
        """Raise an error, before the model runs, where it does not show what is read."""

    def begin(self, read: Any) -> None:
        """What is read; of shared tokens again for each batch whose gradients come next."""

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        """Get A and dL/dA of some query rows and the keys that they see, in any precision."""

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


@dataclass(frozen=True, eq=False)
class Readers:
    """The observers of a question that get rows of A and dL/dA."""

    owner: str
    observers: Sequence[Observer]
    trusted: Event

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        """Hand rows to each observer; an error if what it runs edits them."""
        for each in self.observers:
            if not each.runs_user_code:
                each.use(layer, rows, keys, a, slope, *values)
                continue
            # Of a copy in float32 no tensor of the model would tell that it was edited.
            given = wide(a), wide(slope), *values
            compares = not self.trusted.is_set()
            with unedited(f"metric {self.owner!r}", "A or dL/dA", *given, compares=compares):
                each.use(layer, rows, keys, *given)


def row_hooks(
    layers: Layers, readers: Readers, first: int, *, free_later: bool
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that hand patterns on in rows, and to what needs gradients when these arrive.

    ``first`` is the position of the first query row. See ``product_hooks`` for ``free_later``.
    """

    def those(later: bool, whole: bool) -> Readers:
        each_kind = [(SLOPE in each.needs, each.is_whole) for each in readers.observers]
        chosen = compress(readers.observers, (kind == (later, whole) for kind in each_kind))
        return replace(readers, observers=[*chosen])

    at_once, whole, later = those(False, False), those(False, True), those(True, False)
    of_values = any(VALUES in each.needs for each in later.observers)
    values: dict[int, Tensor] = {}

    @cache  # for all layers
    def slices_of(batch: int, heads: int, queries: int, keys: int) -> list[slice]:
        return [*row_slices(queries, batch * heads * keys)]

    def hand_on(to: Readers, layer: int, pattern: Pattern, slope: Pattern, *values: Values) -> None:
        keys = slice(0, pattern.shape[3])
        for rows in [slice(0, pattern.shape[2])] if to is whole else slices_of(*pattern.shape):
            queries = slice(first + rows.start, first + rows.stop)
            to.use(layer, queries, keys, pattern[:, :, rows], slope[:, :, rows], *values)

    def use_pattern(layer: int, pattern: Tensor) -> None:
        for each in (whole, at_once):
            if each.observers:
                hand_on(each, layer, pattern.detach(), pattern.detach())

    def use_product(layer: int, pattern: Shared, slope: Pattern) -> None:
        model = layers.needed(readers.owner) if of_values else None
        of_layer = [transformed_values(model, layer, values.pop(layer))] if model else []
        hand_on(later, layer, pattern.expand_as(slope), slope, *of_layer)

    shows = whole.observers or at_once.observers
    hooks = layers.hooks_at(layers.patterns, use_pattern) if shows else []
    if not later.observers:
        return hooks, []
    storing, backward = product_hooks(layers, use_product, free_later=free_later)
    if of_values:
        points = [values_name(layer) for layer in range(layers.count)]
        storing += layers.hooks_at(points, lambda n, each: values.update({n: each.detach()}))
    return [*hooks, *storing], backward


class HooksObserver(Observer):
    """Hooks of the user."""

    takes_rows, runs_user_code = False, True

    def begin(self, read: Hooks) -> None:
        self._found, trusted = read.found, self.layers.trusted
        watched = partial(Watched, owner=f"metric {self.owner!r}", trusted=trusted, is_users=True)
        self.hooks = [(name, watched(act)) for name, act in read.hooks]
        self.backward_hooks = [(name, watched(act)) for name, act in read.backward_hooks]

    def found(self) -> Any:
        return self._found


class SumsObserver(Observer):
    """Sums of a weight over sets of edges."""

    @staticmethod
    def check(layers: Layers, read: Sums, owner: str, batch: PromptBatch) -> None:
        if isinstance(read.weight, WithValues):
            require_transformed_values(layers.needed(owner))
        else:
            try_weight(read.weight, layers.n_heads, batch)

    def begin(self, read: Sums) -> None:
        self.runs_user_code = vars(weights).get(name_of(read.weight)) is not read.weight
        self._of_values = VALUES in read.needs
        self._sums = EdgeSums(read.sets, read.weight)

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        if a.dtype.itemsize < 4:
            a, slope = a.float(), slope.float()
        self._sums.add_rows(layer, rows, keys, a, slope, *(values if self._of_values else ()))

    def use_classes(self, layer: int, sums_of: Callable[[Tensor, int, Any], Tensor]) -> None:
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
        self, layers: Layers, read: Blocks, owner: str, batch: PromptBatch, columns: slice
    ) -> None:
        padding = ~batch.attention_mask
        self._padding = padding if (~batch.on_cpu.attention_mask).any() else None
        super().__init__(layers, read, owner, batch, columns)

    def begin(self, read: Blocks) -> None:
        self._read, self.is_whole = read, read.whole
        self._of_layers: dict[int, Tensor] = {}

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        if self._padding is not None:
            padding = self._padding[:, None, rows, None].to(a.device)
            a, slope = (each.masked_fill(padding, 0) for each in (a, slope))
        copies = [] if self._padding is None else [a, slope]  # which nothing else watches
        before = [row_sums(each.detach()) for each in copies]
        block = Block(layer, rows, keys, a, slope if self._read.slope else None)
        made: Any = called(f"a function of {self.owner}", self._read.of, "a block", block)
        if not all(map(np.array_equal, [row_sums(each.detach()) for each in copies], before)):
            raise edited(f"metric {self.owner!r}", "A or dL/dA")
        first = next(iter(self._of_layers.values()), made)
        if not holds_numbers(made) or made.shape[:1] != a.shape[:1] or made.shape != first.shape:
            raise MetricError(
                f"a function of blocks gives a tensor [batch, ...] for {len(a)} prompts, always of "
                f"one shape; that of {self.owner} gave {described(made)}"
            )
        others = self._of_layers.get(layer)
        self._of_layers[layer] = made.detach() if others is None else others + made.detach()

    def found(self) -> Tensor:
        return _by_layer(self.owner, self._of_layers)


class AtObserver(Observer):
    """Numbers at the chosen positions that lie in the columns of a pass."""

    def __init__(
        self, layers: Layers, read: At, owner: str, batch: PromptBatch, columns: slice
    ) -> None:
        super().__init__(layers, read, owner, batch, columns)
        self._read, self._length = read, batch.tokens.shape[1]
        self._rows: dict[torch.device, Tensor] = {}
        self._places: dict[Any, _Places | None] = {}  # the same for all layers of a device
        self._dtypes: set[torch.dtype] = set()
        queries, keys = read.columns(batch, owner)
        inside = (queries >= columns.start) & (queries < columns.stop)
        self.places = inside[0].nonzero().flatten()  # the same in all prompts, see ``begins_as``
        self.takes_rows = bool(read.needs & {PATTERN, SLOPE}) and len(self.places) > 0
        if not len(self.places):
            return
        self._stop = columns.stop
        self._queries = queries[:, self.places]
        self._keys = keys[:, self.places] if read.pairs and keys is not None else keys
        if read.what in (QUERIES, KEYS):
            operands, of_keys = layers.operands(owner), read.what == KEYS
            self._key_heads = lcm(*(each.key_heads for each in operands))
            self.hooks = hooks_on_operands(operands, self._add_heads, of_keys=of_keys)
        elif not self.takes_rows:
            points = [read.what.format(layer) for layer in range(layers.count)]
            self.hooks = layers.hooks_at(points, self._add_states)

    @staticmethod
    def check(layers: Layers, read: At, owner: str, batch: PromptBatch) -> None:
        read.columns(batch, owner)
        if read.needs & {QUERIES, KEYS}:
            layers.operands(owner)
        elif not read.needs and layers.model is not None:
            layers.require_alike(read.what, owner)

    def begin(self, read: At) -> None:
        self._of_layers: dict[int, Tensor] = {}

    def _add_heads(self, layer: int, heads: Tensor) -> None:
        self._add_states(layer, heads.transpose(1, 2))
        chosen = self._of_layers[layer].transpose(1, 2)
        if self._read.what == KEYS:  # of which layers may have different numbers
            chosen = chosen.repeat_interleave(self._key_heads // chosen.shape[1], dim=1)
        self._of_layers[layer] = chosen

    def _add_states(self, layer: int, states: Tensor) -> None:
        self._dtypes.add(states.dtype)
        if states.device not in self._rows:
            self._rows[states.device] = sent(self._queries - self._stop, states.device)
        # Keys of a cache may stand before those of the columns that run.
        rows = self._rows[states.device] + states.shape[1]
        prompts = torch.arange(len(rows), device=rows.device)[:, None]
        self._of_layers[layer] = states.detach()[prompts, rows]

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        key = rows.start, keys.start, tuple(a.shape), a.device
        if key not in self._places:
            self._places[key] = _Places.of(self._queries, self._keys, rows, keys, a)
        if (places := self._places[key]) is None:
            return
        table = slope if self._read.what == SLOPE else a
        self._dtypes.add(table.dtype)
        numbers = places.numbers(table.detach(), self._read.pairs)
        if table is slope:
            numbers = numbers * (places.numbers(a, self._read.pairs) != 0)
        if self._keys is None:
            numbers = _padded(numbers, keys.start, self._length - keys.start - table.shape[3])
        if places.inside is not None:
            inside = places.inside
            numbers *= inside.view(len(inside), 1, -1, *[1] * (numbers.ndim - 3))
        before = self._of_layers.get(layer)
        self._of_layers[layer] = numbers if before is None else before + numbers

    def found(self) -> Tensor | None:
        return wide(_by_layer(self.owner, self._of_layers)) if len(self.places) else None

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
        return 3 if self.needs else 2

    def dtype(self) -> torch.dtype | None:
        return max(self._dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


_OBSERVERS = {At: AtObserver, Sums: SumsObserver, Blocks: BlocksObserver, Hooks: HooksObserver}


def observer_of(read: Any) -> type[Observer]:
    """The class that observes a kind of read."""
    return next(made for kind, made in _OBSERVERS.items() if isinstance(read, kind))


@dataclass(frozen=True, eq=False)
class _Places:
    """Chosen places of tables of the same shape."""

    prompts: Tensor
    rows: Tensor
    keys: Tensor | None  # None for all
    has: Tensor | None  # False for keys that the tables have not
    inside: Tensor | None  # False for chosen rows that the tables have not; None if they have all

    @classmethod
    def of(
        cls, queries: Tensor, chosen: Tensor | None, rows: slice, keys: slice, table: Tensor
    ) -> "_Places | None":
        """Those of a table of these rows and keys; None if it has no chosen row."""
        inside = (queries >= rows.start) & (queries < rows.stop)
        if not inside.any():
            return None
        # Shared tokens ran for one prompt, but have slopes of all.
        count, device = len(table), table.device
        all_inside = None if inside.all() else sent(inside, device).expand(count, -1)
        row = (queries - rows.start).clamp(0, table.shape[2] - 1)
        row = sent(row, device).expand(count, -1)
        prompts = torch.arange(count, device=device)[:, None]
        if chosen is None:
            return cls(prompts, row, None, None, all_inside)
        key = sent(chosen - keys.start, device).expand(count, -1)
        has = (key >= 0) & (key < table.shape[3])
        return cls(prompts, row, key.clamp(0, table.shape[3] - 1), has, all_inside)

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
