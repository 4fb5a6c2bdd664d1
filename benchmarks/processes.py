"""Time of a run in two processes, compared with one process and with two threads.

    python benchmarks/processes.py

A random model of GPT-2's size with 1000 tokens. The three variants take turns. Only the run
itself is timed, after all processes have started. Prints seconds on the clock, and processor
seconds of the busiest process, which are more reliable on a machine with other work.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState, debug_launcher
from transformers import GPT2Config, GPT2LMHeadModel

import anchorlens as al
from anchorlens.system.processes import gather_from_processes
from benchmarks.saliency_cost import byte_level_tokenizer

VARIANTS = {
    "1 process, 1 thread": (1, 1),
    "1 process, 2 threads": (1, 2),
    "2 processes, 1 thread each": (2, 1),
}


def in_process(model: Any, batches: list[al.PromptBatch], threads: int, path: Path) -> None:
    state = PartialState(cpu=True)
    torch.set_num_threads(threads)  # after the state, which sets them to all cores

    def flows(prompts: list[al.PromptBatch]) -> torch.Tensor:
        results = al.run(model, prompts, [al.SaliencyFlows()], resamples=0, progress=False)
        return results["saliency_flows"].per_prompt

    flows(batches[-2:])  # warm-up; after it all processes have started
    begin, started = time.perf_counter(), time.process_time()
    values = flows(batches)
    worked = time.process_time() - started
    seconds = time.perf_counter() - begin
    most = max(gather_from_processes("seconds", worked))
    if state.is_main_process:
        torch.save((seconds, most, values), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(1)  # a fork may hang if threads of the process have worked
    torch.manual_seed(0)
    tokenizer = byte_level_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0)
    weights = GPT2LMHeadModel(config).eval()
    weights.config.architectures = ["GPT2LMHeadModel"]
    model = al.load_model(weights, tokenizer=tokenizer)
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples)
    queries = [example for example in examples if example not in demos][: options.queries]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries, batch_size=4)

    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    work: dict[str, list[float]] = {name: [] for name in VARIANTS}
    numbers = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "results"
        for _ in range(options.repeats):
            for name, (processes, threads) in VARIANTS.items():
                debug_launcher(in_process, (model, batches, threads, path), processes)
                seconds, worked, numbers[name] = torch.load(path)
                times[name].append(seconds)
                work[name].append(worked)
    first, _, last = VARIANTS
    assert torch.equal(numbers[first], numbers[last])
    print(f"flows of {len(queries)} prompts in {len(batches)} batches, {options.repeats} repeats")
    for name, taken in times.items():
        ratios = sorted(a / b for a, b in zip(times[first], taken, strict=True))
        print(
            f"{name}: {median(taken):.1f} s; times as fast as one: {median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}); {median(work[name]):.1f} s of processor time"
        )


if __name__ == "__main__":
    main()
