"""A task for a data file that comes alone: its columns, classes, template and label words.

Classes are in a column with few different values, and texts in that with the longest, which mostly
differ; columns with gaps come last. The name of a class is its label word. If a tokenizer cannot
tell these apart, others take their place, with a warning of those that say nothing of a class.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple

from ..errors import DataError, PromptError
from ..printable import printable
from .chat import ChatTask
from .datafiles import classes_in, nested_fields, read_columns, shortened
from .examples import Example
from .tasks import Task

_TOO_MANY = 100
_DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{1,4}(\D|$)")  # a time may follow
_FEW_GAPS = 0.05  # of the rows; a column with more of them says something of some rows only
_CELLS = str | int | float | None
# Words that say nothing of a class where others are left out or come after them.
_SAY_NOTHING = (
    " a all an and any are as at be by for from in is it its my no non not of off on or other our "
    "out over per than that the their this to under up via with without your "
)
# Names of columns, in the order in which they are taken; other names come after these.
_TEXTS = ("text", "sentence", "review", "message", "body", "content", "question", "description")
_CLASSES = ("label", "class", "category", "target", "topic", "intent", "sentiment", "type", "kind")


class Layout(NamedTuple):
    """Where a file has its texts and classes."""

    text: str  # the column of the texts
    label: str  # the column of the classes
    other_texts: list[str]  # columns that may be that of the texts, too, the likeliest first
    others: list[str]  # the same for the classes
    counts: dict[Any, int]  # how many rows each class has, in class order
    without_text: list[int]  # the numbers of the rows without a text, from 1
    without_class: list[int]
    whole: set[str]  # the columns in which no row is empty
    is_unsure: bool  # whether nothing but its place tells the column of the classes from another

    def __str__(self) -> str:
        """Which columns were taken, and which others may be meant."""
        both = (", ".join(names) or "no other" for names in (self.other_texts, self.others))
        texts, classes = both
        return printable(
            f"texts are taken from the column {self.text} (text= names another: {texts}), and "
            f"classes from the column {self.label} (label= names another: {classes})"
        )


def layout_of(
    path: Path, text: str | None = None, label: str | None = None, image: str | None = None
) -> Layout:
    """The columns that are named, or else those that look like texts and classes; not ``image``."""
    whole = read_columns(path, label or "")
    columns = {name: cells for name, cells in whole.items() if name != image}
    missing = [name for name in (text, label) if name is not None and name not in columns]
    problems = [f"there is no column {name!r}" for name in missing]
    if unfit := [value for value in columns.get(label or "", ()) if not _may_be_class(value)]:
        problems.append(
            f"the column {label!r} has values that are no texts and no whole numbers, such as "
            f"{shortened(unfit[0])}"
        )
    # The classes are often the last column.
    of_classes = [name for name in [*columns][::-1] if name != text and _has_classes(columns[name])]
    of_classes.sort(key=lambda name: _order_of_classes(name, columns[name]))
    is_given = label is not None
    label = label or next(iter(of_classes), None)
    of_texts = [name for name in columns if name != label and _letters(columns[name])]
    of_texts.sort(key=lambda name: _order_of_texts(name, columns[name]))
    text = text or next(iter(of_texts), None)
    if text is None:
        problems.append("no column has texts (text= names one)")
    if label is None:
        problems.append(
            f"no column has classes, that is 2 to {_TOO_MANY} different values, each in two "
            "rows on average (label= names one)"
        )
    if problems or text is None or label is None:
        found = "; ".join(f"{name} ({len(_counts(columns[name]))})" for name in columns)
        raise DataError(
            f"{path}: {'; '.join(problems)}. Columns, with how many different values: {found}"
            f"{nested_fields(columns, path)}"
        )
    values = classes_in(columns, label, path)
    others = [name for name in of_classes if name not in (text, label)]
    counts = sorted(_counts(values).items(), key=lambda each: (isinstance(each[0], str), each[0]))
    return Layout(
        text,
        label,
        [name for name in of_texts if name not in (text, label)],
        others,
        dict(counts),
        [number for number, words in enumerate(columns[text], start=1) if not _is_text(words)],
        [number for number, value in enumerate(values, start=1) if _value(value) is None],
        {name for name, cells in columns.items() if not _share_of_empty(cells)},
        not is_given
        and _rank(label, _CLASSES) == len(_CLASSES)
        and any(_letters(columns[name]) for name in others),
    )


def problems_of(
    layout: Layout, classes: Sequence[Any], shots: int, queries: int | None
) -> list[str]:
    """All that keeps the rows of a file from being a task, in words."""
    problems = []
    for what, column, others, argument, rows in (
        ("text", layout.text, layout.other_texts, "text=", layout.without_text),
        ("class", layout.label, layout.others, "label=", layout.without_class),
    ):
        whole = [name for name in others if name in layout.whole]
        if rows:
            first = ", ".join(map(str, rows[:5])) + ", ..." * (len(rows) > 5)
            cure = (
                f"if another column is meant, give {argument}{whole[0]}"
                + f" (or {', '.join(whole[1:])})" * (len(whole) > 1)
                + ", which has no empty row; else fill them"
                if whole
                else "fill them, or delete these rows"
            )
            problems.append(
                f"{len(rows)} rows have no {what} in the column {column} (counted from 1 without "
                f"the names of the columns: {first}); {cure}"
            )
    if unlisted := [value for value in layout.counts if value not in classes]:
        problems.append(
            f"the column {layout.label} has the values {', '.join(map(str, unlisted))}, which are "
            "not among classes="
        )
    if not 1 < len(classes) <= _TOO_MANY:
        problems.append(
            f"the column {layout.label} has {len(classes)} classes, and a task has 2 to "
            f"{_TOO_MANY}; name another by label="
        )
    words = Counter(_spelled(str(value), is_chat=True) for value in classes)
    alike = [
        repr(value)
        for value in classes
        if words[_spelled(str(value), is_chat=True)] > 1 or not str(value).strip()
    ]
    if alike:
        problems.append(
            f"the classes {', '.join(alike)} are the same word, or blank; give each class one name "
            "in all rows"
        )
    rare = [value for value in classes if layout.counts.get(value, 0) < shots]
    if rare and len(rare) <= _TOO_MANY:
        counted = ", ".join(f"{value} has {layout.counts.get(value, 0)}" for value in rare)
        problems.append(f"shots={shots} needs as many rows of each class, but {counted}")
    left = sum(layout.counts.values()) - shots * len(classes)
    if not rare and left < (queries or 1):
        problems.append(
            f"{left} rows are left for queries beside the demonstrations, and "
            f"{queries or 1} are needed; lower queries= or shots=, or give more rows"
        )
    return problems


def entries_for(layout: Layout, classes: Sequence[Any] | None, chat: bool) -> dict[str, Any]:
    """The entries of a task file for a data file: columns, classes, template and label words."""
    values = list(layout.counts) if classes is None else list(classes)
    return {
        "template": f"{_title(layout.text)}: {{text}}\n{_title(layout.label)}:{{label}}",
        "labels": [_spelled(str(value), chat) for value in values],
        **({"chat": True} if chat else {}),
        "text_column": layout.text,
        "label_column": layout.label,
        "classes": values,
    }


def with_other_words(tokenizer: Any, task: Task) -> Task:
    """The task with label words of which no two begin with the same token, or an error."""
    is_chat = isinstance(task, ChatTask)
    before = "" if is_chat else task.pieces[1]
    names = [word.strip() for word in task.first_words]
    parts: dict[int | None, str] = {}  # of each name the whole, or its first word that differs
    for name in names:
        telling_first = sorted(name.split(), key=_says_nothing)
        words = [_spelled(part, is_chat) for part in (name, *telling_first)]
        tokens = [_first_token(tokenizer, before, word) for word in words]
        new = [k for k, token in enumerate(tokens) if token is not None and token not in parts]
        parts |= {tokens[k]: words[k] for k in new[:1]}
    letters = list((ascii_letters[26:] + ascii_letters[:26])[: len(names)])
    capital = [name[:1].upper() + name[1:] for name in names]
    spelled = [[_spelled(word, is_chat) for word in words] for words in (names, capital, letters)]
    for labels in (*spelled[:2], names, list(parts.values()), spelled[2], letters):
        firsts = {_first_token(tokenizer, before, word) for word in labels} - {None}
        if len(firsts) == len(names):
            return replace(task, labels=tuple(labels))
    raise PromptError(
        f"of the names of the {len(names)} classes some begin with the same token, and so do "
        "their words; give a task file with label words that begin differently"
    )


def words_of(entries: Mapping[str, Any]) -> str:
    """Which classes have a label word that is not their name, as a table; nothing if none has."""
    pairs = [*zip(map(str, entries["classes"]), entries["labels"], strict=True)]
    others = [
        (name, word)
        for name, word in pairs
        if word.strip().lower() != _spelled(name, is_chat=True).lower()
    ]
    width = max((len(name) for name, _ in others), default=0)
    rows = "".join(f"    {name:{width}}  {word!r}\n" for name, word in others)
    return rows and (
        f"  {len(others)} of {len(pairs)} classes have a label word that is not their name, as no "
        f"two may begin with the same token:\n{rows}"
    )


def words_that_say_nothing(entries: Mapping[str, Any]) -> list[str]:
    """The label words whose first word, which is what is predicted, says nothing of the class."""
    return [
        word
        for value, word in zip(entries["classes"], entries["labels"], strict=True)
        if _says_nothing(first := word.split()[0])
        and first.lower() != _spelled(str(value), is_chat=True).lower()
    ]


def repetitions(examples: Sequence[Example]) -> str:
    """How many rows repeat a text (with its image), and how many texts have several classes."""
    classes: dict[tuple[str, str], set[Any]] = {}
    for each in examples:
        classes.setdefault((each.text, str(each.image)), set()).add(each.label)
    rows, mixed = len(examples) - len(classes), sum(len(each) > 1 for each in classes.values())
    if not rows:
        return ""
    several = f"{mixed} texts have several classes, of which one answer is right at most; "
    return (
        f"{rows} rows repeat the text of another row; {several * bool(mixed)}intervals take all "
        "rows as independent, so that they are too narrow: leave repeated rows out"
    )


def _says_nothing(word: str) -> bool:
    return f" {word.lower()} " in _SAY_NOTHING or (len(word) == 1 and word.isalpha())


def _first_token(tokenizer: Any, before: str, word: str) -> int | None:
    """The token that follows the end of the query; None if the word merges with this end."""
    alone, both = tokenizer([before, before + word], add_special_tokens=False)["input_ids"]
    return both[len(alone)] if both[: len(alone)] == alone and len(both) > len(alone) else None


def in_toml(entries: Mapping[str, Any]) -> str:
    """Entries as a task file; texts, numbers and lists are written as in json."""
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}\n"
        for name, value in entries.items()
    )


def _spelled(name: str, is_chat: bool) -> str:
    """The name of a class as a label word; an answer of a chat begins without a space."""
    word = re.sub(r"[\s_]+", " ", name).strip() or name
    return word if is_chat else f" {word}"


def _title(column: str) -> str:
    words = re.sub(r"[\W_]+", " ", column).strip()
    return words[:1].upper() + words[1:] or "Text"


def _rank(name: str, names: Sequence[str]) -> int:
    return names.index(name.lower()) if name.lower() in names else len(names)


def _order_of_classes(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Columns with few gaps first, then by their names; numbers last, as they may be amounts."""
    gaps = _share_of_empty(values)
    return gaps > _FEW_GAPS, _rank(name, _CLASSES), gaps > 0, not _letters(values)


