"""The answer that a model writes: its likeliest tokens, up to the end of the line."""

from typing import Any

from ..errors import PromptError
from ..experiments.generation import written_tokens
from ..prompts.build import build_segments
from ..prompts.documents import Pieces

LONGEST_WRITTEN = 24  # tokens


def written_answer(model: Any, pieces: Pieces) -> str:
    """What the model writes after a prompt."""
    [prompt] = build_segments(model.tokenizer, [pieces])
    tokens, _ = written_tokens(model, prompt, LONGEST_WRITTEN, 0, {})
    before, text = (model.tokenizer.decode(each[0].tolist()) for each in (prompt.tokens, tokens))
    answer, _, _ = text[len(before) :].partition("\n")
    if not answer.strip():
        raise PromptError(f"the model writes no answer after {pieces[-1][1]!r}; give answers")
    return answer
