"""What a metric reads, and sums of it, in runs of every kind; in pieces, against slow loops."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.metrics.edge_sums import EdgeSets, EdgeSums, Segments
from anchorlens.metrics.edge_sums import row_pieces as pieces_of
from anchorlens.metrics.saliency_flows import by_heads
from anchorlens.passes import provide
from anchorlens.prompts.edge_set import EdgeSet
from anchorlens.runs import way as decision
from anchorlens.runs.study import Study
from anchorlens.system import row_pieces
from tests.references import plain
from tests.support.measures import contributed, difference
from tests.support.tiny_models import questions

RESID = "blocks.{}.hook_resid_post"
PATTERN = "blocks.{}.attn.hook_pattern"


@dataclass(frozen=True)
class Reading(al.Metric):
    read: Callable[[al.PromptBatch], Any]
    name: str = "reading"
    record: ClassVar = al.records.AccuracyRecord  # no run makes it

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"it": self.read(batch)}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        it = seen["it"]
        return {"it": it if isinstance(it, Tensor) else torch.stack([*it.values()], dim=1)}


@dataclass(frozen=True)
class ByHand:
    """What one pass over whole prompts has in each layer, by hooks of TransformerLens alone."""

    patterns: Tensor  # [batch, layer, head, query, key]
    slopes: Tensor
    states: Tensor  # [batch, layer, position, d_model]
    queries: Tensor  # [batch, layer, position, head, d_head]
    keys: Tensor

    @classmethod
    def of(cls, model: Any, batch: al.PromptBatch) -> "ByHand":
        prefix = "" if model.cfg.positional_embedding_type == "standard" else "rot_"
        points = ["attn.hook_pattern", "hook_resid_post"]
        points += [f"attn.hook_{prefix}{name}" for name in "qk"]
        found: dict[str, list[Tensor]] = {point: [] for point in points}

        def keep(into: list[Tensor], tensor: Tensor, hook: Any) -> None:
            into.append(tensor if tensor.requires_grad else tensor.requires_grad_())

        hooks = [
            (f"blocks.{layer}.{point}", partial(keep, found[point]))
            for layer in range(model.cfg.n_layers)
            for point in points
        ]
        mask = batch.attention_mask.long()
        logits = model.run_with_hooks(batch.tokens, attention_mask=mask, fwd_hooks=hooks)
        logits = logits[torch.arange(len(batch)), batch.target_positions]
        patterns, *others = found.values()
        slopes = torch.autograd.grad(al.losses.label_cross_entropy(logits, batch).sum(), patterns)
        every = (patterns, slopes, *others)
        pattern, slope, *rest = (torch.stack([*of], 1).detach() for of in every)
        return cls(pattern, slope * (pattern != 0), *rest)

    @property
    def products(self) -> Tensor:
        return self.patterns * self.slopes


def mixed(batch: al.PromptBatch) -> Tensor:
    """Positions after the shared tokens and in them, in no order."""
    target, labels = batch.target_positions, batch.label_positions
    return torch.stack([labels[:, 3], target, labels[:, 0], target - 1], 1).cpu()


def chosen(table: Tensor, columns: Tensor, dim: int) -> Tensor:
    pairs = zip(table, columns, strict=True)
    return torch.stack([of_prompt.index_select(dim - 1, at) for of_prompt, at in pairs])


def at_pairs(table: Tensor, batch: al.PromptBatch) -> Tensor:
    square = chosen(chosen(table, mixed(batch), 3), mixed(batch) - 1, 4)
    return square.diagonal(dim1=3, dim2=4)


def edge_sets(batch: al.PromptBatch) -> list[Any]:
    return [al.edges.pq(batch), al.edges.from_first(batch)]


def over_sets(merged: Tensor, of_heads: Tensor, batch: al.PromptBatch) -> Tensor:
    both = torch.cat([merged[:, :, None], of_heads], 2)
    inside = torch.stack([edges[:] for edges in edge_sets(batch)], 1).to(both)
    return torch.einsum("blhqk,bsqk->blhs", both, inside)


def segments(batch: al.PromptBatch) -> Segments:
    return Segments(torch.stack([al.edges.anchors(batch), al.edges.query(batch)], dim=1))


def between_segments(merged: Tensor, of_heads: Tensor, batch: al.PromptBatch) -> Tensor:
    both = torch.cat([merged[:, :, None], of_heads], 2).tril(-1)
    inside = segments(batch).positions.to(both)
    return torch.einsum("bsq,blhqk,btk->blhst", inside, both, inside)


def products(block: al.reads.Block) -> Tensor:
    return block.pattern if block.slope is None else block.pattern * block.slope


def placed(batch: al.PromptBatch, block: al.reads.Block) -> Tensor:
    """A sum over all edges that tells each from each other: [batch, head]."""
    inside = batch.attention_mask[:, None, block.rows, None].to(block.pattern.device)
    rows, keys = (torch.arange(1000)[part].double() for part in (block.rows, block.keys))
    return (products(block) * inside * (1 + rows[:, None] + 3 * keys)).sum((2, 3))


def placed_by_hand(numbers: Tensor, batch: al.PromptBatch) -> Tensor:
    length = batch.tokens.shape[1]
    inside = batch.attention_mask[:, None, None, :, None]
    places = 1 + torch.arange(length)[:, None] + 3 * torch.arange(length)
    return (numbers * inside * places).sum((3, 4))


def hooks_of(layers: int, name: str, at: Callable[[Tensor], Tensor]) -> al.reads.Hooks:
    found: dict[int, Tensor] = {}

    def keep(layer: int, tensor: Tensor, hook: Any) -> None:
        found[layer] = at(tensor).detach()

    points = [(name.format(layer), partial(keep, layer)) for layer in range(layers)]
    return al.reads.Hooks(found, points)


At, Sums, Blocks = al.reads.At, al.reads.Sums, al.reads.Blocks
Case = tuple[Any, Callable[[ByHand, al.PromptBatch], Tensor]]
# What is read, and the same by hand, of whole prompts.
ANYWHERE: dict[str, Case] = {
    "rows": (
        lambda batch: At("pattern", mixed(batch)),
        lambda hand, batch: chosen(hand.patterns, mixed(batch), 3),
    ),
    "rows of the target": (
        lambda batch: At("pattern", al.edges.target),
        lambda hand, batch: chosen(hand.patterns, batch.target_positions[:, None], 3),
    ),
    "squares": (
        lambda batch: At("pattern", mixed(batch), al.edges.forerunners),
        lambda hand, batch: chosen(
            chosen(hand.patterns, mixed(batch), 3), batch.label_positions - 1, 4
        ),
    ),
    "pairs": (
        lambda batch: At("pattern", mixed(batch), mixed(batch) - 1, pairs=True),
        lambda hand, batch: at_pairs(hand.patterns, batch),
    ),
    "slopes": (
        lambda batch: At("slope", mixed(batch)),
        lambda hand, batch: chosen(hand.slopes, mixed(batch), 3),
    ),
    "slopes of the target": (
        lambda batch: At("slope", al.edges.target, al.edges.anchors),
        lambda hand, batch: chosen(
            chosen(hand.slopes, batch.target_positions[:, None], 3), batch.label_positions, 4
        ),
    ),
    "pairs of slopes": (
        lambda batch: At("slope", mixed(batch), mixed(batch) - 1, pairs=True),
        lambda hand, batch: at_pairs(hand.slopes, batch),
    ),
    "queries": (
        lambda batch: At("queries", mixed(batch)),
        lambda hand, batch: chosen(hand.queries, mixed(batch), 2).transpose(2, 3),
    ),
    "keys": (
        lambda batch: At("keys", al.edges.anchors),
        lambda hand, batch: chosen(hand.keys, batch.label_positions, 2).transpose(2, 3),
    ),
    "states": (
        lambda batch: At(RESID, mixed(batch)),
        lambda hand, batch: chosen(hand.states, mixed(batch), 2),
    ),
    "attention over sets": (
        lambda batch: Sums(al.weights.attention, EdgeSets(edge_sets(batch))),
        lambda hand, batch: over_sets(hand.patterns.mean(2), hand.patterns, batch),
    ),
    "attention between segments": (
        lambda batch: Sums(al.weights.attention, segments(batch)),
        lambda hand, batch: between_segments(hand.patterns.mean(2), hand.patterns, batch),
    ),
    "saliency over sets": (
        lambda batch: Sums(al.weights.saliency, EdgeSets(edge_sets(batch))),
        lambda hand, batch: over_sets(hand.products.sum(2).abs(), hand.products.abs(), batch),
    ),
    "signs between segments": (
        lambda batch: Sums(al.weights.signed, segments(batch)),
        lambda hand, batch: between_segments(hand.products.sum(2), hand.products, batch),
    ),
    "blocks of slopes": (
        lambda batch: Blocks(partial(placed, batch), slope=True),
        lambda hand, batch: placed_by_hand(hand.products, batch),
    ),
}
UNSHARED = ANYWHERE | {
    "blocks": (
        lambda batch: Blocks(partial(placed, batch)),
        lambda hand, batch: placed_by_hand(hand.patterns, batch),
    ),
    "hooks": (
        lambda batch: hooks_of(3, RESID, lambda states: states[:, 2:5]),
        lambda hand, batch: hand.states[:, :, 2:5],
    ),
}
OF_PATTERNS: dict[str, Case] = {
    "whole blocks": (
        lambda batch: Blocks(partial(placed, batch), whole=True),
        lambda hand, batch: placed_by_hand(hand.patterns, batch),
    ),
    "whole blocks of products": (
        lambda batch: Blocks(lambda block: products(block).sum((2, 3)), slope=True, whole=True),
        lambda hand, batch: (hand.patterns * hand.slopes).sum((3, 4)),
    ),
    "hooks on patterns": (
        lambda batch: hooks_of(3, PATTERN, lambda a: a.diagonal(-1, 2, 3)[..., :100]),
        lambda hand, batch: hand.patterns.diagonal(-1, 3, 4)[..., :100],
    ),
}


@pytest.mark.quick_cases("many passes", "gpt2-slopes")
@pytest.mark.parametrize(
    ("cases", "shares", "fuses"),
    [
        (ANYWHERE, True, True),
        ({"slopes": ANYWHERE["slopes"]}, True, True),
        (UNSHARED, False, True),
        (OF_PATTERNS, False, False),
    ],
    ids=["anywhere", "slopes", "unshared", "of patterns"],
)
def test_reads_are_those_of_whole_prompts(
    cases: dict[str, Case],
    shares: bool,
    fuses: bool,
    exact_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batches = exact_model, questions(exact_model, 5, batch_size=3)
    assert len({batch.tokens.shape[1] for batch in batches}) > 1
    metrics = [Reading(read, name) for name, (read, _) in cases.items()]
    with plain.everything_in_float64():
        by_hand = [ByHand.of(model, batch) for batch in batches]

        def check(shared: bool | None, fused: bool, **options: Any) -> None:
            with Study(model, batches, {}, progress=False, resamples=0).entered() as study:
                passes = study.passes(metrics, **options)
                assert passes.way.attention.startswith("fused: ") == fused
                assert shared is None or ("run once for all" in passes.status) == shared
                for batch, hand in zip(batches, by_hand, strict=True):
                    ours = passes.contributions(batch)
                    for name, (_, expected) in cases.items():
                        values = expected(hand, batch)
                        assert difference(ours[f"{name}/it"], values) <= 1e-10, name

        check(False, False, share_prefix=False)
        check(shares, False)
        monkeypatch.setattr(decision, "LARGE", 0)
        monkeypatch.setattr(row_pieces, "PIECE", 5_000)
        check(None, fuses)


def test_a_metric_sees_how_many_edges_there_are_and_in_which_type(gpt2: Any) -> None:
    batch = questions(gpt2, 3)[0]
    sets = EdgeSets(edge_sets(batch))

    @dataclass(frozen=True)
    class Facts(Reading):
        def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
            assert [*seen] == ["it"] and len(seen) == 1 and seen.clean is None
            assert seen.n_heads == gpt2.cfg.n_heads
            if isinstance(self.read(batch), At):
                assert seen.dtype("it") == torch.float32
                return {"found": seen["it"]}
            with pytest.raises(MetricError, match=r"'it' is no al\.reads\.At, so that it has no"):
                seen.dtype("it")
            return {"counts": seen.reads["it"].sets.counts()}

    contributed(gpt2, batch, Facts(lambda batch: At("pattern", al.edges.target)))
    _, [found] = contributed(gpt2, batch, Facts(lambda batch: Sums(al.weights.attention, sets)))
    expected = [edges[:].sum((1, 2)) for edges in edge_sets(batch)]
    assert torch.equal(found["counts"], torch.stack(expected, 1))


@pytest.mark.parametrize("whole", [False, True])
def test_a_block_has_zeros_in_rows_of_padding(gpt2: Any, whole: bool) -> None:
    [batch] = questions(gpt2, 4, batch_size=4)
    lengths = batch.attention_mask.sum(1)
    assert len(set(lengths.tolist())) > 1
    read = Blocks(lambda block: block.pattern.sum((1, 2, 3)), whole=whole)
    _, [found] = contributed(gpt2, batch, Reading(lambda batch: read))
    expected = gpt2.cfg.n_heads * lengths[:, None].expand(-1, gpt2.cfg.n_layers)
    torch.testing.assert_close(found["it"], expected.float())


def test_a_point_with_other_shapes_in_some_layers_is_refused_before_the_run(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of key heads in models whose layers store different numbers."""

    def hooks_in_layers(model: Any, name: Any, act: Any) -> Any:
        def wider(layer: int, states: Tensor, hook: Any) -> None:
            act(layer, states.unflatten(0, (1, -1)) if layer else states, hook)

        return [(name(layer), partial(wider, layer)) for layer in range(model.cfg.n_layers)]

    monkeypatch.setattr(provide, "hooks_in_layers", hooks_in_layers)
    metric = Reading(lambda batch: At("blocks.{}.hook_resid_post", al.edges.target))
    with pytest.raises(MetricError, match=r"reading reads has other shapes in some .* in layer 1"):
        al.run(gpt2, questions(gpt2, 2), [metric], progress=False)


