"""How segments are removed from prompts: the edges to them are cut, or their tokens are deleted.

A removal, which can be your own, is a function of the model, a batch and the positions of the
tokens to remove, to the batch that runs and the hooks of the pass. The token at which the answer is
predicted is never removed.

Examples:
    The tokens stay, and their input is 0.

    >>> def silence(model, batch, removed):
    ...     def set_to_0(resid, hook):
    ...         rows = removed[:, batch.first_query :, None]
    ...         return resid.masked_fill(rows.to(resid.device), 0.0)
    ...     return batch, [("blocks.0.hook_resid_pre", set_to_0)]
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, PromptError
from ..hooks import Site, hooks_on_edges
from ..models.hooked import Hook, HookedModel
from ..models.verify_hooks import carries_beside_attention
from ..prompts import edges as edge_sets
from ..prompts.batch import PromptBatch, demonstrations_ids
from ..prompts.positions import checked_positions
from ..prompts.segment_names import PADDING
from ..system.arguments import checked

Removal = Callable[
    [HookedModel, PromptBatch, edge_sets.Positions], tuple[PromptBatch, Sequence[Hook]]
]


@checked
def edges(
    model: HookedModel, batch: PromptBatch, removed: edge_sets.Positions
) -> tuple[PromptBatch, Sequence[Hook]]:
    """Cuts every edge from a token that stays to a removed token, in all layers and heads.

    It cuts before the softmax, so that attention goes to the tokens that remain. Positions and
    batch stay as they were; removed tokens still read one another, but nothing reads them.

    Raises:
        PromptError: ``removed`` are no positions of the batch.
        ModelError: The model also carries tokens on beside its attention, as recurrent layers do.

    Examples:
        >>> same, hooks = al.removal.edges(model, batch, al.edges.demonstration(batch, 0))
        >>> same is batch, len(hooks) == model.cfg.n_layers
        (True, True)
    """
    removed = checked_positions(batch, "removed", removed, PromptError)
    if not removed.any():
        return batch, []
    if carries_beside_attention(model):
        raise ModelError(
            f"{model.cfg.model_name} carries tokens on beside its attention (recurrent layers, "
            "convolutions), so that cut edges remove nothing; remove the text (al.removal.text), "
            "or ask what the attention alone does (al.EdgeSweep)"
        )
    cut = edge_sets.between(batch.attention_mask & ~removed, removed)
    return batch, hooks_on_edges(model, batch, cut, Site())


@checked
def text(
    model: HookedModel, batch: PromptBatch, removed: edge_sets.Positions
) -> tuple[PromptBatch, Sequence[Hook]]:
    """Prompts without the removed tokens: later tokens move up, and the model never sees them.

    Tokens are deleted, not characters: a tokenizer might give the text others. A label word of
    which a token is removed is no anchor any more; prompts that keep none, or not equally many,
    have none. The new batch is padded on the right; it is the batch itself if nothing is removed.

    Raises:
        PromptError: ``removed`` are no positions of the batch, or hold a target position.

    Examples:
        >>> shorter, hooks = al.removal.text(model, batch, al.edges.demonstration(batch, 0))
        >>> shorter.label_positions.shape[1] == batch.label_positions.shape[1] - 1
        True
    """
    removed = checked_positions(batch, "removed", removed, PromptError)
    if not removed.any():
        return batch, []
    if batch.inputs:
        raise PromptError(
            "text of prompts with images is not removed, as images would belong to other tokens; "
            "cut the edges from it with al.removal.edges"
        )
    stays = batch.attention_mask & ~removed
    if not stays.gather(1, batch.target_positions[:, None]).all():
        raise PromptError("the target position is removed, so that nothing is predicted; keep it")
    counts = stays.sum(1)
    # A stable sort puts the tokens that stay first, in their order.
    columns = (~stays).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
    inside = torch.arange(columns.shape[1], device="cpu") < counts[:, None]

    def moved(positions: Tensor) -> Tensor:
        """How many tokens stay before each position."""
        rows = positions if positions.ndim == 2 else positions[:, None]
        before = stays.cumsum(1).gather(1, rows) - stays.gather(1, rows).long()
        return before.view_as(positions)

    changed = replace(
        batch,
        tokens=batch.tokens.gather(1, columns).masked_fill(~inside, 0),
        attention_mask=inside,
        segments=batch.segments.gather(1, columns).masked_fill(~inside, PADDING),
        target_positions=moved(batch.target_positions),
        query_start=moved(batch.query_start),
        first_query=0,
        begins_with_bos=batch.begins_with_bos
        and bool(stays.gather(1, batch.starts[:, None]).all()),
        **_labels(batch, stays, moved),
    )
    return replace(changed, demonstrations_id=demonstrations_ids(changed)), []


def _labels(
    batch: PromptBatch, stays: edge_sets.Positions, moved: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """The fields of the label words that stay; those of a batch without label words if need be."""
    names = ("label_positions", "label_ends", "label_classes")
    kept = stays.gather(1, batch.label_positions) & stays.gather(1, batch.label_ends)
    counts = kept.sum(1)
    if not counts.min() or counts.min() < counts.max():
        none = batch.label_classes[:, :0]
        return {"verbalizer": None, "labels": (), **dict.fromkeys(names, none)}
    first, last = moved(batch.label_positions), moved(batch.label_ends)
    values = zip(names, (first, last, batch.label_classes), strict=True)
    return {name: value[kept].view(len(batch), -1) for name, value in values}
