"""`anchorlens run FILE` finds columns, classes, template and label words in a data file."""

import json
import re
import shlex
import warnings
from pathlib import Path
from string import ascii_uppercase
from typing import Any
from unittest.mock import DEFAULT, Mock

import pandas as pd
import pytest

import anchorlens as al
from anchorlens.cli import analysis, work
from anchorlens.cli.options import Run
from anchorlens.cli.tasks import chosen_tasks
from anchorlens.errors import DataError
from anchorlens.prompts import own_data
from anchorlens.prompts.own_data import layout_of, words_of, words_that_say_nothing
from tests.support.chat_tokenizers import chat_tokenizer

pytestmark = pytest.mark.filterwarnings(  # of few queries
    *("ignore:in . of . sets", "ignore:some pairs", "ignore:in layers", "ignore:intervals "),
    *("ignore:no result for", "ignore:the label words"),
)
TWENTY = [f"{first}{second}" for first in "abcd" for second in "klmno"]


def frame(classes: list[Any], text: str = "message", label: str = "topic") -> pd.DataFrame:
    """Four rows of each class, and columns that hold neither texts nor classes."""
    rows = [value for value in classes for _ in range(max(4, 16 // len(classes)))]
    texts = [f"text number {k}, which is long" for k in range(len(rows))]
    dates = [f"2026-01-{k % 28 + 1:02d}" for k in range(len(rows))]
    return pd.DataFrame({"id": range(9, 9 + len(rows)), text: texts, label: rows, "date": dates})


def commas(table: pd.DataFrame, path: Path, **options: Any) -> None:
    table.to_csv(path, index=False, **options)


@pytest.mark.quick_cases("whole commands", "table1")
@pytest.mark.parametrize(
    ("name", "table", "expected"),
    [
        ("names.csv", frame(["yes", "no", "may be"]), {"labels": [" may be", " no", " yes"]}),
        (
            "integers.csv",  # the tokenizer has no token for a space and a digit
            frame([5, 2], "Review_text", "stars"),
            {"template": "Review text: {text}\nStars:{label}", "labels": ["2", "5"]},
        ),
        ("twenty.csv", frame(TWENTY), {"classes": TWENTY}),
        (
            "semicolon.csv",
            frame(["gut", "schlecht"], "Text", "Gefühl"),
            {"template": "Text: {text}\nGefühl:{label}", "text_column": "Text"},
        ),
        ("rows.parquet", frame([0, 1]), {"classes": [0, 1], "label_column": "topic"}),
    ],
)
def test_a_file_is_analysed_and_the_printed_command_does_the_same(
    done: Any, no_analysis: Mock, of_a_csv: list[str], name: str, table: pd.DataFrame, expected: Any
) -> None:
    """All is computed from one of the files, and from that with most classes once."""
    prompts: list[Any] = []

    def analysed(model: Any, task: str, batches: list[Any], options: Run) -> Any:
        prompts.append([batch.tokens.tolist() for batch in batches])
        if len(prompts) > {"names.csv": 2, "twenty.csv": 1}.get(name, 0):
            return DEFAULT  # a page without records
        return analysis.analysed(model, task, batches, options)

    no_analysis.side_effect = analysed
    if name == "rows.parquet":
        table.to_parquet(name)
    else:
        form = {"sep": ";", "encoding": "utf-8-sig"} if name == "semicolon.csv" else {}
        commas(table, Path(name), **form)
    given = [name, *of_a_csv[1:], "--queries", "11", "--draws", "1", "--out", "out"]
    printed = done("run", *given).err
    settings = json.loads(Path("out/settings.json").read_text())
    assert {entry: settings.get(entry) for entry in expected} == expected
    assert f"{name}: {len(table)} rows, understood as" in printed
    assert "the model has 3 layers: --depth 1, the layers" in printed
    [line] = [line for line in printed.splitlines() if line.startswith("  anchorlens run")]
    # Rows that are stored are those of this run, or it would be an error.
    done(*shlex.split(line)[1:])
    assert prompts[0] == prompts[1]
    task, _ = al.prompts.read_task(f"out/{Path(name).stem}.toml")
    assert task.template == settings["template"] and list(task.labels) == settings["labels"]


def chosen(path: Path, **options: Any) -> Any:
    return chosen_tasks(None, Run(model="x", data=path, **options))[0]


def test_columns_and_classes_may_be_given(tmp_path: Path) -> None:
    table = frame(["b", "a"]).assign(kind=["x", "y"] * 8)
    commas(table, path := tmp_path / "a.csv")
    assert chosen(path).entries["label_column"] == "topic"
    # Of columns whose names say nothing, the last one.
    commas(table.rename(columns={"topic": "c1", "kind": "c2"}), tmp_path / "b.csv")
    assert chosen(tmp_path / "b.csv").entries["label_column"] == "c2"
    found = chosen(path, label_column="kind", text_column="date", classes=["y", "x"])
    assert found.task == al.Task("Date: {text}\nKind:{label}", labels=[" y", " x"])
    assert found.examples.pool[0] == al.Example("2026-01-01", 1)
    # A chat has answers without a space.
    commas(frame(["not_yet", "done"]), path := tmp_path / "a.csv")
    expected = al.ChatTask("Message: {text}\nTopic:{label}", labels=["done", "not yet"])
    assert chosen(path, chat=True).task == expected


def test_dates_are_no_classes_unless_they_are_named(tmp_path: Path) -> None:
    """Two dates, each in many rows, would be classes otherwise."""
    path = tmp_path / "a.csv"
    for days in (["2026-01-03", "2026-1-4"], ["3.1.26", "04.01.2026 12:30"]):
        commas(frame(["b", "a"]).drop(columns="date").assign(date=days * 8), path)
        others = str(layout_of(path)).partition("classes from")[2]
        assert "column topic" in others and "date" not in others
        assert chosen(path, label_column="date").entries["label_column"] == "date"
    commas(frame(["b", "a"]).drop(columns="topic").assign(date=["1.2.x", "1.3.x"] * 8), path)
    assert layout_of(path).label == "date"


def test_classes_of_json_may_be_numbers_with_a_point_or_truths_but_no_lists(tmp_path: Path) -> None:
    def stored(classes: list[Any]) -> Path:
        frame(classes).to_json(tmp_path / "a.jsonl", orient="records", lines=True)
        return tmp_path / "a.jsonl"

    for values in ([0.0, 1.0], [False, True]):
        found = chosen(stored(values))
        assert found.entries["classes"] == values
        assert [example.label for example in found.examples.pool] == [0] * 8 + [1] * 8
    for unfit, shown in (([[0], [1]], "[0]"), ([0.5, 1.5], "0.5")):
        path = stored(unfit)
        with pytest.raises(DataError, match="no column has classes"):
            chosen(path)
        words = f"'topic' has values that are no texts and no whole numbers, such as {shown}"
        with pytest.raises(DataError, match=re.escape(words)):
            chosen(path, label_column="topic")


def test_all_problems_of_a_file_are_one_error(call: Any, tmp_path: Path) -> None:
    table = frame(["a", "b", "c"]).loc[:11]
    table.loc[2, "topic"] = None
    table.loc[[4, 6], "message"] = " "
    commas(table, path := tmp_path / "a.csv")
    given = ["--model", "x", "--classes", "a,b,d", "--shots", "2", "--queries", "40"]
    told = call("run", str(path), "--label-column", "topic", *given)
    lines = told.err.splitlines()
    assert told.status == 1 and lines[0] == f"error: {path} cannot be used as it is:"
    words = [
        "  - 2 rows have no text in the column message .* 5, 7.; fill them, or delete these rows",
        "  - 1 rows have no class in the column topic .*3.; fill them, or delete these rows",
        "  - the column topic has the values c, which",
        "  - --shots 2 needs as many rows .*d has 0",
        r"  - texts are taken .* from the column topic \(--label-column names another: no other\)$",
    ]
    assert all(map(re.match, words, lines[1:])) and len(lines) == 6


def tickets(**columns: Any) -> pd.DataFrame:
    rows = range(120)
    made = {
        "id": [f"3fa85f64-{k:04d}-facade" for k in rows],
        "about": [f"about {k}" for k in rows],
        "letter": [f"a long text about case {k} of a customer" for k in rows],
        "queue": [f"Queue {k % 12}" for k in rows],
        "agent": [["ann", "bob", None][k % 3] for k in rows],
    }
    return pd.DataFrame(made | columns)


GREETING = "Dear customer, thank you for this letter, which we shall read"


@pytest.mark.parametrize(
    ("changes", "text", "label"),
    [
        ({}, "letter", "queue"),
        ({"agent": [["ann", "bob"][k % 2] for k in range(120)]}, "letter", "agent"),  # the last
        ({"answer": [GREETING] * 120}, "letter", "queue"),  # the same in all rows
        ({"answer": [f"{GREETING} {'again ' * (k % 3)}" for k in range(120)]}, "letter", "answer"),
        ({"body": [f"see {k}" if k % 4 else None for k in range(120)]}, "letter", "queue"),
        ({"body": [f"see {k}" if k else None for k in range(120)]}, "body", "queue"),
        ({"price": [k % 7 for k in range(120)]}, "letter", "queue"),  # a number may be an amount
        ({"queue": [k % 12 for k in range(120)], "agent": range(120)}, "letter", "queue"),
        ({"type": [["a", None][k % 2] for k in range(120)]}, "letter", "queue"),
        ({"type": [["a", "b"][k % 2] if k else None for k in range(120)]}, "letter", "type"),
        ({"page": [f"https://example.org/a/very/long/address/of/{k}/letters" for k in range(120)]},
         "letter", "queue"),
    ],
)  # fmt: skip
def test_columns_without_gaps_and_with_sentences_come_first(
    tmp_path: Path, changes: dict[str, Any], text: str, label: str
) -> None:
    commas(tickets(**changes), path := tmp_path / "tickets.csv")
    layout = layout_of(path)
    assert (layout.text, layout.label) == (text, label)


def test_an_error_names_the_columns_and_those_without_gaps(tmp_path: Path) -> None:
    commas(tickets(), path := tmp_path / "tickets.csv")
    with pytest.raises(DataError) as caught:
        chosen(path, label_column="agent", queries=500)
    _, *lines = str(caught.value).splitlines()
    assert "40 rows have no class in the column agent" in lines[0] and "delete" not in lines[0]
    assert "give label=queue, which has no empty row" in lines[0]
    assert "500 are needed" in lines[1]
    others = "(text= names another: about, id, queue)"
    assert f"from the column letter {others}, and classes from the column agent" in lines[2]
    assert "(label= names another: queue)" in lines[2]
    # Of a class only in a column with gaps.
    commas(tickets().drop(columns="queue"), path)
    with pytest.raises(DataError, match=r"in the column agent .*; fill them, or delete these rows"):
        chosen(path)


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (pd.DataFrame({"a": range(9), "b": range(9)}), {}, "no column has texts (text= names one"),
        (pd.DataFrame({"a": list("abcdefghi")}), {}, "no column has classes, that is 2 to 100"),
        (frame(["a", "b"]), {"text_column": "c"}, "there is no column 'c'. Columns, with how many"),
        (frame(["a", "b"]), {"queries": 50}, "14 rows are left for queries beside the demonstrat"),
        (frame(["a", "b"]), {"label_column": "id"}, "0 rows are left for queries beside the"),
        (frame(["good", "good "]), {}, "the classes 'good', 'good ' are the same word, or blank"),
        (frame(["a_b", "a b", "c"]), {}, "the classes 'a b', 'a_b' are the same word, or blank; g"),
        (frame(["a", " "]), {}, "the classes ' ' are the same word, or blank; give each class one"),
    ],
)
def test_a_file_without_a_task_is_an_error(
    tmp_path: Path, table: pd.DataFrame, options: dict[str, Any], words: str
) -> None:
    commas(table, tmp_path / "a.csv")
    with pytest.raises(DataError) as caught:
        chosen(tmp_path / "a.csv", **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["alpha", "beta"], [" alpha", " beta"]),
        # Their first words are the same, so the next ones stand for them.
        (["delivery late", "delivery lost"], [" delivery late", " lost"]),
        (["delivery of mail", "delivery of goods"], [" delivery of mail", " goods"]),
        (["same", "same same"], [" A", " B"]),
        (["same" + " same" * k for k in range(30)], [*ascii_uppercase, *"abcd"]),
    ],
)
def test_words_that_begin_alike_are_replaced(names: list[str], labels: list[str]) -> None:
    tokenizer = chat_tokenizer("byte-level")
    task = al.Task("T: {text}\nL:{label}", labels=[f" {name}" for name in names])
    assert list(own_data.with_other_words(tokenizer, task).labels) == labels


