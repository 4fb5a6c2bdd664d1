"""Speed, memory, long prompts and precision on a GPU, with random weights.

    python benchmarks/gpu.py [--sections 1 2 3]

Prints Markdown tables, each as soon as it is measured. Models have random weights, which are made
on the GPU in the type of the section. The ways of a table take turns after one turn to warm up;
seconds are medians, and memory is the most that PyTorch allocated during a way beyond the weights.

1. *Speed and memory* in bfloat16, at the size of GPT-2 XL and of a Llama with 7B parameters: TREC
   prompts with one demonstration of each class. The floors are plain transformers over the same
   whole prompts in the same batches, with eager attention, frozen weights and logits only at
   targets. *One prompt at a time* takes patterns and gradients from ``output_attentions`` and
   ``retain_grad``.
2. *Long prompts* in bfloat16, 8 layers of the 7B size: flows over one prompt, in one turn, against
   a forward and backward pass of plain transformers with the fused attention of PyTorch (sdpa).
3. *Precision*: flows and AUCROC in float32 (without TF32 unless a row says so) against the CPU,
   and in bfloat16 and float16 against float32 with the same rounded weights, with whole patterns
   and with a fused attention. The largest difference of any layer and flow.

A part that fails, as where memory runs out, prints one line, and the next goes on. On a CPU,
``--quick --device cpu`` runs the script at tiny sizes, which says nothing about speed.
"""

import argparse
import copy
import gc
import importlib.metadata
import math
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import anchorlens as al
from anchorlens.runs import way as decision
from benchmarks import published_way
from benchmarks.saliency_cost import byte_level_tokenizer

LARGE = decision.LARGE
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
CLASSES = 6
FEW = 4  # prompts that are run one at a time


class Measured(NamedTuple):
    """What a way took: medians over the turns, or why it failed."""

    seconds: float = math.nan
    gigabytes: float = math.nan
    failure: str = ""


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def number(value: float, digits: int) -> str:
    """For a table, in which what was not measured is empty."""
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def free_memory(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    """The error and the line of code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def attempt(device: str, name: str, part: Callable[[], None]) -> None:
    """Run a part of the benchmark; if it fails, say so in one line."""
    started = time.perf_counter()
    try:
        free_memory(device)
        part()
    except Exception as error:
        say(f"\n{name} failed: {one_line(error)}")
    else:
        say(f"\n({name}: {time.perf_counter() - started:.0f} s in all)")


def measure(device: str, way: Callable[[], object]) -> Measured:
    """Seconds of one call, and gigabytes that it allocated beyond what was there (NaN on a CPU)."""
    if device == "cpu":
        started = time.perf_counter()
        way()
        return Measured(time.perf_counter() - started)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    way()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    return Measured(seconds, (torch.cuda.max_memory_allocated(device) - before) / 1e9)


def in_turns(
    device: str, ways: Mapping[str, Callable[[], object]], turns: int
) -> dict[str, Measured]:
    """Each way in each turn; a way that fails is left out of the later turns."""
    runs: dict[str, list[Measured]] = {name: [] for name in ways}
    failures: dict[str, str] = {}
    for _ in range(turns):
        for name in [name for name in ways if name not in failures]:
            try:
                runs[name].append(measure(device, ways[name]))
            except Exception as error:
                failures[name] = one_line(error)
            if name in failures:  # after the except block, whose error holds the tensors
                free_memory(device)
    medians = {}
    for name, its_runs in runs.items():
        if name in failures:
            medians[name] = Measured(failure=failures[name])
        else:
            seconds, gigabytes, _ = zip(*its_runs, strict=True)
            medians[name] = Measured(statistics.median(seconds), statistics.median(gigabytes))
    return medians


def random_weights(config: Any, device: str, dtype: torch.dtype) -> Any:
    """A model with random weights, made on the device in this type."""
    torch.manual_seed(0)
    with torch.device(device):
        weights = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return weights.eval().requires_grad_(False)


def gpt2(layers: int, width: int, heads: int, **options: Any) -> GPT2Config:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 1024}
    return GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **options)


def llama(layers: int, width: int, heads: int, wide: int, **options: Any) -> LlamaConfig:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return LlamaConfig(bos_token_id=0, eos_token_id=0, intermediate_size=wide, **sizes, **options)


def trec(tokenizer: Any, count: int, size: int) -> list[al.PromptBatch]:
    """Prompts with one demonstration of each class."""
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples)
    queries = [example for example in examples if example not in demos][:count]
    return al.build_prompts(tokenizer, al.TASKS["trec"], demos, queries, batch_size=size)


def long_prompt(length: int, vocabulary: int) -> al.PromptBatch:
    """One prompt of random tokens, with a demonstration in every 32 of them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CLASSES, vocabulary, (1, length), generator=generator)
    positions = torch.arange(31, length - 32, 32)
    classes = torch.arange(len(positions)) % CLASSES
    tokens[0, positions] = classes
    return al.PromptBatch.from_positions(
        tokens,
        label_positions=positions[None],
        label_classes=classes[None],
        label_token_ids=torch.arange(CLASSES),
        gold=[0],
    )


