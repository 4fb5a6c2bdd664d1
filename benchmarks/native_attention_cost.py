"""Cost of wrapped attention of transformers, compared with attention that the bridge computes.

    python benchmarks/native_attention_cost.py

The bridge computes the attention of a random Llama of GPT-2's size itself. Its modules are then
wrapped like those of GPT-J, so the same model runs with both kinds of attention. Prints the
ratios of wall times of saliency flows and of a plain forward pass, measured in turns, and the ratio
of peak memory. Each peak is measured in a separate process.
"""

import argparse
import resource
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import anchorlens as al
from anchorlens.models import native_attention
from anchorlens.passes.forward import run_pass
from benchmarks.saliency_cost import byte_level_tokenizer, seconds


def llama_of_gpt2_size(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
    )
    return al.load_model(LlamaForCausalLM(config).eval(), tokenizer=tokenizer, device="cpu")


def wrap(model: Any) -> None:
    """Do what prepare_model does with the modules of GPT-J."""
    for block in model.blocks:
        vars(block.attn)["forward"] = partial(native_attention._run_native, block.attn)


def main(variant: str | None, repeats: int) -> None:
    model = llama_of_gpt2_size(byte_level_tokenizer())
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, shots=1, seed=42)
    queries = (examples * 2)[:32]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries, batch_size=8)

    def flows() -> Any:
        return al.run(model, batches, [al.SaliencyFlows()], resamples=0, progress=False)

    def forward() -> Any:
        return [run_pass(model, batch) for batch in batches]

    if variant:  # in a separate process, to measure peak memory
        if variant == "wrapped":
            wrap(model)
        flows()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    native = flows()["saliency_flows"].flows
    wrap(model)
    wrapped = flows()["saliency_flows"].flows
    difference = float((wrapped - native).abs().max() / native.max())
    print(f"relative difference of flows: {difference:.1e}")
    for name, work in (("saliency flows", flows), ("plain forward", forward)):
        ratios = []
        for _ in range(repeats):
            wrap(model)
            with_wrapping = seconds(work)
            native_attention.unwrap_model(model)
            ratios.append(with_wrapping / seconds(work))
        print(
            f"{name}: wrapped / native {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    peaks = {}
    for name in ("wrapped", "native"):
        command = [sys.executable, __file__, "--way", name]
        completed = subprocess.run(command, capture_output=True, check=True, text=True)
        peaks[name] = int(completed.stdout)
    print(f"peak memory: wrapped / native {peaks['wrapped'] / peaks['native']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["wrapped", "native"], help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    main(options.way, options.repeats)
