"""All metrics of one run: against plain transformers, and what must not matter."""

from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import anchorlens as al
from anchorlens.metrics.aucroc import cumulative_excess
from anchorlens.metrics.distances import pair_auc
from tests.metrics.test_aucroc import reference
from tests.metrics.test_distances import published, uneven_questions
from tests.references import plain
from tests.references.nulls import jackknife
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

MAKE: dict[str, Any] = {
    "gpt2": (tiny_gpt2, "byte_level"),
    "llama": (tiny_llama, "sentencepiece_like"),
    "gemma3": (tiny_gemma3, "sentencepiece_like"),
}
METRICS: list[al.Metric] = [
    al.SaliencyFlows(),
    al.SaliencyFlows(weight=al.weights.saliency_of_heads, name="of heads"),
    al.AttentionAUCROC(),
    al.AnchorDistances(),
    al.LabelHeads(draws=2),
]
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
# The limits of test_matrix.py in float64.
TOLERANCE = {"bridge": 1e-9, "processed": 1e-6, "hooked-transformer": 1e-6}


def sentiment(tokenizer: Any, **options: Any) -> list[al.PromptBatch]:
    examples = al.load_examples("sentiment")
    demos = al.sample_demonstrations(examples, shots=2, seed=3)
    queries = [example for example in examples if example not in demos][:13]
    return al.build_prompts(tokenizer, al.TASKS["sst2"], demos, queries, **options)


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
@pytest.mark.filterwarnings("ignore:some pairs of classes have no prompts")
@pytest.mark.parametrize("prompts_of", [uneven_questions, sentiment])
@pytest.mark.parametrize("name", MAKE)
def test_records_equal_plain_transformers(
    name: str, prompts_of: Any, hooked: Any, kind_of_model: str, request: pytest.FixtureRequest
) -> None:
    make, of_tokenizer = MAKE[name]
    tokenizer = request.getfixturevalue(of_tokenizer)
    weights, oracle = (make(len(tokenizer)).double() for _ in range(2))
    model = hooked(weights, tokenizer)
    oracle.set_attn_implementation("eager")
    both = [prompts_of(tokenizer, batch_size=5, padding_side=side) for side in ("left", "right")]
    with plain.everything_in_float64():
        results: Any = [al.run(model, batches, METRICS, **QUIET) for batches in both]
        prompts, same = (
            [prompt for batch in batches for prompt in plain.prompts_of(batch)] for batches in both
        )
        observed = [plain.observe(oracle, prompt) for prompt in prompts]
    assert [each.tokens.tolist() for each in prompts] == [each.tokens.tolist() for each in same]
    order = torch.cat([batch.index for batch in both[0]]).argsort()
    tolerance = TOLERANCE[kind_of_model]
    for expected in (
        *flows_by_hand(prompts, [each.products for each in observed], order),
        aucroc_by_hand(prompts, observed),
        distances_by_hand(prompts, observed),
        heads_by_hand(both[0], prompts, observed),
    ):
        record_name = expected.pop("name")
        for number, field in product(range(2), expected):
            ours, values = getattr(results[number][record_name], field), expected[field]
            assert torch.equal(ours.isnan(), values.isnan()), field
            assert difference(ours.nan_to_num(), values.nan_to_num()) <= tolerance, field


def test_attention_is_that_of_the_changed_run(gpt2: Any) -> None:
    """A target that cannot read label words has no attention to them, and an AUCROC of 0.5."""
    batches, metrics = questions(gpt2, 8), METRICS[2:5:2]

    def records(cut: Any, layers: Any) -> Any:
        hooks = lambda batch: al.block_edges(gpt2, batch, cut, layers)  # noqa: E731
        return al.run(gpt2, batches, metrics, hooks=hooks, **QUIET).values()

    aucroc, heads = records(al.edges.pq, range(3))
    assert (aucroc.aucroc == 0.5).all()
    assert not heads.scores[..., :3].any() and not heads.heads[:, :3].any()
    assert float(heads.scores[..., 3].min()) > 0
    assert float(heads.random_scores[..., 0].min()) > 0
    _, heads = records(al.edges.wp, 0)
    assert not heads.scores[0, :, 3].any() and float(heads.scores[..., 0].min()) > 0


