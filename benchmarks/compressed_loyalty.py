"""Loyalty and accuracy of a real model after compressed contexts: Table 2 with intervals.

python benchmarks/compressed_loyalty.py --model M --train train.jsonl --test test.jsonl
"""

import argparse

import torch

import anchorlens as al


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="trec")
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    options = parser.parse_args()

    model = al.load_model(options.model, dtype=torch.float32)
    pool, tests = al.load_examples(options.train), al.load_examples(options.test)
    batches: list[al.PromptBatch] = []
    for seed in options.seeds:
        demos = al.sample_demonstrations(pool, seed=seed)
        queries = al.sample_queries(tests, options.queries, seed, exclude=demos)
        batches += al.build_prompts(
            model.tokenizer, al.TASKS[options.task], demos, queries, batch_size=16
        )
    contexts = {"anchors": al.compress}
    asked = al.ContextComparison(contexts, draws=20, repeats=0)
    record = al.run(model, batches, [asked])["contexts"]
    for name, axes in record.axes().items():
        value = getattr(record, name)
        if axes == ("draw",):
            print(f"{name:24}{value.mean():12.3f} (draws {value.min():.3f} to {value.max():.3f})")
        elif name in record.intervals and axes in ((), ("context",)):
            low, high = record.intervals[name].flatten()
            print(f"{name:24}{value.item():12.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
