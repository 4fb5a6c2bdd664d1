"""A prompt as it is written, and its tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import PromptError
from .examples import Example
from .segment_names import QUERY
from .tasks import Piece, Task
from .tokens import encode


class WrittenPrompt(NamedTuple):
    demos: Sequence[Example]
    query: Example
    pieces: Sequence[Piece]  # of which the text is joined
    text: str
    end: str  # the end of the text, which belongs to the query
    tokens: list[int]
    spans: list[tuple[int, int]]  # the characters of each token
    special: list[bool]  # which tokens the tokenizer has added
    query_start: int  # the first token of the query


def write_prompt(
    tokenizer: Any, task: Task, demos: Sequence[Example], query: Example, index: int
) -> WrittenPrompt:
    """Write and tokenize the prompt of the query with this index.

    Raises:
        PromptError: The query has no token, or a token is added after it.
    """
    pieces = task.write(tokenizer, demos, query.text)
    text = "".join(piece.text for piece in pieces)
    end = "".join(piece.text for piece in pieces if piece.segment == QUERY)
    if not end:
        raise PromptError(
            f"query {index} is empty, and so is the template before {{label}}, so that there is no "
            "token at which the label is predicted; put a word before {label} or drop the query"
        )
    tokens, spans, special = encode(tokenizer, text, adds_special_tokens=task.adds_special_tokens)
    begin = len(text) - len(end)
    query_start = next((k for k, (_, stop) in enumerate(spans) if stop > begin), None)
    if query_start is None:
        raise PromptError(
            f"the tokenizer gives no tokens for the query {end!r}; leave query {index} out, or, if "
            "it gives none for any text, add its files (such as tokenizer.json) to the folder of "
            "the model"
        )
    if special[-1]:
        raise PromptError(
            "the tokenizer adds a special token after the prompt, so that its last token is not "
            "where the label is predicted; switch that off (for example in its "
            "tokenizer_config.json, or by add_eos_token=False)"
        )
    return WrittenPrompt(demos, query, pieces, text, end, tokens, spans, special, query_start)
