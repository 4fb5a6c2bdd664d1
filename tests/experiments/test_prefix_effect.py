"""What a prefix does to attention: cases by hand, scores, one token, masks, padding, errors."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.experiments.prefix_effect import (
    POSITIONS,
    _sampled,
    effect_contributions,
)
from anchorlens.experiments.prefix_terms import LayerTerms, prefix_runs, terms_of_layer
from anchorlens.passes.forward import run_prefix
from tests.support.measures import assert_same, contributed, is_shared, patterns_of
from tests.support.tiny_models import questions, tiny_gpt2

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}
NAN = float("nan")
ALL = al.PrefixEffect(keys={"all": al.edges.demonstrations})


def effect_of(model: Any, batches: list[al.PromptBatch], **options: Any) -> Any:
    metric = al.PrefixEffect(**options)
    return al.run(model, batches, [metric], **QUIET)["prefix_effect"]


def of_class(batch: al.PromptBatch, number: int) -> Tensor:
    nowhere = torch.zeros_like(batch.attention_mask)
    return nowhere.scatter(1, batch.label_positions, batch.label_classes == number)


def first_anchors(batch: al.PromptBatch, count: int = 1) -> Tensor:
    nowhere = torch.zeros_like(batch.attention_mask)
    return nowhere.scatter(1, batch.label_positions[:, :count], True)


def by_hand(
    pattern: list[float], alone: tuple[float, float] = (0.25, 0.75), *, sinks: bool = False
) -> LayerTerms:
    """One head and one row, which attends to two prefix tokens, a content token and itself.

    ``alone`` is its attention to the last two if this layer alone lacks the prefix.
    """
    values = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 4.0]]).double()[None, None]
    rows = torch.tensor([pattern, [0.0, 0.0, *alone], [0.0, 0.0, 0.5, 0.5]])
    with_prefix, cut_here, cut = rows.double()[:, None, None, None]
    inside = torch.tensor([[True, True, False, False]])
    return terms_of_layer((with_prefix, values), (cut, values), cut_here, inside, sinks)


def test_terms_of_a_row_by_hand() -> None:
    terms = by_hand([0.25, 0.25, 0.125, 0.375])
    assert float(terms.stolen) == 0.5
    assert terms.taken.flatten().tolist() == [1.0, 0.0]  # 0.25 * 1 + 0.25 * 3
    assert terms.output.flatten().tolist() == [1.0, 1.75]  # and 0.125 * 2 + 0.375 * 4
    assert terms.rescaled.flatten().tolist() == [0.0, 3.5]  # 0.25 * 2 + 0.75 * 4
    assert terms.without.flatten().tolist() == [0.0, 3.0]
    assert terms.direct.flatten().tolist() == [1.0, -1.75]
    assert terms.indirect.flatten().tolist() == [0.0, 0.5]
    assert terms.expected.flatten().tolist() == [0.0, 0.0, 0.25, 0.75]


def test_a_sink_has_a_part_of_what_the_prefix_leaves() -> None:
    pattern = [0.25, 0.25, 0.125, 0.125]  # the sink has 0.25
    assert by_hand(pattern).expected.flatten().tolist() == [0.0, 0.0, 0.5, 0.5]
    terms = by_hand(pattern, (0.25, 0.25), sinks=True)
    assert terms.expected.flatten().tolist() == [0.0, 0.0, 0.25, 0.25]
    assert terms.rescaled.flatten().tolist() == [0.0, 1.5]


def test_a_prefix_with_all_attention_leaves_no_output_to_compare() -> None:
    terms = by_hand([0.5, 0.5, 0.0, 0.0])
    assert float(terms.stolen) == 1 and terms.taken.flatten().tolist() == [2.0, 0.0]
    for name in ("rescaled", "direct", "indirect", "expected"):
        assert getattr(terms, name).isnan().any(), name


def test_shares_of_attention_sum_to_one(llama: Any) -> None:
    """The prefix, BOS, and the query, which is everything else."""
    batches = questions(llama, 3)
    effect = effect_of(llama, batches)
    assert effect.stolen_by_segment.sum(-1).allclose(effect.stolen)
    assert effect.axis_names("segment") == ("text", "label", "format", "other")
    means: list[Tensor] = []
    for batch in batches:
        query = al.edges.query(batch)
        patterns = patterns_of(llama, batch, [])
        to_query = (patterns * query[:, None, None, None]).sum(-1)
        for number, rows in enumerate(query):
            means.append(to_query[number][..., rows].mean(-1))
    total = effect.stolen + effect.bos + torch.stack(means).mean(0)
    assert (total - 1).abs().max() < 1e-5
    assert float(effect.bos.min()) > 1e-4 and float(effect.stolen.max()) < 0.99


def test_stolen_by_label_words_is_the_score_of_aucroc(gpt2: Any) -> None:
    batch = questions(gpt2, 5)[0]
    classes = {str(c): partial(of_class, number=c) for c in range(6)}
    metric = al.PrefixEffect(keys=classes, rows=al.edges.target)
    whole = al.contexts.QueryPass(batch, None)
    rows = effect_contributions(gpt2, whole, metric.segments_of(batch), metric.rows_of(batch))
    _, [attention] = contributed(gpt2, batch, al.AttentionAUCROC())
    scores = attention["attention"].sum(2)
    assert rows["stolen_by_segment"].sum(2).allclose(scores, atol=1e-6)
    assert scores.min() > 1e-4


def test_one_token_moves_a_head_along_one_line(gpt2: Any) -> None:
    batches = questions(gpt2, 6)
    one = effect_of(gpt2, batches, keys={"one": first_anchors})
    assert (one.concentration - 1).abs().max() < 1e-6
    assert (one.effective_rank - 1).abs().max() < 1e-4
    # The raw difference lies on no line.
    _, changes = changes_of(gpt2, batches[0], first_anchors(batches[0]))
    sizes = torch.linalg.svdvals(changes)
    assert (sizes[:, 1] > 1e-2 * sizes[:, 0]).all()
    all_tokens = effect_of(gpt2, batches)
    assert float(all_tokens.concentration.min()) < 0.99
    assert float(all_tokens.effective_rank.max()) > 1.05


def changes_of(model: Any, batch: al.PromptBatch, in_prefix: Tensor) -> tuple[Tensor, Tensor]:
    """m b and z+ - z0 of the last layer's heads [head, row, d_head], in all rows of the queries."""
    queries = al.edges.query(batch)
    runs = prefix_runs(model, batch, in_prefix, queries)
    *_, terms = runs.layers()
    rows = queries[:, runs.rows]
    taken, raw = terms.taken, terms.output - terms.without
    return taken.movedim(1, 0)[:, rows], raw.movedim(1, 0)[:, rows]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_prefix_tokens_move_a_head_in_as_many_directions(gpt2: Any, count: int) -> None:
    (batch,) = questions(gpt2, 6)
    taken, _ = changes_of(gpt2, batch, first_anchors(batch, count))
    sizes = torch.linalg.svdvals(taken)
    assert (sizes[:, count - 1] > 1e-4 * sizes[:, 0]).all()
    assert (sizes[:, count] < 1e-6 * sizes[:, 0]).all()


