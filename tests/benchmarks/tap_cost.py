"""Cost of attention that is tapped against attention that the bridge rebuilds.

    python tests/benchmarks/tap_cost.py

A random Llama of GPT-2's size, which TransformerLens rebuilds; its modules are then tapped as those
of GPT-J are, so that the same model runs both ways. Prints the ratio of wall times, the two in
turns, of saliency flows and of a plain forward, and the ratio of peak memory, each in a process of
its own.
"""

import argparse
import resource
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from saliency_cost import byte_level_tokenizer, seconds
from transformers import LlamaConfig, LlamaForCausalLM

import anchorlens as al
from anchorlens.models import native_attention
from anchorlens.passes.forward import run_pass


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


def tap(model: Any) -> None:
    """What prepare_model does with the modules of GPT-J."""
    for block in model.blocks:
        vars(block.attn)["forward"] = partial(native_attention._run_native, block.attn)


def main(way: str | None, repeats: int) -> None:
    model = llama_of_gpt2_size(byte_level_tokenizer())
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, shots=1, seed=42)
    queries = (examples * 2)[:32]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries, batch_size=8)

    def flows() -> Any:
        return al.run(model, batches, [al.SaliencyFlows()], resamples=0, progress=False)

    def forward() -> Any:
        return [run_pass(model, batch) for batch in batches]

    if way:  # a process of its own, for its peak memory
        if way == "tapped":
            tap(model)
        flows()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    rebuilt = flows()["saliency_flows"].flows
    tap(model)
    tapped = flows()["saliency_flows"].flows
    difference = float((tapped - rebuilt).abs().max() / rebuilt.max())
    print(f"relative difference of flows: {difference:.1e}")
    for name, work in (("saliency flows", flows), ("plain forward", forward)):
        ratios = []
        for _ in range(repeats):
            tap(model)
            with_taps = seconds(work)
            native_attention.restore(model)
            ratios.append(with_taps / seconds(work))
        print(
            f"{name}: tapped / rebuilt {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    peaks = {}
    for name in ("tapped", "rebuilt"):
        command = [sys.executable, __file__, "--way", name]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        peaks[name] = int(done.stdout)
    print(f"peak memory: tapped / rebuilt {peaks['tapped'] / peaks['rebuilt']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["tapped", "rebuilt"], help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    main(options.way, options.repeats)