def _order_of_texts(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Columns with few gaps first, then by their names, then those of many different sentences."""
    texts = [value for value in values if _is_text(value)]
    gaps = 1 - len(texts) / len(values)
    spaced = sum(bool(re.search(r"\s", text.strip())) for text in texts)
    few = 2 * len(set(texts)) <= len(texts)  # as names of classes, or one text in all rows
    is_spaced = 2 * spaced > len(texts)  # and no identifiers or addresses
    return gaps > _FEW_GAPS, _rank(name, _TEXTS), few, not is_spaced, gaps > 0, -_letters(values)


def _share_of_empty(values: Sequence[Any]) -> float:
    """The share of rows that are empty."""
    return sum(_value(value) is None for value in values) / len(values)


def _has_classes(values: Sequence[Any]) -> bool:
    """Whether there are few different values, each in two rows on average, and no dates."""
    counts = _counts(values)
    few = min(_TOO_MANY, counts.total() // 2)
    are_dates = all(_DATE.match(str(value)) for value in counts)
    return 1 < len(counts) <= few and all(map(_may_be_class, values)) and not are_dates


def _may_be_class(value: Any) -> bool:
    return isinstance(_value(value), str | int | None) and isinstance(value, _CELLS)


def _counts(values: Sequence[Any]) -> Counter[Any]:
    """How many rows have each value, without missing ones."""
    return Counter(value for value in map(_value, values) if value is not None)


def _value(value: Any) -> Any:
    """A cell: None if it is empty, a whole number for 1.0, a text for what has no order."""
    if isinstance(value, float):
        return None if isnan(value) else int(value) if value.is_integer() else value
    return value if isinstance(value, str | int) or value is None else repr(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _letters(values: Sequence[Any]) -> int:
    """How many letters the texts of a column have."""
    return sum(sum(map(str.isalpha, value)) for value in values if isinstance(value, str))