@pytest.mark.slow("many passes")
def test_reweighting_moves_a_head_within_the_values_of_the_label_words(
    hooked: Any, byte_level: Any
) -> None:
    model = hooked(tiny_gpt2(len(byte_level)).double(), byte_level)
    (batch,) = questions(model, 3)
    beta = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    target, anchors = al.edges.target(batch), al.edges.anchors(batch)
    plain, moved = (
        prefix_runs(model, batch, anchors, target, hooks=hooks)
        for hooks in ([], al.reweight_anchors(model, batch, beta))
    )
    # Deeper layers have other inputs in the two runs.
    outputs = [next(runs.layers()).output for runs in (plain, moved)]
    _, values = plain.with_prefix.layer(0)
    for prompt, row in enumerate(target[:, plain.rows].long().argmax(1)):
        change = (outputs[1] - outputs[0])[prompt, :, row, :, None]
        of_labels = values[prompt][:, anchors[prompt]].mT
        assert of_labels.shape[1] > of_labels.shape[2]  # they do not span everything
        fitted = of_labels @ torch.linalg.lstsq(of_labels, change).solution
        assert (change.norm(dim=1) > 1e-3).all()
        assert ((change - fitted).norm(dim=1) < 1e-10 * change.norm(dim=1)).all()


@pytest.mark.slow("many passes")
def test_equal_values_move_a_head_along_one_line(hooked: Any, byte_level: Any) -> None:
    weights: Any = tiny_gpt2(len(byte_level))
    with torch.no_grad():
        for block in weights.transformer.h:
            block.attn.c_attn.weight[:, 48:] = 0  # the values are their biases
    model = hooked(weights, byte_level)
    effect = effect_of(model, questions(model, 6))
    assert (effect.concentration - 1).abs().max() < 1e-6
    assert (effect.effective_rank - 1).abs().max() < 1e-4


