"""The loop over batches: what each contributes, in the order of the queries."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .batch import PromptBatch
from .errors import MetricError, PromptError, StoreError
from .forward import check_fits, device_of, undisturbed
from .hooked import HookedModel
from .memory import PartsThatFit, joined
from .store import Store, same_rows, versions


def collect(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    rows_of_batch: Callable[[PromptBatch], dict[str, Tensor]],
    *,
    store: Store | None = None,
    progress: bool = True,
) -> dict[str, Tensor]:
    """The rows of all prompts, in the order of their queries, whatever the batches were.

    A batch that does not fit into memory is run in smaller parts, and so are those after it.
    """
    device = device_of(model)
    fitting = PartsThatFit(rows_of_batch)
    collected = []
    with undisturbed(model):
        for number, batch in enumerate(tqdm(batches, disable=not progress, desc="batches")):
            stored = store.read(number) if store else None
            if stored is None or number == 0:
                rows = fitting.rows(batch.to(device))
                if store and stored is not None and not same_rows(stored, rows):
                    raise StoreError(
                        f"the first batch gives other numbers than those stored in {store.folder}, "
                        "so hooks, loss or weights are not those of the stored run; use another "
                        "folder, or start over in this one (al.forget_rows, --fresh)"
                    )
                if store and stored is None:
                    store.write(number, rows)
            collected.append(rows if stored is None else stored)
    order = _order_of_queries(batches)
    return {name: values[order] for name, values in joined(collected).items()}


def describe(model: HookedModel, batches: Sequence[PromptBatch]) -> dict[str, Any]:
    """What the numbers are of."""
    ids = torch.cat([batch.demonstrations_id for batch in batches])
    return {
        "model": str(model.cfg.model_name),
        "dtype": str(next(iter(model.parameters())).dtype).removeprefix("torch."),  # type: ignore[attr-defined]
        "labels": [label.strip() for label in batches[0].labels] or None,
        "prompts": len(ids),
        "demonstration_sets": len(ids.unique()),
        "versions": versions(),
    }


def check_batches(model: HookedModel, batches: Sequence[PromptBatch], resamples: int) -> None:
    """Refuse batches that do not fit the model or one another, and resamples below 0."""
    if resamples < 0:
        raise MetricError(f"resamples must be 0 (no intervals) or more; got {resamples}")
    if isinstance(batches, PromptBatch):
        raise PromptError("expected a list of batches; got a single one, so write [batch]")
    if not batches:
        raise PromptError("there are no batches to run")
    for batch in batches:
        check_fits(model, batch)
        if batch.label_token_ids.tolist() != batches[0].label_token_ids.tolist():
            raise PromptError(
                "the batches of one run must have the same label words; run each task by itself"
            )


def _order_of_queries(batches: Sequence[PromptBatch]) -> Tensor:
    """Sorts rows by their place among the queries, whatever the batches were.

    Where lists of several calls are joined a place comes twice: then by set of demonstrations, in
    the order in which the sets appear, and within it the first of each place before the second.
    """
    places = torch.cat([batch.index for batch in batches]).tolist()
    if len(set(places)) == len(places):
        return torch.tensor(places).argsort()
    sets = torch.cat([batch.demonstrations_id for batch in batches]).tolist()
    rank = {name: k for k, name in enumerate(dict.fromkeys(sets))}
    seen: Counter[tuple[int, int]] = Counter()
    keys = []
    for name, place in zip(sets, places, strict=True):
        keys.append((rank[name], seen[name, place], place))
        seen[name, place] += 1
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
