"""Sets of edges: tensors of True and False over (query, key), made from positions.

Edge (i, j) is True if query position i attends to key position j and j < i. No edge set holds the
diagonal or padding. Each is an ``al.prompts.EdgeSet``; combine them by ``|``, ``&``, ``& ~``.

Examples:
    >>> to_labels = edges.between(edges.segment(batch, "query"), edges.anchors(batch))
    >>> bool((to_labels & edges.wp(batch)).any())
    False
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import HookError, PromptError
from ..other_words import instead_of
from ..system.arguments import checked
from ..system.devices import Device, sent
from ..system.texts import described
from .batch import PromptBatch, anchors_of, check_inside, check_label_words, holds_integers
from .edge_set import Edges, EdgeSet, EdgesOfBatch, Positions, edges_between, paper_edges
from .random_edges import best_of_all_rows, best_of_each_row, draw_generator, drawn_edges, edges_at
from .segment_names import FORMAT, SEGMENTS, TEXT

PositionsOfBatch = Callable[[PromptBatch], Positions]
Pairs = Sequence[tuple[int, int]]
ColumnNumbers = Int[Tensor, "*batch anchor"]  # of columns
Tokens = ColumnNumbers | PositionsOfBatch


@checked
def between(queries: Positions, keys: Positions) -> EdgeSet:
    """Edges from every position in ``queries`` to every earlier position in ``keys``.

    Examples:
        >>> between(torch.tensor([[False, True]]), torch.tensor([[True, True]])).tolist()
        [[[False, False], [True, False]]]
    """
    # Copies, so that later edits of the positions do not change the edges.
    return edges_between(*(each.detach().to("cpu", copy=True) for each in (queries, keys)))


@checked
def segment(batch: PromptBatch, name: str) -> Positions:
    """Positions of a segment: text, label, format, target, query or other, or one of your own.

    ``label`` holds all tokens of each label word, ``anchors`` only one of them.

    Raises:
        PromptError: There is no segment of that name.
    """
    names = batch.segment_names
    if name not in names:
        message = f"there is no segment {name!r}; the segments are {', '.join(names)}"
        if name in SEGMENTS:  # the batch had it before its names were replaced
            message += (
                "; leave segment_names of a batch with label words as they are, and give segments "
                "of your own as al.SegmentFlows({name: function})"
            )
        raise PromptError(message)
    return batch.segments == names.index(name)


@checked
def at(batch: PromptBatch, positions: ColumnNumbers) -> Positions:
    """Positions given by number, in columns of the batch: a row for each prompt, or one for all.

    Raises:
        PromptError: They are no whole numbers, or a position lies outside its prompt.

    Examples:
        >>> first_two = edges.at(batch, batch.label_positions[:, :2])
        >>> edges.at(batch, [3]).sum(1).tolist() == [1] * len(batch)
        True
    """
    if positions.ndim not in (1, 2) or not holds_integers(positions) or not positions.numel():
        raise PromptError(
            "positions must be whole numbers, a list for all prompts or one for each, the shape "
            f"(batch, anchor); got {described(positions)}"
        )
    if positions.ndim == 1:
        positions = positions.expand(len(batch), -1)
    check_inside(batch, "positions", positions)
    return torch.zeros_like(batch.attention_mask).scatter(1, positions.long().cpu(), True)


@checked
def anchors(batch: PromptBatch) -> Positions:
    """Positions of the anchors: one token of each label word (the paper's p_k).

    Raises:
        PromptError: A label position lies outside its prompt, or there are no label words.
    """
    return anchors_of(batch)


@checked
def forerunners(batch: PromptBatch) -> Positions:
    """Positions of the token before each anchor, such as the colon; errors as of ``anchors``."""
    labels = anchors(batch)
    return torch.cat([labels[:, 1:], torch.zeros_like(labels[:, :1])], 1) & batch.attention_mask


@checked
def target(batch: PromptBatch) -> Positions:
    """The target position (the paper's q); all False in a batch that ends before it."""
    return batch.positions == batch.target_positions[:, None]


@checked
def demonstrations(batch: PromptBatch) -> Positions:
    """Positions of all tokens before the query, without BOS."""
    return batch.attention_mask & ~batch.from_query & ~bos(batch)


@checked
def demonstration(batch: PromptBatch, number: int) -> Positions:
    """Positions of one demonstration: its text, its label word, and the separator after it.

    So a prompt without these tokens is the prompt that would be written without the demonstration.
    As many tokens belong to the separator as stand between the last label word and the query. The
    first demonstration begins after BOS and the instructions.

    Args:
        number: Which one, from 0, in order of appearance.

    Raises:
        PromptError: There are no label words, or no demonstration of this number.

    Examples:
        >>> first = edges.demonstration(batch, 0)
        >>> bool((first & edges.anchors(batch)).sum(1).eq(1).all())
        True
    """
    check_label_words([batch])
    count = batch.label_ends.shape[1]
    if not 0 <= number < count:
        raise PromptError(f"the prompts have the demonstrations 0 to {count - 1}; got {number}")
    after = (batch.query_start - batch.label_ends[:, -1] - 1).clamp(min=0)  # of the separator
    stop = batch.label_ends[:, number] + 1 + after
    if number:
        start = batch.label_ends[:, number - 1] + 1 + after
    else:  # batches from bare positions do not know which tokens are instructions
        inside = (batch.segments == TEXT) | (batch.segments == FORMAT)
        known = torch.where(inside.any(1, keepdim=True), inside, batch.attention_mask & ~bos(batch))
        start = known.long().argmax(1)
    is_after = batch.positions >= start[:, None]
    return batch.attention_mask & is_after & (batch.positions < stop[:, None])


@checked
def each_demonstration(batch: PromptBatch) -> dict[str, PositionsOfBatch]:
    """Every demonstration as a segment: functions of the batch to ``demonstration``, by name.

    Other batches of a run must have as many demonstrations. An error if there are no label words.

    Examples:
        >>> results = al.run(model, batches, [al.SegmentFlows(edges.each_demonstration(batch))],
        ...                  progress=False)
        >>> results["segment_flows"].axis_names("segment")[:2]
        ('demonstration 1', 'demonstration 2')
    """
    check_label_words([batch])
    numbers = range(batch.label_ends.shape[1])
    return {f"demonstration {k + 1}": partial(demonstration, number=k) for k in numbers}


@checked
def bos(batch: PromptBatch) -> Positions:
    """The position of BOS; all False in prompts that do not begin with one."""
    return _first(batch) if batch.begins_with_bos else torch.zeros_like(batch.attention_mask)


@checked
def query(batch: PromptBatch) -> Positions:
    """Positions from the first token of the query to the target, which is a segment by itself."""
    return batch.up_to_target & batch.from_query


@checked
def every(batch: PromptBatch) -> EdgeSet:
    """All edges to earlier tokens up to the target position; later ones cannot influence it."""
    return edges_between(batch.up_to_target, batch.up_to_target)


@checked
def pairs(batch: PromptBatch, pairs: Pairs | Sequence[Pairs]) -> EdgeSet:
    """Single edges by number: (query, key) for each of them.

    Args:
        pairs: Positions from 0 at the first token of a prompt (its BOS), whatever the padding; the
            key is the earlier one. A list for all prompts, or a list for each.

    Raises:
        PromptError: A position lies outside its prompt, a key is not before its query, or none is.

    Examples:
        >>> hooks = al.block_edges(model, batch, edges.pairs(batch, [(20, 8)]))
    """
    of_prompts: Sequence[Pairs] = pairs  # type: ignore[assignment]
    if any(isinstance(number, int) for pair in pairs for number in pair):
        of_prompts = [pairs] * len(batch)  # type: ignore[list-item]
    if len(of_prompts) != len(batch) or not any(of_prompts):
        raise PromptError(
            f"pairs are (query, key) for all {len(batch)} prompts, [(20, 8), (21, 8)], or such a "
            f"list for each of them; got {pairs!r}"
        )
    chosen = list[tuple[int, int, int]]()
    spans = zip(batch.starts.tolist(), batch.attention_mask.sum(1).tolist(), strict=True)
    for number, ((start, count), of_prompt) in enumerate(zip(spans, of_prompts, strict=True)):
        for query, key in of_prompt:
            if not 0 <= key < query < count:
                raise PromptError(
                    "a pair is (query, key), counted from 0, and the key is the earlier one; got "
                    f"({query}, {key}) for prompt {number} of the batch, which has {count} tokens"
                )
            chosen.append((number, start + query, start + key))
    count, length = batch.tokens.shape
    positions = torch.tensor(chosen, device="cpu").T
    return edges_at(positions, (count, length, length))


@checked
def previous_token(batch: PromptBatch) -> EdgeSet:
    """Edges from each token to the one before it: what a previous token head attends to."""
    return _of_equal(batch, batch.positions[None], batch.positions[None] + 1)


@checked
def same_token(batch: PromptBatch) -> EdgeSet:
    """Edges to earlier tokens of the same id: what a duplicate token head attends to.

    In a prompt of demonstrations most are between tokens of its format.
    """
    return _of_equal(batch, batch.tokens, batch.tokens)


@checked
def induction(batch: PromptBatch) -> EdgeSet:
    """Edges to the token after an earlier one of the same id: what an induction head attends to.

    In "A B ... A" this is the edge from the second A to B. As in TransformerLens's head detector,
    but for the edge from a token to itself where its id is that of the token before it.

    Examples:
        >>> both = {"induction": edges.induction, "every": edges.every}
        >>> heads = al.SaliencyFlows(edges=both, weight=al.weights.attention)  # of its per_head
    """
    before = batch.tokens.roll(1, 1).masked_fill(_first(batch), -1)  # no token
    return _of_equal(batch, batch.tokens, before)


@checked
def wp(batch: PromptBatch) -> EdgeSet:
    """Word to label: ``{(p_k, j): j < p_k}``, what label words gather (section 2.1)."""
    return paper_edges(batch)["wp"]


@checked
def pq(batch: PromptBatch) -> EdgeSet:
    """Label to target: ``{(q, p_k)}``, what the target reads from the label words."""
    return paper_edges(batch)["pq"]


@checked
def ww(batch: PromptBatch) -> EdgeSet:
    """Word to word: every edge that is neither in ``wp`` nor in ``pq``."""
    return paper_edges(batch)["ww"]


@checked
def tq(batch: PromptBatch) -> EdgeSet:
    """Every other word to target: ``{(q, j): j is no anchor}``, the baseline of S_pq."""
    return paper_edges(batch)["tq"]


@checked
def from_first(batch: PromptBatch) -> EdgeSet:
    """Edges to the first token of each prompt, often a BOS with much of the attention."""
    return between(batch.attention_mask, _first(batch))


@checked
def read_by(positions: Tokens, readers: Tokens | None = None) -> EdgesOfBatch:
    """A function of the batch: all edges to these tokens, from every later one.

    Args:
        positions: Numbers, as of ``at``, or a function of the batch such as ``anchors``.
        readers: The only tokens that read them, likewise; None for all.

    Examples:
        >>> hooks = al.block_edges(model, batch, edges.read_by([3]), 1)  # nobody reads token 3
        >>> hooks = al.block_edges(model, batch, edges.read_by([3], [8]), 1)  # token 8 does not
    """
    return partial(_between, readers, positions)


@checked
def reading(positions: Tokens) -> EdgesOfBatch:
    """A function of the batch: all edges from these tokens (as of ``read_by``) to earlier ones.

    Examples:
        >>> hooks = al.block_edges(model, batch, edges.reading(edges.target), 1)
    """
    return partial(_between, positions, None)


def _between(readers: Tokens | None, read: Tokens | None, batch: PromptBatch) -> EdgeSet:
    """Edges between tokens; None for all."""
    both = [
        batch.attention_mask if of is None else of(batch) if callable(of) else at(batch, of)
        for of in (readers, read)
    ]
    return between(*both)


@checked
def random_candidates(
    batch: PromptBatch, *, after: Int[Tensor, "batch 1"] | None = None
) -> Positions:
    """The positions of which ``random_positions`` draws some."""
    first = batch.starts[:, None] if after is None else after.cpu()
    last = batch.label_ends.max(1, keepdim=True).values
    labels = segment(batch, "label") | anchors(batch)
    allowed = batch.attention_mask & (batch.positions > first) & (batch.positions < last) & ~labels
    # Instructions are not drawn. Batches from bare positions do not know which tokens these are.
    inside = segment(batch, "text") | segment(batch, "format")
    return allowed & (inside | ~inside.any(1, keepdim=True))


@checked
def random_positions(
    batch: PromptBatch,
    seed: int,
    *,
    whole_words: bool = False,
    after: Int[Tensor, "batch 1"] | None = None,
) -> Positions:
    """Random positions of the demonstrations, as many as label words: the control of ``wp``.

    The draw depends on ``seed`` and the demonstrations alone, not on batch, process or padding. The
    first token of a prompt, BOS, instructions and label words are never drawn.

    Args:
        whole_words: Draw as many positions as the label words have tokens.
        after: Draw only positions after these; by default after the first token of each prompt.

    Raises:
        HookError: The demonstrations have fewer other positions than label words.

    Examples:
        >>> drawn = edges.random_positions(batch, seed=0)
        >>> bool((drawn.sum(1) == edges.anchors(batch).sum(1)).all())
        True
    """
    words, allowed = anchors(batch), random_candidates(batch, after=after)
    counts = (segment(batch, "label") | words if whole_words else words).sum(1).tolist()
    drawn = torch.zeros_like(allowed)
    rows = zip(counts, batch.demonstrations_id.tolist(), strict=True)
    for row, (count, set_id) in enumerate(rows):
        candidates = allowed[row].nonzero().flatten()
        if len(candidates) < count:
            raise HookError(
                f"the demonstrations have {len(candidates)} tokens other than the {count} of their "
                "label words, too few for a random control; use longer demonstrations"
            )
        # Padding does not change the draw: candidates are counted, not positions.
        generator = draw_generator(seed, set_id)
        chosen = torch.randperm(len(candidates), generator=generator, device="cpu")[:count]
        drawn[row, candidates[chosen]] = True
    return drawn


@checked
def random_keys(batch: PromptBatch, edges: Edges | EdgesOfBatch, seed: int) -> EdgeSet:
    """Random edges of the same queries: each query reads as many other keys as in ``edges``.

    Edges up to the target position count, and those to the first token are not drawn. Draws depend
    on ``seed`` and the tokens of the demonstrations, and in each row on nothing after it.

    Args:
        edges: Edges of these prompts, from a token to an earlier one; or a function of the batch.

    Raises:
        HookError: A row has too few other keys.
        PromptError: ``edges`` are not edges of these prompts.

    Examples:
        >>> drawn = edges.random_keys(batch, edges.pq(batch), seed=0)
        >>> bool((drawn.sum(2) == edges.pq(batch).sum(2)).all())
        True
    """
    return drawn_edges(batch, edges, from_first(batch), seed, best_of_each_row, 1)


@checked
def random_edges(batch: PromptBatch, edges: Edges | EdgesOfBatch, seed: int) -> EdgeSet:
    """Random edges of each prompt, as many as in ``edges``, from any query to any key.

    For edges that leave their queries too few other keys, such as all edges from the query to the
    demonstrations. Otherwise as ``random_keys``, but a draw depends on the whole prompt.

    Examples:
        >>> context = edges.between(edges.query(batch), edges.demonstrations(batch))
        >>> drawn = edges.random_edges(batch, context, seed=0)
        >>> bool((drawn.sum((1, 2)) == context.sum((1, 2))).all())
        True
    """
    return drawn_edges(batch, edges, from_first(batch), seed, best_of_all_rows, (0, 1))


def _of_equal(batch: PromptBatch, of_queries: Tensor, of_keys: Tensor) -> EdgeSet:
    """Edges up to the target position between a query and keys of its number."""
    of_queries, of_keys, all_edges = of_queries.clone(), of_keys.clone(), every(batch)

    def rows_of(rows: slice, device: Device) -> Edges:
        queries, keys = sent(of_queries, device), sent(of_keys, device)
        return all_edges.rows(rows, device) & (queries[:, rows, None] == keys[:, None])

    return EdgeSet(rows_of, tuple(all_edges.shape))


def _first(batch: PromptBatch) -> Positions:
    return torch.zeros_like(batch.attention_mask).scatter(1, batch.starts[:, None], True)


if not TYPE_CHECKING:  # with it, a type checker would take any name

    def __getattr__(name: str) -> Any:
        raise AttributeError(f"al.edges has no {name!r}{instead_of(f'edges.{name}')}")