def test_a_prefix_that_is_masked_does_nothing(llama: Any) -> None:
    batch = questions(llama, 4)[0]
    metric = al.PrefixEffect()
    segments, rows = metric.segments_of(batch), metric.rows_of(batch)
    cut = al.edges.between(al.edges.query(batch), segments.any(1))
    masked = al.contexts.QueryPass(batch, None, al.block_edges(llama, batch, cut, range(3)))
    given = effect_contributions(llama, masked, segments, rows)
    effect = metric.result(al.Contributions(given))
    for name in ("stolen", "direct", "indirect"):
        assert not getattr(effect, name).any(), name
    for name in ("concentration", "effective_rank", "spread"):
        assert getattr(effect, name).isnan().all(), name


def test_rows_of_different_attention_are_averaged_over_the_query(gpt2: Any) -> None:
    batch = questions(gpt2, 4)[0]
    whole, target = (
        effect_of(gpt2, [batch], rows=rows) for rows in (al.edges.query, al.edges.target)
    )
    assert (whole.stolen - target.stolen).abs().max() > 1e-2
    # The target is the last row of both.
    for name in ("concentration", "effective_rank", "spread"):
        assert torch.equal(getattr(whole, name), getattr(target, name))


def test_other_metrics_of_the_run_share_the_demonstrations(gpt2: Any) -> None:
    batches = questions(gpt2, 4)
    results = al.run(gpt2, batches, [al.PrefixEffect(), al.SaliencyFlows()], **QUIET)
    assert is_shared(results["prefix_effect"])
    alone = effect_of(gpt2, batches)
    assert_same(results["prefix_effect"], replace(alone, info={}), 1e-12)


def rows_by_hand(taken: Tensor, within: Tensor, ids: list[int]) -> al.Contributions:
    """Contributions of one layer, one head and one segment."""
    count = len(taken)
    ones, known = torch.ones(count, 1, 1), torch.ones(count, 1)
    weights = torch.full((count, 1, POSITIONS), torch.nan)
    weights[:, 0, : within.shape[1]] = within
    rows = {
        "stolen_by_segment": ones[..., None] / 2,
        "bos": ones * torch.nan,
        "direct": known,
        "indirect": known * torch.nan,
        "taken": taken[:, None, None],
        "within": weights,
        "deviation": torch.arange(count)[:, None] / 10,
    }
    return al.Contributions(rows, torch.tensor(ids))


def test_directions_and_spread_equal_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    taken = torch.randn(7, 4, generator=generator).double()
    within = torch.rand(7, 5, generator=generator).double()
    record = ALL.result(rows_by_hand(taken, within, [3] * 7))
    squares = np.linalg.svd(taken.numpy(), compute_uv=False) ** 2
    shares = squares / squares.sum()
    assert float(record.concentration) == pytest.approx(shares[0])
    assert float(record.effective_rank) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    low, high = np.percentile(within.float().numpy(), [1, 99], axis=0)
    assert float(record.spread) == pytest.approx((high - low).mean(), rel=1e-5)
    assert float(record.invariance) == pytest.approx(0.6)
    assert float(record.indirect.isnan()) and float(record.stolen) == 0.5


