"""How what questions read is got from a pass: no other place knows the ways in which a batch runs.

1. Each read of a question gets an observer. A pass runs the columns of whole prompts from
   ``first_query`` on. Those before it ran once for a set of demonstrations, with observers of their
   own; both parts together are what the question sees (``Observation.seen``).
2. A and dL/dA come a few query rows at a time (``use``): where the attention forms no pattern, and
   also of whole patterns (``Observation._row_hooks``). All else is observed at its hook points.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import lcm
from threading import Event
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics import weights
from ..metrics.edge_sums import EdgeSums, try_weight
from ..metrics.reads import (
    KEYS,
    PATTERN,
    QUERIES,
    SLOPE,
    VALUES,
    At,
    Block,
    Blocks,
    Hooks,
    Read,
    Reads,
    Seen,
    Sums,
)
from ..metrics.weights import Pattern, Values, WithValues
from ..models.facts import Operands, facts_of, hooks_on_operands
from ..models.head_outputs import of_one_width, require_transformed_values, transformed_values
from ..models.hooked import (
    Hook,
    HookedModel,
    attention_layers,
    hooks_in_layers,
    pattern_name,
    refuse_folded_value_biases,
    require_patterns,
    values_name,
)
from ..models.tiny_pass import logits_of, tiny_passes, tiny_tokens
from ..prompts.batch import PromptBatch
from ..system.arguments import called
from ..system.devices import holds_numbers, on_one_device, sent, wide
from ..system.row_pieces import row_slices
from ..system.texts import described
from .forward import Watched, any_loss, at_rows, unedited

ModelOrSizes = Any  # a HookedModel; the sizes of a cache that came without its model
Shared = Float[Tensor, "_ head query key"]  # one pattern for the gradients of several prompts


@runtime_checkable
class Reader(Protocol):
    """What reads of a pass: a question, or a selection by score."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Callable[[PromptBatch], Reads]: ...


