"""Compression: queries are answered from the keys and values of label words (section 3.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ModelError, PromptError
from ..hooks import Site, hooks_on_edges
from ..metrics.question import HooksOfBatch, no_hooks
from ..models.hooked import Hook, HookedModel, check_fits, hooks_by_layer, scores_name
from ..models.kv_cache import KeyValues, layers_of_entries
from ..models.load import ensure_prepared
from ..models.media_tokens import refuse_media_tokens
from ..models.model_state import frozen_in_eval_mode, has_user_hooks, without_user_hooks
from ..models.rotary import refuse_another_rotation
from ..models.tiny_pass import relative_difference
from ..passes.comparison import TOLERANCE, reason_of, tolerance
from ..passes.forward import run_pass, run_prefix
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_batch
from ..prompts.edge_set import Edges, EdgeSet
from ..prompts.segment_names import SEGMENTS
from ..system.arguments import called, checked, fitted
from ..system.devices import Device, holds_numbers, sent
from ..system.texts import described, name_of
from .placement import Placement, as_in_prompt, rebased
from .protocol import (
    QueryPass,
    bos_of,
    demonstrations_of,
    model_identity,
    queries_after,
    selected_by,
)
from .selection import ONE_SET, ByScore, Selection, anchors_and_format
from .stored import StoredContext, key_values_at_start

# How many roundings may lie between logits after a context and those of whole prompts.
ROUNDINGS = 8


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CompressedContext(StoredContext):
    """Keys and values of selected tokens of the demonstrations, from which queries are answered.

    Attributes:
        prefix: Keys and values of the selected tokens; of all if ``is_cut`` is False.
        tokens: The demonstrations, up to the first token of the query.
        selected: True for the selected tokens.
        key_positions: Position of each selected token as the model takes it.
        query_position: Position of the query's first token as the model takes it.
        info: The model, its type and weights, the placement, whether demonstrations were run
            ``separately``, the BOS, how many tokens of each segment are selected, the score
            (``scored``).
    """

    selected: Bool[Tensor, " position"]
    key_positions: Int[Tensor, " key"]
    query_position: int

    def _summary(self) -> dict[str, str]:
        segments = self.info.get("selected", {})
        apart = ", each demonstration alone" if self.info.get("separately") else ""
        return {
            "positions": f"{int(self.selected.sum())} of {len(self.selected)}",
            "segments": ", ".join(f"{name} {count}" for name, count in sorted(segments.items()))
            or "not known",
            **({"selection": self.info["scored"]} if "scored" in self.info else {}),
            "cached": "these positions" if self.is_cut else "all positions, the others masked",
            "bytes": f"{self.size:,}",
            "placement": f"{self.info.get('positions')}{apart}",
            "model": f"{self.info.get('model')}, {self.info.get('dtype')}",
        }

    @property
    def is_cut(self) -> bool:
        """Whether the cache holds the selected tokens only, so that dropped ones take no memory.

        Where distances follow the index in the cache (ALiBi, chunked attention, a
        HookedTransformer) all stay and dropped ones are masked: the same answers, no memory saved.
        """
        return len(self.prefix) == int(self.selected.sum())

    @property
    def cached_tokens(self) -> Int[Tensor, " cached"]:
        """The selected tokens."""
        return self.tokens[self.selected]

    @property
    def has_no_gap(self) -> bool:
        """Whether the position of each token is its index in the cache."""
        indices = torch.arange(len(self.prefix), device="cpu")
        keys_have_no_gap = torch.equal(self.key_positions, indices)
        return keys_have_no_gap and self.query_position == len(self.prefix)

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``.

        Raises:
            PromptError: The prompts begin with other tokens, or a query is too long.
        """
        whole = _after_prefix(batch, self.tokens)
        left = model.cfg.n_ctx - max(self.query_position, len(self.prefix))
        longest = int(whole.attention_mask[:, whole.first_query :].sum(1).max())
        if longest > left:
            raise PromptError(
                f"a query has {longest} tokens, but {left} of the model's context of "
                f"{model.cfg.n_ctx} are left after this compressed context; use shorter queries "
                "or fewer demonstrations, or positions=al.contexts.placement.rebased"
            )
        refuse_another_rotation(model, self.prefix.text_length, self.query_position + longest)
        prefix, read = self.prefix.beside(model), torch.ones_like(whole.tokens[0], dtype=torch.bool)
        read[: len(self.selected)] = self.selected
        if not self.is_cut:
            of_query = whole.positions >= whole.first_query
            cut = edges.between(of_query[None], ~read[None])
            return QueryPass(whole, prefix, hooks_on_edges(model, whole, cut, Site()))
        compact = selected_columns(whole, read).after(int(self.selected.sum()))
        hooks = [] if self.has_no_gap else self._window_hooks(model, compact, whole)
        return QueryPass(compact, prefix, hooks)

    def _window_hooks(
        self, model: HookedModel, batch: PromptBatch, whole: PromptBatch
    ) -> list[Hook]:
        """Hooks that count windows in positions, where the model's own mask counts cached keys."""
        windows = _windows(model, whole)
        n_keys, indices = batch.first_query, batch.positions
        positions = indices - n_keys + self.query_position
        positions[:n_keys] = self.key_positions
        queries = indices[:, None] >= n_keys
        hooks: list[Hook] = []
        for window in set(windows):
            beyond = queries & (positions[:, None] - positions >= window)
            if (queries & (indices[:, None] - indices >= window) & ~beyond).any():
                raise ModelError(
                    f"layers with a window of {window} tokens cannot see all keys that these "
                    "positions put there; use positions=al.contexts.placement.as_in_prompt"
                )
            if beyond.any():
                layers = [layer for layer, size in enumerate(windows) if size == window]
                cut = EdgeSet.of(beyond[None])
                hooks += hooks_on_edges(model, batch, cut, Site(layers))
        return hooks

    @classmethod
    def _key_values(
        cls, keys: Sequence[Tensor], values: Sequence[Tensor], own: Mapping[str, Any]
    ) -> KeyValues:
        in_prompt = torch.equal(own["key_positions"], own["selected"].nonzero().flatten())
        return replace(
            key_values_at_start(keys, values),
            next_position=torch.tensor([own["query_position"]], device="cpu"),
            text_length=len(own["tokens"] if in_prompt else own["key_positions"]),
        )

    def _check_loaded(self) -> None:
        count = int(self.selected.sum())
        if len(self.key_positions) != count or len(self.prefix) not in (count, len(self.tokens)):
            raise ValueError("the keys are neither those of the selected tokens nor of all tokens")
        if not {"bos", "selected"} <= self.info.keys():
            raise ValueError("info does not say what was selected")
        if not isinstance(self.info.get("separately"), bool):
            raise ValueError("info does not say whether demonstrations were run separately")


