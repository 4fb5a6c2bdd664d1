"""Reads the columns of a local data file: a ``FileReader`` for each kind of file, at the end.

Files are read as bytes here and not by a library that gets the path: such a library takes some
paths for a pattern, an address or a compressed file, and may return a cached copy.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from shlex import quote
from sys import getsizeof
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import DataError
from ..system.files import bytes_of, kind_of

Table = Mapping[str, Sequence[Any]]
# What a task says of a data file. Options of the command need these names without other packages.
COLUMNS = ("text_column", "label_column", "image_column", "classes")

_EXAMPLE = '{"text": "...", "label": 0}'
_LINE_END = r"\r\n|\r|\n"
# Characters that no text of a data file has: control characters, but for tabs and line ends.
_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
# What a file may be that is not UTF-8, by the names of iconv and of Python; the likeliest first.
_TWO_BYTES = {"UTF-16LE": "utf-16-le", "UTF-16BE": "utf-16-be"}
_ONE_BYTE = {"WINDOWS-1252": "cp1252", "MACINTOSH": "mac_roman"}
# Letters with accents inside words, and marks, as they stand in texts that are read rightly.
_WRITTEN = re.compile(
    r"[a-zß-öø-ÿœ][ß-öø-ÿœ\u2019]|[À-ÖØ-ÿœ\u2019][a-zß-öø-ÿœ]|[\u201c\u201d\u201e«»\u2013€]"
)
# The first bytes of compressed files, and what unpacks them.
_PACKED = {b"\x1f\x8b": "gunzip", b"PK": "unzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz"}
_MOST_BYTES = 2**31  # of the values of a packed file, with what Python adds to each
# At most 18 digits, so that a number fits 64 bits: Python raises an error for very long ones.
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")


def read_columns(path: Path, label: str) -> Table:
    """The columns of a file by name; of csv texts, and whole numbers in the column ``label``."""
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise DataError(
            f"the name of {path} does not tell how to read it; give a file whose name ends in "
            f"{', '.join(READERS)} (a spreadsheet can be saved as csv)"
        )
    if not kind_of(path, DataError):
        raise DataError(f"there is no file {path}; give one that exists ({', '.join(READERS)})")
    columns = READERS[suffix].read(bytes_of(path, DataError), path)
    refuse_no_rows(columns, path)
    return {**columns, label: classes_in(columns, label, path)} if label in columns else columns


def classes_in(columns: Table, label: str, path: Path) -> Sequence[Any]:
    """The cells of the column of the classes; where all are text, whole numbers become integers."""
    cells = columns[label]
    if READERS[path.suffix.lower()].has_types:
        return cells
    is_text = (isinstance(cell, str) and _INTEGER.fullmatch(cell) for cell in cells)
    return [int(cell) if number else cell for cell, number in zip(cells, is_text, strict=True)]


def refuse_no_rows(columns: Table, source: str | Path) -> None:
    if not any(columns.values()):
        raise DataError(f"{source} has no rows; expected a text and its class in each row")


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The columns of rows by name; None where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _jsonl(data: bytes, path: Path) -> Table:
    text = _decoded(data, path)
    if text.lstrip().startswith("["):
        rows = _parsed(text, path, 1)
    elif text.lstrip().partition("\n")[0].strip() == "{":  # one object, over several lines
        rows = [_parsed(text, path, 1)]
    else:
        lines = enumerate(StringIO(text, newline=None), start=1)
        rows = [_parsed(line.strip(), path, number) for number, line in lines if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(
                f"row {number} of {path} is not a json object; expected {_EXAMPLE}; "
                f"got {shortened(row)}"
            )
    return table_of(rows)


def _parsed(text: str, path: Path, first_line: int) -> Any:
    """The json value of a text that begins in this line of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        number, reason = first_line + error.lineno - 1, f"{error.msg} (column {error.colno})"
        line = text.split("\n")[error.lineno - 1]
    except (ValueError, RecursionError) as error:  # a number too long, or brackets too deep
        number, reason, line = first_line, str(error), text
    raise DataError(
        f"line {number} of {path} cannot be read as json: {reason}; expected {_EXAMPLE}, one on "
        f"each line or in an array; got {shortened(line)}"
    )