class Observation:
    """What a question observes in a pass over a batch, after what was observed ``before`` it.

    ``columns`` are those of the whole prompts that run, by default all. ``trusted`` is set when a
    batch has shown that no code of a user edits what it gets.
    """

    def __init__(
        self,
        model: ModelOrSizes,
        question: Reader,
        whole: PromptBatch,
        columns: slice | None = None,
        before: "Observation | None" = None,
        trusted: Event | None = None,
    ) -> None:
        self.model, self.question, self.before = model, question, before
        self.reads, self.whole = reads_of(question, whole), whole
        self.trusted = Event() if trusted is None else trusted
        self.columns = slice(0, whole.tokens.shape[1]) if columns is None else columns
        self._observers = {
            name: next(made for kind, made in _OBSERVERS.items() if isinstance(read, kind))(
                self, read
            )
            for name, read in self.reads.items()
        }
        observers, self._needs = [*self._observers.values()], needs_of(self._observers)
        self.needs_gradient = SLOPE in self._needs
        self.of_rows = [each for each in observers if each.takes_rows]  # of A and dL/dA
        self.beside = [each for each in observers if not each.takes_rows]  # at other hook points
        hooks, slopes = self._row_hooks()
        self.hooks = [*hooks, *(hook for each in self.beside for hook in each.hooks)]
        self.backward_hooks = [*slopes, *(h for each in self.beside for h in each.backward_hooks)]
        if before is not None:
            for name, read in self.reads.items():
                if SLOPE in read.needs:  # which comes again with each batch
                    before._observers[name].begin(read)

    @classmethod
    def of_shared(
        cls, model: HookedModel, question: Reader, batch: PromptBatch, trusted: Event | None = None
    ) -> "Observation":
        """What a question observes in the tokens before a batch, once for all prompts of a set."""
        one, columns = batch.whole().prompt(0), slice(0, batch.first_query)
        return cls(model, question, one, columns, trusted=trusted)

    @property
    def why_whole(self) -> str:
        """Why shared tokens cannot run once for what is read; empty if they can."""
        reasons = (read.why_whole(self.question.name) for read in self.reads.values())
        return next(filter(None, reasons), "")

    def check(self) -> None:
        """Raise an error, before the model runs, where it does not show what is read."""
        if self._needs & {SLOPE, VALUES}:
            refuse_folded_value_biases(self.model)
        for each in self._observers.values():
            each.check()

    def use(
        self,
        observers: Sequence["Observer"],
        layer: int,
        rows: slice,
        keys: slice,
        a: Pattern,
        slope: Pattern,
        *values: Values,
    ) -> None:
        """Hand rows to each observer; an error if what it runs edits them."""
        for each in observers:
            if not each.runs_user_code:
                each.use(layer, rows, keys, a, slope, *values)
                continue
            # Of a copy in float32 no tensor of the model would tell that it was edited.
            given = wide(a), wide(slope), *values
            owner, compares = f"metric {self.question.name!r}", not self.trusted.is_set()
            with unedited(owner, "A or dL/dA", *given, compares=compares):
                each.use(layer, rows, keys, *given)

    def _row_hooks(self) -> tuple[list[Hook], list[Hook]]:
        """Hooks that hand patterns on in rows, and to what needs gradients when these arrive."""
        later = [each for each in self.of_rows if SLOPE in each.needs]
        at_once = [each for each in self.of_rows if each not in later]
        of_values = any(VALUES in each.needs for each in later)
        values, first = dict[int, Tensor](), self.columns.start
        slices_of = cache(row_slices)  # the same for all layers

        def hand_on(
            to: Sequence[Observer], layer: int, pattern: Pattern, slope: Pattern, *values: Values
        ) -> None:
            batch, heads, count, length = pattern.shape
            keys, whole = slice(0, length), [slice(0, count)]
            for is_whole in (True, False):
                if chosen := [each for each in to if each.is_whole == is_whole]:
                    for rows in whole if is_whole else slices_of(count, batch * heads * length):
                        queries = slice(first + rows.start, first + rows.stop)
                        given = pattern[:, :, rows], slope[:, :, rows], *values
                        self.use(chosen, layer, queries, keys, *given)

        def use_pattern(layer: int, pattern: Tensor, hook: Any) -> None:
            hand_on(at_once, layer, pattern.detach(), pattern.detach())

        def use_product(layer: int, pattern: Shared, slope: Pattern) -> None:
            given = [values.pop(layer)] if of_values else []
            of_layer = [transformed_values(self.model, layer, each) for each in given]
            hand_on(later, layer, pattern.expand_as(slope), slope, *of_layer)

        def store_values(layer: int, of_layer: Tensor, hook: Any) -> None:
            values[layer] = of_layer.detach()

        hooks = hooks_in_layers(self.model, pattern_name, use_pattern) if at_once else []
        if not later:
            return hooks, []
        # A gradient comes to the patterns of shared tokens again with each batch.
        is_shared = self.columns.stop < self.whole.tokens.shape[1]
        storing, backward = product_hooks(self.model, use_product, free_later=is_shared)
        if of_values:
            storing += hooks_in_layers(self.model, values_name, store_values)
        return [*hooks, *storing], backward

    def seen(self, logits: Tensor, clean: Tensor | None) -> Seen:
        """What was read, of every prompt, with copies of the logits for this question alone."""
        found, dtypes = dict[str, Any](), dict[str, torch.dtype]()
        for name in self.reads:
            ours = self._observers[name]
            theirs = None if self.before is None else self.before._observers[name]
            found[name] = ours.found() if theirs is None else ours.after(theirs, len(logits))
            if known := {*ours.dtypes, *(() if theirs is None else theirs.dtypes)}:
                dtypes[name] = max(known, key=lambda dtype: torch.finfo(dtype).eps)
        clean = None if clean is None else clean.clone()
        return Seen(self.reads, found, dtypes, logits.clone(), clean, int(self.model.cfg.n_heads))