@checked
def compress(
    model: HookedModel,
    demonstrations: PromptBatch,
    select: Selection | ByScore = anchors_and_format,
    *,
    positions: Placement = as_in_prompt,
    separately: bool = False,
) -> CompressedContext:
    r"""Run demonstrations once and store the keys and values of some positions (section 3.2).

    The others are dropped after they had their effect on the selected ones. With D the positions of
    the demonstrations, S the selected ones, and s the scores before the softmax, the output of a
    head at a position i of the query is

    $$
    z_i = \sum\limits_{j \in J} \frac{\exp s_{ij}}{\sum\limits_{j' \in J} \exp s_{ij'}} \, v_j ,
    \qquad J = \{ j \le i: \; j \in S \text{ or } j \notin D \} .
    $$

    So with positions as in the prompt the answers are those of the whole prompt without the edges
    from the query to dropped positions. This is verified on the first prompt: where a cache of the
    selected positions alone gives other logits (by more than 1e-5 of the largest), the whole cache
    is stored and those edges are blocked; ``is_cut`` says which.

    Moved keys (``al.contexts.placement.rebased``) are rotated by the model's own rotation, if the
    later half of the keys, moved in one piece with the query, gives the same answer. Else it is
    refused, as for learned positions.

    With ``separately`` a demonstration sees BOS, the instructions and itself, but no other
    demonstration. It keeps its positions: one pass runs without the edges between them.

    Pitfalls:
        Format tokens collect too: compare with ``al.contexts.selection.random_and_format``.

    Source:
        Section 3.2, Tables 2 and 3. Text_anchor is a prompt (``al.prompts.text_anchor_prompts``).

    Args:
        demonstrations: Any batch of ``build_prompts`` with these demonstrations.
        select: Function from the demonstrations, a batch of one prompt, to Bool["position"], of
            ``al.contexts.selection`` or your own; or a ``ByScore``, which asks the model.
        positions: Function from the selected positions to those of keys and query as the model
            takes them, of ``al.contexts.placement`` or your own.
        separately: Run each demonstration without the others before it.

    Raises:
        PromptError: There are several sets of demonstrations, their texts are not known, nothing is
            selected, a demonstration is too short for a control, or the model rotates
            demonstrations differently before a query (longrope).
        ModelError: There is no key-value cache, or logits with these positions would not be exact.

    Examples:
        >>> context = al.compress(model, batch)
        >>> logits = context.logits(model, batch)
    """
    options: dict[str, Any] = {"positions": positions, "separately": separately}
    return compressed_contexts(model, demonstrations, [select], **options)[0]


