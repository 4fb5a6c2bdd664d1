"""Memory and time of saliency flows over one long prompt, with fused attention and without.

    python benchmarks/long_prompts.py

A random model of GPT-2's size with enough positions and a small vocabulary runs one prompt with ten
label words. Each variant runs in a separate process, and the variants take turns. Peak memory is
the largest resident size during the pass minus the size before it, after a short prompt has warmed
the model up. The variants are

- ``floor``: a plain forward and backward pass of transformers with fused attention and frozen
  parameters, without flows;
- ``fused`` and ``fused-checkpointed``: ``al.run``, which fuses the attention of a long prompt;
- ``whole`` and ``checkpointed``: ``al.run`` with whole patterns. At 4096 tokens the first takes
  16 GB;
- ``transformers``: flows in plain transformers, which also stores the gradients of all patterns and
  takes half as much again (--length 2048).

    python benchmarks/long_prompts.py --ways floor fused-checkpointed --length 32768
    python benchmarks/long_prompts.py --ways floor fused --device cuda --dtype bfloat16

On a GPU the memory is what PyTorch allocated at most, minus what the model takes.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import anchorlens as al
from anchorlens.runs import way
from benchmarks.saliency_cost import byte_level_tokenizer, seconds

VARIANTS = ("transformers", "whole", "checkpointed", "floor", "fused-checkpointed", "fused")
MEASURED = ("memory", "seconds", "work")
LABELS = 10


def prompt(length: int, vocabulary: int) -> al.PromptBatch:
    generator = torch.Generator().manual_seed(0)
    return al.PromptBatch.from_positions(
        torch.randint(2, vocabulary, (1, length), generator=generator),
        label_positions=[[length * (k + 1) // (LABELS + 2) for k in range(LABELS)]],
        label_classes=[[k % 2 for k in range(LABELS)]],
        label_token_ids=[0, 1],
        gold=[0],
    )


def weights(length: int, vocabulary: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocabulary, n_positions=length, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def transformers_alone(model: Any, batch: al.PromptBatch) -> torch.Tensor:
    """Flows in plain transformers: each layer's attention times its gradient."""
    embedded = model.get_input_embeddings()(batch.tokens.to(model.device)).detach().requires_grad_()
    hidden = model.base_model(inputs_embeds=embedded, output_attentions=True)
    for attention in hidden.attentions:
        attention.retain_grad()
    logits = model.get_output_embeddings()(hidden.last_hidden_state[:, -1])
    al.losses.label_cross_entropy(logits, batch).sum().backward()
    chosen = [flow(batch)[0] for flow in (al.edges.wp, al.edges.pq, al.edges.ww)]
    flows = []
    for attention in hidden.attentions:
        saliency = (attention * attention.grad).sum(1).abs()[0]
        flows.append(torch.stack([saliency[edges].mean() for edges in chosen]))
    return torch.stack(flows).detach()


def floor(model: Any, batch: al.PromptBatch) -> torch.Tensor:
    """A plain forward and backward pass with fused attention; flows of zeros."""
    embedded = model.get_input_embeddings()(batch.tokens.to(model.device)).detach().requires_grad_()
    hidden = model.base_model(inputs_embeds=embedded).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, -1])
    al.losses.label_cross_entropy(logits, batch).sum().backward()
    return torch.zeros(model.config.n_layer, 3)


def memory_of(device: str) -> int:
    """Bytes in use now: resident ones of this process, or on a GPU what PyTorch allocated."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_memory_of(device: str) -> int:
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(variant: str, length: int, device: str, dtype: torch.dtype) -> None:
    """Run one variant in this process; print gigabytes, seconds and flows."""
    tokenizer = byte_level_tokenizer()
    model: Any = weights(length, len(tokenizer)).to(device, dtype)
    alone = {"transformers": transformers_alone, "floor": floor}.get(variant)
    if alone is not None:
        model.set_attn_implementation("sdpa" if variant == "floor" else "eager")
        model.requires_grad_(False)
    else:
        model = al.load_model(model, tokenizer=tokenizer, device=device, dtype=dtype)
    if not variant.startswith("fused"):
        way.LARGE = sys.maxsize

    def flows(batch: al.PromptBatch) -> torch.Tensor:
        if alone is not None:
            return alone(model, batch)
        results = al.run(
            model,
            [batch],
            [al.SaliencyFlows()],
            resamples=0,
            progress=False,
            gradient_checkpointing="checkpointed" in variant,
        )
        values: torch.Tensor = results["saliency_flows"].flows
        return values

    results: list[torch.Tensor] = []
    flows(prompt(64, len(tokenizer)))
    batch, before = prompt(length, len(tokenizer)), memory_of(device)
    started = time.process_time()
    took = seconds(lambda: results.append(flows(batch).cpu().float()))
    worked = time.process_time() - started
    peak = peak_memory_of(device) - before
    numbers = {"memory": peak / 1e9, "seconds": took, "work": worked}
    print(json.dumps(numbers | {"flows": results[0].tolist()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=VARIANTS, default=VARIANTS[3:])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        dtype = getattr(torch, options.dtype)
        return measure(options.ways[0], options.length, options.device, dtype)
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.ways}
    for _ in range(options.repeats):
        for variant in options.ways:
            command = [sys.executable, __file__, "--one", "--ways", variant]
            command += ["--length", str(options.length)]
            command += ["--device", options.device, "--dtype", options.dtype]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            runs[variant].append(json.loads(done.stdout.splitlines()[-1]))
            print(variant, *(f"{runs[variant][-1][key]:.2f}" for key in MEASURED), flush=True)
    memory, took, work = (
        {
            variant: statistics.median(run[key] for run in its_runs)
            for variant, its_runs in runs.items()
        }
        for key in MEASURED
    )
    last = options.ways[-1]
    reference = torch.tensor(runs[last][0]["flows"])
    for variant in options.ways:
        values = torch.tensor(runs[variant][0]["flows"])
        difference = float((values - reference).abs().max() / reference.abs().max())
        ratios = [
            a["seconds"] / b["seconds"] for a, b in zip(runs[last], runs[variant], strict=True)
        ]
        print(
            f"{variant}: {memory[variant]:.2f} GB in {took[variant]:.1f} s; {last} / {variant}: "
            f"memory {memory[last] / memory[variant]:.3f}, time {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), processor time "
            f"{work[last] / work[variant]:.2f}; flows differ by {difference:.1e}"
        )
    return None


if __name__ == "__main__":
    main()