def flows_by_hand(
    prompts: list[plain.Prompt], products: list[Tensor], order: Tensor
) -> list[dict[str, Any]]:
    """Saliency with the absolute value after the sum over heads, and before it."""

    def flows_of(maps: Tensor, prompt: plain.Prompt) -> Tensor:
        """The flows [layer, flow], and S_tq in a last column."""
        others = [j for j in range(prompt.target) if j not in prompt.anchors]
        rows = [
            [*plain.flows_of(of_layer, prompt), float(of_layer[prompt.target, others].mean())]
            for of_layer in maps
        ]
        return torch.tensor(rows, dtype=torch.double)

    def expected(name: str, maps: list[Tensor]) -> dict[str, Any]:
        pairs = zip(maps, prompts, strict=True)
        of_prompts = torch.stack([flows_of(*pair) for pair in pairs])
        flows, tq = of_prompts.mean(0)[:, :3], of_prompts.mean(0)[:, 3]
        share = flows / flows.sum(-1, keepdim=True)

        def change(rows: Tensor) -> Tensor:
            means = rows.mean(0)[:, :3]
            return means[2] / means[2].sum() - means[0] / means[0].sum()

        def over_ww(rows: Tensor) -> Tensor:
            means = rows.mean(0)[:, :3]
            return means / means[:, 2:]

        read_off = jackknife(lambda rows: rows.mean(0)[:, 1] / rows.mean(0)[:, 3], of_prompts)
        of_heads = [
            torch.stack([flows_of(head, prompt)[:, :3] for head in of_prompt.abs().unbind(1)], 1)
            for of_prompt, prompt in zip(products, prompts, strict=True)
        ]
        return {
            "name": name,
            "per_prompt": of_prompts[order, :, :3],
            "flows": flows,
            "share": share,
            "tq": tq,
            "pq_over_tq": read_off,
            # Three layers: the first is the first third, the last is the last third.
            "shallow_share": share[0],
            "deep_share": share[2],
            "share_change": jackknife(change, of_prompts),
            "deep_pq_over_tq": read_off[2],
            "over_ww": jackknife(over_ww, of_prompts).median(0).values,
            "per_head": torch.stack(of_heads).mean(0),
        }

    merged = [of_prompt.sum(1).abs() for of_prompt in products]
    apart = [of_prompt.abs().sum(1) for of_prompt in products]
    return [expected("saliency_flows", merged), expected("of heads", apart)]


def aucroc_by_hand(prompts: list[plain.Prompt], observed: list[plain.Observed]) -> dict[str, Any]:
    scores, predicted = [], []
    for prompt, each in zip(prompts, observed, strict=True):
        of_classes = torch.zeros(*each.attention.shape[:2], len(prompt.label_token_ids)).double()
        for position, label in zip(prompt.anchors, prompt.classes, strict=True):
            of_classes[..., label] += each.attention[:, :, prompt.target, position]
        scores.append(of_classes)
        predicted.append(each.logits[prompt.label_token_ids].argmax())
    of_heads, labels = torch.stack(scores), torch.stack(predicted)
    assert len(labels.unique()) > 1
    layers, heads = of_heads.shape[1:3]
    of_layers = [reference(of_heads[:, layer].sum(1), labels) for layer in range(layers)]
    aucroc = torch.tensor(of_layers, dtype=torch.double)
    per_head = [
        [reference(of_heads[:, layer, head], labels) for head in range(heads)]
        for layer in range(layers)
    ]
    return {
        "name": "attention_aucroc",
        "aucroc": aucroc,
        "per_head": torch.tensor(per_head, dtype=torch.double),
        "r": cumulative_excess(aucroc),
        "deep_aucroc": aucroc[2],
    }