def test_label_words_that_are_not_the_names_are_a_table_and_empty_ones_are_named() -> None:
    entries = {
        "classes": ["lost_card", "Top", "via bank", "not", "not spam", 5, "a", "cat"],
        "labels": [" lost card", " top", " via", "not", " not spam", "5", " A", " B"],
    }
    title, *rows = words_of(entries).splitlines()
    assert title.startswith("  2 of 8 classes have a label word that is not their name, ")
    assert rows == ["    via bank  ' via'", "    cat       ' B'"]
    assert words_that_say_nothing(entries) == [" via", " not spam", " B"]
    whole = {"classes": ["no", 1], "labels": [" no", "1"]}
    assert words_of(whole) == "" and words_that_say_nothing(whole) == []


@pytest.fixture
def of_a_csv(monkeypatch: pytest.MonkeyPatch, shallow_folder: Path, tmp_path: Path) -> list[str]:
    """Arguments of a command on a.csv, which has two classes, in the current folder."""
    monkeypatch.chdir(tmp_path)
    commas(frame(["a", "b"]), Path("a.csv"))
    return ["a.csv", "--model", str(shallow_folder)]


def test_vague_label_words_are_told(done: Any, no_analysis: Mock, of_a_csv: list[str]) -> None:
    commas(frame(["same", "same same"]), Path("a.csv"))
    with pytest.warns(UserWarning, match="words ' A', ' B' begin with .* into labels of .*/a.t"):
        printed = done("run", *of_a_csv, "--queries", "4").err
    assert "2 of 2 classes have a label word" in printed and "same same  ' B'" in printed


