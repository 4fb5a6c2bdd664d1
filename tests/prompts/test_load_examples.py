"""Examples from files of all kinds, from the bundled sets and from the hub."""

import json
import re
from collections import Counter
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import anchorlens as al
from anchorlens.errors import AnchorlensError, DataError
from anchorlens.prompts.examples import BUNDLED, HUB_SOURCES

raises = partial(pytest.raises, DataError)
ROWS = [("dull, \"slow\"\nand 'long'", 0), ("schön 😀", 1), ("  fun ", 1)]
EXAMPLES = [al.Example(text, label) for text, label in ROWS]


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the cache below a file, so that nothing can be written to it or read from it."""
    file = tmp_path_factory.mktemp("cache") / "file"
    file.write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", file / "cache")


def write(path: Path, rows: Any, text: str = "text", label: str = "label") -> Path:
    frame = pd.DataFrame(rows, columns=[text, label])
    # The file is opened here, because pandas takes some names for addresses or compressed files.
    suffix = path.suffix.lower()
    if suffix == ".csv":
        path.write_text(frame.to_csv(index=False), newline="")
    elif suffix == ".parquet":
        path.write_bytes(frame.to_parquet(index=False))
    else:
        path.write_text(frame.to_json(orient="records", lines=True))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_columns_and_classes_may_be_named(tmp_path: Path, suffix: str) -> None:
    """And all rows of a long file are read."""
    rows = [(text, ["bad", "good"][label]) for text, label in 50 * ROWS]
    path = write(tmp_path / f"file.{suffix}", rows, "sentence", "verdict")
    examples = al.load_examples(path, text="sentence", label="verdict", classes=["bad", "good"])
    assert examples == 50 * EXAMPLES
    swapped = al.load_examples(path, text="sentence", label="verdict", classes=["good", "bad"])
    assert [example.label for example in swapped] == 50 * [1, 0, 0]
    path = write(tmp_path / "file.jsonl", [("a", 7), ("b", 3)])
    assert [example.label for example in al.load_examples(path, classes=[3, 7])] == [1, 0]


TABLE: dict[str, Any] = {"sentence": [text for text, _ in ROWS], "verdict": ["bad", "good", "good"]}
LISTED = [dict(zip(TABLE, row, strict=True)) for row in zip(*TABLE.values(), strict=True)]


@pytest.mark.parametrize(
    "rows",
    [
        LISTED,
        (row for row in LISTED),
        pd.DataFrame(TABLE),
        pd.DataFrame(TABLE).astype({"verdict": "category"}),
        datasets.Dataset.from_dict(TABLE),
    ],
    ids=["list", "generator", "frame", "categories", "dataset"],
)
def test_rows_that_are_there_already_give_the_same_examples(rows: Any) -> None:
    columns: dict[str, Any] = {"text": "sentence", "label": "verdict"}
    assert al.load_examples(rows, classes=["bad", "good"], **columns) == EXAMPLES


def test_rows_with_numbers_need_no_classes() -> None:
    assert al.load_examples(NUMBERS) == EXAMPLES
    [example] = al.load_examples([{"text": "a", "label": np.int64(1), "more": None}])
    assert example == al.Example("a", 1) and type(example.label) is int
    with raises(match="rows are one split, but split='test' came"):
        al.load_examples(NUMBERS, split="test")
    with pytest.raises(AnchorlensError, match=r"several columns with the names .*; rename"):
        al.sample_demonstrations(TWICE[0])


NUMBERS: Any = pd.DataFrame(ROWS, columns=["text", "label"])
NAMED_TWICE = ["text", "text", "label"], ["text", "label", "label"]
TWICE: list[Any] = [pd.DataFrame([["a", 0, 1]], columns=names) for names in NAMED_TWICE]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the list of rows has no rows"),
        (LISTED, r"the list of rows has the columns \['sentence', 'verdict'\], but not"),
        ([{"text": "a", "label": 0}, {"text": "b"}], "row 1 of the list of rows: .* label None"),
        ([{"text": "a", "label": True}], "row 0 .* label True"),
        (TABLE, "or a list of dicts; got .*; give its rows: one of several splits"),
        (["a"], "must be a text or a path or a list of dicts; got "),
        *((frame, r"several columns with the names .*; rename") for frame in TWICE),
    ],
)
def test_rows_without_a_text_and_its_class_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(AnchorlensError, match=message):
        al.load_examples(rows)


NAMES = ["x[1].jsonl", "s*.jsonl", "s?.csv", "a::b.jsonl", "{a,b}.parquet", "with space.json"]
NAMES += ["Größe 😀.jsonl", "-x.csv", "50%.jsonl", "http:x.csv", "LOUD.JSONL", "Loud.Csv"]
NAMES += ["LOUD.PARQUET", "sst2.jsonl", "x.jsonl.csv", "x.gz.csv"]


@pytest.mark.parametrize("name", NAMES)
def test_files_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("x1.jsonl", "sother.jsonl", "so.csv", "b.jsonl", "a.parquet"):
        write(tmp_path / other, [("another", 0)])
    write(tmp_path / name, ROWS)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name, str(tmp_path / name), name):
        assert al.load_examples(path) == EXAMPLES
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_texts_that_resemble_other_values_stay_texts(tmp_path: Path, suffix: str) -> None:
    for text in ("NA", "null", "None", "nan", "007", "1e5", "True", "-", " 3 ", "#"):
        path = write(tmp_path / f"file.{suffix}", [(text, 0)])
        assert al.load_examples(path) == [al.Example(text, 0)]


def test_json_lines_may_have_blank_lines_any_line_end_and_a_byte_order_mark(tmp_path: Path) -> None:
    lines = ["", *(json.dumps({"text": text, "label": label}) for text, label in ROWS), "  ", ""]
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "file.jsonl").write_bytes(end.join(lines).encode("utf-8-sig"))
        assert al.load_examples(tmp_path / "file.jsonl") == EXAMPLES
    # json allows this line separator inside a text.
    (tmp_path / "file.jsonl").write_text('{"text": "a\u2028b", "label": 0}')
    assert al.load_examples(tmp_path / "file.jsonl") == [al.Example("a\u2028b", 0)]
    rows = [{"text": text, "label": label} for text, label in ROWS]
    (tmp_path / "file.json").write_text(f" \n{json.dumps(rows, indent=1)}\n")
    assert al.load_examples(tmp_path / "file.json") == EXAMPLES


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_encoding_and_separator_are_found(encoding: str, separator: str, tmp_path: Path) -> None:
    """Old spreadsheets on a Mac end lines in a carriage return, and Excel writes ``sep=``."""
    path, read = tmp_path / "file.csv", [al.Example("né, un; b\nd", 0), al.Example('c"e"', 1)]
    rows = [["text", "label"], ['"né, un; b\nd"', "0"], [""], ['"c""e"""', " 1 "]]
    for end in ("\n", "\r\n", "\r"):
        text = end.join(separator.join(row) for row in rows)
        for begin in ("", end, f"sep={separator}{end}"):
            for last in ("", end):
                path.write_bytes(f"{begin}{text}{last}".encode(encoding))
                assert al.load_examples(path) == read
            path.write_bytes(f"{begin}{text}{separator}{end}".encode(encoding))
            with raises(match=re.escape(f"delete a {separator!r} that ends a row")):
                al.load_examples(path)


