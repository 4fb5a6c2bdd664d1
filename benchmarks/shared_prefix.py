"""Time that is saved by running shared demonstrations once, and the largest difference of numbers.

python benchmarks/shared_prefix.py --model M
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import anchorlens as al
from anchorlens.runs import way


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def largest_difference(ours: al.Record, theirs: al.Record) -> float:
    """The largest difference over all quantities, relative to the largest value of each."""
    differences = []
    for name, values in theirs.tensors().items():
        size = values.nan_to_num().abs().max().clamp(min=1e-30)
        differences.append((getattr(ours, name) - values).nan_to_num().abs().max() / size)
    return float(torch.stack(differences).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--queries", type=int, default=64)
    options = parser.parse_args()

    model = al.load_model(options.model, dtype=torch.float32)
    examples = al.load_examples("questions")
    quiet: dict[str, Any] = {"resamples": 0, "progress": False}
    metrics: list[al.Metric] = [al.AttentionAUCROC(), al.AnchorDistances(), al.Accuracy()]
    for shots in (1, 4):
        demos = al.sample_demonstrations(examples, shots=shots)
        queries = [example for example in examples if example not in demos][: options.queries]
        batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)

        def metrics_of(prompts: list[al.PromptBatch]) -> dict[str, al.Record]:
            return al.run(model, prompts, metrics, **quiet)

        def isolation_of(prompts: list[al.PromptBatch]) -> dict[str, al.Record]:
            sites = {"first 5 layers": al.Site(range(5))}
            return al.run(model, prompts, [al.EdgeSweep.isolation(sites)], **quiet)

        variants = {
            "AUCROC, distances, accuracy": metrics_of,
            "isolation, 10 controls": isolation_of,
        }
        for name, work in variants.items():
            shared_time, shared = timed(partial(work, batches))
            with patch.object(way, "shared_lengths", lambda *of: {}):
                whole_time, whole = timed(partial(work, batches))
            off = max(largest_difference(shared[key], whole[key]) for key in whole)
            status = next(iter(shared.values())).info["shared_prefix"]
            print(
                f"{shots} shots, {name}: {whole_time:.1f} s whole, {shared_time:.1f} s shared, "
                f"{whole_time / shared_time:.1f} times as fast; largest difference {off:.1e} "
                f"({status}; {len(queries)} queries)",
                flush=True,
            )


if __name__ == "__main__":
    main()
