"""Scores of retrieval heads against QRHead's own lines, on attentions of plain transformers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError
from tests.references import plain
from tests.support.measures import does_not_run
from tests.support.tiny_models import tiny_gpt2, tiny_llama

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TASK, EXAMPLES = al.TASKS["trec"], al.load_examples("questions")
DEMOS = al.sample_demonstrations(EXAMPLES, shots=2, seed=1)
QUERIES = [example for example in EXAMPLES if example not in DEMOS][:5]
TEXTS = {
    "d0": " The river runs through an old town in the north of the country.",
    "d1": " Who wrote the first letter is not known to anybody.",
    "d2": " Yes",  # one token
    "d3": " What is the name of the highest mountain? It has two names.",
}
PROMPTS = [
    (["d0", "d1", "d2"], " Who wrote the letter?", ["d1"]),
    (["d3", "d2", "d0"], " How high?", ["d3", "d2"]),
    (["d1", "d0"], " In what part of the country is the town?", ["d0"]),
]
RIGHT = [right for *_, right in PROMPTS]


def documents(model: Any, question: str | None = None, **options: Any) -> list[al.PromptBatch]:
    prompts = list[Any]()
    for names, query, _ in PROMPTS:
        asked = ("query", f" Query:{query if question is None else question}"), (None, " Answer:")
        texts = ((name, TEXTS[name]) for name in names)
        prompts.append([(None, "Here are some texts."), *texts, *asked])
    return al.build_segments(model.tokenizer, prompts, **options)


def demonstrations(model: Any, queries: Sequence[Any] = QUERIES, **options: Any) -> Any:
    return al.build_prompts(model.tokenizer, TASK, DEMOS, queries, **options)


def in_order(batches: Sequence[al.PromptBatch]) -> list[al.PromptBatch]:
    prompts = [batch.prompt(k) for batch in batches for k in range(len(batch))]
    return sorted(prompts, key=lambda prompt: int(prompt.index))


def start_of(prompt: al.PromptBatch) -> int:
    if prompt.has_label_words:
        return int(prompt.query_start)
    return prompt.segments[0].tolist().index(prompt.segment_names.index("query"))


def spans_of(prompt: al.PromptBatch) -> dict[str, tuple[int, int]]:
    if prompt.has_label_words:
        ends, last = prompt.label_ends[0].tolist(), int(prompt.query_start) - 1
        after = last - ends[-1]
        starts = [int(prompt.begins_with_bos), *(end + after + 1 for end in ends[:-1])]
        pairs = zip(starts, [end + after for end in ends], strict=True)
        return {f"demonstration {k + 1}": pair for k, pair in enumerate(pairs)}
    spans = {}
    for number, name in enumerate(prompt.segment_names):
        inside = (prompt.segments[0] == number).nonzero().flatten().tolist()
        if inside and name != "query":
            spans[name] = inside[0], inside[-1]
    return spans


def attentions(weights: Any, prompt: al.PromptBatch) -> Tensor:
    with torch.no_grad():
        out = weights(prompt.tokens, output_attentions=True, use_cache=False)
    return torch.stack(out.attentions)[:, 0]


def qrhead(weights: Any, prompt: al.PromptBatch, null: al.PromptBatch) -> dict[str, Tensor]:
    start = start_of(prompt)
    scores = attentions(weights, prompt)[:, :, start:].mean(2)
    of_null = attentions(weights, null)[:, :, start:].mean(2)
    least = min(scores.shape[-1], of_null.shape[-1])
    calibrated = scores[:, :, :least] - of_null[:, :, :least]
    by_document = {}
    for name, (first, last) in spans_of(prompt).items():
        tokens = calibrated[:, :, first : last + 1]
        threshold = tokens.mean(dim=-1) - 2 * tokens.std(dim=-1)
        masked = tokens.masked_fill(~(tokens > threshold.unsqueeze(-1)), 0.0)
        # Theirs is 0 for a single token, whose deviation is NaN.
        by_document[name] = tokens[..., 0] if first == last else masked.sum(dim=-1)
    return by_document


def expected(
    weights: Any, batches: Any, null: Any, right: Sequence[Sequence[str]]
) -> dict[str, Tensor]:
    scores, raw, found = [], [], []
    for prompt, other, names in zip(in_order(batches), in_order(null), right, strict=True):
        of = qrhead(weights, prompt, other)
        attention = attentions(weights, prompt)[:, :, start_of(prompt) :].mean(2)
        spans = [spans_of(prompt)[name] for name in names]
        scores.append(sum(of[name] for name in names))
        raw.append(sum(attention[..., first : last + 1].sum(-1) for first, last in spans))
        best = torch.stack([*of.values()]).argmax(0)
        found.append(sum(best == [*of].index(name) for name in names))
    return {name: torch.stack([*map(torch.as_tensor, each)]).double().mean(0)
            for name, each in {"score": scores, "raw": raw, "found": found}.items()}  # fmt: skip


# The softmax of Llama is computed in float32 whatever the type of the model.
@pytest.mark.slow("many passes")
@pytest.mark.parametrize(("make", "tolerance"), [(tiny_gpt2, 1e-14), (tiny_llama, 1e-7)])
def test_it_equals_the_steps_of_qrhead(make: Any, tolerance: float, request: Any) -> None:
    """Documents that not all prompts have, one of a single token, several right; demonstrations."""
    name = "byte_level" if make is tiny_gpt2 else "sentencepiece_like"
    tokenizer, hooked = request.getfixturevalue(name), request.getfixturevalue("hooked")
    weights, same = (make(len(tokenizer)).double() for _ in range(2))
    weights.set_attn_implementation("eager")
    model = hooked(same, tokenizer)
    ours, null = documents(model, padding_side="left"), documents(model, " N/A", batch_size=2)
    right: list[Any] = [names[0] if len(names) == 1 else names for names in RIGHT]
    record = al.retrieval_heads(model, ours, null, right=right, **QUIET)
    cases = [(record, expected(weights, documents(model), null, RIGHT))]
    prompts, null = demonstrations(model, batch_size=2), demonstrations(model, ["N/A"] * 5)
    labels = [(f"demonstration {k}", demo.label) for k, demo in enumerate(DEMOS, start=1)]
    names = [[name for name, label in labels if label == query.label] for query in QUERIES]
    record = al.retrieval_heads(model, prompts, null, **QUIET)
    cases.append((record, expected(weights, prompts, null, names)))
    for record, numbers in cases:
        for name, values in numbers.items():
            torch.testing.assert_close(getattr(record, name), values, rtol=1e-12, atol=tolerance)
        assert record.score.abs().max() > 0.01 and record.found.unique().numel() > 1


@pytest.mark.slow("many passes")
def test_prompts_of_two_calls_have_the_same_numbers_of_queries(gpt2: Any) -> None:
    null = demonstrations(gpt2, ["N/A"] * 10, batch_size=3)
    both = [*demonstrations(gpt2), *demonstrations(gpt2, QUERIES[::-1])]
    twice = al.retrieval_heads(gpt2, both, null, **QUIET)
    null = demonstrations(gpt2, ["N/A"] * 5)
    once = al.retrieval_heads(gpt2, demonstrations(gpt2), null, **QUIET)
    torch.testing.assert_close(twice.score, once.score)
    assert once.info["passes"] == "native"


@pytest.mark.quick_cases("many passes", "demonstrations")
@pytest.mark.parametrize("of", ["demonstrations", "documents"])
def test_the_best_heads_are_cut_and_as_many_random_ones(of: str, request: Any) -> None:
    """Against plain transformers with the scores of the same edges cut, by KL of single prompts.

    Of two heads a layer most seeds draw the same; the two of these draws do not.
    """
    tokenizer, hooked = request.getfixturevalue("byte_level"), request.getfixturevalue("hooked")
    weights, same = (tiny_gpt2(len(tokenizer)).double() for _ in range(2))
    weights.set_attn_implementation("eager")
    model = hooked(same, tokenizer)
    case: Any = documents(model), documents(model, " N/A"), RIGHT
    if of == "demonstrations":
        case = demonstrations(model), demonstrations(model, ["N/A"] * 5), None
    batches, null, right = case
    record = al.retrieval_heads(model, batches, null, right=right, **QUIET)
    site = record.top(3)
    chosen = {divmod(k, 2) for k in record.score.flatten().argsort(descending=True)[:3].tolist()}
    heads: Any = site.heads
    assert {(layer, head) for layer, of in heads.items() for head in of} == chosen
    lost = al.run(model, batches, [record.masking(3, draws=2, seed=5)], **QUIET)
    masked = lost["retrieval_masking"]
    assert masked.axis_names("site") == ("top 3 heads",)
    drawn = al.sites.random_heads(model, site, 6)
    for where, kl in ((site, masked.kl[0]), (drawn, masked.random_kl[1, 0])):
        assert where.layers_of(model) == site.layers_of(model)
        by_hand = []
        for prompt in in_order(batches):
            length, start = prompt.tokens.shape[1], start_of(prompt)
            cut = torch.zeros(model.cfg.n_layers, 2, length, length, dtype=torch.bool)
            for first, last in spans_of(prompt).values():
                for layer in where.layers_of(model):
                    cut[layer, where.heads_of(model, layer), start:, first : last + 1] = True
            of_plain = plain.Prompt(prompt.tokens, [], [], prompt.tokens[0], prompt.tokens[0])
            p = plain.logits_of(weights, of_plain).log_softmax(-1)
            q = plain.with_edits(weights, of_plain, cut=cut).log_softmax(-1)
            by_hand.append((p.exp() * (p - q)).sum())
        assert float(kl) == pytest.approx(float(torch.stack(by_hand).mean()), rel=1e-8)
        assert float(kl) > 1e-4
    assert masked.plot().data[1].name == "random heads cut, mean"


def test_bad_input_is_refused_before_any_pass(gpt2: Any) -> None:
    ours, null = documents(gpt2), documents(gpt2, " N/A")
    labels, texts = demonstrations(gpt2), demonstrations(gpt2, [each.text for each in QUERIES])
    build = partial(al.build_segments, gpt2.tokenizer)

    def of(*pieces: Any) -> Any:
        return build([[(name, text) for name, text in pieces]])

    d0, d1, query = ("d0", " One town."), ("d1", " A river."), ("query", " Who?")
    none = of(d0, d1, ("query", " N/A"))
    for batches, nulls, right, message in (
        (ours, null[:0], RIGHT, "no batches to run"),
        (ours, none, RIGHT, "each of 3 prompts needs one in null.*got 1 and 3"),
        (ours, null, RIGHT[:2], "got 3 and 2"),
        (ours, null, None, r"prompt 0 needs right documents among \['d0', .*; got None"),
        (ours, null, ["d1", "d2", "d4"], "prompt 2 needs right documents.*got 'd4'"),
        (ours, null, ["d1", "d2", "d3"], "prompt 2 needs right documents.*with tokens; got 'd3'"),
        (ours, null, [["d0", "d1", "d2"], "d2", "d0"], "prompt 0 needs a document that is not"),
        (of(d1, query), of(("d1", " A town."), query), ["d1"], "in null the same tokens before"),
        (of(d0, d1), none, ["d0"], "no segment 'query'"),
        (of(query, d0, d1), of(query, d0, d1), ["d0"], "prompt 0 needs a segment 'query' after a"),
        (of(d0, query, d1), of(d0, query, d1), ["d0"], "needs no document after the query begins"),
        (texts, labels, None, "retrieval_heads needs the true label of each query"),
    ):
        with pytest.raises(AnchorlensError, match=message), does_not_run(gpt2):
            al.retrieval_heads(gpt2, batches, nulls, right=right, **QUIET)
    fields: dict[str, Any] = dict.fromkeys(("score", "raw", "found"), torch.ones(3, 2))
    with pytest.raises(AnchorlensError, match="count"):
        al.records.RetrievalHeadsRecord(**fields).top(0)
