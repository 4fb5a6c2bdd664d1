"""Do label words anchor the predictions of a real model? The paper's Figures 3 to 5 with controls.

    python benchmarks/label_words.py --model M --train train.jsonl --test test.jsonl

The seeds are fixed beforehand, and all are reported. 95 % intervals are bootstrapped over prompts;
they are paired if two runs of the same prompts are compared.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import anchorlens as al
from anchorlens.prompts.examples import sample_queries


def interval(values: np.ndarray, seed: int = 0) -> str:
    """Mean and 95 % bootstrap interval over prompts."""
    generator = np.random.default_rng(seed)
    means = [generator.choice(values, len(values)).mean() for _ in range(2000)]
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{values.mean():6.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True, eq=False, kw_only=True)
class LastThirdRecord(al.Record):
    """The mean of AUCROC_l over the last third of the layers."""

    mean: Float[Tensor, ""]


@dataclass(frozen=True)
class LastThird(al.AttentionAUCROC):
    """AttentionAUCROC with a single number, which gets its own interval."""

    name: str = "last_third"

    def result(self, rows: Any) -> Any:
        by_layer = super().result(rows).aucroc
        return LastThirdRecord(mean=by_layer[-(len(by_layer) // 3) :].mean())


def mean_of(record: Any) -> str:
    low, high = record.intervals["mean"]
    return f"{float(record.mean):.3f} [{float(low):.3f}, {float(high):.3f}]"


def random_twin(model_name: str, tokenizer: object) -> object:
    """The same architecture with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_name)
    return al.load_model(AutoModelForCausalLM.from_config(config).float(), tokenizer=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name or local folder")
    parser.add_argument("--train", required=True, help="examples for demonstrations (TREC)")
    parser.add_argument("--test", required=True, help="examples for queries (TREC)")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("label-words"))
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    model = al.load_model(options.model, dtype=torch.float32)
    train, test = al.load_examples(options.train), al.load_examples(options.test)
    seeds = {}
    for seed in (42, 43, 44):
        demos = al.sample_demonstrations(train, shots=1, seed=seed)
        queries = sample_queries(test, options.queries, seed)
        seeds[seed] = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)

    all_batches = [batch for batches in seeds.values() for batch in batches]
    metrics: list[al.Metric] = [
        al.SaliencyFlows(),
        al.AttentionAUCROC(),
        al.AnchorDistances(),
        LastThird(),
    ]
    results = al.run(model, all_batches, metrics)
    for name, record in results.items():
        record.save(options.out / f"{name}.safetensors")
    aucroc = results["attention_aucroc"].aucroc
    print(f"accuracy {float(results['anchor_distances'].accuracy):.3f}")
    print("AUCROC_l", [round(float(value), 3) for value in aucroc])
    print(f"AUCROC_l, mean of the last third, all seeds: {mean_of(results['last_third'])}")
    for seed, batches in seeds.items():
        of_seed = al.run(model, batches, [LastThird()])["last_third"]
        print(f"  seed {seed}: {mean_of(of_seed)}")

    flows = results["saliency_flows"]
    twin = random_twin(options.model, model.tokenizer)
    control = al.run(twin, all_batches, [al.SaliencyFlows()])["saliency_flows"]  # type: ignore[arg-type]
    for name, record in (("trained", flows), ("random weights", control)):
        low, high = record.intervals["pq_over_tq"]
        bounds = zip(record.pq_over_tq, low, high, strict=True)
        ratios = "  ".join(f"{value:.2f} [{a:.2f}, {b:.2f}]" for value, a, b in bounds)
        print(f"S_pq / S_tq, {name}: {ratios}; S_pq share last layer {record.share[-1, 1]:.3f}")

    for keep_bos in (False, True):
        if keep_bos and not all_batches[0].begins_with_bos:
            continue
        first, last = list[Any](), list[Any]()
        ends = (
            {"first": al.Site(range(5), keep_bos=keep_bos)},
            {"last": al.Site(range(-5, 0), keep_bos=keep_bos)},
        )
        for seed, batches in seeds.items():
            asked = [
                al.EdgeSweep.isolation(ends[0], draws=options.draws, name="first"),
                al.EdgeSweep.isolation(ends[1], draws=1, name="last"),
            ]
            for name, record in al.run(model, batches, asked).items():
                record.save(options.out / f"{name}5-{seed}-{keep_bos}.safetensors")
                (first if name == "first" else last).append(record)
        print(f"\nisolated, edge to BOS {'kept' if keep_bos else 'cut'}")
        for seeds_named, early_records, late_records in [
            *((f"seed {seed}", [a], [b]) for seed, a, b in zip(seeds, first, last, strict=True)),
            ("all seeds", first, last),
        ]:
            for kind, field in (("word", "word_overlap"), ("label", "label_kept")):
                early = torch.cat([getattr(each, field)[..., 0] for each in early_records]).numpy()
                late = torch.cat([getattr(each, field)[..., 0] for each in late_records]).numpy()
                draws = torch.cat(
                    [getattr(each, f"random_{field}")[..., 0] for each in early_records]
                ).numpy()
                means = draws.mean(0)
                print(
                    f"  {seeds_named:<10}{kind} loyalty: first 5 {interval(early)}, "
                    f"last 5 {interval(late)}, random first 5 {interval(draws.mean(1))} "
                    f"(draws {means.min():.2f} to {means.max():.2f}); "
                    f"random - first 5 {interval(draws.mean(1) - early)}, "
                    f"last 5 - first 5 {interval(late - early)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
