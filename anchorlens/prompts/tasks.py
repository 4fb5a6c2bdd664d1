"""Tasks (template, label words, separator) and the labelled examples that fill them."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from ..errors import DataError, PromptError
from .datafiles import READERS, Columns, read_columns


@dataclass(frozen=True)
class Task:
    r"""How demonstrations and queries are written.

    Args:
        template: One demonstration, with ``{text}`` and then ``{label}`` in it, each once. The
            query is the part before ``{label}``.
        labels: The label words, by class, exactly as they stand in the prompt. Most tokenizers
            want the space before the word to belong to it: ``" Positive"``.
        separator: What stands between demonstrations.
        prefix: Instructions before the first demonstration.

    Raises:
        PromptError: A part is no string, the template lacks a field or has them in the wrong
            order, there are fewer than two labels, or two labels are the same.

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
        """The template cut at its fields: before the text, text to label, after the label."""
        before, rest = self.template.split("{text}")
        between, after = rest.split("{label}")
        return before, between, after

    def demonstration(self, text: str, label: int) -> str:
        """The demonstration of a text of class ``label``."""
        before, between, after = self.pieces
        return before + text + between + self.labels[label] + after

    def query(self, text: str) -> str:
        """The query: the template up to where the label would stand."""
        before, between, _ = self.pieces
        return before + text + between


@dataclass(frozen=True)
class Example:
    """A text and its class, ``None`` where the class is not known."""

    text: str
    label: int | None = None


@dataclass(frozen=True)
class HubSource:
    """Where a data set of the paper lies on the hub, in a revision without a loading script."""

    path: str
    text: str
    label: str
    test: str = "test"
    revision: str | None = None


# Table 4 of the paper; classes in the order of the hub's data sets.
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

# The hub's own parquet conversion serves the two data sets that still have a loading script.
HUB_SOURCES: MappingProxyType[str, HubSource] = MappingProxyType(
    {
        "sst2": HubSource("stanfordnlp/sst2", text="sentence", label="label", test="validation"),
        "trec": HubSource(
            "CogComp/trec", text="text", label="coarse_label", revision="refs/convert/parquet"
        ),
        "agnews": HubSource("fancyzhx/ag_news", text="text", label="label"),
        "emo": HubSource("aps/emo", text="text", label="label", revision="refs/convert/parquet"),
    }
)

# Bundled examples, written by the project, and the task of the paper that each belongs to.
BUNDLED: MappingProxyType[str, str] = MappingProxyType(
    {"sentiment": "sst2", "questions": "trec", "news": "agnews", "emotions": "emo"}
)

# How a data set of the hub can be called; every other name is a path.
_ON_HUB = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)


def load_examples(
    source: str | Path,
    split: str | None = None,
    *,
    text: str = "text",
    label: str = "label",
    classes: Sequence[str | int] | None = None,
) -> list[Example]:
    """Read labelled examples.

    Args:
        source: A bundled name (``"sentiment"``, ``"questions"``, ``"news"``, ``"emotions"``), a
            task of the paper (``"sst2"``, ``"trec"``, ``"agnews"``, ``"emo"``, read from the
            hub), the path of a jsonl, csv or parquet file, or any other data set of the hub. A
            ``Path`` is always a file, and so is a name that exists or has the suffix of one. A
            file is read as it is now, and nothing of it is cached.
        split: ``"train"`` or ``"test"``; for other hub data sets any split they have. Bundled
            sets are cut in halves with all classes in each; without a split they are whole. A
            file is one split, so it takes none. Hub data sets default to ``"train"``.
        text: Column of the texts (files and other hub data sets).
        label: Column of the classes, integers from 0, or the values listed in ``classes``.
        classes: The values of the label column in class order, where they are not 0, 1, ...

    Returns:
        The examples in the order of the source.

    Raises:
        DataError: The source, split or column does not exist, a label is not a class, or the hub
            cannot be reached.

    Examples:
        >>> examples = load_examples("sentiment", split="train")
        >>> sorted({example.label for example in examples})
        [0, 1]
    """
    name = str(source)
    if not isinstance(source, Path) and name in BUNDLED:
        with as_file(files("anchorlens") / "data" / f"{name}.jsonl") as path:
            whole = _examples(read_columns(path, label), name, text, label, classes)
        return _half(whole, name, split)
    if _is_file(source):
        if split is not None:
            raise DataError(
                f"a file is one split, but split={split!r} came with {name}; "
                "pass the file of the split that you want, and no split"
            )
        return _examples(read_columns(Path(source), label), name, text, label, classes)
    if name in HUB_SOURCES:
        hub = HUB_SOURCES[name]
        split = hub.test if split == "test" else split or "train"
        return _read_hub(hub.path, split, hub.revision, hub.text, hub.label, classes)
    return _read_hub(name, split or "train", None, text, label, classes)


