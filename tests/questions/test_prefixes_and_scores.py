"""What a prefix does to attention, and what scores are made of, by hand and by plain weights."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.questions.prefix_effect import POSITIONS, _sampled, effect_contributions
from anchorlens.questions.prefix_terms import LayerTerms, terms_of_layer
from tests.support.asked import ask
from tests.support.measures import assert_same, patterns_of
from tests.support.tiny_models import boot, questions, tiny_gemma3, tiny_gpt2, tiny_llama

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}
NAN = float("nan")
ALL = al.PrefixEffect(keys={"all": al.edges.demonstrations})


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
    # A sink has a part of what the prefix leaves.
    pattern = [0.25, 0.25, 0.125, 0.125]  # the sink has 0.25
    assert by_hand(pattern).expected.flatten().tolist() == [0.0, 0.0, 0.5, 0.5]
    terms = by_hand(pattern, (0.25, 0.25), sinks=True)
    assert terms.expected.flatten().tolist() == [0.0, 0.0, 0.25, 0.25]
    assert terms.rescaled.flatten().tolist() == [0.0, 1.5]
    # A prefix with all attention leaves no output to compare.
    terms = by_hand([0.5, 0.5, 0.0, 0.0])
    assert float(terms.stolen) == 1 and terms.taken.flatten().tolist() == [2.0, 0.0]
    for name in ("rescaled", "direct", "indirect", "expected"):
        assert getattr(terms, name).isnan().any(), name


def test_shares_of_attention_sum_to_one(llama: Any) -> None:
    batches = questions(llama, 3)
    effect = ask(llama, batches, al.PrefixEffect(), **QUIET)
    assert effect.stolen_by_segment.sum(-1).allclose(effect.stolen)
    assert effect.axis_names("segment") == ("text", "label", "format", "other")
    means: list[Tensor] = []
    for batch in batches:
        query = al.edges.query(batch)
        to_query = (patterns_of(llama, batch, []) * query[:, None, None, None]).sum(-1)
        for number, rows in enumerate(query):
            means.append(to_query[number][..., rows].mean(-1))
    total = effect.stolen + effect.bos + torch.stack(means).mean(0)
    assert (total - 1).abs().max() < 1e-5
    assert float(effect.bos.min()) > 1e-4 and float(effect.stolen.max()) < 0.99


def test_a_prefix_that_is_masked_or_not_there_does_nothing(llama: Any) -> None:
    batch = questions(llama, 4)[0]
    metric = al.PrefixEffect()
    segments, rows = metric.segments_of(batch), metric.rows_of(batch)
    cut = al.edges.between(al.edges.query(batch), segments.any(1))
    masked = al.contexts.QueryPass(batch, None, al.block_edges(llama, batch, cut, range(3)))
    effect = metric.result(al.Contributions(effect_contributions(llama, masked, segments, rows)))
    nothing = ask(llama, [batch], al.PrefixEffect(context=al.contexts.NoContext()), **QUIET)
    for each in (effect, nothing):
        for name in ("stolen", "direct", "indirect"):
            assert not getattr(each, name).any(), name
        for name in ("concentration", "effective_rank", "spread"):
            assert getattr(each, name).isnan().all(), name
    assert (nothing.bos > 0).all()


def rows_by_hand(taken: Tensor, within: Tensor, ids: list[int]) -> al.Contributions:
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


@pytest.mark.slow("many passes")
def test_a_pattern_is_drawn_without_the_prefix_with_it_and_rescaled(llama: Any) -> None:
    batch = questions(llama, 4)[0]
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


def test_what_one_token_moves_lies_on_a_line_also_in_the_figure(llama: Any) -> None:
    batch = questions(llama, 4)[0]
    one = al.PrefixEffect(keys={"one": first_anchors})
    effect, of_all = (ask(llama, [batch], asked, **QUIET) for asked in (one, al.PrefixEffect()))
    assert (effect.concentration - 1).abs().max() < 1e-6 and of_all.concentration.min() < 0.99
    assert (effect.effective_rank - 1).abs().max() < 1e-4 and of_all.effective_rank.max() > 1.05
    (dots,) = one.plot_directions(llama, batch, -1, 0).data
    assert len(dots.x) == int(al.edges.query(batch).sum())
    assert max(map(abs, dots.y)) < 1e-6 * max(map(abs, dots.x))
    (dots,) = al.PrefixEffect().plot_directions(llama, batch, -1, 0).data
    assert max(map(abs, dots.y)) > 1e-2 * max(map(abs, dots.x))


@pytest.mark.every_kind
def test_a_context_of_all_tokens_acts_as_the_demonstrations(model: Any) -> None:
    """Without a BOS the whole context is the prefix; with one BOS is content in both."""
    batches = questions(model, 5, batch_size=3)
    asked = al.PrefixEffect()
    expected = ask(model, batches, asked, **QUIET)
    context = al.compress(model, batches[0], select=al.contexts.selection.everything)
    effect = ask(model, batches, replace(asked, context=context), **QUIET)
    rounding: dict[str, Any] = {"invariance": torch.zeros(3).double()}
    assert_same(replace(effect, **rounding), replace(expected, **rounding), 1e-4)
    assert effect.indirect[0] == 0 and effect.invariance.max() < 1e-5


@pytest.mark.slow("many passes")
def test_the_keys_of_a_context_are_divided_into_segments(gpt2: Any) -> None:
    """Two of the label words are stored, at other columns than in the prompt."""
    batches = questions(gpt2, 4)
    keys = al.PrefixEffect().keys
    (batch,) = batches
    positions, ends = batch.label_positions[0, [1, 4]], batch.label_ends[0, [1, 4]]
    assert torch.equal(positions, ends)

    def select(demonstrations: al.PromptBatch) -> Tensor:
        stored = torch.zeros_like(demonstrations.attention_mask[0])
        stored[positions], stored[7] = True, True
        return stored

    context = al.compress(gpt2, batch, select=select)
    assert context.is_cut
    queries = context.query_pass(gpt2, batch).batch
    assert queries.label_positions.tolist() == [[1, 2]] * 4
    assert queries.label_classes.equal(batch.label_classes[:, [1, 4]])
    effect, of_anchors = (
        ask(gpt2, batches, al.PrefixEffect(context=context, keys=given), **QUIET)
        for given in (keys, {"anchors": al.edges.anchors})
    )
    of_text, of_labels = effect.stolen_by_segment.unbind(-1)[:2]
    assert (of_text > 1e-4).all() and (of_labels > 1e-4).all()
    assert effect.stolen_by_segment[..., 2:].sum() == 0
    assert of_anchors.stolen.equal(of_labels)


@pytest.mark.slow("many passes")
def test_keys_that_a_context_has_not_are_refused(gpt2: Any) -> None:
    [batch] = questions(gpt2, 3)
    no_text = al.compress(gpt2, batch, select=al.contexts.selection.label_words)
    text: Any = {"text": al.PrefixEffect().keys["text"]}  # type: ignore[index]
    with pytest.raises(MetricError, match="hold no token of some prompt"):
        ask(gpt2, [batch], al.PrefixEffect(text, context=no_text), **QUIET)
    for draw in (al.PrefixEffect.plot_pattern, al.PrefixEffect.plot_directions):
        with pytest.raises(MetricError, match="hold no token of some prompt"):
            draw(al.PrefixEffect(context=al.contexts.NoContext()), gpt2, batch, 0, 0)


@pytest.mark.slow("many passes")
def test_the_figures_of_a_context_name_its_keys(llama: Any) -> None:
    """Learned keys belong to no token; those of a hard prompt do, and BOS is not learned."""
    batches = questions(llama, 2, batch_size=1)
    how = al.contexts.Training(steps=0)
    learned = al.train_prefix(llama, batches[:1], how, held_out=batches[1:], length=2)
    tokens = al.contexts.hard_prompts.of_tokens(llama, [300, 301], held_out=batches)
    names = []
    for context in (learned, tokens):
        asked = al.PrefixEffect(context=context)
        figure = asked.plot_pattern(llama, batches[0], 1, 1)
        names.append(figure.layout.xaxis.ticktext[:3:2])  # every second one is written
        stolen = torch.tensor(figure.data[1].z)[:, 1:3].sum(1)
        effect = ask(llama, batches[:1], asked, **QUIET)
        assert float(effect.stolen[1, 1]) == pytest.approx(float(stolen.mean()), abs=1e-5)
    assert names[0][1] == "learned_1"
    assert names[1] == (names[0][0], llama.tokenizer.decode(301))


def one_prompt(model: Any) -> al.PromptBatch:
    return questions(model, 4)[0].prompt(1)


def near(batch: al.PromptBatch) -> Tensor:
    before = batch.up_to_target.long()
    return (before > 0) & (before.flip(1).cumsum(1).flip(1) <= 5)


class Plain(NamedTuple):
    """Queries, keys and values [part, head, position, d_head], by plain transformers.

    ``logits`` has what each part and key [part, head, key, token] gives to the logits of a query.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    pattern: Tensor
    logits: Callable[[int], Tensor]