def plain(weights: Any, batches: Sequence[al.PromptBatch], backward: bool) -> None:
    """Forward and, if asked, backward passes of plain transformers, with logits at targets."""
    for batch in batches:
        with torch.set_grad_enabled(backward):
            embedded = weights.get_input_embeddings()(batch.tokens.to(weights.device)).detach()
            whole = bool(batch.attention_mask.all())  # sdpa then has its kernel without a mask
            hidden = weights.base_model(
                inputs_embeds=embedded.requires_grad_(backward),
                attention_mask=None if whole else batch.attention_mask.long().to(weights.device),
                use_cache=False,
            ).last_hidden_state
            rows = torch.arange(len(batch), device=hidden.device)
            logits = weights.get_output_embeddings()(hidden[rows, batch.target_positions])
            loss = al.losses.label_cross_entropy(logits, batch).sum()
        if backward:
            loss.backward()


def speed(device: str, name: str, config: Any, count: int, size: int) -> None:
    """A table of section 1."""
    tokenizer = byte_level_tokenizer()
    weights = random_weights(config, device, torch.bfloat16)
    model = al.load_model(copy.deepcopy(weights), tokenizer=tokenizer)
    batches = trec(model.tokenizer, count, size)
    few = batches[0].prompts(0, FEW)
    results: dict[str, Any] = {}
    one_at_a_time: list[Tensor] = []

    def ours(key: str, metrics: Sequence[Any], **options: Any) -> None:
        results[key] = al.run(model, batches, metrics, **QUIET, **options)

    def naive() -> None:
        one_at_a_time[:] = [published_way.flows(weights, [few], logits_to_keep=1)]

    both = [al.SaliencyFlows(), al.AttentionAUCROC()]
    backward, forward = "floor: plain forward and backward", "floor: plain forward"
    slow = f"one prompt at a time ({len(few)} prompts, times {count / len(few):.0f})"
    ways: dict[str, Callable[[], object]] = {
        backward: lambda: plain(weights, batches, backward=True),
        "anchorlens, flows and AUCROC": partial(ours, "both", both),
        "the same, share_prefix=False": partial(ours, "whole", both, share_prefix=False),
        slow: naive,
        forward: lambda: plain(weights, batches, backward=False),
        "anchorlens, AUCROC": partial(ours, "auc", [al.AttentionAUCROC()]),
    }
    in_turns(device, ways, turns=1)  # warm-up
    found = in_turns(device, ways, turns=3)
    found[slow] = found[slow]._replace(seconds=found[slow].seconds * count / len(few))
    length = max(batch.tokens.shape[1] for batch in batches)
    say(
        f"\n### {name}, bfloat16, {count} prompts of up to {length} tokens in batches of {size}\n",
        "| | seconds | times its floor | GB beyond the weights |",
        "| --- | --- | --- | --- |",
    )
    floor = found[backward].seconds
    for way, each in found.items():
        floor = found[forward].seconds if way == forward else floor
        cells = [number(each.seconds, 3), number(each.seconds / floor, 2)]
        say(f"| {way} | {' | '.join(cells)} | {each.failure or number(each.gigabytes, 2)} |")
    say(f"\n{sum(each.numel() for each in weights.parameters()) / 1e9:.2f} billion parameters.")
    for key, name_of in (("both", "saliency_flows"), ("auc", "attention_aucroc")):
        if key in results:
            say(f"Shared demonstrations, {name_of}: {results[key][name_of].info['shared_prefix']}.")
    for key in ("both", "whole"):
        if key in results and one_at_a_time:
            flows = results[key]["saliency_flows"].per_prompt[few.index.cpu()]
            off = of_largest(flows, one_at_a_time[0].double().cpu())
            say(f"Flows ({key}) differ from one prompt at a time by {off:.1e} of the largest.")


