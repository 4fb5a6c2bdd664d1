"""Saved records and contexts: equal files, and nothing but what was saved is ever loaded."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from safetensors.torch import load, save, save_file
from tiny_models import questions
from torch import Tensor

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.system.digest_file import to_bytes_with_digest

pytestmark = [
    pytest.mark.without_jaxtyping,
]  # wrong types are made on purpose


@dataclass(frozen=True, eq=False, kw_only=True)
class Small(al.Record):
    mean: Float[Tensor, " layer"]
    best: Int[Tensor, "layer class class"]


def small(**changes: Any) -> Small:
    values: dict[str, Any] = {
        "mean": torch.tensor([0.5, 0.25]),
        "best": torch.arange(8).reshape(2, 2, 2),
        "intervals": {"mean": torch.tensor([[0.4, 0.1], [0.6, 0.3]])},
        "info": {"model": "tiny", "labels": ["bad"], "options": {"n": 3, "share": float("nan")}},
    }
    return Small(**(values | changes))


def contents(record: Small) -> str:
    """Every number and word, in one order."""
    info = json.dumps(dict(record.info), sort_keys=True)
    return repr((record.tensors(), dict(record.intervals), info))


def survives(path: Path, data: bytes, load: Callable[[Path], Any]) -> bool:
    """Whether damaged data is an error that names the file; anything else is raised."""
    path.write_bytes(data)
    try:
        load(path)
    except StoreError as error:
        return str(path) in str(error)
    return False


def damages(data: bytes) -> list[bytes]:
    """Each byte flipped, in one bit and in all; cut, longer, in another order."""
    found = []
    for place, byte in enumerate(data):
        for flip in (1 << place % 8, 0xFF):
            found.append(data[:place] + bytes([byte ^ flip]) + data[place + 1 :])
    found += [data[:length] for length in range(0, len(data), 7)]
    found += [data + b"\0", data + data, b"\0" + data, data[::-1], b""]
    return found


def test_every_damage_of_a_record_is_an_error(tmp_path: Path) -> None:
    made = small()
    path = made.save(tmp_path / "small.safetensors")
    data = path.read_bytes()
    assert contents(Small.load(path)) == contents(made)
    failed = [one for one in damages(data) if not survives(path, one, Small.load)]
    assert not failed


def test_every_damage_of_a_context_is_an_error(gpt2: Any, tmp_path: Path) -> None:
    context = al.compress(gpt2, questions(gpt2, 1)[0])
    path = context.save(tmp_path / "context.safetensors")
    data = path.read_bytes()
    generator = random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    places = [*generator.sample(range(header), 150), *generator.sample(range(len(data)), 50)]
    flips = [data[:n] + bytes([data[n] ^ 1 << n % 8]) + data[n + 1 :] for n in places]
    for damaged in [*flips, data[:-1], data[: len(data) // 2], data + b"\0", b""]:
        assert survives(path, damaged, al.CompressedContext.load)


def with_header(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with another entry of ours, and the old digest."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entry = json.loads(header["__metadata__"]["anchorlens"])
    change(entry)
    return save(load(data), metadata={"anchorlens": json.dumps(entry, sort_keys=True)})


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(info=[]),
        lambda entry: entry["info"].update(model="other"),
        lambda entry: entry.pop("info"),
        lambda entry: entry.pop("digest"),
        lambda entry: entry.update(digest=None),
        lambda entry: entry.update(record="AccuracyRecord"),
        lambda entry: entry.clear(),
    ],
)
def test_an_edited_header_is_an_error(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    path = small().save(tmp_path / "small.safetensors")
    assert survives(path, with_header(path.read_bytes(), change), Small.load)


@pytest.mark.parametrize("entry", ["[]", "7", "null", '"', "[" * 100_000, "{}", '{"digest": 1}'])
def test_a_header_that_is_no_entry_of_ours_is_an_error(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    for load_it in (Small.load, al.CompressedContext.load):
        data = save(dict(small().tensors()), metadata={"anchorlens": entry})
        assert survives(path, data, load_it)
        assert survives(path, save(dict(small().tensors()), metadata={"x": "y"}), load_it)


def test_swapped_tensors_are_an_error(tmp_path: Path) -> None:
    path = small().save(tmp_path / "small.safetensors")
    data = path.read_bytes()
    tensors = load(data)
    tensors["mean"] = tensors["mean"].flip(0)
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert survives(path, save(tensors, metadata=metadata), Small.load)


@pytest.mark.parametrize(
    ("tensors", "info", "reason"),
    [
        ({"mean": torch.ones(3)}, {}, r"best is int64 \(2, 2, 2\), but expected Int\["),
        ({"mean": torch.ones(2, 1)}, {}, r"mean is float32 \(2, 1\), but expected Float\["),
        ({"mean": torch.ones(2, dtype=torch.int64)}, {}, r"mean is int64 \(2,\), but expected"),
        ({"best": torch.ones(2, 2, 2)}, {}, r"best is float32 \(2, 2, 2\), but expected Int"),
        ({"best": torch.ones(2, 2, 3).long()}, {}, r"best is int64 \(2, 2, 3\), but expected"),
        ({"other": torch.ones(2)}, {}, r"fields \['best', 'mean', 'other'\], not \['best', 'mean'"),
        ({"intervals.nothing": torch.ones(2)}, {}, "an interval of nothing, which is no field"),
        ({"intervals.mean": torch.ones(3, 2)}, {}, r"interval of mean is float32 \(3, 2\), but"),
        ({"intervals.mean": torch.ones(2, 2).long()}, {}, "interval of mean is int64"),
        ({}, [], "its info is a list, not a dict"),
        ({}, None, "its info is a NoneType, not a dict"),
    ],
)
def test_what_no_record_holds_is_an_error(
    tensors: Mapping[str, Tensor], info: Any, reason: str, tmp_path: Path
) -> None:
    """With a digest that is right, as by a program of somebody else."""
    path = tmp_path / "small.safetensors"
    fields = {**small().tensors(), **tensors}
    path.write_bytes(to_bytes_with_digest({"record": "Small", "info": info}, fields))
    with pytest.raises(
        StoreError, match=r"not hold what a Small of this version holds: .*" + reason
    ):
        Small.load(path)
    fields = {"mean": small().mean}
    path.write_bytes(to_bytes_with_digest({"record": "Small", "info": {}}, fields))
    with pytest.raises(StoreError, match=r"fields \['mean'\], not \['best', 'mean'\]"):
        Small.load(path)


def wrong(header: dict[str, Any], tensors: dict[str, Tensor], name: str, value: Any) -> None:
    if name in header:
        header[name] = value
    elif value is None:
        del tensors[name]
    else:
        tensors[name] = value


@pytest.mark.parametrize(
    "change",
    [
        partial(wrong, name="query_position", value="1"),
        partial(wrong, name="query_position", value=True),
        partial(wrong, name="info", value=[]),
        partial(wrong, name="kept", value=torch.ones(3, dtype=torch.bool)),
        partial(wrong, name="kept", value=None),
        partial(wrong, name="tokens", value=torch.ones(4)),
        partial(wrong, name="key_positions", value=torch.ones(2, dtype=torch.int64)),
        partial(wrong, name="key.0", value=torch.ones(3)),
        partial(wrong, name="key.0", value=None),
        partial(wrong, name="more", value=torch.ones(3)),
    ],
)
def test_what_no_context_holds_is_an_error(
    gpt2: Any, tmp_path: Path, change: Callable[..., None]
) -> None:
    path = al.compress(gpt2, questions(gpt2, 1)[0]).save(tmp_path / "context.safetensors")
    data = path.read_bytes()
    outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    header = json.loads(outer["anchorlens"])
    tensors = load(data)
    change(header["context"], tensors)
    path.write_bytes(to_bytes_with_digest({"context": header["context"]}, tensors))
    with pytest.raises(StoreError, match="not hold what a CompressedContext of this version"):
        al.CompressedContext.load(path)


def test_each_file_is_loaded_by_its_own_kind(gpt2: Any, tmp_path: Path) -> None:
    record = small().save(tmp_path / "small.safetensors")
    context = al.compress(gpt2, questions(gpt2, 1)[0]).save(tmp_path / "context.safetensors")
    with pytest.raises(StoreError, match="holds a Small, not a CompressedContext"):
        al.CompressedContext.load(record)
    with pytest.raises(StoreError, match=r"holds a CompressedContext, not a Small; use"):
        Small.load(context)
    for path in (tmp_path, tmp_path / "none"):
        for load_it in (Small.load, al.CompressedContext.load):
            with pytest.raises(StoreError, match=f"{path} cannot be read: "):
                load_it(path)


def test_files_of_earlier_versions_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    save_file(dict(small().tensors()), path, metadata={"record": "Small", "info": "{}"})
    with pytest.raises(StoreError, match=r"saved by an earlier version .* save it with this"):
        Small.load(path)
    save_file({"tokens": torch.ones(2)}, path, metadata={"context": "{}"})
    with pytest.raises(StoreError, match=r"saved by an earlier version .* save it with this"):
        al.CompressedContext.load(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"info": {"labels": {"a", "b"}}}, r"set is not JSON serializable; use .*list for a set"),
        ({"info": {"value": torch.ones(1)}}, "Tensor is not JSON serializable"),
        ({"info": {0: "a"}}, "the key 0 is no string"),
        ({"info": {"a": [{1: 2}]}}, "the key 1 is no string"),
        ({"mean": torch.ones(3)}, "is not written, because this is no valid Small: best is int64"),
        ({"mean": [0.5, 0.5]}, "mean is a list, but expected"),
        ({"intervals": {"means": torch.ones(2)}}, "an interval of means, which is no field"),
    ],
)
def test_what_cannot_be_saved_is_an_error_before_anything_is_written(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = small().save(tmp_path / "small.safetensors")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=reason):
        small(**changes).save(path)
    assert path.read_bytes() == before and len([*tmp_path.iterdir()]) == 1


def test_info_of_a_context_that_json_cannot_hold(gpt2: Any, tmp_path: Path) -> None:
    context = al.compress(gpt2, questions(gpt2, 1)[0])
    with pytest.raises(StoreError, match="json cannot store"):
        replace(context, info=context.info | {"of": {1, 2}}).save(tmp_path / "c.safetensors")
    assert not [*tmp_path.iterdir()]


def test_equal_results_are_equal_files(tmp_path: Path) -> None:
    """Each header of safetensors has an order of its own where it has several entries."""
    files = set()
    for number in range(20):
        info = {name: ord(name) for name in random.Random(number).sample("abcdef", 6)}
        path = small(info=info).save(tmp_path / str(number))
        files.add(path.read_bytes())
    assert len(files) == 1