def parts_of_llama(weights: Any, ids: Tensor, layer: int) -> Plain:
    seen, is_gemma = dict[Any, Any](), hasattr(weights.model.layers[0], "pre_feedforward_layernorm")

    def watch(module: Any, *key: Any) -> None:
        def store(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            seen[key] = args, kwargs, output[0] if isinstance(output, tuple) else output

        module.register_forward_hook(store, with_kwargs=True)

    for n, block in enumerate(weights.model.layers):
        watch(block.input_layernorm, "norm", n)
        watch(block.self_attn, "attended", n)
        watch(block.post_attention_layernorm if is_gemma else block.self_attn, "attn", n)
        watch(block.post_feedforward_layernorm if is_gemma else block.mlp, "mlp", n)
    final = weights.model.norm
    watch(final, "last", 0)
    weights.config._attn_implementation = "eager"
    with torch.no_grad():
        pattern = weights(ids, output_attentions=True).attentions[layer][0]
    parts = [seen["norm", 0][0][0][0]]
    parts += [seen[name, n][2][0] for n in range(layer) for name in ("attn", "mlp")]
    block = weights.model.layers[layer]
    attention, resid = block.self_attn, seen["norm", layer][0][0][0]

    def held(values: Tensor, whole: Tensor, norm: Any) -> Tensor:
        weight = norm.weight.double() + is_gemma
        eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0)))
        return values * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + eps) * weight

    normed = held(torch.stack(parts), resid, block.input_layernorm)

    def projected(projection: Any, norm: Any) -> Tensor:
        values = (normed @ projection.weight.T).unflatten(-1, (-1, attention.head_dim))
        return (values if norm is None else held(values, values.sum(0), norm)).transpose(1, 2)

    queries = projected(attention.q_proj, getattr(attention, "q_norm", None))
    keys = projected(attention.k_proj, getattr(attention, "k_norm", None))
    cos, sin = (each.double() for each in seen["attended", layer][1]["position_embeddings"])
    queries, keys = (apply_rotary_pos_emb(each, each, cos, sin)[0] for each in (queries, keys))
    groups = queries.shape[1] // keys.shape[1]
    values = projected(attention.v_proj, None)
    keys, values = (each.detach().repeat_interleave(groups, 1) for each in (keys, values))

    def logits(query: int) -> Tensor:
        output = attention.o_proj.weight.unflatten(1, (-1, attention.head_dim))  # [d, head, d_head]
        of_keys = pattern[:, query, :, None].double() * values
        written = torch.einsum("phkd,mhd->phkm", of_keys, output)
        if is_gemma:
            whole = seen["attended", layer][2][0, query]
            written = held(written, whole, block.post_attention_layernorm)
        return (
            held(written, seen["last", 0][0][0][0, query], final) @ weights.lm_head.weight.T
        ).detach()

    return Plain((queries * attention.scaling).detach(), keys, values, pattern, logits)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_parts_equal_products_of_weights(make: Any, byte_level: Any) -> None:
    weights = make(len(byte_level)).double()
    copied = copy.deepcopy(weights)  # without the wrappers of a bridge
    model = al.prepare_model(boot(weights, byte_level))
    batch, layer = one_prompt(model), 1
    queries, keys, _, pattern, _ = parts_of_llama(copied, batch.tokens, layer)
    record = ask(model, [batch], al.ScoreParts(layer, heads=[0, 1]), **QUIET)
    target, anchors = int(batch.target_positions), batch.label_positions[0]
    for place, head in enumerate((0, 1)):
        products = torch.einsum("ad,bkd->abk", queries[:, head, target], keys[:, head, anchors])
        scores = products.sum((0, 1))
        expected = scores - scores.mean()
        limit = 1e-6 * float(scores.abs().max())  # transformers rotates and normalizes in float32
        log = pattern[head, target, anchors].double().log()
        assert (expected - (log - log.mean())).abs().max() <= limit
        assert (record.score[place] - expected).abs().max() <= limit
        assert (record.level[place] - scores.mean()).abs() <= limit
        order = scores.argsort(descending=True)
        contrasts = products[..., order[0]] - products[..., order[1:]].mean(-1)
        assert (record.pairs[place, :-1, :-1] - contrasts).abs().max() <= limit
        assert (record.at_key[place, :-1] - contrasts.sum(0)).abs().max() <= limit
        assert (record.at_query[place, :-1] - contrasts.sum(1)).abs().max() <= limit
        by_key = products.sum(0) - products.sum(0).mean(-1, keepdim=True)
        assert (record.score_at_key[place, :, :-1] - by_key.T).abs().max() <= limit
        by_query = products.sum(1) - products.sum(1).mean(-1, keepdim=True)
        assert (record.score_at_query[place, :, :-1] - by_query.T).abs().max() <= limit
        groups = contrasts.sum(0)
        expected = torch.stack([groups[0], groups[1::2].sum(), groups[2::2].sum(), 0 * groups[0]])
        assert (record.of_groups[place] - expected).abs().max() <= limit
        assert not record.pairs[place, -1].any() and not record.at_key[place, -1].any()  # no biases


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("has_labels", [True, False])
def test_an_edge_carries_products_of_weights(make: Any, has_labels: bool, byte_level: Any) -> None:
    weights = make(len(byte_level)).double()
    copied = copy.deepcopy(weights)
    model = al.prepare_model(boot(weights, byte_level))
    batch, layer = one_prompt(model), 1
    asked = al.ScoreParts(layer, keys=near)
    if not has_labels:
        text = model.tokenizer.decode(batch.tokens[0])
        [batch] = al.build_segments(model.tokenizer, [[("text", text)]])
    plain, target = parts_of_llama(copied, batch.tokens, layer), int(batch.target_positions)
    record = ask(model, [batch], asked, **QUIET)
    with torch.no_grad():
        logits = copied(batch.tokens).logits[0, target]
    words = batch.label_token_ids if has_labels else torch.arange(len(logits))
    answer = int(logits[words].argmax())
    others = torch.arange(len(words)) != answer
    given = plain.logits(target)[..., near(batch)[0], :][..., words]
    expected = given[..., answer] - given[..., others].mean(-1)  # [part, head, key]
    limit = 1e-6 * float(expected.sum(0).abs().max())
    assert limit > 0 and (record.carried - expected.sum(0)).abs().max() <= limit
    for head in range(model.cfg.n_heads):
        key = int(record.score[head].argmax())
        assert (record.carries_by_part[head, :-1] - expected[:, head, key]).abs().max() <= limit
        assert (record.carries[head] - expected[:, head, key].sum()).abs() <= limit