def test_sets_of_demonstrations_are_compared_with_themselves() -> None:
    """Two sets of unlike lengths, in each of which nothing varies, as they are and pooled."""
    taken = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 2.0]] * 2)
    within = torch.tensor([[0.5, 0.25, 0.25]] * 3 + [[0.75, 0.25, NAN]] * 2)
    rows = rows_by_hand(taken, within, [0, 0, 0, 1, 1])
    record = ALL.result(rows)
    assert float(record.concentration) == 1 and float(record.spread) == 0
    pooled = ALL.result(al.Contributions(rows, torch.zeros(5), rows.sets))
    assert float(pooled.concentration) == pytest.approx(8 / 11) and float(pooled.spread) == 0
    after_one = replace(ALL, context=al.contexts.NoContext())
    same = after_one.result(rows)  # its first position varies by 0.25
    assert float(same.spread) == pytest.approx(0.25 / 3)
    longer = torch.eye(4)[[0, 0, 0, 1, 1]].double()  # fewer prompts than directions: 3 and 2 of 4
    unlike = ALL.result(rows_by_hand(longer, within, [0, 0, 0, 1, 1]))
    assert float(unlike.concentration) == 1 and float(unlike.effective_rank) == 1
    single = ALL.result(rows_by_hand(taken[:1], within[:1], [0]))
    assert float(single.concentration) == 1 and single.spread.isnan().all()


def test_of_a_long_prefix_some_positions_at_equal_distances_are_stored() -> None:
    inside = torch.zeros(2, 1100, dtype=torch.bool)
    inside[0, 1:1025], inside[1, 7:10] = True, True
    long, short = _sampled(inside)
    assert long.tolist() == list(range(1, 1025, 4))
    assert short[:4].tolist() == [7, 8, 9, -1] and (short[3:] == -1).all()


def test_a_run_that_continues_from_a_prefix_gives_the_whole_cache(gemma3: Any) -> None:
    batch = questions(gemma3, 4)[0]
    whole = run_prefix(gemma3, batch)
    length = int(batch.query_start[0])
    shared = run_prefix(gemma3, batch.prompt(0).before(length))
    continued = run_prefix(gemma3, batch.after(length), prefix=shared)
    assert torch.equal(continued.attention_mask, whole.attention_mask)
    assert torch.equal(continued.next_position, whole.next_position)
    inside = batch.attention_mask
    pairs = zip((*continued.keys, *continued.values), (*whole.keys, *whole.values), strict=True)
    for ours, theirs in pairs:
        assert ours.mT.movedim(-1, 1)[inside].allclose(theirs.mT.movedim(-1, 1)[inside], atol=1e-5)


@pytest.mark.slow("many passes")
def test_the_figures_show_the_numbers(llama: Any) -> None:
    batch = questions(llama, 4)[0]
    effect = effect_of(llama, [batch])
    heat, *lines = effect.plot().data
    assert torch.tensor(heat.z, dtype=torch.double).T.equal(effect.stolen)
    assert [line.y for line in lines] == [
        pytest.approx(values.tolist()) for values in (effect.direct, effect.indirect)
    ]
    without, with_prefix, rescaled = (
        torch.tensor(panel.z, dtype=torch.double)
        for panel in al.PrefixEffect().plot_pattern(llama, batch, 1, 2, prompt=1).data
    )
    prompt = batch.prompt(1)
    inside = al.edges.demonstrations(prompt)[0]
    assert rescaled[:, inside].isnan().all() and not without[:, inside].any()
    assert without[:, ~inside].allclose(rescaled[:, ~inside], atol=1e-6)
    assert len(without) == int(al.edges.query(prompt).sum())
    stolen = with_prefix[:, inside].sum(1)
    assert with_prefix[:, ~inside].allclose((1 - stolen)[:, None] * without[:, ~inside], atol=1e-6)


def test_what_one_token_moves_lies_on_a_line_in_the_figure(llama: Any) -> None:
    batch = questions(llama, 4)[0]
    one = al.PrefixEffect(keys={"one": first_anchors})
    (dots,) = one.plot_directions(llama, batch, -1, 0).data
    assert len(dots.x) == int(al.edges.query(batch).sum())
    assert max(map(abs, dots.y)) < 1e-6 * max(map(abs, dots.x))
    (dots,) = al.PrefixEffect().plot_directions(llama, batch, -1, 0).data
    assert max(map(abs, dots.y)) > 1e-2 * max(map(abs, dots.x))


def nothing(batch: al.PromptBatch) -> Tensor:
    return torch.zeros_like(batch.attention_mask)
