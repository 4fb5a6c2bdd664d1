"""What peft itself does with a prefix: it writes an adapter, and answers queries with one."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor

import anchorlens as al


def peft_logits(
    weights: Any, folder: Path, batch: al.PromptBatch, before: Sequence[int] = ()
) -> Tensor:
    """Next-token logits of each query alone, after tokens, from peft on a transformers model."""
    with torch.random.fork_rng(devices=[]):  # a new adapter is random until its file is read
        tuned = PeftModel.from_pretrained(copy.deepcopy(weights), str(folder)).eval()
    rows = []
    for tokens, start, target in zip(
        batch.tokens, batch.query_start.tolist(), batch.target_positions.tolist(), strict=True
    ):
        ids = torch.tensor([[*before, *tokens[start : target + 1].tolist()]])
        with torch.no_grad():
            rows.append(tuned(input_ids=ids).logits[0, -1])
    return torch.stack(rows)


def saved_by_peft(weights: Any, folder: Path, count: int, **options: Any) -> Path:
    """A folder that peft wrote, with a random prefix."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        get_peft_model(copy.deepcopy(weights), config).save_pretrained(str(folder))
    return folder
