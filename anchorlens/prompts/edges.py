"""Sets of edges: boolean tensors over (query, key), made from positions.

Edge (i, j) is True if query position i attends to key position j and j < i. No edge set holds the
diagonal or padding. Combine sets as tensors: ``|``, ``&``, ``& ~``.

Examples:
    >>> to_labels = edges.between(edges.group(batch, "query"), edges.anchors(batch))
    >>> without_bos = edges.wp(batch) & ~edges.from_first(batch)
    >>> bool((to_labels & edges.wp(batch)).any())
    False
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import PromptError
from .batch import PromptBatch, check_inside, require_label_words

Edges = Bool[Tensor, "batch query key"]
Positions = Bool[Tensor, "batch position"]


def between(queries: Positions, keys: Positions) -> Edges:
    """Edges from every position in ``queries`` to every earlier position in ``keys``.

    Args:
        queries: Positions that attend.
        keys: Positions attended to.

    Returns:
        True at (i, j) where i is in ``queries``, j in ``keys``, and j < i.

    Examples:
        >>> between(torch.tensor([[False, True]]), torch.tensor([[True, True]])).tolist()
        [[[False, False], [True, False]]]
    """
    edges = queries[:, :, None] & keys[:, None, :]
    return edges & torch.ones_like(edges[0]).tril(-1)


def group(batch: PromptBatch, name: str) -> Positions:
    """Positions of a segment: text, label, format, target, query or other, or one of your own.

    ``label`` holds all tokens of each label word, ``anchors`` only one of them.

    Raises:
        PromptError: There is no segment of that name.
    """
    names = batch.segment_names
    if name not in names:
        raise PromptError(f"there is no segment {name!r}; the segments are {', '.join(names)}")
    return batch.groups == names.index(name)


def anchors(batch: PromptBatch) -> Positions:
    """Positions of the anchors: one token of each label word (the paper's p_k).

    Raises:
        PromptError: A label position lies outside its prompt, or there are no label words.
    """
    require_label_words([batch])
    check_inside(batch, "label_positions", batch.label_positions)
    return torch.zeros_like(batch.attention_mask).scatter(1, batch.label_positions, True)


def target(batch: PromptBatch) -> Positions:
    """The target position (the paper's q); all False in a batch that ends before it."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return positions == batch.target_positions[:, None]


def demonstrations(batch: PromptBatch) -> Positions:
    """Positions of all tokens before the query, without BOS."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return batch.attention_mask & (positions < batch.query_start[:, None]) & ~bos(batch)


def bos(batch: PromptBatch) -> Positions:
    """The position of BOS; all False in prompts that do not begin with one."""
    first = batch.attention_mask.long().argmax(1, keepdim=True)
    nowhere = torch.zeros_like(batch.attention_mask)
    return nowhere.scatter(1, first, True) if batch.begins_with_bos else nowhere


def query(batch: PromptBatch) -> Positions:
    """Positions from the first token of the query to the target position.

    The group ``query`` does not hold the target position, which is a group by itself.
    """
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    up_to_target = positions <= batch.target_positions[:, None]
    return batch.attention_mask & up_to_target & (positions >= batch.query_start[:, None])


def every(batch: PromptBatch) -> Edges:
    """All edges up to the target position; later tokens cannot influence it."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    inside = batch.attention_mask & (positions <= batch.target_positions[:, None])
    return between(inside, inside)


def wp(batch: PromptBatch) -> Edges:
    """Word to label: ``{(p_k, j): j < p_k}``, what label words gather (section 2.1)."""
    return between(anchors(batch), batch.attention_mask)


def pq(batch: PromptBatch) -> Edges:
    """Label to target: ``{(q, p_k)}``, what the target reads from the label words."""
    return between(target(batch), anchors(batch))


def ww(batch: PromptBatch) -> Edges:
    """Word to word: every edge that is neither in ``wp`` nor in ``pq``."""
    labels = anchors(batch)
    of_labels = between(labels, batch.attention_mask) | between(target(batch), labels)
    return every(batch) & ~of_labels


def tq(batch: PromptBatch) -> Edges:
    """Every other word to target: ``{(q, j): j is no anchor}``, the baseline of S_pq."""
    return between(target(batch), batch.attention_mask & ~anchors(batch))


def from_first(batch: PromptBatch) -> Edges:
    """Edges to the first token of each prompt, often a BOS with much of the attention."""
    first = batch.attention_mask.long().argmax(1, keepdim=True)
    keys = torch.zeros_like(batch.attention_mask).scatter(1, first, True)
    return between(batch.attention_mask, keys)
