"""How far flows and AUCROC in bfloat16 and float16 are from float32.

    python benchmarks/precision.py --model M

Uses the bundled questions. Compares once with the float32 model (the difference for a user) and
once with a float32 model whose weights were rounded to the type (the difference from arithmetic
alone).
"""

import argparse
import copy
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models.read_weights import read_weights


def measure(weights: Any, tokenizer: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    model = al.load_model(
        copy.deepcopy(weights), tokenizer=copy.deepcopy(tokenizer), device=DEVICE, dtype=dtype
    )
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, shots=1, seed=42)
    queries = [example for example in examples if example not in demos][:24]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries, batch_size=8)
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC()]
    results: Any = al.run(model, batches, metrics, resamples=0)
    flows = results["saliency_flows"]
    return {
        "flow": flows.flows,
        "flow of one prompt": flows.per_prompt,
        "share": flows.share,
        "AUCROC": results["attention_aucroc"].aucroc,
    }


def compare(title: str, values_by_name: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in values_by_name.items():
        difference = (values - expected[name]).abs()
        # Shares and AUCROC are numbers from 0 to 1; for flows the difference is relative. Flows to
        # label words in the last layer are 0, because no later layer uses them.
        if name.startswith("flow"):
            difference = difference / expected[name]
        print(
            f"{title:42} {name:20} median {float(difference.nanmedian()):.4f}"
            f"  largest {float(difference[~difference.isnan()].max()):.4f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    DEVICE = options.device
    weights, tokenizer = read_weights(options.model, None, "cpu", torch.float32)
    exact = measure(weights, tokenizer, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = copy.deepcopy(weights).to(dtype).to(torch.float32)
        try:
            low_precision = measure(weights, tokenizer, dtype)
        except ModelError as error:  # Gemma 3 overflows in float16
            print(f"{dtype}: {error}")
            continue
        compare(f"{dtype} against float32", low_precision, exact)
        same_weights = measure(rounded, tokenizer, torch.float32)
        compare(f"{dtype}, arithmetic alone", low_precision, same_weights)
