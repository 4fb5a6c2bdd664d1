"""The answer that a model writes: its likeliest tokens, up to the end of the line."""

from typing import Any

import torch

from ..errors import PromptError
from ..models.hooked import device_of
from ..prompts.documents import Pieces

MOST = 24  # tokens


def written_answer(model: Any, pieces: Pieces) -> str:
    """What the model writes after a prompt."""
    ids: list[int] = model.tokenizer("".join(text for _, text in pieces))["input_ids"]
    before, answer = model.tokenizer.decode(ids), ""
    for _ in range(MOST):
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device_of(model)))
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == model.tokenizer.eos_token_id:
            break
        answer, is_over, _ = model.tokenizer.decode(ids)[len(before) :].partition("\n")
        if is_over:
            break
    if not answer.strip():
        raise PromptError(f"the model writes no answer after {pieces[-1][1]!r}; give answers")
    return answer