def test_what_an_edge_carries_past_centred_norms_and_biases(byte_level: Any) -> None:
    weights = tiny_gpt2(len(byte_level)).double()
    copied = copy.deepcopy(weights)
    model = al.prepare_model(boot(weights, byte_level))
    batch, layer = one_prompt(model), 1
    asked, target = al.ScoreParts(layer, keys=near), int(batch.target_positions)
    record = ask(model, [batch], asked, **QUIET)
    seen: dict[str, Tensor] = {}
    transformer, width = copied.transformer, copied.config.n_embd
    attention = transformer.h[layer].attn
    attention.c_attn.register_forward_hook(lambda _, args, out: seen.update(qkv=out[0]))
    transformer.ln_f.register_forward_pre_hook(lambda _, args: seen.update(last=args[0][0]))
    copied.config._attn_implementation = "eager"
    with torch.no_grad():
        out = copied(batch.tokens, output_attentions=True)
        values = seen["qkv"][:, 2 * width :].unflatten(1, (copied.config.n_head, -1))
        mixed = out.attentions[layer][0, :, target, :, None] * values.transpose(0, 1)
        output = attention.c_proj.weight.unflatten(0, (copied.config.n_head, -1))
        written = torch.einsum("hkd,hdm->hkm", mixed, output)
        written = written - written.mean(-1, keepdim=True)
        divisor = (seen["last"][target].var(correction=0) + transformer.ln_f.eps).sqrt()
        words = copied.lm_head.weight[batch.label_token_ids]
        given = (written / divisor * transformer.ln_f.weight) @ words.T
        answer = int(out.logits[0, target, batch.label_token_ids].argmax())
    others = torch.arange(len(words)) != answer
    expected = (given[..., answer] - given[..., others].mean(-1))[:, near(batch)[0]]
    assert expected.abs().max() > 0
    assert (record.carried - expected).abs().max() <= 1e-9 * expected.abs().max()
    assert (record.carries_by_part.sum(1) - record.carries).abs().max() <= 1e-12


