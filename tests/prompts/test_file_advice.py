"""Each advice that an error about a data file gives is followed, and the result is read."""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import anchorlens as al
from anchorlens.errors import DataError
from anchorlens.prompts.own_data import layout_of

raises = partial(pytest.raises, DataError)
# Of bytes from 0x80 to 0x9f, too.
TEXTS = ["Zürich \u2013 \u201cschön\u201d für 5 €", "l\u2019été, œuvre"]
EXPECTED = [al.Example(text, k) for k, text in enumerate(TEXTS)]
TABLE = pd.DataFrame({"text": TEXTS, "label": [0, 1]})


NAMES = [("cp1252", "WINDOWS-1252"), ("mac_roman", "MACINTOSH")]
OF_ENCODINGS = pytest.mark.parametrize(("encoding", "named"), NAMES)


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        al.load_examples(path, **options)
    return str(error.value)


@OF_ENCODINGS
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_advised_command_works(tmp_path: Path, suffix: str, encoding: str, named: str) -> None:
    path = tmp_path / f"my file{suffix}"
    lines = TABLE.to_json(orient="records", lines=True, force_ascii=False)
    written = lines if suffix == ".jsonl" else TABLE.to_csv(index=False)
    path.write_bytes(written.encode(encoding))
    message = error_of(path)
    assert "in Excel: Save As, 'CSV UTF-8 (Comma delimited)'" in message
    assert re.search(rf"a line reads '.*{TEXTS[0]}", message)
    command = re.search(r"iconv -f (\S+) -t (\S+) .*", message)
    assert command is not None and command[1] == named
    if shutil.which("iconv"):
        subprocess.run(command[0], shell=True, check=True)
    else:  # what the command would do
        text = path.read_bytes().decode(command[1])
        path.with_name(f"my file-utf8{suffix}").write_bytes(text.encode(command[2]))
    read = al.load_examples(tmp_path / f"my file-utf8{suffix}")
    assert read == EXPECTED
    assert not any("\x7f" <= letter < "\xa0" for example in read for letter in example.text)


OF_EUROPE = ["l\u2019été à Noël", "café", "¿Qué pasó, señor?", "på Åland", "5 \u2013 7 €"]
OF_EUROPE += ["rødgrød med fløde", "não são informações", "Österreich, Übergröße"]
OF_EUROPE += ["it\u2019s \u201cfine\u201d"]


@pytest.mark.parametrize("text", OF_EUROPE)
@OF_ENCODINGS
def test_letters_tell_the_encoding(tmp_path: Path, text: str, encoding: str, named: str) -> None:
    (tmp_path / "f.csv").write_bytes(f'text,label\n"{text}",0\n'.encode(encoding))
    assert f"iconv -f {named} " in error_of(tmp_path / "f.csv")


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE"])
def test_utf_16_without_its_first_mark_is_read_or_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "f.csv"
    path.write_bytes(TABLE.to_csv(index=False).encode(encoding))
    assert al.load_examples(path) == EXPECTED
    # Letters at the begin hide it.
    path.write_bytes("дни,жизнь\nдни,жизнь\n".encode(encoding))
    message = error_of(path)
    assert f"reads 'дни,жизнь': iconv -f {encoding} " in message and "a zero byte" in message


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (gzip.compress(b"text,label\na,0\n", mtime=0), "it is compressed: unpack it with gunzip$"),
        (b"PK\x03\x04\xff", r"it is compressed: unpack it with unzip$"),
        (b"text,label\n\x81\x7f,0\n", r"delimited\)'\) in the program that wrote it$"),
        (b"text,label\n\xe9\x00\x01,0\n", r"in the program that wrote it$"),
        (b"text,label\n\x00,0\n", r"line 2 has a zero byte; .* in the program that wrote it$"),
    ],
)
def test_no_useless_conversion_is_advised(tmp_path: Path, data: bytes, advice: str) -> None:
    (tmp_path / "f.csv").write_bytes(data)
    message = error_of(tmp_path / "f.csv")
    assert re.search(advice, message) and "iconv" not in message


def test_the_line_of_a_wrong_byte_is_counted_for_all_line_ends(tmp_path: Path) -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        (tmp_path / "f.csv").write_bytes(end.join([b"text,label", b"a,0", b"\xe9,1"]))
        assert "line 3 has the byte 0xe9" in error_of(tmp_path / "f.csv")


