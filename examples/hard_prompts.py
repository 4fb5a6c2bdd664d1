"""Search for hard prompts with PEZ and its baselines, and compare what they answer.

python examples/hard_prompts.py --model gpt2 --steps 300
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import anchorlens as al
from anchorlens.prompts.examples import BUNDLED

METHODS = {
    "PEZ": al.hard_prompts.PEZ,
    "PEZ as published": al.hard_prompts.PEZ_AS_PUBLISHED,
    "AutoPrompt": al.hard_prompts.AUTOPROMPT,
}


def right_answers(
    model: Any, batches: list[al.PromptBatch], contexts: Sequence[al.Context]
) -> torch.Tensor:
    """1 for each right answer of each context, else 0: [query, context]."""
    answers = [
        torch.cat([batch.label_scores(context.logits(model, batch)) for batch in batches]).argmax(1)
        for context in contexts
    ]
    gold = torch.cat([batch.gold for batch in batches if batch.gold is not None])
    return (torch.stack(answers, 1) == gold[:, None]).double()


def with_interval(numbers: torch.Tensor) -> str:
    """The mean of numbers of queries, with its 95 % interval (normal approximation)."""
    mean, half = float(numbers.mean()), 1.96 * float(numbers.std()) / len(numbers) ** 0.5
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--tasks", nargs="+", default=["questions", "sentiment"])
    parser.add_argument("--data-folder", type=Path, help="with TASK/train.jsonl, test.jsonl")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--training", type=int, default=32, help="queries for training")
    parser.add_argument("--held-out", type=int, default=16, help="queries to choose the best step")
    parser.add_argument("--length", type=int, default=10, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--draws", type=int, default=20, help="random prompts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, help="stores the searches, so that they continue")
    options = parser.parse_args()
    ...


if __name__ == "__main__":
    main()
