"""How random edges are drawn, the control of a set of edges; ``edges.py`` draws random words.

1. The other edges of a prompt get random numbers, which follow from a seed and the demonstrations.
2. As many of them as are wanted are drawn, those with the largest numbers: in each row, or in all.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import HookError
from ..system.devices import Device, sent
from ..system.row_pieces import row_slices
from .batch import PromptBatch
from .edge_set import Edges, EdgeSet, check_edges, edges_between


def edges_at(positions: Iterable[Tensor], shape: tuple[int, ...]) -> EdgeSet:
    """The edges at some prompts, queries and keys; only these numbers are stored."""
    prompts, queries, keys = positions
    count, length, width = shape

    def rows_of(rows: slice, device: Device) -> Edges:
        start, stop, _ = rows.indices(length)
        inside = (queries >= start) & (queries < stop)
        edges = torch.zeros(count, stop - start, width, dtype=torch.bool, device="cpu")
        edges[prompts[inside], queries[inside] - start, keys[inside]] = True
        return sent(edges, device)

    return EdgeSet(rows_of, shape)


def draw_generator(seed: int, demonstrations_id: int) -> torch.Generator:
    """The generator of a draw for prompts with these demonstrations."""
    return torch.Generator().manual_seed((seed * 1_000_003 + demonstrations_id) % 2**63)


# Chooses as many of the free edges of a square (query, key) as are wanted, by their random numbers.
_Choice = Callable[[Int[Tensor, " _"], Bool[Tensor, "query key"], torch.Generator], Tensor]


def drawn_edges(
    batch: PromptBatch,
    edges: Any,
    never: EdgeSet,
    seed: int,
    choose: _Choice,
    axes: int | tuple[int, int],
) -> EdgeSet:
    """As many edges of each prompt, counted over axes, neither in ``edges`` nor in ``never``."""
    allowed = edges_between(batch.up_to_target, batch.up_to_target).table()
    counted = check_edges(batch, edges).table() & allowed
    free = allowed & ~never.table() & ~counted
    drawn = []
    for row, set_id in enumerate(batch.demonstrations_id.tolist()):
        # Padding does not change the draw: tokens are counted, not positions.
        tokens = batch.attention_mask[row].nonzero().flatten()
        square = (row, tokens[:, None], tokens)
        wanted, available = (each[square].sum(axes).view(-1) for each in (counted, free))
        worst = (wanted - available).argmax()
        if wanted[worst] > available[worst]:
            raise HookError(
                f"prompt {row} has {available[worst]} other edges to draw from for {wanted[worst]} "
                "edges, too few for a random control; draw from all edges of the prompt "
                "(control=al.edges.random_edges), or choose fewer edges"
            )
        chosen = choose(wanted, free[square], draw_generator(seed, set_id))
        queries, keys = (tokens[numbers] for numbers in chosen.nonzero().unbind(1))
        drawn.append(torch.stack([torch.full_like(queries, row), queries, keys]))
    return edges_at(torch.cat(drawn, dim=1).int(), tuple(counted.shape))


def best_of_each_row(
    wanted: Int[Tensor, " query"], free: Bool[Tensor, "query key"], generator: torch.Generator
) -> Bool[Tensor, "query key"]:
    chosen = torch.zeros_like(free)
    for rows, scores in _random_scores(free, generator):
        busy = (wanted[rows] > 0).nonzero().flatten()
        order = scores[busy].argsort(dim=1, descending=True, stable=True)
        ranked = torch.arange(len(free), device="cpu") < wanted[rows][busy, None]
        chosen[rows.start + busy] = torch.zeros_like(ranked).scatter(1, order, ranked)
    return chosen


def best_of_all_rows(
    wanted: Int[Tensor, " 1"], free: Bool[Tensor, "query key"], generator: torch.Generator
) -> Bool[Tensor, "query key"]:
    best = torch.zeros(0, dtype=torch.double, device="cpu")
    indices = torch.zeros(0, dtype=torch.long, device="cpu")
    for rows, scores in _random_scores(free, generator):
        start = rows.start * len(free)
        more = torch.arange(start, start + scores.numel(), device="cpu")
        best, indices = torch.cat([best, scores.flatten()]), torch.cat([indices, more])
        best, selected = best.topk(min(int(wanted), len(best)))
        indices = indices[selected]
    chosen = torch.zeros_like(free).flatten()
    chosen[indices] = True
    return chosen.view_as(free)


def _random_scores(
    free: Bool[Tensor, "query key"], generator: torch.Generator
) -> Iterator[tuple[slice, Float[Tensor, "query key"]]]:
    """Random numbers of the free edges, -1 elsewhere; later tokens do not change earlier rows."""
    for rows in row_slices(len(free), len(free)):
        scores = torch.zeros_like(free[rows], dtype=torch.double)
        count, length = scores.shape
        queries, keys = torch.tril_indices(count, length, offset=rows.start - 1, device="cpu")
        scores[queries, keys] = torch.rand(
            len(queries), dtype=torch.double, generator=generator, device="cpu"
        )
        yield rows, scores.masked_fill(~free[rows], -1.0)
