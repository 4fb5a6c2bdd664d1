"""What a prefix adds to the attention of query rows, from passes with it and without it.

The symbols and the theory are those of ``PrefixEffect``. It says that A = A+ / (1 - m); here A is
measured in a pass of its own, so that z~ is exactly z0 in the first layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..contexts.protocol import QueryPass
from ..hooks import Site, hooks_on_edges
from ..metrics.weights import Pattern
from ..models.batch_hooks import WholeHook
from ..models.hooked import Hook, HookedModel, has_sinks, hooks_by_layer, pattern_name
from ..models.kinds import cached_heads
from ..models.kv_cache import entries_of_cache
from ..models.media_tokens import refuse_media_tokens
from ..passes.forward import run_prefix
from ..prompts.edges import Positions, between, query

HeadValues = Float[Tensor, "batch _ key d_head"]
Outputs = Float[Tensor, "batch head query d_head"]


@dataclass(frozen=True, eq=False)
class AttentionRun:
    """Patterns of some query rows, and the values that they weight, in every layer."""

    patterns: Sequence[Pattern]
    values: Sequence[HeadValues]  # as cached; several heads and layers may share them
    heads: Sequence[Int[Tensor, " head"]]  # the number of the values of each head

    def layer(self, number: int) -> tuple[Pattern, HeadValues]:
        """Pattern and values of each head of a layer, in float64 on the CPU."""
        pattern, values = self.patterns[number].cpu(), self.values[number].cpu()
        return pattern.double(), values.double()[:, self.heads[number]]


@dataclass(frozen=True, eq=False)
class PrefixRuns:
    """The attention of the same query rows in three passes."""

    with_prefix: AttentionRun
    without: AttentionRun  # no layer has the edges from the queries to the prefix
    alone: Sequence[Pattern]  # of each layer, if this layer alone lacks these edges
    rows: slice  # the columns of the batch to which the query rows of the patterns belong
    in_prefix: Bool[Tensor, "batch key"]
    has_sinks: bool  # rows of the patterns sum to less than 1

    def layers(self) -> Iterator["LayerTerms"]:
        for layer, alone in enumerate(self.alone):
            yield terms_of_layer(
                self.with_prefix.layer(layer),
                self.without.layer(layer),
                alone.cpu().double(),
                self.in_prefix,
                self.has_sinks,
            )


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """The terms of one layer, in float64 on the CPU; NaN where m = 1."""

    pattern: Pattern  # A+, with the prefix
    stolen: Float[Tensor, "batch head query"]  # m
    taken: Outputs  # m b
    output: Outputs  # z+
    rescaled: Outputs  # z~
    without: Outputs  # z0
    expected: Pattern  # A+ / (1 - m) at the content's keys, 0 at those of the prefix
    alone: Pattern  # A, if this layer alone lacks the edges to the prefix

    @property
    def direct(self) -> Outputs:
        """z+ - z~ = m (b - z~): what the attention taken in this layer changes."""
        return self.output - self.rescaled

    @property
    def indirect(self) -> Outputs:
        """z~ - z0: what the prefix changed in earlier layers; exactly 0 in the first."""
        return self.rescaled - self.without


def prefix_runs(model: HookedModel, query_pass: QueryPass, in_prefix: Positions) -> PrefixRuns:
    """Run a batch with the keys ``in_prefix`` for the query's rows, and with edges to them cut."""
    batch, prefix, hooks = query_pass.batch, query_pass.prefix, query_pass.hooks
    refuse_media_tokens(model, batch)
    queries = query(batch)
    columns = queries.any(0).nonzero().flatten()
    first, last = int(columns[0]), int(columns[-1])
    rows = slice(first - batch.first_query, last + 1 - batch.first_query)
    layers = range(model.cfg.n_layers)
    edges = between(queries, in_prefix)
    cut = hooks_on_edges(model, batch, edges, Site()) if in_prefix.any() else []

    def run(acting: Sequence[Hook]) -> AttentionRun:
        patterns: dict[int, Tensor] = {}

        def store(layer: int, pattern: Tensor) -> None:
            # A view would hold the memory of all rows.
            patterns[layer] = pattern[:, :, rows].detach().clone()

        observers = hooks_by_layer(model, pattern_name, store)
        cached = run_prefix(model, batch, hooks=acting, observers=observers, prefix=prefix)
        values = [cached.values[entry] for entry in entries_of_cache(model)]
        return AttentionRun(
            patterns=[patterns[layer] for layer in layers],
            values=values,
            heads=[cached_heads(model, of_layer.shape[1]) for of_layer in values],
        )

    with_prefix = run(hooks)
    without = run([*hooks, *cut])
    alone: dict[int, Tensor] = {}

    def restore(layer: int) -> Hook:
        """Store a pattern and go on with that of the prefix, so that later inputs have it."""

        def store_and_restore(pattern: Tensor, hook: object) -> Tensor:
            alone[layer] = pattern[:, :, rows].detach().clone()
            restored = pattern.clone()
            restored[:, :, rows] = with_prefix.patterns[layer]
            return restored

        return pattern_name(layer), WholeHook(store_and_restore)

    run_prefix(model, batch, hooks=[*hooks, *cut, *map(restore, layers)], prefix=prefix)
    return PrefixRuns(
        with_prefix=with_prefix,
        without=without,
        alone=[alone[layer] for layer in layers],
        rows=slice(first, last + 1),
        in_prefix=in_prefix,
        has_sinks=has_sinks(model),
    )


def terms_of_layer(
    with_prefix: tuple[Pattern, HeadValues],
    without: tuple[Pattern, HeadValues],
    alone: Pattern,
    in_prefix: Bool[Tensor, "batch key"],
    has_sinks: bool,
) -> LayerTerms:
    """The terms of a layer; tensors are of float64 on the CPU, with values for every head."""
    (pattern, values), (pattern_0, values_0) = with_prefix, without
    inside = in_prefix[:, None, None]
    to_prefix, to_content = pattern * inside, pattern * ~inside
    # 1 - m. The sum over the content is more exact where m is near 1; a sink has a part of it.
    left = to_content.sum(-1)
    if has_sinks:
        left = left + (1 - pattern.sum(-1))
    return LayerTerms(
        pattern=pattern,
        stolen=to_prefix.sum(-1),
        taken=to_prefix @ values,
        output=pattern @ values,
        rescaled=(alone @ values).masked_fill(left[..., None] == 0, torch.nan),
        without=pattern_0 @ values_0,
        expected=to_content / left[..., None],
        alone=alone,
    )