GOOD = '{"text": "a", "label": 0}\n'
CSV = "text,label\n"
NAMED = "sentence,verdict\na,bad\n"
TWO_BAD = {"text": "sentence", "label": "verdict", "classes": ["bad", "bad", "good"]}


def then(text: Any, label: Any) -> str:
    return GOOD + json.dumps({"text": text, "label": label})


# The content of a file, the options with which it is read, and the error.
FAULTS: dict[str, list[tuple[str | bytes, dict[str, Any], str]]] = {
    "f.jsonl": [
        ("", {}, r"f\.jsonl has no rows; expected a text and its class"),
        (GOOD + '\n{"text": "b", label: 1}\n', {}, r"line 3 of .*f\.jsonl .*column 15.*label"),
        (GOOD + "[" * 100_000, {}, r"line 2 of .*f\.jsonl cannot be read as json"),
        (GOOD + "7" * 5000, {}, r"line 2 of .*f\.jsonl cannot be read as json"),
        (GOOD + '"b"\n', {}, r"row 1 of .*f\.jsonl is not a json object; .* got 'b'$"),
        (GOOD + GOOD.replace("a", "é"), {}, r"not UTF-8 text: line 2 has the byte 0xe9; save"),
        (then("b", -1), {}, r"row 1 of .*l: expected a text and a class \(an integer .* label -1$"),
        (then("b", 2), {"classes": [0, 5]}, r"classes=\[0, 5\]\); got text 'b' and label 2$"),
        (then("b", None), {}, r"row 1 of .*f\.jsonl: .*label None$"),
        (then(None, 1), {}, r"row 1 of .*f\.jsonl: .*got text None and label 1$"),
        (then("b", "0"), {}, r"row 1 of .*f\.jsonl: .*label '0'$"),
        (then("b", True), {}, r"row 1 of .*f\.jsonl: .*label True$"),
        (then("b", "c"), {"classes": [0, "b"]}, r"row 1 of .*f\.jsonl: .*label 'c'$"),
        (then("b", [0]), {"classes": [0, 1]}, r"row 1 of .*f\.jsonl: .*label \[0\]$"),
    ],
    "f.json": [
        ("[]", {}, r"has no rows"),
        (f"[\n{GOOD},\n5]", {}, r"row 1 of .* is not a json object; .* got 5$"),
        (f"[\n{GOOD},}}]", {}, r"line 3 of .* cannot be read as json"),
    ],
    "f.csv": [
        ("", {}, r"has no rows"),
        (CSV, {}, r"has no rows"),
        ((CSV + "a,0").encode("utf-16")[:-1], {}, r"begins as UTF-16 text, but cannot .* as UTF-8"),
        (CSV + '"a\nb",0\nc,0,\n', {}, "2 fields in row 3, saw 3; .* delete a ',' that ends a"),
        ("label,text\n0,a\n1\n", {}, r"row 1 of .* got text None and label 1$"),
        (CSV + "a,\n", {}, r"row 0 of .* got text 'a' and label None$"),
        (CSV + "a,1.0\n", {}, r"row 0 of .* label '1.0'$"),
        (CSV + f"a,{'9' * 5000}\n", {}, r"row 0 of .* label '999"),
        (NAMED, {}, r"\['sentence', 'verdict'\], but not \['text', 'label'\]; name .*text="),
        (NAMED, {"text": "sentence"}, r"but not \['label'\]; name the right ones .*label="),
        (NAMED, {"text": "a", "label": "a"}, r"are two columns; got 'a' for both"),
        (NAMED, TWO_BAD, r"classes is a list of the different .*; got \['bad', 'bad', 'good'\]$"),
        (NAMED, {"split": "test"}, r"a file is one split, but split='test' came with .*csv; pass"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [(name, *fault) for name, faults in FAULTS.items() for fault in faults],
)
def test_errors_name_the_file_and_what_is_wrong_in_it(
    tmp_path: Path, name: str, content: str | bytes, options: dict[str, Any], message: str
) -> None:
    data = content if isinstance(content, bytes) else content.encode("latin-1")
    (tmp_path / name).write_bytes(data)
    with raises(match=message):
        al.load_examples(tmp_path / name, **options)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("sst2", {"text": "review"}, r"columns of 'sst2', .* 'review' and 'label' came .*stanfo"),
        ("news", {"split": "validation"}, r"'news' has the splits 'train' and 'test'; got 'val"),
        ("none.csv", {}, r"no file .*none\.csv; give one that exists \(\.jsonl, .*\.parquet"),
    ],
)
def test_errors_name_the_source(source: str, options: dict[str, Any], message: str) -> None:
    with raises(match=message):
        al.load_examples(source, **options)


