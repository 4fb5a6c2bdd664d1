"""The loop over batches: what each contributes, in the order of the queries."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import PromptError, StoreError
from ..models.hooked import HookedModel, check_fits, device_of
from ..models.model_state import undisturbed
from ..passes.memory import PartsThatFit, joined
from ..prompts.batch import PromptBatch, check_batch
from ..results.bootstrap import check_resamples, warn_of_few
from ..system.processes import (
    alone,
    failed_elsewhere,
    gathered,
    is_main,
    own_part,
    refuse_split_weights,
    same_everywhere,
)
from .fingerprint import fingerprint, versions
from .store import Store, same_rows


def collect(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    rows_of_batch: Callable[[PromptBatch], dict[str, Tensor]],
    *,
    needed: Sequence[str] = (),
    store: Store | None = None,
    progress: bool = True,
) -> dict[str, Tensor]:
    """The rows of all prompts, in the order of their queries, whatever the batches were.

    A batch that does not fit into memory is run in smaller parts, and so are those after it. Of
    several processes each computes a part of the batches, and all end with all rows. Stored rows
    without any whose name begins with each of ``needed`` are computed again: something failed
    there. To be called within ``together()`` and after ``check_same_call``.
    """
    part = _part(batches, store)  # before anything is written
    quiet = not (progress and is_main())
    device = device_of(model)
    fitting = PartsThatFit(rows_of_batch)
    collected = []
    with undisturbed(model):
        if store is not None:
            if is_main():
                _check_stored(store, batches, needed, lambda one: fitting.rows(one.to(device)))
            gathered("what is stored", None)
        for number in tqdm(part, disable=quiet, desc="batches"):
            if failed_elsewhere():
                break
            rows = _stored(store, number, needed)
            if rows is None:
                rows = fitting.rows(batches[number].to(device))
                if store is not None:
                    store.write(number, rows)
            collected.append(rows)
    collected = _of_all_processes(collected)
    order = _order_of_queries(batches)
    return {name: values[order] for name, values in joined(collected).items()}


def sets_of(batches: Sequence[PromptBatch]) -> Int[Tensor, " prompt"]:
    """The set of demonstrations of each prompt, in the order of the rows."""
    ids = torch.cat([batch.demonstrations_id.cpu() for batch in batches])
    return ids[_order_of_queries(batches)]


def check_same_call(
    model: HookedModel, batches: Sequence[PromptBatch], settings: Mapping[str, str]
) -> None:
    """Refuse to share out a run of which the processes were given different things."""
    if alone():
        return
    refuse_split_weights(model)
    what: dict[str, str] = fingerprint(model, batches, settings)
    # What has no repr of its own says where it lies in the memory of each process.
    same_everywhere({name: re.sub(r" at 0x[0-9a-f]+", "", said) for name, said in what.items()})


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
    """Refuse batches that do not fit the model or one another, and resamples below 0.

    Warns where intervals were asked for of too few prompts.
    """
    check_resamples(resamples)
    if isinstance(batches, PromptBatch):
        raise PromptError("expected a list of batches; got a single one, so write [batch]")
    if not isinstance(batches, Sequence):
        raise PromptError(f"expected a list of batches; got a {type(batches).__name__}")
    if not batches:
        raise PromptError("there are no batches to run")
    if other := [one for one in batches if not isinstance(one, PromptBatch)]:
        raise PromptError(
            f"expected a list of batches; got one of {type(other[0]).__name__}; lists of several "
            "calls are joined by +"
        )
    for batch in batches:
        check_batch(batch)
        check_fits(model, batch)
        if batch.label_token_ids.tolist() != batches[0].label_token_ids.tolist():
            raise PromptError(
                "the batches of one run must have the same label words; run each task by itself"
            )
    if resamples and is_main():
        warn_of_few(torch.cat([batch.demonstrations_id for batch in batches]))


def as_run(batches: Sequence[PromptBatch]) -> list[PromptBatch]:
    """The batches with their padding on the right, whatever side it was given on.

    Some models count positions by columns (Llama 4 takes the temperature of its attention from
    them), so that padding on the left would change their numbers.
    """
    return [batch.padded_right() for batch in batches]


def _stored(store: Store | None, number: int, needed: Sequence[str]) -> dict[str, Tensor] | None:
    """The rows of a batch on disk, unless something failed when they were computed."""
    rows = None if store is None else store.read(number)
    if rows is None or not all(any(key.startswith(one) for key in rows) for one in needed):
        return None
    return rows


def _check_stored(
    store: Store,
    batches: Sequence[PromptBatch],
    needed: Sequence[str],
    compute: Callable[[PromptBatch], dict[str, Tensor]],
) -> None:
    """Compute the first batch that is stored again: hooks and losses say nothing of themselves."""
    for number, batch in enumerate(batches):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged file is told of when its batch is computed
            stored = _stored(store, number, needed)
        if stored is None:
            continue
        if not same_rows(stored, compute(batch)):
            raise StoreError(
                f"batch {number} gives other numbers than those stored in {store.folder}, so "
                "hooks, loss or weights are not those of the stored run; use another folder, or "
                "start over in this one (--fresh, in Python al.forget_rows)"
            )
        return


def _part(batches: Sequence[PromptBatch], store: Store | None) -> list[int]:
    """Numbers of the batches of this process; as the main one sees what is stored already."""
    costs = [
        0 if store and store.has(number) else batch.tokens.numel()
        for number, batch in enumerate(batches)
    ]
    return own_part(gathered("batches", costs)[0])


def _of_all_processes(collected: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The rows of all batches; the parts are contiguous, so that they only need to be joined."""
    if alone():
        return collected
    # Copies, as a view would be sent with all that it is a view of.
    own = [{name: values.clone() for name, values in rows.items()} for rows in collected]
    return [rows for part in gathered("rows", own) for rows in part]


def _order_of_queries(batches: Sequence[PromptBatch]) -> Tensor:
    """Sorts rows by their place among the queries, whatever the batches were.

    Where lists of several calls are joined a place comes twice: then by set of demonstrations, in
    the order in which the sets appear, and within it by call. A call of the same set begins where
    one of its places comes again.
    """
    places = torch.cat([batch.index for batch in batches]).tolist()
    if len(set(places)) == len(places):
        return torch.tensor(places).argsort()
    sets = [batch.demonstrations_id.tolist() for batch in batches]
    rank = {name: k for k, name in enumerate(dict.fromkeys(chain(*sets)))}
    calls: Counter[int] = Counter()
    seen: set[tuple[int, int, int]] = set()
    keys: list[tuple[int, int, int]] = []
    for batch, names in zip(batches, sets, strict=True):
        own = list(zip(names, batch.index.tolist(), strict=True))
        for name in {name for name, place in own if (name, calls[name], place) in seen}:
            calls[name] += 1
        seen.update((name, calls[name], place) for name, place in own)
        keys += [(rank[name], calls[name], place) for name, place in own]
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
