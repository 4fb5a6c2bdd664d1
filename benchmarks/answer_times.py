"""Time of a query with whole prompts, with a cached prefix, and with a compressed context.

python benchmarks/answer_times.py --model M --task trec --train train.jsonl
"""

import argparse
from functools import partial
from typing import Any

import torch

import anchorlens as al

CONTEXTS: dict[str, Any] = {
    "cached": partial(al.compress, select=al.contexts.selection.everything),
    "compressed": al.compress,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="trec")
    parser.add_argument("--train", default="questions", help="jsonl file, or a bundled name")
    parser.add_argument("--queries", type=int, default=16)
    options = parser.parse_args()

    model = al.load_model(options.model, dtype=torch.float32)
    examples = al.load_examples(options.train)
    print(
        "| shots | tokens | batch | whole | cached | compressed | speed-up | over cached | kept |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for shots in (1, 2, 4, 8):
        demos = al.sample_demonstrations(examples, shots=shots)
        queries = [example for example in examples if example not in demos][: options.queries]
        for size in (1, 16):
            batches = al.build_prompts(
                model.tokenizer, al.TASKS[options.task], demos, queries, batch_size=size
            )
            asked = al.ContextComparison(CONTEXTS)
            times: Any = al.run(model, batches, [asked], resamples=0, progress=False)["contexts"]
            context = al.compress(model, batches[0])
            whole, (cached, compressed) = float(times.whole_seconds), times.seconds.tolist()
            tokens = int(torch.cat([batch.attention_mask.sum(1) for batch in batches]).sum())
            print(
                f"| {shots} | {tokens / len(queries):.0f} | {size} | "
                + " | ".join(f"{1e3 * time:.0f} ms" for time in (whole, cached, compressed))
                + f" | {whole / compressed:.1f} | {cached / compressed:.2f} "
                f"| {context.selected.sum()} of {len(context.selected)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