PATHS = ["none.JSONL", "./none", "../me/moods", "/nowhere/moods", "a b", "x*", "a/b/c", "s3://x/y"]
PATHS += ["https://host/x.jsonl", "no\0name.csv", "n" * 300 + ".csv", "n" * 300, "folder.csv"]
PATHS += ["folder", ""]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_never_sent_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("folder.csv", "folder"):
        (tmp_path / folder).mkdir()
    for source in (name, Path(name)):
        with raises(match=r"there is no file|cannot be read: |does not tell how to read it"):
            al.load_examples(source)
    assert not hub


def test_a_name_of_a_set_is_a_file_only_if_given_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sst2", "news", "mine.csv"):
        (tmp_path / name).write_text("text,label\na,1\n")
    assert al.load_examples("mine.csv") == al.load_examples(Path("mine.csv"))
    assert len(al.load_examples("news")) > 1 and not hub
    assert len(al.load_examples("sst2")) == 3 and len(hub) == 1
    for name in ("sst2", "news"):
        with raises(match=rf"{name} does not tell how to read it"):
            al.load_examples(Path(name))


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_examples_agree_with_their_readme(name: str) -> None:
    text = (files("anchorlens") / "data" / "README.md").read_text(encoding="utf-8")
    row = rf"\| `{name}\.jsonl` \|.*\| (.*) \| (\d+) a class, (\d+) \|"
    [(listed, each, total)] = re.findall(row, text)
    classes = re.findall(r"\d (\w+)", listed)
    examples = al.load_examples(name)
    assert [word.strip() for word in al.TASKS[name].first_words] == classes
    counts = Counter(example.label for example in examples)
    assert counts == dict.fromkeys(range(len(classes)), int(each))
    assert len(examples) == int(total)
    assert len({example.text.strip().lower() for example in examples}) == len(examples)
    train, test = al.load_examples(name, "train"), al.load_examples(name, split="test")
    assert not set(train) & set(test) and set(train) | set(test) == set(examples)
    for split in (train, test):
        counts = Counter(example.label for example in split)
        assert counts.keys() == {*range(len(classes))} and len({*counts.values()}) == 1
        assert split == [example for example in examples if example in split]  # in the same order
    assert abs(len(train) - len(test)) <= len(classes)


