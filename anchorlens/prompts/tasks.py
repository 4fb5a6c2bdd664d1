"""Tasks: how demonstrations and queries are written (template, label words, separator)."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import PromptError


@dataclass(frozen=True)
class Task:
    r"""How demonstrations and queries are written.

    Args:
        template: One demonstration, with ``{text}`` and then ``{label}`` in it, each once. The
            query is the part before ``{label}``.
        labels: The label words, by class, exactly as they are written in the prompt. For most
            tokenizers the space before a word must be a part of it: ``" Positive"``.
        separator: Characters between demonstrations.
        prefix: Instructions before the first demonstration.

    Raises:
        PromptError: A part is not a string, the template lacks a field or has the fields in the
            wrong order, there are fewer than two labels, or two labels are the same.

    Examples:
        >>> task = Task("Review: {text}\nSentiment:{label}", labels=[" Negative", " Positive"])
        >>> task.demonstration("fun", 1)
        'Review: fun\nSentiment: Positive'
        >>> task.query("dull")
        'Review: dull\nSentiment:'
    """

    template: str
    labels: Sequence[str]
    separator: str = "\n"
    prefix: str = ""

    def __post_init__(self) -> None:
        for name in ("template", "separator", "prefix"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise PromptError(f"the {name} of a task must be a string; got {value!r}")
        is_list = isinstance(self.labels, Sequence) and not isinstance(self.labels, str)
        if not is_list or not all(isinstance(word, str) for word in self.labels):
            raise PromptError(
                "labels must be a list of words, such as [' Negative', ' Positive']; "
                f"got {self.labels!r}"
            )
        for field in ("{text}", "{label}"):
            if self.template.count(field) != 1:
                raise PromptError(
                    f"the template must contain {field} exactly once, "
                    f"but contains it {self.template.count(field)} times: {self.template!r}"
                )
        if self.template.index("{label}") < self.template.index("{text}"):
            raise PromptError(
                "the template must have {text} before {label}, because the query is what stands "
                f"before {{label}}; got {self.template!r}"
            )
        if len(self.labels) < 2:
            raise PromptError(f"a task needs at least two label words; got {list(self.labels)}")
        blank = [word for word in self.labels if not word.strip()]
        if blank or len(set(self.labels)) < len(self.labels):
            raise PromptError(
                f"label words must be different and not blank; got {list(self.labels)}"
            )
        object.__setattr__(self, "labels", tuple(self.labels))

    @property
    def pieces(self) -> tuple[str, str, str]:
        """The three parts of the template: before the text, text to label, after the label."""
        before, rest = self.template.split("{text}")
        between, after = rest.split("{label}")
        return before, between, after

    def demonstration(self, text: str, label: int) -> str:
        """The demonstration for a text of class ``label``."""
        before, between, after = self.pieces
        return before + text + between + self.labels[label] + after

    def query(self, text: str) -> str:
        """The query for a text: the template up to the label."""
        before, between, _ = self.pieces
        return before + text + between


TASKS: MappingProxyType[str, Task] = MappingProxyType(
    {
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
)
"""The tasks of the paper (its Table 4): sst2, trec, agnews and emo.

Classes are in the order of the data sets on the hub. The bundled examples ``"sentiment"``,
``"questions"``, ``"news"`` and ``"emotions"`` are for these tasks, in this order.
"""
