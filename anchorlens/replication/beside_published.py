"""The paper's tables for a model, beside the values that papers report, as they print them."""

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from math import nan
from types import MappingProxyType
from typing import NamedTuple

from ..prompts.examples import BUNDLED
from ..results.record import Results
from ..results.text_tables import Section, TextTable
from ..system.arguments import checked

HERE = "this model"
TASK_NAMES: Mapping[str, str] = MappingProxyType(
    {"sst2": "SST-2", "trec": "TREC", "agnews": "AGNews", "emo": "EmoC"}
)


class Published(NamedTuple):
    """A number as it was printed, and what stood after its ±; NaN if nothing did."""

    value: float
    spread: float = nan


@cache
def published(paper: str, table: str) -> Mapping[str, Mapping[str, Mapping[str, Published]]]:
    """The values of ``published("anchors", "table_1")``, say, by setting, row and column."""
    text = (files("anchorlens") / "data" / "published.toml").read_text("utf-8")
    return {
        setting: {
            row: {
                column: Published(**v) if isinstance(v, dict) else Published(v)
                for column, v in values.items()
            }
            for row, values in rows.items()
        }
        for setting, rows in tomllib.loads(text)[paper][table].items()
        if setting != "note"
    }


def task_name(task: str) -> str:
    """The paper's name of a task; for a bundled task, also that of the task that it resembles."""
    if task in BUNDLED:
        return f"{task} (as {TASK_NAMES[BUNDLED[task]]})"
    return TASK_NAMES.get(task, task)


@checked
def paper_tables(found: Mapping[str, Results]) -> str:
    """Tables 1 to 3 of a model as text, beside what the paper reports.

    Accuracies and loyalties are in per cent, each with its 95 % interval. Figures 3 to 6 are the
    records' own: ``claims`` says what they show, and ``write_report`` draws them.

    Args:
        found: What ``paper`` returns, or the ``results`` of its error.

    Examples:
        >>> right = {"vanilla": torch.tensor([1., 0.]), "re-weighted": torch.tensor([1., 1.])}
        >>> accuracies = al.metrics.compare_accuracies(right, resamples=0)
        >>> found = {"trec": al.Results(accuracies=accuracies)}
        >>> lines = al.replication.paper_tables(found).splitlines()
        >>> [line.split() for line in lines if "vanilla  " in line]
        [['vanilla', '50'], ['vanilla', '57.56']]
    """
    return "\n\n".join(section.text() for section in paper_sections(found))


def paper_sections(found: Mapping[str, Results]) -> list[Section]:
    """What ``paper_tables`` writes, table by table."""
    sections = [
        Section(
            "Table 1. Accuracy, % [95 % intervals]",
            _by_task(found, _accuracies, "table_1", 2),
            "Vanilla and re-weighted have 1 demonstration a class. More shots: the examples too "
            "that re-weighting is trained on, as many of each class as fit into the prompt; in the "
            "paper 5, on AGNews 3.",
        ),
        Section(
            "Table 2. What compressed demonstrations keep, % [95 % intervals]",
            _table_2(found),
            "Loyalties are to ICL, the whole prompt. Text_anchor: prompts without the "
            "demonstrations' texts. Hidden_anchor: keys and values of label words and format "
            "alone. Hidden_random: random words in place of the label words, mean of the draws; "
            "-top: the draw with the best label loyalty. Not in the paper: separately, each "
            "demonstration run without the others; label words alone, without the format; and the "
            "bytes that are kept. The paper's tasks are SST-2, TREC, AGNews and EmoC.",
        ),
        Section(
            "Table 3. How many times as fast Hidden_anchor answers one query",
            _by_task(found, _speed_ups, "table_3", 1),
            "On this machine, without the one pass over the demonstrations. Against a cached "
            "prefix (not in the paper): keys and values of whole demonstrations are kept as well.",
        ),
    ]
    shown = [section for section in sections if section.table]
    if shown and (bundled := ", ".join(task_name(task) for task in found if task in BUNDLED)):
        shown.append(Section("", {}, f"Bundled examples, not the paper's data: {bundled}."))
    return shown


def _by_task(
    found: Mapping[str, Results],
    rows_of: Callable[[Results], dict[str, str]],
    table: str,
    decimals: int,
) -> TextTable:
    """A column for each task: rows of this model, and those of the paper for its own tasks."""
    rows: TextTable = {}
    for task, results in found.items():
        for row, text in rows_of(results).items():
            rows.setdefault((HERE, row), {})[task_name(task)] = text
    theirs = {task: BUNDLED.get(task, task) for task in found}
    for setting, of_model in published("anchors", table).items() if rows else ():
        for row, numbers in of_model.items():
            texts = {
                task_name(task): f"{numbers[name].value:.{decimals}f}"
                for task, name in theirs.items()
                if name in TASK_NAMES
            }
            rows |= {(f"{setting} in the paper", row): texts} if texts else {}
    return rows


def _accuracies(results: Results) -> dict[str, str]:
    """The accuracies of a task, and what re-weighting gains over vanilla."""
    if (record := results.get("accuracies")) is None:
        return {}
    methods: list[str] = record.info["methods"]
    rows = {name: record.estimate("accuracy", k).percent("") for k, name in enumerate(methods)}
    gain = record.estimate("gain", methods.index("re-weighted"))
    return rows | {"gain of re-weighting": gain.percent("")}


def _speed_ups(results: Results) -> dict[str, str]:
    if (record := results.get("times")) is None:
        return {}
    cached, compressed = record.seconds.tolist()
    whole = float(record.whole_seconds)
    return {
        "against the whole prompt": f"{whole / compressed:.2f}",
        "against a cached prefix": f"{cached / compressed:.2f}",
    }


def _table_2(found: Mapping[str, Results]) -> TextTable:
    """Loyalties and accuracy after each context and after random words, task by task."""
    rows: TextTable = {}
    columns = ("label loyalty", "word loyalty", "accuracy")
    fields = {column: column.replace(" ", "_") for column in columns}
    for task, results in found.items():
        if (record := results.get("contexts")) is None:
            continue
        here, kept = f"{HERE}, {task_name(task)}", record.bytes_stored / record.bytes_stored[0]
        for k, name in enumerate(record.info["contexts"]):
            texts = {column: record.estimate(fields[column], k).percent("") for column in columns}
            rows[here, name] = texts | {"cache kept": f"{100 * kept[k]:.0f}"}
        for column, name in fields.items():
            mean = 100 * float(getattr(record, f"random_{name}").mean())
            rows.setdefault((here, "Hidden_random"), {})[column] = f"{mean:.0f}"
            best = record.estimate(f"top_{name}").percent("")
            rows.setdefault((here, "Hidden_random-top"), {})[column] = best
    for setting, of_model in published("anchors", "table_2").items() if rows else ():
        for row, numbers in of_model.items():
            texts = {column: f"{number.value:.2f}" for column, number in numbers.items()}
            rows[f"{setting} in the paper, mean of its 4 tasks", row] = texts
    return rows
