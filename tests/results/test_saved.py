"""Saved records and contexts: equal results give equal files, damaged files raise an error."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from safetensors.torch import load, save
from torch import Tensor

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.system.digest_file import to_bytes_with_digest
from tests.support.tiny_models import questions


@dataclass(frozen=True, eq=False, kw_only=True)
class Small(al.Record):
    mean: Float[Tensor, " layer"]
    best: Int[Tensor, "layer class class"]


def make_small(**changes: Any) -> Small:
    values: dict[str, Any] = {
        "mean": torch.tensor([0.5, 0.25]),
        "best": torch.arange(8).reshape(2, 2, 2),
        "intervals": {"mean": torch.tensor([[0.4, 0.1], [0.6, 0.3]])},
        "info": {"model": "tiny", "labels": ["bad"], "options": {"n": 3, "share": float("nan")}},
    }
    return Small(**(values | changes))


def contents(record: Small) -> str:
    info = json.dumps(dict(record.info), sort_keys=True)
    return repr((record.tensors(), dict(record.intervals), info))


LOADERS = (
    Small.load,
    al.contexts.CompressedContext.load,
    al.Record.load,
    al.contexts.StoredContext.load,
)


@pytest.mark.parametrize("load_file", LOADERS)
def test_what_nobody_saved_raises_an_error(load_file: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a record at all")
    (tmp_path / "bare").write_bytes(save({"mean": torch.zeros(1)}))
    for name, reason in (
        ("text", "is no file that anchorlens saved"),
        ("bare", "is no file that anchorlens saved"),
        ("none", "cannot be read: No such"),
        (".", "cannot be read: "),
    ):
        with pytest.raises(StoreError, match=f"{tmp_path / name} {reason}"):
            load_file(tmp_path / name)


SMALL, CONTEXT, MINE = ({"class": name} for name in ("Small", "CompressedContext", "Mine"))
COMPRESSED, PREFIX = al.contexts.CompressedContext.load, al.contexts.PrefixContext.load
ANY = al.contexts.StoredContext.load


@pytest.mark.parametrize(
    ("header", "load_file", "message"),
    [
        (SMALL, COMPRESSED, r"a Small, not a CompressedContext; al\.Record\.load"),
        (SMALL, al.records.AccuracyRecord.load, "a Small, not a AccuracyRecord; al"),
        (CONTEXT, Small.load, "a CompressedContext, not a Small; al"),
        (CONTEXT, al.Record.load, "a CompressedContext, not a Record; al"),
        (SMALL, ANY, "a Small, not a StoredContext; al"),
        (CONTEXT, PREFIX, "a CompressedContext, not a PrefixContext; al"),
        (MINE, ANY, "a Mine, a class that is not known here; import the module"),
        ({"class": [1]}, al.Record.load, "no record and no context; expected"),
        ({}, ANY, "no record and no context; expected"),
    ],
)
def test_a_file_of_another_class_raises_an_error(
    header: dict[str, Any], load_file: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(to_bytes_with_digest(header, {"mean": torch.tensor(1.0)}))
    with pytest.raises(StoreError, match=rf"file\.safetensors holds {message}"):
        load_file(path)


def is_store_error(path: Path, data: bytes, load: Callable[[Path], Any]) -> bool:
    """Whether loading the data raises a StoreError that names the file; others are not caught."""
    path.write_bytes(data)
    try:
        load(path)
    except StoreError as error:
        return str(path) in str(error)
    return False


def damages(data: bytes, positions: Sequence[int]) -> Iterator[bytes]:
    """The data with a byte changed (in one bit or in all), cut, extended, or reversed."""
    for n in positions:
        for flip in (1 << n % 8, 0xFF):
            yield data[:n] + bytes([data[n] ^ flip]) + data[n + 1 :]
    yield from (data[:length] for length in (*positions[::7], len(data) - 1))
    yield from (data + b"\0", data + data, b"\0" + data, data[::-1], b"")


@pytest.mark.slow("many passes")
def test_every_damage_of_a_record_raises_an_error(tmp_path: Path) -> None:
    record = make_small()
    path = record.save(tmp_path / "small.safetensors")
    data = path.read_bytes()
    assert contents(Small.load(path)) == contents(record)
    for damaged in damages(data, range(len(data))):
        assert is_store_error(path, damaged, Small.load)


def test_damage_of_a_context_raises_an_error(gpt2: Any, tmp_path: Path) -> None:
    path = al.compress(gpt2, questions(gpt2, 1)[0]).save(tmp_path / "context.safetensors")
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    positions = [*range(0, header, header // 30), *range(header, len(data), len(data) // 20)]
    for damaged in damages(data, positions):
        assert is_store_error(path, damaged, al.contexts.CompressedContext.load)


def entry_of(data: bytes) -> dict[str, Any]:
    """What anchorlens wrote into the header of a file."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["anchorlens"])