class Doubled(torch.nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return 2 * super().forward(rows)


def test_what_an_edge_carries_is_unknown_with_another_unembedding(byte_level: Any) -> None:
    weights = tiny_llama(len(byte_level))
    weights.lm_head.__class__ = Doubled
    model = al.prepare_model(boot(weights, byte_level))
    with pytest.warns(UserWarning, match="heads of layer 1 carry is NaN: the logits and the sum"):
        record = ask(model, [one_prompt(model)], al.ScoreParts(1), **QUIET)
    assert record.carries.isnan().all() and not record.contrast.isnan().any()


def test_heads_of_a_layer_sum_to_its_part_and_all_parts_to_the_contrast(exact_model: Any) -> None:
    """With biases (GPT-2), and with norms after the attention (Gemma 3)."""
    batches = questions(exact_model, 8)
    asked = (al.ScoreParts(-1, keys=near, by=by) for by in ("layer", "head"))
    by_layer, by_head = (ask(exact_model, batches, each, **QUIET) for each in asked)
    parts, heads = by_layer.axis_names("part"), [*(by_head.axis_names("part") or ())]
    assert parts == ("embedding", "attention 0", "MLP 0", "attention 1", "MLP 1", "biases")
    assert by_head.axis_names("key_part") == parts == by_layer.axis_names("query_part")
    after = 1 + exact_model.cfg.n_heads  # the bias of layer 0
    assert (heads[1], heads[after]) == ("head 0.0", "bias of attention 0")
    for name in ("at_key", "at_query", "score_at_key"):
        ours, layers = getattr(by_head, name), getattr(by_layer, name)
        assert (ours[..., 1 : after + 1].sum(-1) - layers[..., 1]).abs().max() <= 1e-9
        assert (ours[..., after + 2 : -2].sum(-1) - layers[..., 3]).abs().max() <= 1e-9
    for record in (by_layer, by_head):
        sums = [record.at_key.sum(1), record.at_query.sum(1), record.pairs.sum((1, 2))]
        sums += [record.of_groups.sum(1)]
        for total in sums:
            assert (total - record.contrast).abs().max() <= 1e-9
        assert (record.contrast > 0).all() and record.attention.sum(1).le(1).all()


def test_a_record_answers_and_draws(gpt2: Any) -> None:
    batches = questions(gpt2, 12)
    record = al.run(gpt2, batches, [al.ScoreParts(1, heads=[1, 0])], progress=False)["score_parts"]
    assert record.axis_names("head") == ("1.0", "1.1") and record.at_key.shape == (2, 4)
    answer: Any = record.answer("")
    assert answer.sentence.startswith("Head 1.") and " from MLPs" in answer.sentence
    assert [trace.name for trace in record.plot().data[1:]] == ["head 1.0", "head 1.1"]
    assert (record.at_key.sum(1) - record.contrast).abs().max() <= 1e-4


def test_keys_behind_a_window_are_refused(gemma3: Any) -> None:
    message = "in layer 2 a query sees 0 of its 6 keys, as behind a window"
    with pytest.raises(al.AnchorlensError, match=message):
        ask(gemma3, [one_prompt(gemma3)], al.ScoreParts(2), **QUIET)