def distances_by_hand(
    prompts: list[plain.Prompt], observed: list[plain.Observed]
) -> dict[str, Any]:
    count, layers = len(prompts[0].label_token_ids), len(observed[0].queries)
    of_class = [
        [p for p, label in zip(prompts[0].anchors, prompts[0].classes, strict=True) if label == k]
        for k in range(count)
    ]
    distances = []
    for layer in range(layers):
        queries = torch.stack([each.queries[layer][:, -1].flatten() for each in observed])
        keys = [[each.keys[layer][:, at].mean(1).flatten() for at in of_class] for each in observed]
        mean = torch.stack([torch.stack(of_prompt) for of_prompt in keys]).mean(0)
        distances.append(torch.from_numpy(published(queries, mean, 10)))
    distance = torch.stack(distances)
    logits = torch.stack([each.logits[prompts[0].label_token_ids] for each in observed])
    gold = torch.stack([prompt.gold for prompt in prompts])
    confusion = pair_auc(logits, gold)
    a, b = torch.ones_like(confusion).triu(1).nonzero().unbind(1)
    known = ~confusion[a, b].isnan()
    positions = torch.tensor([sum(at) / len(at) for at in of_class])

    def correlation(with_what: Tensor, chosen: Tensor) -> Tensor:
        if chosen.sum() < 3:
            return torch.full((layers,), torch.nan).double()
        pairs = [(of_layer[a, b][chosen], with_what[chosen]) for of_layer in distance]
        return torch.tensor([spearmanr(*pair).statistic for pair in pairs]).double()

    return {
        "name": "anchor_distances",
        "anchor_distance": distance,
        "pair_auc": confusion,
        "correlation": correlation(confusion[a, b], known),
        "position_correlation": correlation((positions[a] - positions[b]).abs(), known | True),
        "accuracy": (logits.argmax(1) == gold).double().mean(),
    }


def heads_by_hand(
    batches: list[al.PromptBatch], prompts: list[plain.Prompt], observed: list[plain.Observed]
) -> dict[str, Any]:
    """The scores at label words and at two draws of random positions, term by term."""
    drawn = []
    for batch in batches:
        after = batch.label_positions[:, :1]
        draws = [al.edges.random_positions(batch, seed, after=after) for seed in range(2)]
        for n, mask in enumerate(batch.attention_mask):
            drawn.append([draw[n][mask].nonzero().flatten().tolist() for draw in draws])
    scores, above = [], []
    for prompt, each, at_random in zip(prompts, observed, drawn, strict=True):
        predicted = int(each.logits[prompt.label_token_ids].argmax())
        count, n_classes = prompt.tokens.shape[1], len(prompt.label_token_ids)
        bounds = torch.tensor([5, 5 / n_classes, 5 / n_classes, 5]).double() / count
        of_prompt = [
            scores_of_prompt(each.attention, positions, prompt, predicted)
            for positions in (prompt.anchors, *at_random)
        ]
        scores.append(torch.stack(of_prompt))
        above.append((scores[-1] > bounds).double())
    means, shares = torch.stack(scores).mean(0), torch.stack(above).mean(0)
    heads, random_heads = shares[0].sum(1), shares[1:].mean(0).sum(1)
    assert 0 < float(shares[0].mean()) < 1 and (means[0, ..., 1] != means[0, ..., 2]).any()
    return {
        "name": "label_heads",
        "scores": means[0],
        "share": shares[0],
        "heads": heads,
        "random_scores": means[1:].mean(0),
        "random_share": shares[1:].mean(0),
        "random_heads": random_heads,
        "gap": heads - random_heads,
    }


def scores_of_prompt(
    attention: Tensor, positions: list[int], prompt: plain.Prompt, predicted: int
) -> Tensor:
    scores = torch.zeros(*attention.shape[:2], 4, dtype=torch.double)
    for position, label in zip(positions, prompt.classes, strict=True):
        to_anchor = attention[:, :, prompt.target, position]
        scores[..., 0] += to_anchor
        scores[..., 1] += to_anchor if label == int(prompt.gold) else -to_anchor
        scores[..., 2] += to_anchor if label == predicted else -to_anchor
        scores[..., 3] += attention[:, :, position, position - 1] / len(positions)
    return scores