HUB = {
    "sst2": ("stanfordnlp/sst2", None, "validation", [0, 1, 1]),
    "trec": ("CogComp/trec", "refs/convert/parquet", "test", [1, 0, 1]),
    "agnews": ("fancyzhx/ag_news", None, "test", [0, 1, 1]),
    "emo": ("aps/emo", "refs/convert/parquet", "test", [0, 1, 1]),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    requests: list[Any] = []

    def load_dataset(path: str, *, split: str, revision: str | None) -> Any:
        requests.append((path, split, revision))
        columns = {name: [row[0] for row in ROWS] for name in ("text", "sentence")}
        return datasets.Dataset.from_dict(columns | {"label": [0, 1, 1], "coarse_label": [1, 0, 1]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return requests


@pytest.mark.parametrize("name", HUB)
def test_tasks_of_the_paper_come_from_the_hub(name: str, hub: list[Any]) -> None:
    path, revision, test, labels = HUB[name]
    expected = [al.Example(row[0], label) for row, label in zip(ROWS, labels, strict=True)]
    for split in (None, "train", "test", "validation"):
        assert al.load_examples(name, split) == expected
    assert hub == [(path, split, revision) for split in ("train", "train", test, "validation")]
    assert (HUB_SOURCES[name].text == "sentence") == (name == "sst2")


def test_other_data_sets_of_the_hub_may_have_any_split(hub: list[Any]) -> None:
    options: dict[str, Any] = {"text": "sentence", "label": "coarse_label", "classes": [1, 0]}
    labels = [example.label for example in al.load_examples("me/moods", "dev", **options)]
    assert labels == [0, 1, 0] and hub == [("me/moods", "dev", None)]


def test_an_unreachable_hub_is_an_error_with_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problem = r"'stanfordnlp/sst2' \(split 'validation'\) cannot be loaded: no route to host\. "
    cure = r"Give a file \(\.jsonl, .*\), a bundled set \(sentiment, questions, news, emotions"
    with raises(match=problem + cure):
        al.load_examples("sst2", split="test")


@pytest.mark.parametrize("kind", ["python", "numpy", "torch", "pandas", "arrow"])
def test_formats_of_a_dataset_are_read_or_get_their_cure(kind: str) -> None:
    rows: Any = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    read = [al.Example("a", 0), al.Example("b", 1)]
    if kind in ("python", "numpy"):
        assert al.load_examples(rows.with_format(kind)) == read
    else:
        for given in (rows.with_format(kind), rows.to_iterable_dataset().with_format("torch")):
            with pytest.raises(AnchorlensError, match=r"\.with_format\(None\)"):
                al.load_examples(given)
    assert al.load_examples(rows.with_transform(lambda batch: batch)) == read


@pytest.mark.quick_cases("runs whole pages", "True")
@pytest.mark.parametrize("as_dictionary", [True, False])
def test_a_file_that_unpacks_to_too_much_is_refused(
    as_dictionary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is repeated takes no room in the file; it is refused at the first rows."""
    monkeypatch.setattr("anchorlens.prompts.datafiles._MOST_BYTES", 2**26)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), ["a" * 2**20])
    path = tmp_path / "a.parquet"
    column = texts if as_dictionary else texts.cast(pa.string())
    pq.write_table(pa.table({"text": column, "label": [0] * 200}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="unpacks to more than 67,108,864 bytes"):
        al.load_examples(path)


def test_images_of_the_hub_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    image = {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0", "path": "a.png"}
    string, number = datasets.Value("string"), datasets.Value("int64")
    rows = datasets.Dataset.from_dict(
        {"text": ["a"], "label": [0], "image": [image]},
        features=datasets.Features(text=string, label=number, image=datasets.Image()),
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    monkeypatch.setattr("PIL.Image.open", lambda *_: pytest.fail("an image is opened"))
    assert al.load_examples("someone/images") == [al.Example("a", 0)]
    with raises(match=r"but not \['words'\]"):
        al.load_examples("someone/images", text="words")
