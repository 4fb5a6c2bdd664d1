"""The same model as a bridge and, on transformer-lens 3.9, as a HookedTransformer.

    python benchmarks/both_lines.py --model M --train train.jsonl --test test.jsonl
    PYTHONPATH=.venv/oldest python benchmarks/both_lines.py ...

Computes the numbers for each kind of model that the TransformerLens on the path has. Writes them
into the file `--numbers`, and compares them with the numbers that another line wrote there.
"""

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import anchorlens as al
from anchorlens.models.read_weights import read_weights
from tests.support.hooked_transformers import hooked_transformer


def indices_of(model: Any, train: Path, test: Path, queries: int) -> dict[str, list[float]]:
    demos = al.sample_demonstrations(al.load_examples(train), shots=1, seed=42)
    chosen = al.load_examples(test)[:queries]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, chosen, batch_size=8)
    isolation = al.EdgeSweep.isolation(al.sites.first_and_last(model, [5]), draws=2)
    asked = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(), isolation]
    results: Any = al.run(model, batches, asked, resamples=0)
    of_sites = results["isolation"]
    named = {
        f"{name}, {end} 5 layers": values[number]
        for name, values in (
            ("label loyalty", of_sites.label_loyalty),
            ("word loyalty", of_sites.word_loyalty),
            ("KL", of_sites.kl),
        )
        for number, end in enumerate(("first", "last"))
    } | {
        "AUCROC by layer": results["attention_aucroc"].aucroc,
        "share of flows": results["saliency_flows"].share,
        "anchor distances": results["anchor_distances"].anchor_distance,
    }
    return {name: values.flatten().tolist() for name, values in named.items()}


def main(options: argparse.Namespace) -> None:
    weights, tokenizer = read_weights(options.model, None, "cpu", torch.float32)
    weights.config.architectures = [type(weights).__name__]
    # Weights of a .gguf file are dequantised, but HookedTransformer refuses them with this entry.
    vars(weights.config).pop("quantization_config", None)
    line = f"transformer-lens {version('transformer-lens')}"
    kinds: dict[str, Callable[..., Any]] = {"bridge": al.load_model}
    if version("transformer-lens") < "4":
        kinds["HookedTransformer"] = partial(hooked_transformer, fold_value_biases=False)
    stored = json.loads(options.numbers.read_text()) if options.numbers.exists() else {}
    for kind, make in kinds.items():
        model = make(copy.deepcopy(weights), tokenizer=copy.deepcopy(tokenizer))
        al.prepare_model(model)
        computed = indices_of(model, options.train, options.test, options.queries)
        for other, numbers in stored.items():
            for name, values in numbers.items():
                pairs = zip(values, computed[name], strict=True)
                largest = max(abs(a - b) for a, b in pairs)
                print(f"{kind}, {line} - {other}: {name}: {largest:.1e}")
        stored[f"{kind}, {line}"] = computed
    options.numbers.write_text(json.dumps(stored))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=48)
    parser.add_argument("--numbers", type=Path, required=True)
    main(parser.parse_args())
