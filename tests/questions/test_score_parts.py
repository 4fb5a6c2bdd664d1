"""Parts of scores equal products of weights written out, and attention that was made by hand."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import anchorlens as al
from tests.support.asked import ask
from tests.support.tiny_models import boot, questions, tiny_gemma3, tiny_gpt2, tiny_llama

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


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