def operands(
    batch: int = 2, heads: int = 3, queries: int = 7, keys: int = 9
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, queries, keys)
    pattern = torch.rand(shape, generator=generator)
    gradient = torch.randn(shape, generator=generator)
    return pattern, gradient, torch.rand(batch, 4, queries, keys, generator=generator) > 0.5


def parts_of(pattern: Tensor, gradient: Tensor) -> list[tuple[slice, Tensor]]:
    return [(rows, a * slope) for rows, a, slope in pieces_of(pattern, gradient)]


def edge_sums(
    pattern: Tensor, gradient: Tensor, edges: Tensor, weight: Any = al.weights.saliency
) -> tuple[Tensor, Tensor]:
    sums = EdgeSums(EdgeSets([EdgeSet.of(edges[:, k]) for k in range(4)]), weight)
    sums.add(0, pattern, gradient)
    rows = by_heads(sums.total())
    return rows["sums"][:, 0], rows["head_sums"][:, 0]


@pytest.mark.parametrize("piece", [1, 100, 10**6])
@pytest.mark.parametrize(
    ("weight", "of_edge"),
    [
        (al.weights.saliency, lambda heads: abs(sum(heads))),
        (al.weights.saliency_of_heads, lambda heads: sum(map(abs, heads))),
        (lambda a, slope: (a * slope).sum(1).abs(), lambda heads: abs(sum(heads))),
    ],
)
def test_sums_equal_slow_loops(
    piece: int, weight: Any, of_edge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pieces, "PIECE", piece)
    pattern, gradient, chosen = operands()
    copies = pattern.clone(), gradient.clone()
    sums, head_sums = edge_sums(pattern, gradient, chosen, weight)
    for n in range(2):
        for flow in range(4):
            edges = chosen[n, flow].nonzero().tolist()
            values = [[float(p) for p in (pattern * gradient)[n, :, i, j]] for i, j in edges]
            of_heads = [sum(abs(edge[head]) for edge in values) for head in range(3)]
            sizes = [of_edge(edge) for edge in values]
            assert head_sums[n, :, flow].tolist() == pytest.approx(of_heads, rel=1e-5)
            assert float(sums[n, flow]) == pytest.approx(sum(sizes), rel=1e-5)
    assert torch.equal(pattern, copies[0]) and torch.equal(gradient, copies[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_multiplied_in_float32(dtype: torch.dtype) -> None:
    pattern, gradient, _ = operands()
    pattern, gradient = pattern.to(dtype), gradient.to(dtype)
    ((_, product),) = parts_of(pattern, gradient)
    assert product.dtype == torch.float32
    assert torch.equal(product, pattern.float() * gradient.float())


def test_sums_over_many_edges_have_the_precision_of_float32() -> None:
    """A single matrix product over a million edges had a relative error of 5e-5 or more."""
    pattern, gradient, chosen = operands(1, 4, 1024, 1024)
    sums = edge_sums(pattern, gradient, chosen)
    expected = edge_sums(pattern.double(), gradient.double(), chosen)
    for ours, exact in zip(sums, expected, strict=True):
        assert difference(ours, exact) <= 5e-6
