"""How many heads read label words, read the right ones, and copy into them, by third of the layers.

python examples/label_heads.py --model gpt2
"""

import argparse
from itertools import pairwise
from pathlib import Path

import anchorlens as al


def print_heads(record: al.Record) -> None:
    """Heads above the threshold for label words / for random positions, mean over prompts."""
    layers, heads, _ = record.share.shape
    scores = record.axis_names("score") or ()
    print("layers  heads" + "".join(f"{score:>14}" for score in scores))
    bounds = [layers * third // 3 for third in range(4)]
    for start, stop in pairwise(bounds):
        counts = (record.heads[start:stop].sum(0), record.random_heads[start:stop].sum(0))
        cells = [
            f"{label:6.1f} /{random:6.1f}"
            for label, random in zip(*(count.tolist() for count in counts), strict=True)
        ]
        print(f"{start:2} to {stop - 1:<2}{heads * (stop - start):5}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["questions", "sentiment"],
        help="bundled sets, or folders in --data-folder",
    )
    parser.add_argument("--data-folder", type=Path, help="with TASK/train.jsonl, test.jsonl")
    parser.add_argument("--queries", type=int, default=64, help="of each task, over all sets")
    parser.add_argument("--sets", type=int, default=4, help="sets of demonstrations")
    parser.add_argument("--seed", type=int, default=42, help="of the first set")
    options = parser.parse_args()

    model = al.load_model(options.model)
    for name in options.tasks:
        task = al.TASKS[name]
        pool, tests = (
            al.load_examples(options.data_folder / name / f"{split}.jsonl")
            if options.data_folder
            else al.load_examples(name, split=split)
            for split in ("train", "test")
        )
        batches: list[al.PromptBatch] = []
        # Copy does not depend on the query, so that one set of demonstrations is a single case.
        for seed in range(options.seed, options.seed + options.sets):
            demos = al.sample_demonstrations(pool, seed=seed)
            count = max(2, options.queries // options.sets)
            queries = al.sample_queries(tests, count, seed, exclude=demos)
            batches += al.build_prompts(model.tokenizer, task, demos, queries, batch_size=8)
        record = al.run(model, batches, [al.LabelHeads()])["label_heads"]
        print(f"\n{name}: {sum(map(len, batches))} prompts; heads for label words / at random")
        print_heads(record)
        record.plot().write_html(f"label_heads_{name}.html")


if __name__ == "__main__":
    main()