def of_largest(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


def long_prompts(device: str, config: Any, lengths: Sequence[int]) -> None:
    """The table of section 2."""
    tokenizer = byte_level_tokenizer()
    weights = random_weights(config, device, torch.bfloat16)
    model = al.load_model(copy.deepcopy(weights), tokenizer=tokenizer)
    weights.set_attn_implementation("sdpa")
    info: dict[str, str] = {}

    def flows(batch: al.PromptBatch, key: str, checkpoints: bool) -> None:
        options = QUIET | {"gradient_checkpointing": checkpoints}
        record = al.run(model, [batch], [al.SaliencyFlows()], **options)["saliency_flows"]
        info[key] = record.info.get("attention", "whole patterns")

    say(
        f"\n### Flows over one long prompt, {config.num_hidden_layers} layers, "
        f"{config.hidden_size} wide, bfloat16\n",
        "| tokens | plain sdpa: seconds | GB | flows: seconds | GB | times plain | "
        "with checkpoints: seconds | GB | times plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    )
    notes = []
    for length in lengths:
        batch = long_prompt(length, config.vocab_size)
        ways: dict[str, Callable[[], object]] = {
            "plain": partial(plain, weights, [batch], backward=True),
            "flows": partial(flows, batch, f"{length} tokens", False),
            "checkpoints": partial(flows, batch, f"{length} tokens, checkpoints", True),
        }
        # Warm-up: the kernels of each length are chosen and loaded in its first pass.
        in_turns(device, ways if length == lengths[0] else {"plain": ways["plain"]}, turns=1)
        free_memory(device)
        found = in_turns(device, ways, turns=1)
        cells = [f"{length}"]
        for name, each in found.items():
            cells += [number(each.seconds, 2), number(each.gigabytes, 1)]
            if name != "plain":
                cells.append(number(each.seconds / found["plain"].seconds, 2))
            if each.failure:
                notes.append(f"{length} tokens, {name}: {each.failure}")
        say(f"| {' | '.join(cells)} |")
    say("", *(f"- {key}: {value}" for key, value in info.items()), *(f"- {each}" for each in notes))


class Numbers(NamedTuple):
    """What section 3 compares."""

    flows: Tensor
    aucroc: Tensor
    attention: str


def numbers(
    weights: Any, device: str, dtype: torch.dtype, fused: bool = False, tf32: bool = False
) -> Numbers:
    """Flows and AUCROC of 24 prompts, with a copy of the weights on a device and in a type."""
    decision.LARGE = 0 if fused else 2**62
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        tokenizer = byte_level_tokenizer()
        model = al.load_model(weights, tokenizer=tokenizer, device=device, dtype=dtype)
        batches = trec(model.tokenizer, 24, 8)
        results: Any = al.run(model, batches, [al.SaliencyFlows(), al.AttentionAUCROC()], **QUIET)
    finally:
        decision.LARGE = LARGE
        torch.set_float32_matmul_precision("highest")
    record = results["saliency_flows"]
    attention = record.info.get("attention", "").partition(":")[0] or "whole patterns"
    return Numbers(record.flows, results["attention_aucroc"].aucroc, attention)


def precision(device: str, name: str, config: Any) -> None:
    """A table of section 3."""
    weights = random_weights(config, "cpu", torch.float32)
    on_cpu = numbers(weights, "cpu", torch.float32)
    say(
        f"\n### Precision, {name}\n",
        "| | against | attention | flows, of the largest | AUCROC |",
        "| --- | --- | --- | --- | --- |",
    )

    def row(title: str, against: str, ours: Numbers, expected: Numbers) -> None:
        off = of_largest(ours.flows, expected.flows)
        auc = float((ours.aucroc - expected.aucroc).abs().max())
        say(f"| {title} | {against} | {ours.attention} | {off:.1e} | {auc:.4f} |")

    for title, tf32, fused in (
        ("float32", False, False),
        ("float32", False, True),
        ("float32, TF32 allowed", True, False),
    ):
        ours = numbers(weights, device, torch.float32, fused, tf32)
        row(title, "float32 on the CPU", ours, on_cpu)
    for dtype in (torch.bfloat16, torch.float16):
        title = str(dtype).removeprefix("torch.")
        rounded = copy.deepcopy(weights).to(dtype)
        exact = numbers(rounded, device, torch.float32)
        for fused in (False, True):
            try:
                row(title, "float32", numbers(rounded, device, dtype, fused), exact)
            except Exception as error:  # float16 may overflow
                say(f"| {title} | float32 | {one_line(error)} | | |")


def parts(device: str, quick: bool) -> dict[int, dict[str, Callable[[], None]]]:
    """The parts of each section, by name."""
    # So that patterns are not nearly uniform, and that the predictions are of several classes.
    spread = {"initializer_range": 0.2 if quick else 0.04}
    if quick:
        small, other = gpt2(3, 64, 4), llama(3, 64, 4, 128)
        long, lengths = llama(2, 64, 4, 128, max_position_embeddings=1024), [512, 1024]
        models = {"tiny GPT-2": (small, 8, 4), "tiny Llama": (other, 8, 4)}
        for_precision = {"tiny GPT-2": gpt2(3, 64, 4, **spread)}
        for_precision["tiny Llama"] = llama(3, 64, 4, 128, **spread)
    else:
        long = llama(8, 4096, 32, 11008, max_position_embeddings=40000)
        lengths = [4096, 8192, 16384, 32768]
        models = {
            "GPT-2 XL size": (gpt2(48, 1600, 25), 64, 16),
            "Llama 7B size": (llama(32, 4096, 32, 11008), 32, 8),
        }
        for_precision = {"GPT-2 size": gpt2(12, 768, 12, **spread)}
        for_precision["Llama, 12 layers, 768 wide"] = llama(12, 768, 12, 2048, **spread)
    return {
        1: {name: partial(speed, device, name, *each) for name, each in models.items()},
        2: {"long prompts": partial(long_prompts, device, long, lengths)},
        3: {
            f"precision, {name}": partial(precision, device, name, config)
            for name, config in for_precision.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--sections", type=int, nargs="+", choices=(1, 2, 3), default=(1, 2, 3))
    options = parser.parse_args()
    is_cpu = torch.device(options.device).type == "cpu"
    if not is_cpu and not torch.cuda.is_available():
        print("this machine has no CUDA device, so there is nothing to measure", file=sys.stderr)
        raise SystemExit(2)
    device = "cpu" if is_cpu else options.device
    name = "CPU" if is_cpu else torch.cuda.get_device_name(device)
    if not is_cpu:
        memory = torch.cuda.get_device_properties(device).total_memory
        name = f"{name} ({memory / 1e9:.0f} GB), CUDA {torch.version.cuda}"
    versions = (
        f"{package} {importlib.metadata.version(package)}"
        for package in ("torch", "transformers", "transformer-lens")
    )
    say(f"## {name}\n\n{', '.join(versions)}, Python {platform.python_version()}")
    warnings.filterwarnings("ignore", message=".*one class for all queries")
    every = parts(device, options.quick)
    for section in options.sections:
        for title, part in every[section].items():
            attempt(device, title, part)


if __name__ == "__main__":
    main()