@pytest.mark.parametrize("entry", ["[]", "7", "null", '"', "[" * 100_000, "{}", '{"digest": 1}'])
def test_a_header_without_an_entry_of_anchorlens_is_an_error(entry: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / "small.safetensors", make_small().tensors()
    for load_file in (Small.load, al.contexts.CompressedContext.load):
        for metadata in ({"anchorlens": entry}, {"x": "y"}):
            assert is_store_error(path, save(tensors, metadata=metadata), load_file)


NO_VALUE = "{} is torch.{} of the shape {}, but expected"
NO_INTERVAL = "the interval of mean is torch.{} of the shape {}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mean": torch.ones(3)}, NO_VALUE.format("best", "int64", "(2, 2, 2)") + " Int["),
        ({"mean": torch.ones(2, 1)}, NO_VALUE.format("mean", "float32", "(2, 1)") + " Float["),
        ({"mean": torch.ones(2).long()}, NO_VALUE.format("mean", "int64", "(2,)")),
        ({"best": torch.ones(2, 2, 2)}, NO_VALUE.format("best", "float32", "(2, 2, 2)")),
        ({"best": torch.ones(2, 2, 3).long()}, NO_VALUE.format("best", "int64", "(2, 2, 3)")),
        ({"other": torch.ones(2)}, "fields ['best', 'mean', 'other'], not ['best', 'mean'"),
        ({"intervals.nothing": torch.ones(2)}, "an interval of nothing, which is no field"),
        ({"intervals.mean": torch.ones(3, 2)}, NO_INTERVAL.format("float32", "(3, 2)")),
        ({"info": []}, "its info is a list, not a dict"),
    ],
)
def test_wrong_contents_of_records_are_errors(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The digest is right, as if another program had written the file."""
    path = tmp_path / "small.safetensors"
    fields = {"info": {}, **make_small().tensors(), **changes}
    header = {"class": "Small", "info": fields.pop("info")}
    path.write_bytes(to_bytes_with_digest(header, fields))
    holds = re.escape("not hold what a Small of this version holds: ")
    with pytest.raises(StoreError, match=f"{holds}.*{re.escape(reason)}"):
        Small.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query_position", "1"),
        ("query_position", True),
        ("selected", None),
        ("key.0", torch.ones(3)),
        ("key.0", None),
        ("more", torch.ones(3)),
    ],
)
def test_wrong_contents_of_contexts_are_errors(
    gpt2: Any, tmp_path: Path, name: str, value: Any
) -> None:
    path = al.compress(gpt2, questions(gpt2, 1)[0]).save(tmp_path / "context.safetensors")
    header, tensors = entry_of(path.read_bytes()), load(path.read_bytes())
    (header if name in header else tensors)[name] = value
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path.write_bytes(to_bytes_with_digest({k: header[k] for k in header if k != "digest"}, kept))
    with pytest.raises(StoreError, match="not hold what a CompressedContext of this version"):
        al.contexts.CompressedContext.load(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"info": {"labels": {"a", "b"}}}, r"set is not JSON serializable; use .*list for a set"),
        ({"info": {"value": torch.ones(1)}}, "Tensor is not JSON serializable"),
        ({"info": {0: "a"}}, "the key 0 is no string"),
        ({"info": {"a": [{1: 2}]}}, "the key 1 is no string"),
        ({"mean": torch.ones(3)}, "this is no valid Small: best is torch.int64"),
        ({"intervals": {"means": torch.ones(2)}}, "an interval of means, which is no field"),
    ],
)
def test_invalid_records_raise_an_error_before_anything_is_written(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = make_small().save(tmp_path / "small.safetensors")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=reason):
        make_small(**changes).save(path)
    assert path.read_bytes() == before and len([*tmp_path.iterdir()]) == 1


def test_a_path_of_another_form_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a\.csv is not written: .*to_frame\(\)\.to_csv"):
        make_small().save(tmp_path / "a.csv")


def test_equal_results_give_equal_files(tmp_path: Path) -> None:
    """The order of a safetensors header is arbitrary if it has several entries."""
    files = set()
    for number in range(20):
        info = {name: ord(name) for name in random.Random(number).sample("abcdef", 6)}
        files.add(make_small(info=info).save(tmp_path / str(number)).read_bytes())
    assert len(files) == 1
