"""Tasks: how demonstrations and queries are written (template, label words, separator)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from ..errors import PromptError
from ..printable import printable
from ..system.arguments import checked
from ..system.texts import described, name_of
from .control_tokens import ControlTokens, control_tokens
from .examples import BUNDLED, Example
from .segment_names import FORMAT, LABEL, OTHER, QUERY, TEXT

Score = Callable[[Any, int], Any]
"""From the log probabilities of a class's words, Float[batch, word], and the axis of the words (-1)
to the score of the class, Float[batch]: ``mean``, ``torch.sum``, ``torch.logsumexp`` and others."""


def mean(log_probs: Any, axis: int) -> Any:
    """The mean of the log probabilities: the score of a class if nothing else is said."""
    return log_probs.mean(axis)


def check_score(score: Any) -> None:
    """Raise an error unless a function gives one number a prompt, for one word and for several."""
    import torch  # takes seconds

    from ..system.devices import holds_numbers

    for words in (1, 3):
        log_probs = torch.full((2, words), -1.0, dtype=torch.float32, device="cpu")
        try:
            values = score(log_probs, -1)
        except TypeError as error:
            raise PromptError(
                f"score {name_of(score)} must take (log probabilities, axis), as torch.mean does: "
                f"{error}"
            ) from error
        if not holds_numbers(values) or values.shape != (2,):
            raise PromptError(
                f"score {name_of(score)} must give one number a prompt: for log probabilities of "
                f"the shape (2, {words}) and axis -1 the shape (2,); got {described(values)}. Of "
                "torch's functions, mean, sum, amax (not max) and logsumexp do"
            )


class Piece(NamedTuple):
    """Some characters of a prompt."""

    text: str
    segment: int
    label: int | None = None  # the class that they name
    is_data: bool = False  # what the data gives holds no control tokens


@checked
@dataclass(frozen=True)
class Task:
    r"""How demonstrations and queries are written.

    Args:
        template: One demonstration, with ``{text}`` and then ``{label}`` in it, each once. The
            query is the part before ``{label}``.
        labels: The label words, by class, exactly as they are written in the prompt. For most
            tokenizers the space before a word must be a part of it: ``" Positive"``. A class may
            have several words: ``[[" good", " great"], [" bad"]]``. The first stands in the
            demonstrations; all of them count for the prediction.
        separator: Characters between demonstrations.
        instructions: Text before the first demonstration.
        score: How several words of a class give its score: a function of their log probabilities,
            Float[batch, word], and of the axis of the words: ``torch.mean`` (like the default),
            ``torch.sum``, ``torch.amax``, or ``torch.logsumexp``, which adds the probabilities.
        is_open: Whether queries may have an answer that no demonstration shows (``build_pairs``).

    Raises:
        PromptError: The template has not these two fields in this order, there are fewer than two
            labels, two are the same, or ``score`` does not give one number a prompt.

    Examples:
        >>> task = Task("Review: {text}\nSentiment:{label}", labels=[" Negative", " Positive"])
        >>> task.demonstration("fun", 1)
        'Review: fun\nSentiment: Positive'
        >>> task.query("dull")
        'Review: dull\nSentiment:'
    """

    template: str
    labels: Sequence[str | Sequence[str]]
    separator: str = "\n"
    instructions: str = ""
    score: Score = mean
    is_open: bool = False
    adds_special_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("{text}", "{label}"):
            if (count := self.template.count(field)) != 1:
                raise PromptError(
                    f"the template must contain {field} exactly once, but contains it {count} "
                    f"times: {self.template!r}"
                )
        if unknown := _UNKNOWN_FIELD.search(self.template):
            raise PromptError(
                f"the fields of a template are {{text}} and {{label}}, in single braces; nothing "
                f"would fill {unknown.group()!r} in {self.template!r}"
            )
        if self.template.index("{label}") < self.template.index("{text}"):
            raise PromptError(
                "the template must have {text} before {label}, because the query is what stands "
                f"before {{label}}; got {self.template!r}"
            )
        if len(self.labels) < 2:
            raise PromptError(f"a task has at least two classes; got {list(self.labels)}")
        every = [word for words in self.words for word in words]
        if not all(self.words) or not all(map(str.strip, every)) or len(set(every)) < len(every):
            given = list(self.labels)
            raise PromptError(f"label words must be different and not blank; got {given}")
        if self.score is not mean:
            check_score(self.score)
        # One word in a list is the same task as the word alone.
        labels = tuple(words[0] if len(words) == 1 else words for words in self.words)
        object.__setattr__(self, "labels", labels)

    def __repr__(self) -> str:
        values = {each.name: repr(getattr(self, each.name)) for each in fields(self) if each.init}
        # The repr of a function holds an address, which differs between processes.
        values["score"] = name_of(self.score)
        if self.score is mean and self.labels == self.first_words:
            del values["score"]
        if not self.is_open:
            del values["is_open"]
        written = [f"{name}={value}" for name, value in values.items()]
        return printable(f"{type(self).__name__}({', '.join(written)})")

    @property
    def words(self) -> tuple[tuple[str, ...], ...]:
        """All label words of each class."""
        return tuple((word,) if isinstance(word, str) else tuple(word) for word in self.labels)

    @property
    def first_words(self) -> tuple[str, ...]:
        """The label word of each class that stands in the demonstrations."""
        return tuple(words[0] for words in self.words)

    @property
    def pieces(self) -> tuple[str, str, str]:
        """The three parts of the template: before the text, text to label, after the label."""
        before, rest = self.template.split("{text}")
        between, after = rest.split("{label}")
        return before, between, after

    @checked
    def demonstration(self, text: str, label: int) -> str:
        """The demonstration for a text of class ``label``."""
        before, between, after = self.pieces
        return before + text + between + self.first_words[label] + after

    @checked
    def query(self, text: str) -> str:
        """The query for a text: the template up to the label."""
        before, between, _ = self.pieces
        return before + text + between

    @checked
    def write(self, tokenizer: Any, demonstrations: Sequence[Example], query: str) -> list[Piece]:
        """The pieces of a prompt; joined they are its text. The last belong to the query."""
        (before, between, after), words = self.pieces, self.first_words
        pieces = [Piece(self.instructions, OTHER)]
        for demo in demonstrations:
            assert demo.label is not None
            pieces += [
                Piece(before, FORMAT),
                Piece(demo.text, TEXT, is_data=True),
                Piece(between, FORMAT),
                Piece(words[demo.label], LABEL, demo.label, is_data=True),
                Piece(after + self.separator, FORMAT),
            ]
        of_query = [Piece(query, QUERY, is_data=True), Piece(between, QUERY)]
        return [*pieces, Piece(before, QUERY), *of_query]

    @checked
    def written_word(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str, word: str
    ) -> str:
        """A label word as it is written after a query."""
        return word

    @checked
    def check_asking(self, tokenizer: Any, demonstrations: Sequence[Example], query: str) -> None:
        """Raise an error if the model would write something else before its answer."""

    @checked
    def control_tokens(self, tokenizer: Any) -> ControlTokens:
        """The tokens that no text of the data may become in the prompts of this task."""
        return control_tokens(tokenizer)


# A column of the data, or the braces of other libraries' templates; others are text, as in JSON.
_UNKNOWN_FIELD = re.compile(r"\{\{\s*\w+\s*\}\}|\{(?!text\}|label\})[^\W\d]\w*\}")


_OF_THE_PAPER = {
    "sst2": Task("Review: {text}\nSentiment:{label}", (" Negative", " Positive")),
    "trec": Task(
        "Question: {text}\nAnswer Type:{label}",
        (" Abbreviation", " Entity", " Description", " Person", " Location", " Number"),
    ),
    "agnews": Task(
        "Article: {text}\nAnswer:{label}", (" World", " Sports", " Business", " Technology")
    ),
    "emo": Task("Dialogue: {text}\nEmotion:{label}", (" Others", " Happy", " Sad", " Angry")),
}
TASKS: MappingProxyType[str, Task] = MappingProxyType(
    _OF_THE_PAPER | {name: _OF_THE_PAPER[task] for name, task in BUNDLED.items()}
)
"""The tasks of the paper (its Table 4), by the names of their data and of the bundled examples.

``"sst2"`` and ``"sentiment"`` are one task, and so are ``"trec"`` and ``"questions"``, ``"agnews"``
and ``"news"``, ``"emo"`` and ``"emotions"``. Classes are in the order of the data sets on the hub.
"""