def _csv(data: bytes, path: Path) -> Table:
    import pandas as pd

    text = _decoded(data, path).lstrip("\r\n")
    declared = re.match(rf"sep=(.)({_LINE_END})", text)  # Excel begins some files so
    text = text[declared.end() :] if declared else text
    # What stands between the names of the columns, and as often in the first row: else the most.
    first, *others = re.split(_LINE_END, text, maxsplit=2)
    second = others[0] if others else first
    fits = {mark: first.count(mark) == second.count(mark) > 0 for mark in ",;\t|"}
    found = max(fits, key=lambda mark: (fits[mark], first.count(mark)))
    separator = declared[1] if declared else found
    try:
        # header=None: else pandas may take the first column for an index. dtype and
        # keep_default_na: else it changes texts such as "NA", "null" or "007".
        cells = pd.read_csv(
            StringIO(text), sep=separator, header=None, dtype=str, keep_default_na=False
        )
    except pd.errors.EmptyDataError:
        return {}
    except ValueError as error:
        # What pandas calls a line is a row, whose texts may have several lines.
        reason = str(error).strip().rpartition("C error: ")[2].replace("in line", "in row")
        raise DataError(
            f"{path} cannot be read as csv: {reason}; put quotes around texts that contain "
            f"{separator!r}, a quote or a line break, and delete a {separator!r} that ends a row"
        ) from error
    names, *rows = cells.values.tolist()
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has several columns with the names {twice}; rename them")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    # An empty cell counts as missing; pandas fills rows that are too short with empty cells.
    return {
        name: [value or None for value in values]
        for name, values in zip(names, columns, strict=True)
    }


def _parquet(data: bytes, path: Path) -> Table:
    import pyarrow.parquet

    size = 0
    try:
        file = pyarrow.parquet.ParquetFile(BytesIO(data))
        columns: dict[str, list[Any]] = {name: [] for name in file.schema_arrow.names}
        for rows in file.iter_batches(64):  # a value that is repeated takes no room in the file
            for name in columns:
                cells = rows[name].to_pylist()
                columns[name] += cells
                size += rows[name].nbytes + sum(map(getsizeof, cells))
            if size > _MOST_BYTES:
                raise DataError(
                    f"{path} unpacks to more than {_MOST_BYTES:,} bytes; give fewer rows or columns"
                )
        return columns
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}; write it again") from error


