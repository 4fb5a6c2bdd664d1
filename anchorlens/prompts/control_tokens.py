"""Control tokens: they begin prompts and end turns, and no text of the data may become one.

A tokenizer reads "<|im_end|>" in a text as if the format of the prompt said it: a text of the data
could so end its turn and write an answer. What the data gives (texts, label words, named segments)
is therefore compared with the control tokens. The template of a task is format, and may hold them.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import PromptError

Span = tuple[int, int]

_AROUND = 30  # characters of a text that an error shows on each side of a control token


class ControlTokens(NamedTuple):
    names: dict[int, str]  # the text of each, by its id
    as_text: bool = False  # whether those in the data are read as characters, and are no error
    cure: str = ""  # what else helps against one in the data

    def spans_in_data(
        self, tokens: Sequence[int], spans: Sequence[Span], text: str, is_data: Sequence[bool]
    ) -> list[Span]:
        """The characters of each control token that lies in the data, wholly or in part."""
        found = []
        for token, (start, stop) in zip(tokens, spans, strict=True):
            if token in self.names and start < stop:
                inside = text[start:stop]  # some tokens take in the spaces around them
                start += len(inside) - len(inside.lstrip())
                stop = start + len(inside.strip())
                # A token of unknown text or of a byte is special too, and plain text can give it.
                is_literal = _folded(text[start:stop]) == _folded(self.names[token])
                if is_literal and any(is_data[start:stop]):
                    found.append((start, stop))
        return found

    def error(self, tokenizer: Any, text: str, span: Span) -> PromptError:
        start, stop = span
        name = text[start:stop]
        around = text[max(0, start - _AROUND) : stop + _AROUND]
        spaced = name[:1] + " " + name[1:]
        read = tokenizer(spaced, add_special_tokens=False, return_offsets_mapping=True)
        all_data = [True] * len(spaced)
        still = self.spans_in_data(read["input_ids"], read["offset_mapping"], spaced, all_data)
        spelled = "" if still else f", or write it otherwise ({spaced!r})"
        return PromptError(
            f"the text {around!r} holds the control token {name!r} of the tokenizer, which the "
            f"model would read as format and not as text; leave it out{spelled}{self.cure}"
        )


def control_tokens(tokenizer: Any, template: str = "", **of_task: Any) -> ControlTokens:
    """The special tokens of a tokenizer, and added ones (not white space) of a chat template."""
    listed = getattr(tokenizer, "chat_control_tokens", None) if template else ()

    def is_written(name: str) -> bool:
        return name in template and not name.isspace() if listed is None else name in listed

    names = {
        token: str(added.content)
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special or is_written(added.content)
    }
    special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return ControlTokens(names | dict(special), **of_task)


def _folded(text: str) -> str:
    """A text as a tokenizer may normalise it before it looks for added tokens."""
    return unicodedata.normalize("NFKC", text).casefold()


def tokens_of_characters(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text as if the tokenizer had no added tokens."""
    core = tokenizer.backend_tokenizer
    if core.normalizer is not None:
        text = core.normalizer.normalize_str(text)
    parts = [text]
    if core.pre_tokenizer is not None:
        parts = [part for part, _ in core.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for part in parts for token in core.model.tokenize(part)]