def compressed_contexts(
    model: HookedModel,
    demonstrations: PromptBatch,
    selections: Sequence[Selection | ByScore],
    *,
    positions: Placement = as_in_prompt,
    separately: bool = False,
) -> list[CompressedContext]:
    """Several contexts from one run of the demonstrations."""
    ensure_prepared(model)
    check_batch(demonstrations)
    check_fits(model, demonstrations)
    refuse_media_tokens(model, demonstrations)
    apart: HooksOfBatch = partial(_apart, model) if separately else no_hooks
    masks = checked_selections(selections, demonstrations, model, apart)
    prompt = demonstrations.prompt(0)
    shared = prompt.before(len(masks[0]))
    info = {**model_identity(model), "positions": name_of(positions), "separately": separately}
    info |= {"bos": bos_of(prompt).tolist()}
    _measured.pop(model, None)  # the model's settings may have changed
    placed = [_placed(positions, selected) for selected in masks]
    with frozen_in_eval_mode(model):
        with without_user_hooks(model):
            whole = verified_cache(model, prompt, shared, apart)
            trials: dict[bool, tuple[bool, float]] = {}  # of keys that stay, and of moved ones
            cut = []
            for each in placed:
                if each.moves not in trials:
                    trials[each.moves] = _trial(model, prompt, whole, each, apart)
                cut.append(_may_cut(model, each, *trials[each.moves], name_of(positions)))
        if has_user_hooks(model):
            whole = run_prefix(model, shared, hooks=apart(shared))
        made = []
        for select, each, is_cut in zip(selections, placed, cut, strict=True):
            prefix = _with_cuts(model, shared, whole, each, apart) if is_cut else whole
            scored = {"scored": f"{select.name}, {ONE_SET}"} if isinstance(select, ByScore) else {}
            made.append(_context(prompt, prefix, each, info | scored))
            made[-1].query_pass(model, prompt)  # an error now, and not when queries are answered
        return made


def checked_selections(
    selections: Sequence[Selection | ByScore],
    demonstrations: PromptBatch,
    model: HookedModel,
    hooks: HooksOfBatch = no_hooks,
) -> list[Bool[Tensor, " position"]]:
    """The positions that each selects, checked before the model answers."""
    before = demonstrations_of(demonstrations)
    return [
        select.of(model, before, hooks(before))
        if isinstance(select, ByScore)
        else selected_by("select", select, before)
        for select in selections
    ]


