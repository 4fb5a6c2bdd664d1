"""The order of contributions: the order of the queries, also if the batches have another order."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Int
from torch import Tensor

from ..prompts.batch import PromptBatch


def order_of_queries(batches: Sequence[PromptBatch]) -> Int[Tensor, " prompt"]:
    """The order that sorts the contributions of all batches by the index of their queries.

    If lists of several calls are joined, an index occurs twice. Then contributions are sorted by
    set of demonstrations, in the order in which the sets appear, then by call, then by index.
    Another call with the same set begins where one of its indices occurs again.
    """
    indices = torch.cat([batch.index for batch in batches]).tolist()
    if len(set(indices)) == len(indices):
        return torch.tensor(indices, device="cpu").argsort()
    sets = [batch.demonstrations_id.tolist() for batch in batches]
    rank = {name: number for number, name in enumerate(dict.fromkeys(chain(*sets)))}
    calls: Counter[int] = Counter()
    seen: set[tuple[int, int, int]] = set()
    keys: list[tuple[int, int, int]] = []
    for batch, names in zip(batches, sets, strict=True):
        prompts = list(zip(names, batch.index.tolist(), strict=True))
        for name in {name for name, index in prompts if (name, calls[name], index) in seen}:
            calls[name] += 1
        seen.update((name, calls[name], index) for name, index in prompts)
        keys += [(rank[name], calls[name], index) for name, index in prompts]
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), device="cpu")


def sets_of(batches: Sequence[PromptBatch]) -> Int[Tensor, " prompt"]:
    """The set of demonstrations of each prompt, in the order of the contributions."""
    ids = torch.cat([batch.on_cpu.demonstrations_id for batch in batches])
    return ids[order_of_queries(batches)]