def sample_demonstrations(
    examples: Sequence[Example], shots: int = 1, seed: int = 42
) -> list[Example]:
    """Draw demonstrations: balanced over classes, without replacement, in a random order.

    Args:
        examples: Labelled examples; the classes are 0 to the largest label in them.
        shots: Demonstrations of each class, at least 1.
        seed: Seeds a generator of its own; the global random state is not touched.

    Returns:
        ``shots`` examples of each class, shuffled.

    Raises:
        DataError: A class has no example or fewer than ``shots``, or an example has no label.

    Examples:
        >>> demos = sample_demonstrations(load_examples("questions"), shots=1, seed=42)
        >>> sorted(demo.label for demo in demos)
        [0, 1, 2, 3, 4, 5]
    """
    if not isinstance(shots, int) or shots < 1:
        raise DataError(f"shots must be at least 1; got {shots!r}; give a whole number")
    by_class: dict[int, list[Example]] = {}
    for example in examples:
        if example.label is None or example.label < 0:
            raise DataError(
                f"demonstrations need a label, an integer from 0; {example.text!r} has "
                f"{'none' if example.label is None else example.label}"
            )
        by_class.setdefault(example.label, []).append(example)
    if not by_class:
        raise DataError("there are no examples to draw demonstrations from")
    for number in range(max(by_class) + 1):
        if len(by_class.get(number, ())) < shots:
            raise DataError(
                f"class {number} has {len(by_class.get(number, ()))} examples, but {shots} of "
                "each class are asked for; lower shots or give more examples"
            )
    generator = random.Random(seed)
    drawn = [
        demo for number in sorted(by_class) for demo in generator.sample(by_class[number], shots)
    ]
    generator.shuffle(drawn)
    return drawn


def sample_queries(
    examples: Sequence[Example], count: int, seed: int = 42, exclude: Sequence[Example] = ()
) -> list[Example]:
    """Draw queries without replacement, none with the text of an excluded example.

    Args:
        examples: Where they are drawn from.
        count: How many.
        seed: Seeds a generator of its own; the global random state is not touched.
        exclude: Examples whose texts may not come, such as the demonstrations.

    Raises:
        DataError: There are fewer than ``count`` examples left, or ``count`` is below 0.

    Examples:
        >>> examples = load_examples("questions")
        >>> demos = sample_demonstrations(examples)
        >>> len(sample_queries(examples, 5, exclude=demos))
        5
    """
    if not isinstance(count, int) or count < 0:
        raise DataError(f"count must be a whole number from 0; got {count!r}")
    taken = {example.text for example in exclude}
    pool = [example for example in examples if example.text not in taken]
    if len(pool) < count:
        raise DataError(
            f"{count} queries are asked for, but only {len(pool)} examples are left once the "
            "demonstrations are taken out; ask for fewer queries or give more examples"
        )
    return random.Random(seed).sample(pool, count)


def _half(examples: list[Example], name: str, split: str | None) -> list[Example]:
    if split is None:
        return examples
    if split not in ("train", "test"):
        raise DataError(f"bundled {name!r} has the splits 'train' and 'test'; got {split!r}")
    # Every other example of each class, so that both halves have all classes.
    seen: dict[int | None, int] = {}
    half = []
    for example in examples:
        count = seen.get(example.label, 0)
        seen[example.label] = count + 1
        if (count % 2 == 0) == (split == "train"):
            half.append(example)
    return half


def _is_file(source: str | Path) -> bool:
    """Whether a source is a path; what has a name of the paper's tasks is one only as a Path."""
    if isinstance(source, Path):
        return True
    if source in HUB_SOURCES:
        return False
    is_on_hub = _ON_HUB.fullmatch(source) and Path(source).suffix.lower() not in READERS
    return not is_on_hub or Path(source).exists()


def _read_hub(
    path: str,
    split: str,
    revision: str | None,
    text: str,
    label: str,
    classes: Sequence[str | int] | None,
) -> list[Example]:
    import datasets

    try:
        rows = datasets.load_dataset(path, split=split, revision=revision)
    except Exception as error:  # no hub, no such set or split: datasets has no common base
        raise DataError(
            f"examples {path!r} (split {split!r}) cannot be loaded: {error}. Give a jsonl, csv or "
            f"parquet file, one of the bundled sets ({', '.join(BUNDLED)}), or check the name"
        ) from error
    columns = {name: rows[name] for name in rows.column_names}
    return _examples(columns, path, text, label, classes)


def _examples(
    columns: Columns, source: str, text: str, label: str, classes: Sequence[str | int] | None
) -> list[Example]:
    missing = [name for name in (text, label) if name not in columns]
    if missing:
        raise DataError(
            f"{source} has the columns {list(columns)}, but not {missing}; name the right ones (in "
            "Python with text= and label=) or rename them"
        )
    known = None if classes is None else list(classes)  # a list, as a label may be unhashable
    expected = "an integer from 0; list others in Python with classes="
    if known is not None:
        expected = f"an integer from 0, or one of classes={known}"
    examples = []
    for row, (words, value) in enumerate(zip(columns[text], columns[label], strict=True)):
        fits = value in known if known is not None else type(value) is int and value >= 0
        if not fits or not isinstance(words, str):
            raise DataError(
                f"row {row} of {source}: expected a text and a class ({expected}); got text "
                f"{words!r} and label {value!r}"
            )
        examples.append(Example(words, value if known is None else known.index(value)))
    return examples
