"""Speed, compared with one prompt at a time, with naive TransformerLens, and with the floor.

    python benchmarks/speed.py --model M --train F --test F

Each table is one run. Because a machine's speed drifts, the variants take turns: in every turn a
fast variant does the whole work, and a slow variant a part of it. The printed largest differences
show that the variants give the same numbers. *One prompt at a time* is the procedure of the paper's
published code in plain transformers (``published_way.py``). *Naive TransformerLens* runs each
prompt with ``run_with_hooks`` and takes the last of all logits. The *floor* is plain transformers
in batches over only the tokens that are needed, with only the logits of target positions.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import anchorlens as al
from anchorlens.metrics.question import no_hooks
from anchorlens.models.read_weights import read_weights
from anchorlens.prompts.batch import after_shared
from anchorlens.runs.way import Way, way_of
from benchmarks import published_way
from benchmarks.saliency_cost import byte_level_tokenizer, plain_transformers

Batches = Sequence[al.PromptBatch]
QUIET: dict[str, Any] = {"progress": False}
DRAW = 0
NAIVE = 3  # prompts of each batch; more would take too long


def in_turns(
    turns: int,
    whole: Mapping[str, Callable[[], Any]],
    parts: Mapping[str, Callable[[Batches], Any]] | None = None,
    batches: Batches = (),
) -> dict[str, float]:
    """Seconds of each variant for all batches: the mean over turns, or the sum of its parts."""
    parts = parts or {}
    turns = min(turns, len(batches)) if parts else turns
    spent = dict.fromkeys([*whole, *parts], 0.0)
    for turn in range(turns):
        part = batches[turn::turns]
        work = dict(whole) | {name: partial(variant, part) for name, variant in parts.items()}
        for name, do in work.items():
            begin = time.perf_counter()
            do()
            spent[name] += (time.perf_counter() - begin) / (turns if name in whole else 1)
        so_far = ", ".join(f"{name} {value:.1f}" for name, value in spent.items())
        print(f"turn {turn + 1} of {turns}: {so_far}", file=sys.stderr, flush=True)
    return spent


def print_seconds(title: str, seconds: Mapping[str, float], ours: str, off: str) -> None:
    print(f"\n{title}\n\n| | seconds | times ours |\n| --- | --- | --- |")
    for name, value in seconds.items():
        print(f"| {name} | {value:.1f} | {value / seconds[ours]:.2f} |")
    print(f"\n{off}", flush=True)


def difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


def isolation(weights: Any, model: Any, batches: Batches, turns: int) -> None:
    """AUCROC, and loyalty with isolated words in the first and last 5 layers, with a control."""
    sites = al.sites.first_and_last(model, [5])
    cuts = cuts_of(model, sites)
    records: dict[str, Any] = {}
    passes: list[Any] = []  # for each part: rows for AUCROC, clean logits, isolated logits

    def ours() -> None:
        records.update(isolation_and_aucroc(model, batches, sites))

    def one_at_a_time(part: Batches) -> None:
        rows, clean = published_way.attention_and_logits(weights, part)
        passes.append((rows, clean, published_way.isolated_logits(weights, part, cuts)))

    def naive(part: Batches) -> None:
        for prompt in (batch.prompt(row) for batch in part for row in range(NAIVE)):
            hooks: list[Any] = [[]]
            hooks += [
                al.isolate_labels(model, prompt, layers)
                if draw is None
                else al.hooks.isolate_random(model, prompt, layers, seed=draw)
                for layers, draw in cuts.values()
            ]
            with torch.no_grad():
                for change in hooks:
                    model.run_with_hooks(prompt.tokens, fwd_hooks=change)[:, -1].clone()

    shared = way_of(model, batches, [no_hooks])

    def floor() -> None:
        for _ in range(1 + len(cuts)):
            queries_after_demonstrations(weights, shared, batches)

    naive_name = f"naive TransformerLens, without AUCROC ({NAIVE} prompts of each batch)"
    whole = {"anchorlens": ours, "floor: plain passes of all settings over the same tokens": floor}
    parts = {"one prompt at a time, target logits only": one_at_a_time, naive_name: naive}
    seconds = in_turns(turns, whole, parts, batches)
    seconds[naive_name] *= sum(map(len, batches)) / (NAIVE * len(batches))
    auc, words = indices_of(passes, batches[0].label_token_ids)
    isolated = records["isolation"]
    ours_by_name = {f"{s}/None": isolated.word_loyalty[k] for k, s in enumerate(sites)}
    random = isolated.random_word_loyalty[0]
    ours_by_name |= {f"{s}/{DRAW}": random[k] for k, s in enumerate(sites)}
    off_auc = float((records["attention_aucroc"].aucroc - auc).abs().max())
    off_words = max(float((ours_by_name[name] - words[name]).abs()) for name in words)
    print_seconds(
        f"AUCROC and loyalty, first and last 5 layers with a control, {prompts(batches)}",
        seconds,
        "anchorlens",
        f"AUCROC differs by {off_auc:.1e}, word loyalty by {off_words:.1e}",
    )


def indices_of(passes: Sequence[Any], ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """AUCROC and word loyalties from the passes of one prompt at a time."""
    rows, clean, cut = zip(*passes, strict=True)
    joined = {name: torch.cat([part[name] for part in rows]) for name in rows[0]}
    of_all = {name: torch.cat([part[name] for part in cut]) for name in cut[0]}
    words = {
        name: al.metrics.loyalty(torch.cat(clean), logits, ids).word_loyalty
        for name, logits in of_all.items()
    }
    contributions = al.Contributions(joined, joined["demonstrations_id"])
    return al.AttentionAUCROC().result(contributions).aucroc, words


def isolation_and_aucroc(
    model: Any, batches: Batches, sites: Mapping[str, al.Site]
) -> dict[str, Any]:
    """All numbers of the first table in one call."""
    asked = [al.AttentionAUCROC(), al.EdgeSweep.isolation(sites, draws=1, seed=DRAW)]
    return al.run(model, batches, asked, resamples=0, **QUIET)


def cuts_of(model: Any, sites: Mapping[str, al.Site]) -> dict[str, Any]:
    """The layers and the draw of each change; a draw of None isolates the label words."""
    numbers = {name: site.layers_of(model) for name, site in sites.items()}
    return {f"{name}/{draw}": (numbers[name], draw) for name in sites for draw in (None, DRAW)}


def queries_after_demonstrations(weights: Any, way: Way, batches: Batches) -> None:
    """The demonstrations once, then the queries in batches after their keys and values."""
    keys: dict[int, Any] = {}
    with torch.no_grad():
        for batch in batches:
            ready, _ = after_shared(batch, way.lengths)
            name, start = int(batch.demonstrations_id[0]), ready.first_query
            if name not in keys:
                keys[name] = DynamicCache()
                weights.base_model(
                    ready.tokens[:1, :start], past_key_values=keys[name], use_cache=True
                )
            cache = DynamicCache()
            for layer, cached in enumerate(keys[name].layers):
                wide = (len(batch), -1, -1, -1)
                cache.update(cached.keys.expand(wide), cached.values.expand(wide), layer)
            hidden = weights.base_model(
                ready.tokens[:, start:],
                past_key_values=cache,
                use_cache=True,
                attention_mask=ready.attention_mask.long(),
            ).last_hidden_state
            rows = torch.arange(len(batch))
            weights.get_output_embeddings()(hidden[rows, ready.target_positions - start])


def flows(weights: Any, model: Any, batches: Batches, turns: int) -> None:
    """Saliency flows of all layers."""
    ours_by_name: dict[str, Tensor] = {}
    one_at_a_time: list[Tensor] = []

    def ours() -> None:
        results = al.run(model, batches, [al.SaliencyFlows()], resamples=0, **QUIET)
        ours_by_name["flows"] = results["saliency_flows"].flows

    whole = {
        "anchorlens": ours,
        "floor: plain frozen forward and backward": lambda: plain_transformers(weights, batches),
    }
    parts: dict[str, Callable[[Batches], Any]] = {
        "one prompt at a time": lambda part: one_at_a_time.append(
            published_way.flows(weights, part)
        ),
        "one prompt at a time, target logits only": partial(
            published_way.flows, weights, logits_to_keep=1
        ),
    }
    seconds = in_turns(turns, whole, parts, batches)
    off = difference(ours_by_name["flows"], torch.cat(one_at_a_time).double().mean(0))
    title = f"Saliency flows of all layers, {prompts(batches)}"
    print_seconds(title, seconds, "anchorlens", f"flows differ by {off:.1e} of the largest")


def whole_run(weights: Any, model: Any, batches: Batches, turns: int) -> None:
    """al.run with AUCROC and accuracy, as a user calls it, compared with plain passes."""
    metrics: list[al.Metric] = [al.AttentionAUCROC(), al.Accuracy()]
    way = way_of(model, batches, [no_hooks])
    variants = {
        "al.run, 200 bootstrap resamples": lambda: al.run(model, batches, metrics, **QUIET),
        "al.run, no intervals": lambda: al.run(model, batches, metrics, resamples=0, **QUIET),
        "floor: plain passes": lambda: queries_after_demonstrations(weights, way, batches),
    }
    seconds = in_turns(turns, variants)
    title = f"al.run, AUCROC and accuracy, {prompts(batches)}"
    print_seconds(title, seconds, next(iter(variants)), "")


def prompts(batches: Batches) -> str:
    count, length = sum(map(len, batches)), max(batch.tokens.shape[1] for batch in batches)
    return f"{count} prompts of up to {length} tokens in batches of {len(batches[0])}"


def growth() -> None:
    """AUCROC and isolation on small random GPT-2s, compared with one prompt at a time."""
    tokenizer = byte_level_tokenizer()
    examples = al.load_examples("questions")
    task = al.TASKS["trec"]
    print("\n| layers | classes | shots | tokens | prompts | seconds | one prompt at a time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    base = {"layers": 12, "classes": 6, "shots": 1, "count": 20}
    changes: list[dict[str, int]] = [{}]
    changes += [{"count": count} for count in (10, 40, 80)] + [{"shots": n} for n in (2, 4)]
    changes += [{"layers": n} for n in (6, 24)] + [{"classes": n} for n in (2, 4)]
    for change in changes:
        size = base | change
        config = GPT2Config(
            vocab_size=1000,
            n_positions=4096,
            n_embd=384,
            n_head=6,
            n_layer=size["layers"],
            bos_token_id=0,
            eos_token_id=0,
        )
        weights = GPT2LMHeadModel(config).eval().requires_grad_(False)
        weights.set_attn_implementation("eager")
        model = al.load_model(weights, tokenizer=tokenizer, device="cpu")
        few_examples = [example for example in examples if (example.label or 0) < size["classes"]]
        few_labels = al.Task(task.template, labels=task.labels[: size["classes"]])
        demos = al.sample_demonstrations(few_examples, shots=size["shots"])
        queries = [example for example in few_examples * 4 if example not in demos]
        batches = al.build_prompts(
            model.tokenizer, few_labels, demos, queries[: size["count"]], batch_size=20
        )
        sites = al.sites.first_and_last(model, [5])
        cuts = cuts_of(model, sites)

        def one_at_a_time(part: Batches, weights: Any = weights, cuts: Any = cuts) -> None:
            published_way.attention_and_logits(weights, part)
            published_way.isolated_logits(weights, part, cuts)

        ours = partial(isolation_and_aucroc, model, batches, sites)
        seconds = in_turns(1, {"ours": ours}, {"one": one_at_a_time}, batches)
        length = max(batch.tokens.shape[1] for batch in batches)
        print(
            f"| {size['layers']} | {size['classes']} | {size['shots']} | {length} | "
            f"{size['count']} | {seconds['ours']:.1f} | {seconds['one'] / seconds['ours']:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--train", default="questions", help="examples for demonstrations (TREC)")
    parser.add_argument("--test", default="questions", help="examples for queries (TREC)")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    weights, _ = read_weights(options.model, None, "cpu", torch.float32)
    weights = weights.eval().requires_grad_(False)
    model = al.load_model(options.model, dtype=torch.float32)
    demos = al.sample_demonstrations(al.load_examples(options.train), shots=1, seed=42)
    test = al.load_examples(options.test)
    queries = [example for example in test if example not in demos]

    def batches(count: int, size: int) -> list[al.PromptBatch]:
        task = al.TASKS["trec"]
        return al.build_prompts(model.tokenizer, task, demos, queries[:count], batch_size=size)

    many = batches(options.queries, options.batch_size)
    isolation(weights, model, many, options.turns)
    whole_run(weights, model, many, options.turns)
    flows(weights, model, batches(64, 8), options.turns)
    growth()


if __name__ == "__main__":
    main()