def _decoded(data: bytes, path: Path) -> str:
    """The bytes as text: UTF-8, or UTF-16 or UTF-32, which their first bytes show."""
    encoding = json.detect_encoding(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if not encoding.startswith("utf-8"):
            raise DataError(
                f"{path} begins as {encoding.upper()} text, but cannot be read as such: {error}; "
                "save it as UTF-8"
            ) from error
        before, fault = data[: error.start], f"the byte 0x{data[error.start]:02x}"
    else:
        if "\0" not in text:
            return text
        before, fault = text[: text.index("\0")].encode(), "a zero byte"
    number, cure = len(re.findall(_LINE_END.encode(), before)) + 1, _cure_of_encoding(data, path)
    raise DataError(f"{path} is not UTF-8 text: line {number} has {fault}; {cure}")


def _cure_of_encoding(data: bytes, path: Path) -> str:
    """How bytes that are not UTF-8 become UTF-8; a conversion is tried before it is advised."""
    if program := next((name for magic, name in _PACKED.items() if data.startswith(magic)), None):
        return f"it is compressed: unpack it with {program}"
    cure = "save it as UTF-8 (in Excel: Save As, 'CSV UTF-8 (Comma delimited)')"
    texts: dict[str, str] = {}
    for name, encoding in (_TWO_BYTES if b"\0" in data else _ONE_BYTE).items():
        try:
            texts[name] = data.decode(encoding)
        except UnicodeDecodeError:  # bytes that mean nothing there
            continue
    texts = {name: text for name, text in texts.items() if not _NO_TEXT.search(text)}
    if not texts:
        return f"{cure} in the program that wrote it"

    def likeness(name: str) -> tuple[int, int]:
        letters = texts[name]
        return sum(map(str.isascii, letters)), len(_WRITTEN.findall(letters))

    name = max(texts, key=likeness)
    line = next(line for line in re.split(_LINE_END, texts[name]) if not line.isascii())
    shown = line if len(line) <= 60 else f"{line[:60]}..."
    converted = path.with_name(f"{path.stem}-utf8{path.suffix}")
    return (
        f"{cure}, or convert it, after which a line reads {shown!r}: "
        f"iconv -f {name} -t UTF-8 {quote(str(path))} > {quote(str(converted))}"
    )


def nested_fields(columns: Table, source: str | Path) -> str:
    """What to do about columns that hold fields of their own, in words; nothing without them."""
    reader, nested = READERS.get(Path(source).suffix.lower()), dict[str, str]()
    for name, cells in columns.items():
        keys = [key for cell in cells if isinstance(cell, dict) for key in cell]
        nested |= {name: f"{name}.{keys[0]}"} if keys else {}
        (only,) = cells if len(cells) == 1 else [None]
        if reader and isinstance(only, list) and any(isinstance(row, dict) for row in only):
            read, write = reader.code(Path(source))
            return (
                f". The file is one object, whose rows are in {name!r}. This line of Python makes "
                f"a file of them: {read}pandas.json_normalize(rows[0][{name!r}]){write}"
            )
    if not nested:
        return ""
    read, write = reader.code(Path(source)) if reader else ("", "")
    return (
        f". The fields inside {', '.join(nested)} are nested and cannot be read. This line of "
        f"Python makes each a column, the first of them {next(iter(nested.values()))!r}: "
        f"{read}pandas.json_normalize(rows){write}"
    )


def _json_code(path: Path) -> tuple[str, str]:
    first = path.read_bytes().lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0].strip()
    text = f"pathlib.Path({str(path)!r}).read_text('utf-8-sig')"
    rows = f"[json.loads(line) for line in {text}.split('\\n') if line.strip()]"
    if (is_array := first.startswith(b"[")) or first == b"{":
        rows = f"json.loads({text})" if is_array else f"[json.loads({text})]"
    by_line = ", lines=True" * (not is_array)
    write = f".to_json({_flat(path)!r}, orient='records'{by_line})"
    return f"import json, pandas, pathlib; rows = {rows}; ", write


def _parquet_code(path: Path) -> tuple[str, str]:
    read = f"import pandas; rows = pandas.read_parquet({str(path)!r}).to_dict('records'); "
    return read, f".to_parquet({_flat(path)!r})"


def _flat(path: Path) -> str:
    return str(path.with_name(f"{path.stem}-flat{path.suffix}"))


def shortened(value: Any) -> str:
    """A value of a user's file as it is written in Python, or its beginning."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


class FileReader(NamedTuple):
    read: Callable[[bytes, Path], Table]
    has_types: bool  # else all cells are text
    code: Callable[[Path], tuple[str, str]]  # in Python, that reads rows and that writes others


READERS: Mapping[str, FileReader] = MappingProxyType(
    {
        **dict.fromkeys((".jsonl", ".json"), FileReader(_jsonl, True, _json_code)),
        **dict.fromkeys((".csv", ".tsv"), FileReader(_csv, False, lambda path: ("", ""))),
        ".parquet": FileReader(_parquet, True, _parquet_code),
    }
)
