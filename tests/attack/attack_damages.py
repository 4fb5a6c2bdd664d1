"""Damaged files: an error that names the file, or the numbers that were there. Nothing else."""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attack_scene import QUICK, scene
from attempts import Ending, Fault
from damages import DAMAGES
from stored_runs import same

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from kill_runs import end_of, forked

import anchorlens as al
from anchorlens.errors import AnchorlensError, DataError, StoreError

Damage = Callable[[Path, random.Random], None]

JSON: list[Any] = [
    *(None, 3, "text", [], {}, [1, 2], {"digest": "x"}, {"run": {}}, {"digest": None}, True),
    *({"anchorlens": 1}, {"info": []}, {"record": "SaliencyFlowsRecord"}),
]


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 1, 5])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def flip_near_the_start(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(min(len(data), 600))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 40)))


def blank(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    count = min(len(data) - start, chance.choice([1, 16, 512]))
    data[start : start + count] = bytes(count)
    path.write_bytes(data)


def swap_parts(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    first, second = sorted(chance.sample(range(len(data)), 2))
    path.write_bytes(data[second:] + data[first:second] + data[:first])


def other_json(path: Path, chance: random.Random) -> None:
    path.write_text(json.dumps(chance.choice(JSON)))


def deep_json(path: Path, chance: random.Random) -> None:
    path.write_text(chance.choice(["[", '{"a":']) * 100_000)


def not_text(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(300)))


def a_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def another_header(path: Path, chance: random.Random) -> None:
    """A number or a name of the header is another one."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    places = [k for k in range(8, end) if chr(data[k]).isalnum()] or [0]
    place = chance.choice(places)
    path.write_bytes(data[:place] + chance.choice(b"0123456789abcF").to_bytes() + data[place + 1 :])


GENERAL: list[Damage] = [
    *(flip, flip, flip_near_the_start, cut, lengthen, blank, swap_parts, another_header),
    *(other_json, deep_json, not_text, a_folder),
]


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=scene().folder))


def rows_metrics() -> list[al.Metric]:
    return [al.Accuracy(), al.AttentionAUCROC()]


@cache
def whole() -> tuple[Path, dict[str, Any]]:
    """The folder of a run that ended, and its results."""
    place = folder()
    return place, al.run(scene().model, scene().batches, rows_metrics(), folder=place, **QUICK)


def damaged_rows(chance: random.Random) -> Ending:
    """Of a folder that ``al.run`` filled, which then goes on there."""
    stored, expected = whole()
    place = shutil.copytree(stored, folder() / "rows")
    paths = sorted(place.iterdir())
    path, damage = chance.choice(paths), chance.choice(GENERAL)
    if path.suffix == ".safetensors" and chance.random() < 0.3:
        name = chance.choice([one for one in DAMAGES if "another" not in one])  # of four batches
        damage = lambda path, chance: DAMAGES[name](path)  # noqa: E731
        damage.__name__ = name
    what = harmed(path, damage, chance)
    if what is None:
        return "refused"
    try:
        found = al.run(scene().model, scene().batches, rows_metrics(), folder=place, **QUICK)
    except StoreError:
        return "refused"
    except Exception as error:
        raise Fault(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error
    if not same(found, expected):
        raise Fault(f"{what}: other numbers")
    return "right"


def harmed(path: Path, damage: Damage, chance: random.Random) -> str | None:
    """Damage a file; what was done, None where that cannot be done to this one."""
    try:
        damage(path, chance)
    except ValueError:  # a word that this file does not hold
        return None
    return f"{path.name}: {damage.__name__}"


def damaged_record(chance: random.Random) -> Ending:
    here = scene()
    record = chance.choice([*here.results.values(), here.beta, here.isolation])
    path = record.save(folder() / "record.safetensors")
    what = harmed(path, chance.choice(GENERAL), chance)
    try:
        found = type(record).load(path)
        equal = same({"": found}, {"": record}) and found.info == record.info
        found.to_frame()
    except StoreError:
        return "refused"
    except Exception as error:
        raise Fault(f"{type(record).__name__}, {what}: {type(error).__name__}: {error}") from error
    if not equal:
        raise Fault(f"{type(record).__name__}, {what}: loads, with other numbers")
    return "right"


def damaged_context(chance: random.Random) -> Ending:
    here = scene()
    path = here.context.save(folder() / "context.safetensors")
    what = harmed(path, chance.choice(GENERAL), chance)
    try:
        found = al.CompressedContext.load(path)
        logits = found.logits(here.model, here.batch)
    except AnchorlensError:
        return "refused"
    except Exception as error:
        raise Fault(f"context, {what}: {type(error).__name__}: {str(error)[:200]}") from error
    if not torch.equal(logits, here.context.logits(here.model, here.batch)):
        raise Fault(f"context, {what}: loads, with other numbers")
    return "right"


def written(kind: str) -> Path:
    """Some examples as a file."""
    import pandas as pd

    examples = scene().examples[:20]
    frame = pd.DataFrame([{"text": one.text, "label": one.label} for one in examples])
    path = folder() / f"data.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=kind == "jsonl", force_ascii=False)
    return path


def damaged_data(chance: random.Random) -> Ending:
    """Other texts cannot be told, but what comes are examples of classes, or a reason."""
    path = written(chance.choice(["jsonl", "json", "csv", "parquet"]))
    what = harmed(path, chance.choice(GENERAL), chance)
    # In a process of its own: what reads the file may end the whole process.
    status, ending = end_of(forked(lambda: examples_of(path)))
    if status != 0:
        raise Fault(f"{what}: the process ended with the status {status}")
    if ending not in ("right", "refused"):
        raise Fault(f"{what}: {ending}")
    return "right" if ending == "right" else "refused"


def examples_of(path: Path) -> str:
    """How it ends when the examples of a file are read."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        found = al.load_examples(path)
    except DataError as error:
        return "refused" if path.name in str(error) else f"no file is named: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    wrong = [one for one in found if type(one.text) is not str or type(one.label) is not int]
    return f"{wrong[0]!r}" if wrong else "right"
