"""Flows of each token of an answer, compared with the gradients of all patterns at once.

    python benchmarks/answer_steps.py --model M

The text has 512 tokens, of which the last 1, 8 or 64 are the answer. ``step_flows`` gets the
gradient of one layer after the other, in the one pass of the package. The other variant takes the
gradients of all patterns at once, by hooks of its own. Both run forward once and backward once for
each token, and sum over the same edges. Each measurement runs in a process of its own, and the
variants take turns. Peak memory is the largest resident size minus the size before, after a short
text has warmed the model up.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from anchorlens.models.model_state import frozen_in_eval_mode
from benchmarks.long_prompts import memory_of
from benchmarks.saliency_cost import seconds

VARIANTS = ("steps", "patterns")
ANSWERS = (1, 8, 64)


def text(model: Any, length: int, answer: int) -> al.PromptBatch:
    """The bundled questions one after the other, of which the last tokens are the answer."""
    words = " ".join(example.text for example in al.load_examples("questions"))
    tokens = model.tokenizer(words, return_tensors="pt")["input_ids"][:, :length]
    segments = torch.zeros_like(tokens)
    segments[:, length - answer :] = 1
    return al.PromptBatch.from_segments(tokens, segments, ["text", "answer"])


def with_patterns(model: Any, batch: al.PromptBatch) -> Tensor:
    """Totals between the segments, [step, layer, segment, segment], by one gradient a token."""
    patterns: dict[int, Tensor] = {}

    def leaf(resid: Tensor, hook: Any) -> Tensor:
        return resid.detach().requires_grad_()

    def store(layer: int) -> Any:
        return lambda pattern, hook: patterns.__setitem__(layer, pattern)

    layers = range(model.cfg.n_layers)
    hooks: list[Any] = [("blocks.0.hook_resid_pre", leaf)]
    hooks += [(f"blocks.{layer}.attn.hook_pattern", store(layer)) for layer in layers]
    first = int((batch.segments[0] == 1).nonzero()[0])
    parts = torch.stack([batch.segments[0] == 0, batch.segments[0] == 1]).double()
    with frozen_in_eval_mode(model), model.hooks(fwd_hooks=hooks):
        logits = model(batch.tokens)[0, first - 1 : -1]
        losses = torch.nn.functional.cross_entropy(
            logits, batch.tokens[0, first:], reduction="none"
        )
        steps = []
        for loss in losses:
            gradients = torch.autograd.grad(loss, list(patterns.values()), retain_graph=True)
            products = zip(patterns.values(), gradients, strict=True)
            edges = [(a.detach() * g).sum(1)[0].abs().tril(-1).double() for a, g in products]
            steps.append(torch.stack([parts @ of_layer @ parts.T for of_layer in edges]))
    return torch.stack(steps)


def measure(variant: str, name: str, length: int, answer: int) -> None:
    """Run one variant in this process; print gigabytes, seconds and totals."""
    model = al.load_model(name)

    def totals(batch: al.PromptBatch) -> Tensor:
        if variant == "patterns":
            return with_patterns(model, batch)
        record = al.step_flows(model, batch, "answer")
        return record.total

    totals(text(model, 32, 2))
    batch, before, results = text(model, length, answer), memory_of("cpu"), list[Tensor]()
    took = seconds(lambda: results.append(totals(batch)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    numbers = {"memory": peak / 1e9, "seconds": took}
    print(json.dumps(numbers | {"totals": results[0].flatten().tolist()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return measure(options.one[0], options.model, options.length, int(options.one[1]))
    for answer in ANSWERS:
        runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.repeats):
            for variant in VARIANTS:
                command = [sys.executable, __file__, "--model", options.model]
                command += ["--length", str(options.length), "--one", variant, str(answer)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                runs[variant].append(json.loads(done.stdout.splitlines()[-1]))
        ours, theirs = (torch.tensor(runs[variant][0]["totals"]) for variant in VARIANTS)
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        pairs = zip(*runs.values(), strict=True)
        ratios = [a["seconds"] / b["seconds"] for a, b in pairs]
        memory, took = (
            [statistics.median(run[key] for run in runs[variant]) for variant in VARIANTS]
            for key in ("memory", "seconds")
        )
        print(
            f"{answer} tokens: step_flows {took[0]:.1f} s and {memory[0]:.2f} GB, all "
            f"patterns at once {took[1]:.1f} s and {memory[1]:.2f} GB; ratio of times "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), of memory "
            f"{memory[0] / memory[1]:.2f}; totals differ by {difference:.1e}",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
