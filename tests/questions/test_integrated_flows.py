"""Integrated flows, suppressed segments and losses against plain transformers edited by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import anchorlens as al
from anchorlens.errors import MetricError, PromptError
from anchorlens.models.head_outputs import norms_after
from anchorlens.models.hooked import pattern_name
from anchorlens.models.kinds import original_of
from anchorlens.passes.forward import run_pass
from anchorlens.passes.shortcuts import why_not_late
from anchorlens.questions.integrated_flows import probability_of_prediction
from anchorlens.runs import way
from anchorlens.runs.passes import Passes
from tests.references import plain
from tests.support.asked import ask
from tests.support.measures import assert_same, difference, does_not_run
from tests.support.printed_code import printed
from tests.support.tiny_models import questions, randomize, tiny_gemma3, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:in layers .* the attributions do not sum to F")

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30], [0, 0, 17, 4, 25, 9, 60, 12, 33]])
MASK = torch.tensor([[1] * 9, [0, 0, *[1] * 7]])
NAMES = ("question", "step", "answer")
SEGMENTS = [[0, 0, 0, -1, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 1, 1, 2, 2, 2]]


@pytest.fixture
def batch() -> al.PromptBatch:
    return al.PromptBatch.from_segments(TOKENS, SEGMENTS, NAMES, attention_mask=MASK)


@pytest.mark.slow("many passes")
def test_all_edges_give_the_change(exact_gpt2: Any, byte_level: Any, batch: al.PromptBatch) -> None:
    """F with and without the attention of a layer, of plain transformers in float64."""
    prompt = batch.prompt(1)
    weights = tiny_gpt2(len(byte_level)).double()
    weights.set_attn_implementation("eager")
    same = plain.Prompt(prompt.tokens, [], [], prompt.tokens, prompt.tokens)
    clean = plain.logits_of(weights, same).softmax(-1)
    changes = []
    for layer in range(3):
        factor = torch.ones(3, 1, 1, 1, dtype=torch.float64)
        factor[layer] = 0
        without = plain.with_edits(weights, same, factor=factor).softmax(-1)
        changes.append((clean - without)[clean.argmax()])
    errors = {}
    for steps in (10, 20, 40):
        record = ask(exact_gpt2, [prompt], al.IntegratedFlows(["question"], steps=steps), **QUIET)
        assert difference(record.change, torch.stack(changes)) <= 1e-9
        errors[steps] = record.attributed - torch.stack(changes)
    assert min(changes, key=abs).abs() > 0.1 * clean.max()
    for steps, error in errors.items():
        assert error.abs().max() <= 0.01 / steps**2
    # The output bends more with the pattern of the first layer, where ten steps are few.
    assert (errors[10] / errors[20] - 4)[1:].abs().max() < 0.1
    assert (errors[20] / errors[40] - 4).abs().max() < 0.5


def plain_attribution(
    weights: Any, tokens: Tensor, output: Callable[[Tensor], Tensor], steps: int
) -> Tensor:
    """A times the mean gradient, [layer, head, query, key], by scaling each softmax of a layer."""
    prompt = plain.Prompt(tokens[None], [], [], torch.tensor([]), torch.tensor([]))
    layers, heads = weights.config.num_hidden_layers, weights.config.num_attention_heads
    products = []
    for layer in range(layers):
        total = torch.zeros(heads, len(tokens), len(tokens))
        for step in range(steps):
            # d F(f A) / d f = A * dF / d(f A)
            factor = torch.full_like(total, (2 * step + 1) / (2 * steps), requires_grad=True)
            factors: Any = [factor if k == layer else torch.ones(()) for k in range(layers)]
            with plain._Attention(prompt, factor=factors):
                logits = plain.forward(weights, prompt).logits[0]
            total += torch.autograd.grad(output(logits), factor)[0] / steps
        products.append(total)
    return torch.stack(products)


@pytest.mark.every_kind
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
@pytest.mark.parametrize("output", [None, al.losses.span_cross_entropy("answer")])
def test_flows_equal_plain_transformers(
    model: Any, output: Any, batch: al.PromptBatch, kind_of_model: str
) -> None:
    make: Any = tiny_gpt2 if model.cfg.n_heads == 2 else tiny_llama
    weights = make(model.W_E.shape[0])
    weights.set_attn_implementation("eager")
    record = ask(model, [batch], al.IntegratedFlows(output=output, steps=3), **QUIET)
    totals, of_heads = [], []
    for row, mask in enumerate(batch.attention_mask):
        tokens, part = batch.tokens[row][mask], batch.segments[row][mask]
        prompt = plain.Prompt(tokens[None], [], [], tokens, tokens)
        likeliest = plain.logits_of(weights, prompt).argmax()

        def probability(logits: Tensor, token: Tensor = likeliest) -> Tensor:
            return logits[-1].softmax(-1)[token]

        def loss(logits: Tensor, tokens: Tensor = tokens, part: Tensor = part) -> Tensor:
            losses = -logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            return losses[part[1:] == 2].sum()

        products = plain_attribution(weights, tokens, probability if output is None else loss, 3)
        inside = torch.stack([part == segment for segment in range(3)]).float()
        cells = torch.einsum("sq,lhqk,tk->lhst", inside, products.tril(-1), inside)
        counts = inside @ torch.ones(len(part), len(part)).tril(-1) @ inside.T
        totals.append(cells.sum(1))
        of_heads.append(cells / counts)
    tolerance = 1e-5 if kind_of_model == "bridge" else 1e-4
    assert difference(record.total, torch.stack(totals).mean(0)) <= tolerance
    heads = torch.stack(of_heads).nanmean(0).nan_to_num()
    assert difference(record.flow_of_heads.nan_to_num(), heads) <= tolerance
    assert record.axis_names("segment") == ("question", "step", "answer")
    of_output = "probability of the prediction" if output is None else "NextTokenCrossEntropy"
    assert (record.info["integrated gradient"], record.info["steps"]) == (of_output, 3)
    assert "whole passes" not in record.info


def test_the_prediction_stays_that_of_the_clean_run(gpt2: Any, batch: al.PromptBatch) -> None:
    (with_labels,) = questions(gpt2, 2)
    for prompts, ends in ((batch, torch.arange(3000)), (with_labels, with_labels.label_token_ids)):
        clean = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
        clean[0, ends[1]], clean[1, ends[3]] = 5, 5
        scaled = torch.zeros(2, 3000)
        scaled[:, ends[3]] = 1  # another one is likelier now
        expected = scaled[:, ends].softmax(-1)
        ours = probability_of_prediction(clean, prompts)(scaled, prompts)
        assert difference(ours, torch.stack([expected[0, 1], expected[1, 3]])) <= 1e-6


@pytest.mark.slow("many passes")
def test_passes_start_at_their_layer_and_whole_passes_give_the_same(
    exact_gpt2: Any, batch: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {1: "in a test", 2: "in a test"}
    assert [why_not_late(exact_gpt2, layer) for layer in (1, 2)] == ["", ""]
    with torch.inference_mode():  # autograd would reject its tensors
        record = ask(exact_gpt2, [batch], al.IntegratedFlows(steps=4), **QUIET)
    monkeypatch.setattr(Passes, "why_not_late", lambda *arguments: reasons)
    whole = ask(exact_gpt2, [batch], al.IntegratedFlows(steps=4), **QUIET)
    assert whole.info["whole passes"] == reasons
    assert_same(record, whole, 1e-12)


def test_signed_saliency_of_a_query_sums_to_0_where_a_norm_follows(gemma3: Any, llama: Any) -> None:
    """As the definitions say: a row times any number gives the same output there."""
    for model, is_zero in ((gemma3, True), (llama, False)):
        [batch] = questions(model, 2)
        products = al.saliency(model, batch, weight=al.weights.signed, per_head=True)
        of_queries = products.sum((2, 4)).abs().max()
        assert (of_queries < 1e-4 * products.abs().max()) == is_zero


@pytest.mark.slow("many passes")
def test_norms_of_attention_are_frozen(hooked: Any, byte_level: Any, batch: al.PromptBatch) -> None:
    """A layer norm with a bias, which also takes the mean away, behind the output projection."""
    weights: Any = randomize(tiny_gpt2(len(byte_level)), seed=3, scale=0.3)
    for block in weights.transformer.h[1:]:
        norm = torch.nn.LayerNorm(block.attn.c_proj.weight.shape[1])
        block.attn.c_proj = torch.nn.Sequential(block.attn.c_proj, randomize(norm, seed=4))
    model = hooked(weights.double(), byte_level)
    assert norms_after(model).keys() == {1, 2}
    record = ask(model, [batch], al.IntegratedFlows(steps=30), resamples=0, progress=False)
    torch.testing.assert_close(record.attributed, record.change, rtol=0.02, atol=1e-4)
    clean = run_pass(model, batch)
    function = probability_of_prediction(clean, batch)
    for layer, change in enumerate(record.change):
        cut = [(pattern_name(layer), lambda pattern, hook: pattern * 0)]
        without = function(run_pass(model, batch, hooks=cut), batch)
        torch.testing.assert_close((function(clean, batch) - without).mean(), change)


Suppression = printed("own_question.md", "Suppression")
# The step of the first prompt is scattered, and the second prompt has none.
SCATTERED = torch.tensor([[0, 0, 1, -1, 0, 1, 2, -1, 2], [-1, -1, 0, 0, -1, 0, 2, -1, 2]])


def plain_kl(weights: Any, tokens: Tensor, segments: list[int]) -> Tensor:
    count = len(tokens)

    def log_probs(allowed: Tensor) -> Tensor:
        mask = torch.zeros(count, count, dtype=torch.double)
        mask.masked_fill_(~allowed, torch.finfo(torch.double).min)
        with torch.no_grad():
            out = weights(tokens[None], attention_mask=mask[None, None], use_cache=False)
        return out.logits[0].log_softmax(-1)

    causal = torch.ones(count, count, dtype=torch.bool).tril()
    clean, result = log_probs(causal), torch.full((3, 3), torch.nan, dtype=torch.double)
    for s in range(3):
        inside = [j for j in range(count) if segments[j] == s]
        if not inside:
            continue
        allowed = causal.clone()
        for i in range(inside[-1] + 1, count):
            allowed[i, inside] = False
        suppressed = log_probs(allowed)
        for a in range(3):
            values = [
                kl_div(suppressed[t], clean[t], reduction="sum", log_target=True)
                for t in range(inside[-1] + 1, count - 1)
                if segments[t + 1] == a
            ]
            if values:
                result[a, s] = torch.stack(values).mean()
    return result


@pytest.mark.quick_cases("many passes", "right")
@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_suppression_as_documented_equals_plain_transformers(
    side: str, exact_gpt2: Any, byte_level: Any, batch: al.PromptBatch, kind_of_model: str
) -> None:
    """With attention masks of four axes."""
    scattered = replace(batch, segments=SCATTERED)
    given = scattered if side == "left" else scattered.padded_right()
    record = ask(exact_gpt2, [given], Suppression(NAMES), **QUIET)
    weights: Any = tiny_gpt2(len(byte_level)).double()
    weights.set_attn_implementation("eager")
    prompts = zip(TOKENS, SCATTERED, batch.attention_mask, strict=True)
    stacked = torch.stack([plain_kl(weights, row[m], of[m].tolist()) for row, of, m in prompts])
    assert stacked[0].isfinite().tolist() == [[False] * 3, [False] * 3, [True, True, False]]
    assert stacked[1].isfinite().tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    assert (stacked[stacked.isfinite()] > 1e-3).all()
    # The processed weights of other kinds went through float32.
    tolerance = 1e-10 if kind_of_model == "bridge" else 2 * torch.finfo(torch.float32).eps
    options: dict[str, Any] = {"rtol": 0, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(record.kl_of_prompts, stacked, **options)
    torch.testing.assert_close(record.kl, stacked.nanmean(0), **options)


def test_label_words_are_a_segment_that_is_suppressed(gpt2: Any) -> None:
    batches = questions(gpt2, 3, batch_size=2, padding_side="left")
    record = ask(gpt2, batches, Suppression(("label", "query")), **QUIET)
    assert record.axis_names("segment") == ("label", "query")
    assert float(record.kl[1, 0]) > 0 and int(record.kl.isfinite().sum()) == 1
    with pytest.raises(PromptError, match="there is no segment 'reply'"), does_not_run(gpt2):
        ask(gpt2, batches, Suppression(("reply",)), **QUIET)


TEXTS = [
    "The museum opens at ten. The library opens at nine, and closes late.",
    "Who wrote it? Nobody knows who wrote it.",
    "Ben has pears. Anna has red apples. The apples are of Anna.",
]
CUT = {0: [1], 2: [0]}  # heads by layer


def late(batch: al.PromptBatch) -> Tensor:
    """The second half of each text, each of its predicted tokens with the same weight."""
    has_next = batch.attention_mask & ~al.edges.target(batch)
    start = (batch.starts + batch.target_positions) // 2
    chosen = (has_next & (batch.positions >= start[:, None])).double()
    return chosen / chosen.sum(1, keepdim=True)


def without_heads(model: Any, heads: dict[int, list[int]]) -> Any:
    zeros = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_head)

    def hooks(batch: al.PromptBatch) -> Any:
        site, tokens = al.Site(heads=heads), batch.attention_mask
        return al.replace_heads(model, batch, zeros, site, positions=tokens)

    return hooks


def plain_losses(model: Any, weights: Any, heads: dict[int, list[int]]) -> Tensor:
    size, handles = model.cfg.d_head, []
    for layer, module in weights.named_modules():
        if layer.endswith(("attn.c_proj", "self_attn.o_proj")):
            cut = heads.get(int(layer.split(".")[-3]), [])

            def silence(module: Any, inputs: Any, cut: list[int] = cut) -> Any:
                z = inputs[0].unflatten(-1, (-1, size)).clone()
                z[:, :, cut] = 0
                return (z.flatten(2),)

            handles.append(module.register_forward_pre_hook(silence))
    assert len(handles) == model.cfg.n_layers
    losses = []
    for text in TEXTS:
        (alone,) = al.build_segments(model.tokenizer, [text])
        ids = alone.tokens
        with torch.no_grad():
            logits = weights(ids).logits[0, :-1]
        of_tokens = cross_entropy(logits, ids[0, 1:], reduction="none")
        losses.append(of_tokens[(ids.shape[1] - 1) // 2 :].mean())
    for handle in handles:
        handle.remove()
    return torch.stack(losses)


def test_losses_at_chosen_positions_are_those_of_plain_transformers(exact_model: Any) -> None:
    model, size = exact_model, exact_model.W_E.shape[0]
    make = tiny_gpt2 if "gpt2" in original_of(model).config.model_type else tiny_gemma3
    plain = make(size).double()
    asked = al.Loss(al.losses.next_token_cross_entropy(late))
    batches = al.build_segments(model.tokenizer, TEXTS, batch_size=2)
    options: dict[str, Any] = {"resamples": 20, "progress": False}
    record = al.run(model, batches, [asked], hooks=without_heads(model, CUT), **options)["loss"]
    clean, changed = (plain_losses(model, plain, heads) for heads in ({}, CUT))
    assert difference(record.loss_per_prompt, changed) < 1e-10
    assert difference(record.clean_loss_per_prompt, clean) < 1e-10
    assert abs(float(record.change - (changed - clean).mean())) < 1e-10
    assert float((changed - clean).abs().min()) > 1e-4
    low, high = record.intervals["change"]
    assert low < record.change < high
    unchanged = al.run(model, batches, [asked], **QUIET)["loss"]
    assert torch.equal(unchanged.loss_per_prompt, record.clean_loss_per_prompt)
    assert unchanged.change == 0


def test_hooks_that_change_no_loss_are_told(gpt2: Any) -> None:
    """By default heads are replaced at the target, after which a text ends."""
    asked = [al.Loss(al.losses.span_cross_entropy("text"))]
    with pytest.warns(UserWarning, match="hooks change the loss of no prompt; .*positions="):
        record = al.run(
            gpt2,
            al.build_segments(gpt2, TEXTS),
            asked,
            hooks=lambda batch: al.replace_heads(gpt2, batch, 0.0, 1),
            **QUIET,
        )["loss"]
    assert record.change == 0


def test_losses_of_labels_are_means_over_sets_in_every_way(exact_gpt2: Any) -> None:
    batches = [*questions(exact_gpt2, 4, batch_size=2), *questions(exact_gpt2, 4, seed=2)]
    cut = without_heads(exact_gpt2, CUT)
    asked = [
        al.Loss(al.losses.label_cross_entropy),
        al.Loss(al.losses.word_cross_entropy(), name="words"),
    ]
    results = al.run(exact_gpt2, batches, asked, hooks=cut, **QUIET)
    record = results["loss"]
    hooked = al.target_logits(exact_gpt2, batches, hooks=cut, progress=False)
    clean = al.target_logits(exact_gpt2, batches, progress=False)
    gold = torch.cat([batch.gold for batch in batches if batch.gold is not None])
    order = torch.cat([batches[n].index + 4 * (n > 1) for n in range(3)]).argsort()
    ids = batches[0].label_token_ids
    for logits, found in ((hooked, record.loss_per_prompt), (clean, record.clean_loss_per_prompt)):
        expected = cross_entropy(logits[:, ids], gold[order], reduction="none")
        assert difference(found, expected) < 1e-10
    assert difference(record.loss, record.loss_per_prompt.view(2, 4).mean(1).mean()) < 1e-12
    assert difference(results["words"].loss_per_prompt, record.loss_per_prompt) < 1e-10
    with patch.object(way, "LARGE", 0):
        fused = al.run(exact_gpt2, batches, asked[:1], **QUIET)["loss"]
    assert "fused" in fused.info["attention"]
    assert difference(fused.loss_per_prompt, record.clean_loss_per_prompt) < 1e-10


def test_a_loss_that_does_not_fit_is_refused_before_any_pass(gpt2: Any) -> None:
    (text,) = al.build_segments(gpt2.tokenizer, TEXTS[:1])
    with pytest.raises(MetricError, match="needs the true label of each query"):
        al.run(gpt2, [text], [al.Loss(al.losses.label_cross_entropy)], **QUIET)
    with pytest.raises(MetricError, match=r"loss.*one number"):
        al.run(gpt2, [text], [al.Loss(lambda logits, batch: logits)], **QUIET)
    of_text = al.losses.span_cross_entropy("text")
    with pytest.raises(
        MetricError, match=r"no question .* takes its loss .asked: loss.*al\.Loss\("
    ):
        al.run(gpt2, [text], [al.Loss(of_text)], loss=of_text, **QUIET)
