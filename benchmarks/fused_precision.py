"""How far flows in bfloat16 are from float32, with whole patterns and with a fused attention.

    python benchmarks/fused_precision.py [--seeds 5]

Tiny random models of every architecture in bfloat16, against float32 models with the same rounded
weights. Prints for each the difference of S_wp, S_pq and S_ww as a share of the largest in their
layer, the mean over layers, flows and the seeds that run fused. Random weights are harsher than
trained ones.
"""

import argparse
import copy
import warnings
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.runs import way
from tests.references.architectures import ROWS
from tests.references.comparison import DEMONSTRATIONS, QUERIES, TASK, tokenizer
from tests.support.tiny_models import randomize


def flows(model: Any, is_fused: bool) -> Tensor:
    """[layer, flow]"""
    way.LARGE = 0 if is_fused else 2**31
    batches = al.build_prompts(tokenizer(), TASK, DEMONSTRATIONS, QUERIES)
    options: dict[str, Any] = {"resamples": 0, "progress": False, "share_prefix": False}
    record = al.run(model, batches, [al.SaliencyFlows()], **options)["saliency_flows"]
    if is_fused and not record.info.get("attention", "").startswith("fused: "):
        raise ModelError("its patterns stay whole")
    return record.flows.double()


def distances(row: Any, seed: int) -> list[float]:
    """Of whole patterns, and of a fused attention."""
    low = row.build(len(tokenizer()))
    randomize(low, seed=seed, scale=row.scale)
    low = low.to(torch.bfloat16)
    exact = flows(al.load_model(copy.deepcopy(low).float(), tokenizer=tokenizer()), False)
    model = al.load_model(low, tokenizer=tokenizer())
    sizes = exact.amax(-1, keepdim=True)
    return [
        float(((flows(model, is_fused) - exact).abs() / sizes).nanmean())
        for is_fused in (False, True)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for row in ROWS:
        found, reason = [], ""
        for seed in range(options.seeds):
            try:
                found.append(distances(row, seed))
            except al.AnchorlensError as error:
                reason = str(error).partition(";")[0][:80]
        whole, fused = torch.tensor(found).mean(0).tolist() if found else ("", "")
        print(
            f"| {row.name} | {whole:.3} | {fused:.3} | {len(found)} seeds | {reason} |", flush=True
        )