def cache_of_tokens(
    model: HookedModel, batch: PromptBatch, tokens: Int[Tensor, " position"]
) -> KeyValues:
    """Verified keys and values of tokens that stand before the query of the first prompt."""
    prompt = queries_after(batch.prompt(0), tokens)
    return verified_cache(model, prompt, prompt.before(len(tokens)))


def verified_cache(
    model: HookedModel, prompt: PromptBatch, shared: PromptBatch, hooks: HooksOfBatch = no_hooks
) -> KeyValues:
    """The keys and values of the first tokens of a prompt, if they give its logits."""
    expected = run_pass(model, prompt, hooks=hooks(prompt))
    after_prefix = prompt.after(shared.tokens.shape[1])
    try:
        whole = run_prefix(model, shared, hooks=hooks(shared))
        difference = relative_difference(run_pass(model, after_prefix, prefix=whole), expected)
    except PromptError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.cfg.model_name} does not run from a key-value cache: {reason_of(error)}"
        ) from error
    if not difference <= tolerance(model, ROUNDINGS):
        raise ModelError(
            f"{model.cfg.model_name} gives other logits after a cached prefix (off by "
            f"{difference:.1e} of the largest), and a context is such a prefix"
        )
    return whole


class _Placed(NamedTuple):
    """Selected positions of the demonstrations, and where their keys and the query are put."""

    selected: Bool[Tensor, " position"]
    keys: Int[Tensor, " key"]
    query: int

    @property
    def moves(self) -> bool:
        """Whether the keys are put at 0, 1, ..., and the query after them."""
        if torch.equal(self.keys, self.selected.nonzero().flatten()):
            return False
        indices = torch.arange(len(self.keys), device="cpu")
        if torch.equal(self.keys, indices) and self.query == len(self.keys):
            return True
        raise PromptError(
            "a placement must leave keys at their positions, or put them at 0, 1, ... and the "
            f"query after them; got keys at {self.keys.tolist()}, the query at {self.query}"
        )


def _placed(positions: Placement, selected: Bool[Tensor, " position"]) -> _Placed:
    given: Any = called("positions", positions, "the selected positions", selected)
    is_pair = isinstance(given, tuple) and len(given) == 2 and holds_numbers(given[0])
    if not is_pair or given[0].ndim != 1:
        raise PromptError(
            "positions must give the positions of the keys, a tensor, and that of the query, a "
            f"whole number, as al.contexts.placement.rebased does; got {described(given)}"
        )
    return _Placed(selected, given[0].cpu(), fitted("the query's position", given[1], int))


def _context(
    prompt: PromptBatch, prefix: KeyValues, placed: _Placed, info: Mapping[str, Any]
) -> CompressedContext:
    selected, keys, query = placed
    tokens, segments = (of[0, : len(selected)] for of in (prompt.tokens, prompt.segments))
    counts = {name: int(selected[segments == n].sum()) for n, name in enumerate(SEGMENTS)}
    return CompressedContext(
        prefix=replace(prefix, next_position=torch.tensor([query], device="cpu")),
        tokens=tokens,
        selected=selected,
        key_positions=keys,
        query_position=query,
        info={**info, "selected": {name: count for name, count in counts.items() if count}},
    )


def _apart(model: HookedModel, batch: PromptBatch) -> list[Hook]:
    """Hooks that cut the edges between demonstrations; those to BOS and instructions stay."""
    number = torch.zeros_like(batch.tokens)  # of the demonstration of each token, from 1
    for k in range(batch.label_ends.shape[1]):
        number += (k + 1) * edges.demonstration(batch, k)

    def rows_of(rows: slice, device: Device) -> Edges:
        numbers = sent(number, device)
        return (numbers[:, rows, None] > numbers[:, None]) & (numbers[:, None] > 0)

    return hooks_on_edges(model, batch, EdgeSet(rows_of, (*number.shape, number.shape[1])), Site())