def product_hooks(
    model: ModelOrSizes, use: Callable[[int, Shared, Pattern], None], *, free_later: bool = False
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that pass A and dL/dA of each layer to ``use`` when the gradient reaches the layer."""
    patterns: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, hook: Any) -> None:
        patterns[layer] = pattern.detach()

    def multiply(layer: int, gradient: Tensor, hook: Any) -> None:
        # A pattern is freed after the backward pass of its layer, or later with the hooks.
        use(layer, patterns[layer] if free_later else patterns.pop(layer), gradient)

    layers = attention_layers(model)
    stored: list[Hook] = [(pattern_name(layer), partial(store, layer)) for layer in layers]
    return stored, [(pattern_name(layer), partial(multiply, layer)) for layer in layers]


class Observer:
    """The observer of a read: what gets numbers of a pass, and what was found in the end."""

    takes_rows = True  # of A and dL/dA
    is_whole = False  # those of a layer come at once
    runs_user_code = False  # which may edit what it gets
    hooks: Sequence[Hook] = ()  # at other hook points
    backward_hooks: Sequence[Hook] = ()
    dtypes: Collection[torch.dtype] = ()  # in which the model had the numbers

    def __init__(self, of: Observation, read: Any) -> None:
        self.model, self.owner, self.batch = of.model, of.question.name, of.whole
        self.needs, self.trusted = read.needs, of.trusted
        self.begin(read)

    def check(self) -> None:
        """Raise an error, before the model runs, where it does not show what is read."""

    def begin(self, read: Any) -> None:
        """What is read; of shared tokens again for each batch whose gradients come next."""

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        """Get A and dL/dA of some query rows and the keys that they see, in any precision."""

    def found(self) -> Any:
        return None

    def after(self, shared: "Observer", count: int) -> Any:
        """What was observed in shared tokens and after them, for ``count`` prompts."""
        before = shared.found()
        return before.expand(count, *before.shape[1:]).double() + self.found().double()


class HooksObserver(Observer):
    takes_rows, runs_user_code = False, True

    def begin(self, read: Hooks) -> None:
        self._found, owner = read.found, f"metric {self.owner!r}"
        watched = partial(Watched, owner=owner, trusted=self.trusted, is_users=True)
        self.hooks = [(name, watched(act)) for name, act in read.hooks]
        self.backward_hooks = [(name, watched(act)) for name, act in read.backward_hooks]

    def found(self) -> Any:
        return self._found


class SumsObserver(Observer):
    def check(self) -> None:
        if isinstance(self._sums.weight, WithValues):
            require_transformed_values(self.model)
        elif self.runs_user_code:
            try_weight(self._sums.weight, self.model.cfg.n_heads, self.batch)

    def begin(self, read: Sums) -> None:
        self.runs_user_code = all(read.weight is not each for each in vars(weights).values())
        self._sums = EdgeSums(read.sets, read.weight)

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        if a.dtype.itemsize < 4:
            a, slope = a.float(), slope.float()
        self._sums.add_rows(layer, rows, keys, a, slope, *(values if VALUES in self.needs else ()))

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

    def __init__(self, of: Observation, read: Blocks) -> None:
        padding = ~of.whole.attention_mask
        self._padding = padding if padding.any() else None
        super().__init__(of, read)

    def check(self) -> None:
        """Raise an error for what goes through all layers, where some have no pattern."""
        if self.is_whole:
            cure = "read each layer by itself (al.reads.Blocks without whole), as al.SegmentFlows"
            require_patterns(self.model, f"{self.owner}, which goes through the layers,", cure)

    def begin(self, read: Blocks) -> None:
        self._read, self.is_whole = read, read.whole
        self._of_layers: dict[int, Tensor] = {}

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        if self._padding is not None:
            padding = sent(self._padding[:, None, rows, None], a.device)
            a, slope = (each.masked_fill(padding, 0) for each in (a, slope))
        copies = [] if self._padding is None else [a, slope]  # which nothing else watches
        block = Block(layer, rows, keys, a, slope if self._read.slope else None)
        with unedited(f"metric {self.owner!r}", "A or dL/dA", *copies, compares=True):
            made: Any = called(f"a function of {self.owner}", self._read.of, "a block", block)
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


@dataclass(frozen=True, eq=False)
class _Places:
    """Chosen places of tables of the same shape: indices that broadcast."""

    prompts: Tensor
    rows: Tensor
    keys: Tensor | None  # None for all
    has: Tensor | None  # False for keys that the tables have not
    inside: Tensor | None  # False for chosen rows that the tables have not; None if they have all

    def numbers(self, table: Tensor) -> Tensor:
        """Numbers of a pattern or slope: [batch, head, chosen(, key)]; 0 at keys that it lacks."""
        if self.keys is None or self.has is None:
            return table[self.prompts, :, self.rows].transpose(1, 2)
        return table[self.prompts, :, self.rows, self.keys].movedim(-1, 1) * self.has


class AtObserver(Observer):
    """Numbers at the chosen positions that lie in the columns of a pass."""

    def __init__(self, of: Observation, read: At) -> None:
        super().__init__(of, read)
        self._read, self._length, columns = read, self.batch.tokens.shape[1], of.columns
        self._rows: dict[torch.device, Tensor] = {}
        self._places: dict[Any, _Places | None] = {}  # the same for all layers of a device
        self.dtypes: set[torch.dtype] = set()
        queries, keys = read.columns(self.batch, self.owner)
        inside = (queries >= columns.start) & (queries < columns.stop)
        self.places = inside[0].nonzero().flatten()  # the same in all prompts, see ``begins_as``
        self.takes_rows = bool(read.needs & {PATTERN, SLOPE}) and len(self.places) > 0
        if not len(self.places):
            return
        self._stop = columns.stop
        self._queries = queries[:, self.places]
        self._keys = keys[:, self.places] if read.pairs and keys is not None else keys
        if read.what in (QUERIES, KEYS):
            operands, of_keys = _operands(self.model, self.owner), read.what == KEYS
            self._key_heads = lcm(*(each.key_heads for each in operands))
            self.hooks = hooks_on_operands(operands, self._add_heads, of_keys=of_keys)
        elif not self.takes_rows:
            self.hooks = hooks_in_layers(self.model, read.what.format, self._add_states)

    def check(self) -> None:
        """Raise an error for a hook point with other shapes in some layers."""
        if self.needs:
            return
        shapes = dict[int, tuple[int, ...]]()

        def note(layer: int, states: Tensor, hook: Any) -> None:
            shapes[layer] = tuple(states.shape[:-1])

        hooks = hooks_in_layers(self.model, self._read.what.format, note)
        if self.model.hook_dict.keys() >= {point for point, _ in hooks}:  # an error names others
            with tiny_passes(self.model, hooks):
                logits_of(self.model, tiny_tokens(self.model))
            _refuse_other_shapes(self.owner, [*shapes.values()])

    def begin(self, read: At) -> None:
        self._of_layers: dict[int, Tensor] = {}

    def _add_heads(self, layer: int, heads: Tensor) -> None:
        self._add_states(layer, heads.transpose(1, 2))
        chosen = self._of_layers[layer].transpose(1, 2)
        if self._read.what == KEYS:  # of which layers may have different numbers
            chosen = chosen.repeat_interleave(self._key_heads // chosen.shape[1], dim=1)
        self._of_layers[layer] = chosen

    def _add_states(self, layer: int, states: Tensor, hook: Any = None) -> None:
        self.dtypes.add(states.dtype)
        if states.device not in self._rows:
            self._rows[states.device] = sent(self._queries - self._stop, states.device)
        # Keys of a cache may stand before those of the columns that run.
        rows = self._rows[states.device] + states.shape[1]
        self._of_layers[layer] = at_rows(states.detach(), rows)

    def use(
        self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern, *values: Values
    ) -> None:
        key = rows.start, keys.start, tuple(a.shape), a.device
        if key not in self._places:
            self._places[key] = self._places_in(rows, keys, a)
        if (places := self._places[key]) is None:
            return
        table = slope if self._read.what == SLOPE else a
        self.dtypes.add(table.dtype)
        numbers = places.numbers(table.detach())
        if table is slope:
            numbers = numbers * (places.numbers(a) != 0)
        if self._keys is None and numbers.shape[-1] < self._length:  # zeros for the other keys
            after = self._length - keys.start - table.shape[3]
            numbers = torch.nn.functional.pad(numbers, (keys.start, after))
        if places.inside is not None:
            inside = places.inside
            numbers *= inside.view(len(inside), 1, -1, *[1] * (numbers.ndim - 3))
        before = self._of_layers.get(layer)
        self._of_layers[layer] = numbers if before is None else before + numbers

    def _places_in(self, rows: slice, keys: slice, table: Tensor) -> _Places | None:
        """The places in a table of these rows and keys; None if it has no chosen row."""
        inside = (self._queries >= rows.start) & (self._queries < rows.stop)
        if not inside.any():
            return None
        # Shared tokens ran for one prompt, but have slopes of all.
        count, device = len(table), table.device
        all_inside = None if inside.all() else sent(inside, device).expand(count, -1)
        row = (self._queries - rows.start).clamp(0, table.shape[2] - 1)
        row = sent(row, device).expand(count, -1)
        prompts = torch.arange(count, device=device)[:, None]
        if self._keys is None:
            return _Places(prompts, row, None, None, all_inside)
        key = sent(self._keys - keys.start, device).expand(count, -1)
        if not self._read.pairs:  # each row with each key
            prompts, row, key = prompts[..., None], row[:, :, None], key[:, None]
        has = (key >= 0) & (key < table.shape[3])
        return _Places(prompts, row, key.clamp(0, table.shape[3] - 1), has[:, None], all_inside)

    def found(self) -> Tensor | None:
        return wide(_by_layer(self.owner, self._of_layers)) if len(self.places) else None

    def after(self, shared: Observer, count: int) -> Any:
        before, after = shared.found(), self.found()
        if before is None:
            return after
        if self._read.what in (PATTERN, SLOPE) and self._read.keys is None:
            # The prompt whose columns they were may be shorter or longer than those here.
            before = torch.nn.functional.pad(before, (0, self._length - before.shape[-1]))
        before = before.expand(count, *before.shape[1:])
        if after is None:
            return before
        # Shared columns are before all others of a prompt, but may be named in any order.
        assert isinstance(shared, AtObserver)
        order = torch.cat([shared.places, self.places]).argsort()
        axis = 3 if self.needs else 2  # of [batch, layer, (head,) chosen, ...]
        return torch.cat([before, after], dim=axis).index_select(axis, order)


def _operands(model: HookedModel, owner: str) -> list[Operands]:
    """The hook points of the queries and keys that each layer multiplies."""
    of_layers = facts_of(model).operands
    missing = [layer for layer in attention_layers(model) if of_layers[layer] is None]
    if missing:
        raise MetricError(
            f"in layers {missing} of {model.cfg.model_name} the queries and keys that "
            "attention multiplies stand at no hook point, or a soft cap is saturated, so that "
            f"this cannot be verified: {owner} might read other vectors; leave it out"
        )
    return [operands for operands in of_layers if operands is not None]


_OBSERVERS = {At: AtObserver, Sums: SumsObserver, Blocks: BlocksObserver, Hooks: HooksObserver}


def _by_layer(owner: str, of_layers: dict[int, Tensor]) -> Float[Tensor, "batch layer *axes"]:
    """The numbers of all layers on the CPU, so that a GPU waits for one copy."""
    layers = on_one_device([of_layers[layer] for layer in sorted(of_layers)])
    _refuse_other_shapes(owner, [tuple(each.shape[:-1]) for each in layers])
    return torch.stack(of_one_width(layers), dim=1).cpu()


def _refuse_other_shapes(owner: str, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise an error for layers of other shapes, but for their last axis, which gets zeros."""
    if unlike := [layer for layer, shape in enumerate(shapes) if shape != shapes[0]]:
        raise MetricError(
            f"what {owner} reads has other shapes in some layers than in others: {shapes[0]} in "
            f"layer 0 and {shapes[unlike[0]]} in layer {unlike[0]} (without the last axis); read "
            "each kind of layer by itself (al.reads.Hooks)"
        )


def reads_of(question: Reader, batch: PromptBatch) -> Reads:
    """What a question reads of whole prompts; an error if this is not what it may be."""
    reads: Any = question.reads(batch)
    if not isinstance(reads, Mapping) or not all(isinstance(each, Read) for each in reads.values()):
        raise MetricError(
            f"reads of {question.name} give what is read by name, such as {{'attention': "
            f"al.reads.At('pattern', al.edges.target)}}; got {described(reads)}"
        )
    return reads


def needs_of(reads: "Reads | Mapping[str, Observer]") -> frozenset[str]:
    """What of the attention is needed."""
    return frozenset[str]().union(*(read.needs for read in reads.values()))


def need_gradient(reads: Reads) -> bool:
    return SLOPE in needs_of(reads)


def check_columns(question: Reader, batches: Sequence[PromptBatch], first: Reads) -> None:
    """Raise an error for wrong positions in any batch; ``first`` is what is read of the first."""
    name_some = any(read.columns(batches[0], question.name) for read in first.values())
    for batch in batches[1:] if name_some else ():
        for read in reads_of(question, batch.whole()).values():
            read.columns(batch, question.name)


def begins_as(question: Reader, batch: PromptBatch, first: PromptBatch) -> bool:
    """Whether a question reads in shared tokens what it reads in another prompt of the set."""
    whole, one = batch.whole(), first.whole().prompt(0)
    ours, theirs = reads_of(question, whole), reads_of(question, one)
    return all(
        read.same_before(batch.first_query, theirs[name], (whole, one))
        for name, read in ours.items()
        if isinstance(theirs.get(name), type(read))
    )


def by_hooks(observations: Sequence[Observation]) -> dict[str, Any]:
    """Options of a pass in which questions observe hook points, and change nothing for others."""
    forward = [hook for each in observations for hook in each.hooks]
    backward = [hook for each in observations for hook in each.backward_hooks]
    return {"observers": forward, "backward_hooks": backward}


def by_rows(observations: Sequence[Observation], *, has_kernel: bool) -> dict[str, Any]:
    """Options of a pass with a fused attention: questions get rows, or sums of a kernel."""

    def use(layer: int, rows: slice, keys: slice, a: Tensor, slope: Tensor) -> None:
        for each in observations:
            each.use(each.of_rows, layer, rows, keys, a, slope)

    taps = [tap for each in observations for tap in each.of_rows] if has_kernel else []
    # Rows are formed on the way back.
    needed = {} if any(each.needs_gradient for each in observations) else {"loss": any_loss}
    beside = [hook for of_one in observations for each in of_one.beside for hook in each.hooks]
    return {"use": use, "taps": taps, **needed, "observers": beside}
