"""The mean over prompts of what a hook point gives out in every layer, to write it into others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..contexts.training import query_digests
from ..errors import MetricError
from ..models.head_outputs import of_one_width
from ..models.hooked import HookedModel, hooks_by_layer
from ..passes.forward import run_pass
from ..prompts.batch import PromptBatch
from ..prompts.edges import PositionsOfBatch
from ..prompts.positions import checked_positions
from ..runs.study import Study
from ..system.devices import beside, wide
from ..system.processes import is_main
from ..system.texts import name_of
from ..system.warn import warn_user


def warn_of_same_queries(read: Sequence[PromptBatch], written: Sequence[PromptBatch]) -> None:
    """Warn if the answer to a query is in the states that are written into its prompt."""
    both = set(query_digests(read)) & set(query_digests(written))
    if both and is_main():
        warn_user(
            f"{len(both)} queries are in both lists of prompts, so that their own answers are "
            "written into them; take the mean over other queries"
        )


def positions_in(
    batch: PromptBatch, function: PositionsOfBatch, count: int | None = None
) -> Bool[Tensor, "batch position"]:
    """The positions in a batch; an error if they are not as many in each of its prompts."""
    chosen = checked_positions(batch, "'positions' of states", function)
    counts = sorted(set(chosen.sum(1).tolist()))
    if len(counts) > 1 or counts[0] == 0 or count not in (None, counts[0]):
        raise MetricError(
            f"states are read and written at {count or 'as many'} positions in each prompt, but "
            f"{name_of(function)} gives {', '.join(map(str, counts))} in {batch!r}; queries alone "
            "have a target, no label words"
        )
    return chosen


def mean_states(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    name: Callable[[int], str],
    positions: PositionsOfBatch,
    split: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **options: Any,
) -> Float[Tensor, "layer anchor *axes"]:
    """The mean in float64 of what a hook point gives out at positions of whole prompts."""

    def contributions_of(batch: PromptBatch) -> dict[str, Tensor]:
        rows, columns = positions_in(batch, positions).nonzero(as_tuple=True)
        states: dict[int, Tensor] = {}

        def store(layer: int, tensor: Tensor) -> None:
            row, column = beside(tensor, rows, columns)
            read = wide(split(tensor.detach())[row, column])
            states[layer] = read.cpu().unflatten(0, (len(batch), -1))

        run_pass(model, batch, observers=hooks_by_layer(model, name, store))
        # Heads of Gemma 4 differ.
        padded = of_one_width(states[layer] for layer in sorted(states))
        return {"states": torch.stack(padded, dim=1)}

    settings = {"experiment": "mean states", "point": name(0), "positions": positions}
    with Study(model, batches, settings, resamples=0, **options).entered() as study:
        return study.collect(contributions_of)["states"].double().mean(0)