def _with_cuts(
    model: HookedModel,
    shared: PromptBatch,
    whole: KeyValues,
    placed: _Placed,
    hooks: HooksOfBatch,
) -> KeyValues:
    """Keys and values of the selected positions; to move them, keys are read before rotation."""
    selected = placed.selected
    if not placed.moves:
        return whole.columns(selected)
    refuse_another_rotation(model, len(selected), int(selected.sum()))
    names = [f"blocks.{layer}.attn.hook_k" for layer in layers_of_entries(model)]
    if not set(names) <= set(model.hook_dict):
        raise ModelError("there is no hook point with the keys before their rotation")
    unrotated: dict[str, Tensor] = {}

    def store(name: str, key: Tensor, hook: Any) -> None:
        if key.shape[1] != len(selected):
            raise ModelError("keys before their rotation have heads before positions")
        unrotated[name] = key.detach()

    def replaced(name: str, key: Tensor, hook: Any) -> Tensor:
        return unrotated[name][:, selected]

    observers = [(name, partial(store, name)) for name in names]
    read = run_prefix(model, shared, hooks=hooks(shared), observers=observers).columns(selected)
    replacing = [(name, partial(replaced, name)) for name in names]
    moved = run_prefix(model, selected_columns(shared, selected), hooks=replacing)
    if not relative_difference(moved.values[0], read.values[0]) <= tolerance(model, ROUNDINGS):
        raise ModelError("the values of layer 0 depend on positions")
    return replace(moved, values=read.values)


def _trial(
    model: HookedModel,
    prompt: PromptBatch,
    whole: KeyValues,
    placed: _Placed,
    hooks: HooksOfBatch,
) -> tuple[bool, float]:
    """Whether a cut cache gives the logits of the masked whole cache, and how far they are off."""
    length, moves = len(placed.selected), placed.moves
    indices = torch.arange(length, device="cpu")
    if moves:
        # Without a gap all distances stay the same, so the answers must stay the same too.
        selected = indices >= length // 2
        trial = _Placed(selected, *rebased(selected))
    else:
        # Without a gap between the keys wrong positions would not change the logits.
        has_gap = not placed.selected[int(placed.selected.long().argmax()) :].all()
        selected = placed.selected if has_gap else indices % 2 == 0
        trial = _Placed(selected, *as_in_prompt(selected))
    try:
        cut = _with_cuts(model, prompt.before(length), whole, trial, hooks)
        tried = _context(prompt, cut, trial, {})
        expected = _context(prompt, whole, _Placed(selected, *as_in_prompt(selected)), {})
        passes = [context.query_pass(model, prompt) for context in (tried, expected)]
        difference = relative_difference(*(query_pass.logits(model) for query_pass in passes))
    except PromptError:
        raise
    except Exception as error:  # attention in chunks, keys without a hook point, wrong shapes
        reason_of(error)
        return False, inf
    is_right = difference <= tolerance(model, ROUNDINGS)
    if is_right and not moves and difference > TOLERANCE:
        # In low precision the error of a cut cache with wrong distances (ALiBi) can be smaller than
        # rounding. Where distances are right, another position of the query gives other logits.
        earlier = replace(whole, next_position=whole.next_position - 1)
        after = prompt.after(length)
        logits = [run_pass(model, after, prefix=prefix) for prefix in (whole, earlier)]
        is_right = not torch.equal(*logits)
    return is_right, difference


def _may_cut(
    model: HookedModel, placed: _Placed, is_right: bool, difference: float, name: str
) -> bool:
    """Whether the cut cache is right, or else the masked whole cache; an error if neither is."""
    if is_right and placed.query >= 0:
        return True
    if not placed.moves and placed.query == len(placed.selected):
        return False
    raise ModelError(
        f"positions cannot be {name} in {model.cfg.model_name}: its logits would be off by "
        f"{difference:.1e} of the largest. Positions that are learned, follow the index in the "
        "cache (ALiBi, a HookedTransformer) or enter keys without a hook point cannot be chosen; "
        "use positions=al.contexts.placement.as_in_prompt"
    )