@pytest.mark.slow("whole commands")
def test_repeats_and_columns_are_told(done: Any, no_analysis: Mock, of_a_csv: list[str]) -> None:
    table = frame(["a", "b"])
    table = pd.concat([table, table[:3].assign(topic="b")]).rename(columns={"topic": "queue"})
    table["agent"] = [["p", "q"][(k + k // 16) % 2] for k in range(len(table))]
    commas(table, Path("a.csv"))
    given = [*of_a_csv, "--queries", "4", "--quiet"]
    with pytest.warns(UserWarning) as caught:
        done("run", *given)
    texts = " ".join(str(each.message) for each in caught)
    assert "classes from the column agent (--label-column names another: queue" in texts
    assert "a.csv: 3 rows repeat the text of another row; " in texts
    assert "3 texts have several classes" in texts
    with warnings.catch_warnings():  # nothing is unsure where the column is named
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "a.csv: 3 rows|the label words")
        done("run", *given, "--label-column", "queue", "--fresh")


@pytest.mark.slow("whole commands")
def test_a_task_file_that_was_changed_is_not_written_over(failed: Any, of_a_csv: list[str]) -> None:
    Path("out").mkdir()
    Path("out/a.toml").write_text("# mine")
    error = failed("run", *of_a_csv, "--out", "out", "--queries", "11")
    assert "out/a.toml holds another task than the one that a.csv" in error
    assert Path("out/a.toml").read_text() == "# mine"


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [("tabs.tsv", "mail\tkind", "text {}, long\t{}"), ("comma.csv", "a,mail;kind", "text {};{}")],
)
def test_first_lines_tell_the_separator(tmp_path: Path, name: str, header: str, row: str) -> None:
    lines = [header, *(row.format(k, "ab"[k % 2]) for k in range(8))]
    (tmp_path / name).write_text("\n".join(lines))
    found = chosen(tmp_path / name)
    assert found.entries["label_column"] == "kind" and found.examples.pool[1].label == 1


def next_command(printed: Any) -> tuple[str, list[str]]:
    reason, line = printed.out.partition("Next: ")[2].splitlines()[:2]
    return reason, shlex.split(line)[1:]


@pytest.mark.slow("whole commands")
@pytest.mark.usefixtures("analysis_made_before")
def test_the_next_command_has_the_same_data_and_no_more_queries_than_there_are(
    done: Any, monkeypatch: Any, shallow_folder: Path, tmp_path: Path
) -> None:
    commas(frame(["a", "b"]), tmp_path / "a.csv")
    others = frame(["a", "b"], text="text").assign(text="other " + frame([0, 1]).message)
    commas(others, tmp_path / "b.csv")
    entries = ['template = "T: {text}\\nL:{label}"', 'labels = ["A", "B"]', "chat = true"]
    entries += ['data = "a.csv"', 'label_column = "topic"', 'classes = ["a", "b"]']
    (tmp_path / "t.toml").write_text("\n".join(entries))
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    given = ["--task", "../t.toml", "--model", str(shallow_folder), "--out", ".", "--no-chat"]
    reason, command = next_command(done("run", "../b.csv", *given, "--draws", "1", "--quiet"))
    assert reason.startswith("the model does not clearly do the task t; try more demonstrations, ")
    done(*command, "--quiet")
    settings = json.loads((tmp_path / "here-2/settings.json").read_text())
    assert settings.items() >= {"data": "../b.csv", "chat": False, "shots": 4, "queries": 8}.items()


@pytest.mark.slow("whole commands")
def test_of_one_query_a_metric_fails_alone(done: Any, of_a_csv: list[str]) -> None:
    given = ["run", *of_a_csv, "--queries", "1", "--draws", "1", "--out", "out", "--quiet"]
    with pytest.warns(UserWarning, match="no result for anchor_distances"):
        reason, command = next_command(done(*given))
    assert reason.startswith("a with 4 times as many queries")
    assert command[command.index("--queries") + 1] == "4"
    assert Path("out/report.html").exists() and Path("out/a/saliency_flows.safetensors").exists()


@pytest.mark.slow("whole commands")
def test_paper_takes_a_file(done: Any, paper_parts: Mock, of_a_csv: list[str]) -> None:
    table = pd.concat([frame(["a", "b", "c"])] * 2)
    commas(table.assign(message=[f"text {k}" for k in range(30)]), Path("a.csv"))
    options = ["--text-column", "message", "--out", "out", "--seed", "1"]
    printed = done("paper", *of_a_csv, *options)
    given = paper_parts.call_args
    assert [*given.args[1]] == ["a"] and len(given.kwargs["tasks"]["a"].labels) == 3
    assert "in the paper\n" not in printed.out and "--queries 15 " in printed.err
    assert "--task out/a.toml" in printed.out.splitlines()[-1]


@pytest.mark.slow("whole commands")
def test_contexts_takes_a_file(done: Any, monkeypatch: Any, of_a_csv: list[str]) -> None:
    monkeypatch.setattr(work, "trained_contexts", lambda *arguments: {})
    monkeypatch.setattr(work, "reweighted", lambda *arguments: al.compress)
    options = ["--training", "4", "--held-out", "2", "--draws", "1", "--out", "out", "--quiet"]
    done("contexts", *of_a_csv, *options)
    record = al.records.ContextsRecord.load("out/a/contexts.safetensors")
    assert record.info["prompts"] == 16 - 2 - 4 - 2 and Path("out/a.toml").exists()
