"""A model, its prompts, and the numbers that the paper's published code computes of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

import anchorlens as al
from tests.support.tiny_models import tiny_gpt2

GOLDEN = Path(__file__).parents[1] / "golden"


class GoldenCase:
    """A golden model with its prompts and numbers; see tests/golden/README.md."""

    def __init__(self, name: str) -> None:
        folder = GOLDEN / name
        self.meta = json.loads((folder / "meta.json").read_text())
        self.numbers = load_file(folder / "numbers.safetensors")
        self.weights = load_file(folder / "gpt2.safetensors")

    def transformers_model(self) -> GPT2LMHeadModel:
        model = tiny_gpt2(**self.meta["config"])
        weights = self.weights | {"lm_head.weight": self.weights["transformer.wte.weight"]}
        model.load_state_dict(weights, strict=False)
        return model

    def batch(self, side: str) -> tuple[al.PromptBatch, list[int]]:
        """Return all five prompts in one padded batch, and the index at which each begins."""
        rows = [self.numbers[f"{n}.input_ids"] for n in range(5)]
        length = max(len(row) for row in rows)
        starts = [length - len(row) if side == "left" else 0 for row in rows]
        tokens = torch.zeros(5, length, dtype=torch.long)
        mask = torch.zeros(5, length, dtype=torch.bool)
        positions, classes = [], []
        for n, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[n, start : start + len(row)] = row
            mask[n, start : start + len(row)] = True
            by_class = self.meta["cases"][n]["label_positions_by_class"]
            order = sorted(range(len(by_class)), key=by_class.__getitem__)
            positions.append([by_class[k] + start for k in order])
            classes.append(order)
        batch = al.PromptBatch.from_positions(
            tokens,
            label_positions=positions,
            label_classes=classes,
            label_token_ids=self.meta["label_token_ids"],
            gold=[case["gold"] for case in self.meta["cases"]],
            attention_mask=mask,
        )
        return batch, starts