def selected_columns(batch: PromptBatch, selected: Bool[Tensor, " position"]) -> PromptBatch:
    """The selected columns of the prompts, whose label words are those that are selected whole."""
    dropped = int((~selected).sum())
    whole = (selected[batch.label_positions] & selected[batch.label_ends]).all(0)
    moved = selected.cumsum(0) - 1
    return replace(
        batch,
        tokens=batch.tokens[:, selected],
        attention_mask=batch.attention_mask[:, selected],
        segments=batch.segments[:, selected],
        label_positions=moved[batch.label_positions[:, whole]],
        label_ends=moved[batch.label_ends[:, whole]],
        label_classes=batch.label_classes[:, whole],
        target_positions=batch.target_positions - dropped,
        query_start=batch.query_start - dropped,
    )


# For each model the length of the prompt on which windows were measured, and each layer's window.
_measured: WeakKeyDictionary[Any, tuple[int, list[int]]] = WeakKeyDictionary()


def _windows(model: HookedModel, batch: PromptBatch) -> list[int]:
    """How many tokens each layer can attend to, read from the scores of the longest prompt."""
    row = int(batch.attention_mask.sum(1).argmax())
    prompt = batch.whole().prompt(row)
    length = min(prompt.tokens.shape[1], model.cfg.n_ctx)
    last = torch.full_like(prompt.target_positions, length - 1)
    prompt = replace(prompt.before(length), target_positions=last)
    if model in _measured and _measured[model][0] >= length:
        return _measured[model][1]
    positions = torch.arange(length, device="cpu")
    distances = positions[:, None] - positions
    windows: list[int] = []

    def observe(layer: int, scores: Float[Tensor, "batch head query key"]) -> None:
        visible = (scores[0].detach() > -5e3).any(0).cpu() & (distances >= 0)
        windows.append(int(distances[visible].max()) + 1)
        if not torch.equal(visible, (distances >= 0) & (distances < windows[-1])):
            raise ModelError(
                f"layer {layer} of {model.cfg.model_name} attends in chunks at {length} tokens, "
                "where a cache cannot be cut; compress a prompt as long as this, to store all"
            )

    with without_user_hooks(model):
        run_pass(model, prompt, observers=hooks_by_layer(model, scores_name, observe))
    # A window as long as the prompt is not known to end there.
    unbounded = model.cfg.n_ctx + 1
    _measured[model] = length, [unbounded if size == length else size for size in windows]
    return _measured[model][1]


def _after_prefix(batch: PromptBatch, tokens: Int[Tensor, " position"]) -> PromptBatch:
    """Prompts that begin with these tokens, to be run after a cached prefix of them."""
    right, length = batch.padded_right(), len(tokens)
    if int(right.target_positions.min()) >= length:
        same = right.tokens[:, :length] == tokens
        if same.all():
            return right.after(length)
        row, position = (~same).nonzero()[0].tolist()
        reason = f"prompt {row} differs at position {position}"
    else:
        reason = f"a prompt has its target at position {int(right.target_positions.min())}"
    raise PromptError(
        f"the prompts do not begin with the {length} tokens of this context: {reason}. Build them "
        "with the tokenizer, task and demonstrations that were compressed, or compress theirs"
    )


def refuse_gaps(context: StoredContext, what: str) -> None:
    """Raise an error if the keys and the query of a context do not stand at 0, 1, ..."""
    if not context.has_no_gap:
        raise PromptError(
            f"{what} must have its keys at the positions 0, 1, ... and the query after them, but "
            f"this context has them {context.info.get('positions')}; compress with "
            "positions=al.contexts.placement.rebased, or select=al.contexts.selection.everything"
        )