HEAD, ROW = "text,label\n", '{"text": "...", "label": 0}'
# A file, the error, and what a user does about it: another name, content or options.
ADVICE: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "f.txt",
        '{"text": "a", "label": 0}',
        r"f\.txt does not tell how to read it; .*name ends in \.jsonl, \.json, \.csv, \.tsv",
        {"name": "f.jsonl"},
    ),
    (
        "f.csv",
        f"{HEAD}a,b,0\n",
        "as csv: Expected 2 fields in row 2, saw 3; put quotes around .* contain ','",
        {"content": f'{HEAD}"a,b",0\n'},
    ),
    ("f.csv", f'{HEAD}"a,0\n', "put quotes .* a quote", {"content": f'{HEAD}"""a",0\n'}),
    ("f.csv", f"{HEAD}a,b\rc,0\n", "a class|a line break", {"content": f'{HEAD}"a,b\rc",0\n'}),
    (
        "f.csv",
        "text,label,text\na,0,b\n",
        r"several columns with the names \['text'\]; rename",
        {"content": f"{HEAD[:-1]},b\na,0,c\n"},
    ),
    ("f.csv", "t,l\na,0\n", r"name the right ones \(text= and label", {"text": "t", "label": "l"}),
    ("f.csv", "t,l\na,0\n", r"or rename them$", {"content": f"{HEAD}a,0\n"}),
    ("f.csv", f"{HEAD}a,no\n", r"list others with classes=", {"classes": ["no"]}),
    ("f.jsonl", '{"text": "a", label: 0}', re.escape(f"expected {ROW}"), {"content": ROW}),
    ("f.json", f"{ROW},", "on each line or in an array", {"content": f"[{ROW}]"}),
    ("f.parquet", "PAR", r"cannot be read as parquet: .*; write it again", {}),
]


@pytest.mark.parametrize(("name", "content", "message", "cure"), ADVICE)
def test_each_advice_of_an_error_about_a_file_helps(
    tmp_path: Path, name: str, content: str, message: str, cure: dict[str, Any]
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    with raises(match=message):
        al.load_examples(tmp_path / name)
    followed = tmp_path / cure.pop("name", name)
    if name == "f.parquet":
        pd.DataFrame({"text": ["a"], "label": [0]}).to_parquet(followed)
    else:
        followed.write_bytes(cure.pop("content", content).encode())
    (example,) = al.load_examples(followed, **cure)
    assert example.label == 0 and example.text


def in_examples(path: Path, text: str, label: str) -> list[str]:
    return [each.text for each in al.load_examples(path, text=text, label=label)]


def in_layout(path: Path, text: str, label: str) -> list[str]:
    layout = layout_of(path, text, label)
    return in_examples(path, layout.text, layout.label)


@pytest.mark.parametrize("read", [in_examples, in_layout])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_fields_inside_a_field_are_named_and_the_advice_helps(
    tmp_path: Path, read: Callable[..., list[str]], suffix: str
) -> None:
    texts = [f"text {k}" for k in range(4)]
    rows = [{"data": {"content": text}, "meta": {"y": k % 2}} for k, text in enumerate(texts)]
    path, flat = tmp_path / f"f{suffix}", tmp_path / f"f-flat{suffix}"
    if suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(lines))
    with raises(match=r"fields inside data, meta are nested and .*'data\.content': ") as error:
        read(path, "data.content", "meta.y")
    exec(str(error.value).partition("'data.content': ")[2], {})  # a line of Python
    assert read(flat, "data.content", "meta.y") == texts
    with raises(match="'data'") as error:
        read(flat, "data", "meta")
    assert "fields inside" not in str(error.value)


def test_a_file_that_is_one_object_names_the_line_that_takes_its_rows(tmp_path: Path) -> None:
    rows = [{"text": f"text {k}", "label": k % 2} for k in range(4)]
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"version": 1, "data": rows}, indent=1))
    with raises(match="is one object, whose rows are in 'data'") as error:
        al.load_examples(path, text="text")
    exec(str(error.value).partition("a file of them: ")[2], {})  # a line of Python
    examples = al.load_examples(tmp_path / "all-flat.json")
    assert [each.text for each in examples] == [row["text"] for row in rows]
    path.write_text(json.dumps({"data": {"content": "a"}, "label": 0}, indent=1))
    with raises(match="fields inside data are nested") as error:
        al.load_examples(path)
    exec(str(error.value).partition("'data.content': ")[2], {})
    assert al.load_examples(tmp_path / "all-flat.json", text="data.content")[0].text == "a"
    # Rows with fields inside name the call that flattens them.
    rows = [{"data": {"content": "a"}, "label": 0}]
    with raises(match=r"'data\.content': pandas\.json_normalize\(rows\)$"):
        al.load_examples(rows)
    flat: Any = pd.json_normalize(rows)
    assert al.load_examples(flat, text="data.content")[0].text == "a"
