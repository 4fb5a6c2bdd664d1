"""Labelled examples: read from a bundled set, a file or the hub, and sampled for prompts."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import as_file, files
from itertools import cycle
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import DataError
from ..system.arguments import check_counts, checked
from ..system.files import kind_of
from .datafiles import READERS, Table, nested_fields, read_columns, refuse_no_rows, table_of


@checked
@dataclass(frozen=True)
class Example:
    """A text, its class (or ``None``), and the path of its image, if any (see ``with_images``)."""

    text: str
    label: int | None = None
    image: str | None = field(default=None, repr=False)

    @classmethod
    @checked
    def from_row(cls, row: Mapping[str, Any]) -> "Example":
        """A row of a table that has the columns ``text`` and, where it is known, ``label``.

        A column ``image`` is taken too; others beside these are left out.

        Raises:
            DataError: There is no text, or there are other columns but no label.

        Examples:
            >>> al.Example.from_row({"text": "fun", "label": 1})
            Example(text='fun', label=1)
        """
        names = [each.name for each in fields(cls)]
        if "text" not in row or ("label" not in row and not set(row) <= set(names)):
            raise DataError(
                "a row of a table becomes an example by its columns text and label; got "
                f"{list(row)}; name the columns: "
                'al.load_examples(rows, text="...", label="...", classes=[...])'
            )
        return cls(**{name: row[name] for name in names if name in row})

    @staticmethod
    def _in_place_of(value: Any) -> str:
        """What to write in place of the name of a file or of examples, or of a text and a class."""
        if isinstance(value, tuple | list) and list(map(type, value)) == [str, int]:
            return f"write al.Example({value[0]!r}, {value[1]})"
        if not isinstance(value, str | Path):
            return ""
        is_name = Path(value).suffix.lower() in READERS or value in (*BUNDLED, *HUB_SOURCES)
        return f"read it: al.load_examples({str(value)!r})" if is_name else ""


@dataclass(frozen=True)
class HubSource:
    """A data set of the paper on the hub, in a revision without a loading script."""

    path: str
    text: str
    label: str
    test: str = "test"
    revision: str | None = None


# Two data sets still have a loading script; "refs/convert/parquet" is the hub's conversion of them.
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

# Bundled examples, written by the project, and the task of the paper for which each is.
BUNDLED: MappingProxyType[str, str] = MappingProxyType(
    {"sentiment": "sst2", "questions": "trec", "news": "agnews", "emotions": "emo"}
)

# The names that a data set on the hub can have; every other name is a path.
_ON_HUB = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)


@checked
def load_examples(
    source: str | Path | Sequence[Mapping[str, Any]],
    split: str | None = None,
    *,
    text: str = "text",
    label: str = "label",
    image: str | None = None,
    classes: Sequence[str | int | bool] | None = None,
) -> list[Example]:
    """Read labelled examples, in the order of the source.

    Args:
        source: A bundled name (``"sentiment"``, ``"questions"``, ``"news"``, ``"emotions"``), a
            task of the paper on the hub (``"sst2"``, ``"trec"``, ``"agnews"``, ``"emo"``), a jsonl,
            csv or parquet file, or another data set on the hub. A ``Path`` is always a file, and so
            is a string that names an existing one or ends in the suffix of one. Or rows: a list of
            dicts, a ``Dataset`` or a ``DataFrame``.
        split: ``"train"`` or ``"test"``; of other data sets on the hub any, by default ``"train"``.
            Bundled sets are whole without one, else halves with all classes; files have no splits.
        text: Column of the texts (files, rows and other hub data sets).
        label: Column of the classes: integers from 0, or the values listed in ``classes``.
        image: Column of the paths of images, relative to the folder of the file; none by default.
        classes: The values of the label column in class order, if they are not 0, 1, ...

    Raises:
        DataError: Source, split, column or classes are wrong, or the hub cannot be reached.

    Examples:
        >>> examples = load_examples("sentiment", split="train")
        >>> sorted({example.label for example in examples})
        [0, 1]
        >>> load_examples([{"text": "fun", "kind": "good"}], label="kind", classes=["bad", "good"])
        [Example(text='fun', label=1)]
    """
    name = str(source) if isinstance(source, str | Path) else "the list of rows"
    if text == label:
        raise DataError(
            f"the texts and the classes are two columns; got {text!r} for both (text= and label=)"
        )
    if classes and any(value in classes[:k] for k, value in enumerate(classes)):
        raise DataError(
            "classes is a list of the different values of the label column, in the order of the "
            f"classes, such as ['bad', 'good']; got {classes!r}"
        )
    if not isinstance(source, str | Path):
        if split is not None:
            raise DataError(f"rows are one split, but split={split!r} came with them; give none")
        refuse_no_rows(columns := table_of(source), name)
        return _examples(columns, name, text, label, classes, image)
    if image is not None and not _is_file(source):
        raise DataError(
            f"image={image!r} is a column, which only a file or rows have; {name} is none"
        )
    if not isinstance(source, Path) and name in BUNDLED:
        with as_file(files("anchorlens") / "data" / f"{name}.jsonl") as path:
            examples = _examples(read_columns(path, label), name, text, label, classes)
        if split is None:
            return examples
        if split not in ("train", "test"):
            raise DataError(f"bundled {name!r} has the splits 'train' and 'test'; got {split!r}")
        # Every second example of each class, so that both halves have all classes.
        in_train: dict[int | None, Iterator[bool]] = defaultdict(lambda: cycle([True, False]))
        return [each for each in examples if next(in_train[each.label]) == (split == "train")]
    if _is_file(source):
        if split is not None:
            raise DataError(
                f"a file is one split, but split={split!r} came with {name}; pass its file"
            )
        columns, folder = read_columns(Path(source), label), Path(source).parent
        return _examples(columns, name, text, label, classes, image, folder)
    hub = HUB_SOURCES.get(name) or HubSource(name, text, label)
    if name in HUB_SOURCES and (text, label) != ("text", "label"):
        raise DataError(
            f"the columns of {name!r}, of the paper, are known, but {text!r} and {label!r} came "
            f"with it; leave them out, or name the data set on the hub ({hub.path!r})"
        )
    split = hub.test if split == "test" else split or "train"
    return _examples(_read_hub(hub, split), hub.path, hub.text, hub.label, classes)


@checked
def sample_demonstrations(
    examples: Sequence[Example], shots: int = 1, seed: int = 42
) -> list[Example]:
    """Draw demonstrations: balanced over classes, without replacement, in a random order.

    Args:
        examples: Labelled examples; the classes are 0 to the largest label in them.
        shots: Demonstrations of each class, at least 1.
        seed: Seed of a separate generator; the global random state is not touched.

    Raises:
        DataError: A class has fewer than ``shots`` examples, or an example has no label.

    Examples:
        >>> demos = sample_demonstrations(load_examples("questions"), shots=1, seed=42)
        >>> sorted(demo.label for demo in demos)
        [0, 1, 2, 3, 4, 5]
    """
    check_counts(DataError, shots=shots)
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
    drawn = [demo for k in sorted(by_class) for demo in generator.sample(by_class[k], shots)]
    generator.shuffle(drawn)
    return drawn


@checked
def sample_queries(
    examples: Sequence[Example],
    count: int,
    seed: int = 42,
    exclude: Sequence[Example] = (),
    *,
    even: bool = False,
) -> list[Example]:
    """Draw queries without replacement, none with the text of an excluded example.

    Args:
        seed: Seed of a separate generator; the global random state is not touched.
        exclude: Examples whose texts (with their images) must not be drawn.
        even: Draw as many of each class, or one more of some, whatever their shares in the
            examples are. An accuracy then says more where one class is much the commonest.

    Raises:
        DataError: ``count`` is below 1, or too few examples are left, in all or of a class.

    Examples:
        >>> examples = load_examples("questions")
        >>> demos = sample_demonstrations(examples)
        >>> len(sample_queries(examples, 5, exclude=demos))
        5
    """
    excluded = {(example.text, example.image) for example in exclude}
    pool = [example for example in examples if (example.text, example.image) not in excluded]
    if len(pool) < count:
        raise DataError(
            f"{count} queries are asked for, but only {len(pool)} examples are left without the "
            "demonstrations; ask for fewer queries or give more examples"
        )
    check_counts(DataError, count=count)
    drawn = random.Random(seed).sample(pool, len(pool) if even else count)
    if not even:
        return drawn
    of_class = {
        label: [example for example in drawn if example.label == label]
        for label in {example.label: None for example in examples}
    }
    drawn = [example for of_each in zip(*of_class.values(), strict=False) for example in of_each]
    if len(drawn) < count:
        rare = min(of_class, key=lambda label: len(of_class[label]))
        raise DataError(
            f"{count} queries are to be drawn evenly over {len(of_class)} classes, but of class "
            f"{rare} only {len(of_class[rare])} examples are left without the demonstrations; ask "
            f"for at most {len(drawn)} queries or give more examples of it"
        )
    return drawn[:count]


def _is_file(source: str | Path) -> bool:
    """Whether a source is a file. The name of a task of the paper is one only as a ``Path``."""
    if isinstance(source, Path):
        return True
    if source in HUB_SOURCES:
        return False
    is_on_hub = _ON_HUB.fullmatch(source) and Path(source).suffix.lower() not in READERS
    return not is_on_hub or bool(kind_of(source, DataError))


def _read_hub(hub: HubSource, split: str) -> Table:
    import datasets

    try:
        rows = datasets.load_dataset(hub.path, split=split, revision=hub.revision)
        for column, kind in rows.features.items():  # images of strangers are not opened
            if hasattr(kind, "decode"):
                rows = rows.cast_column(column, replace(kind, decode=False))
    except Exception as error:  # datasets has no common base class of its errors
        raise DataError(
            f"examples {hub.path!r} (split {split!r}) cannot be loaded: {error}. Give a file "
            f"({', '.join(READERS)}), a bundled set ({', '.join(BUNDLED)}), or check the name"
        ) from error
    return {name: rows[name] for name in rows.column_names}


def _examples(
    columns: Table,
    source: str,
    text: str,
    label: str,
    classes: Sequence[str | int | bool] | None,
    image: str | None = None,
    folder: Path = Path(),
) -> list[Example]:
    missing = [name for name in (text, label) if name not in columns]
    if missing:
        raise DataError(
            f"{source} has the columns {list(columns)}, but not {missing}; name the right ones "
            f"(text= and label=) or rename them{nested_fields(columns, source)}"
        )
    if image is not None and image not in columns:
        raise DataError(
            f"{source} has the columns {list(columns)}, but not {image!r}; name the one of the "
            "paths of images (image=)"
        )
    known = None if classes is None else list(classes)  # a list, because labels can be unhashable
    others = "an integer from 0; list others with classes="
    expected = others if known is None else f"one of classes={known}"
    examples = []
    for row, (words, value) in enumerate(zip(columns[text], columns[label], strict=True)):
        is_number = isinstance(value, Integral) and not isinstance(value, bool)
        fits = value in known if known is not None else is_number and value >= 0
        if not fits or not isinstance(words, str):
            tensor = "; convert it with int(), or give a Dataset .with_format(None)"
            raise DataError(
                f"row {row} of {source}: expected a text and a class ({expected}); got text "
                f"{words!r} and label {value!r}{tensor * hasattr(value, '__array__')}"
            )
        examples.append(Example(words, value if known is None else known.index(value)))
    for row, path in enumerate(() if image is None else columns[image]):
        if not isinstance(path, str) or kind_of(folder / path, DataError) != "file":
            raise DataError(
                f"row {row} of {source}: expected the path of an image in the column {image} "
                f"(image=); got {path!r}, which is no file in {folder.resolve()}"
            )
        examples[row] = replace(examples[row], image=str(folder / path))
    return examples
