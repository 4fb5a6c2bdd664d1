"""A damaged file must give an error that names it, or the numbers that were stored."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import anchorlens as al
from anchorlens.errors import AnchorlensError, DataError, StoreError
from anchorlens.prompts.task_file import read_entries
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest
from benchmarks.kill_runs import end_of, forked
from tests.attack.attack_scene import QUICK, scene
from tests.support.damages import DAMAGES
from tests.support.stored_runs import same

JSON: list[Any] = [
    *(None, 3, "text", [], {}, [1, 2], {"digest": "x"}, {"run": {}}, {"digest": None}, True),
    *({"anchorlens": 1}, {"info": []}, {"record": "SaliencyFlowsRecord"}),
]


def flipped(data: bytes, rng: random.Random, end: int, count: int = 1) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        changed[rng.randrange(min(len(data), end))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def blank(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    count = min(len(data) - start, rng.choice([1, 16, 512]))
    return data[:start] + bytes(count) + data[start + count :]


def swapped(data: bytes, rng: random.Random) -> bytes:
    first, second = sorted(rng.sample(range(len(data)), 2))
    return data[second:] + data[first:second] + data[:first]


def another_header(data: bytes, rng: random.Random) -> bytes:
    """Change a letter or a digit of the header, if it is a file of tensors, or anywhere."""
    size = int.from_bytes(data[:8], "little")
    end = 8 + size if size < len(data) else len(data)
    position = rng.choice([k for k in range(8, end) if chr(data[k]).isalnum()] or [0])
    return data[:position] + rng.choice(b"0123456789abcF").to_bytes() + data[position + 1 :]


# What becomes of the bytes of a file.
GENERAL: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit": lambda data, rng: flipped(data, rng, len(data)),
    "some bits": lambda data, rng: flipped(data, rng, len(data), rng.choice([1, 5])),
    "a bit near the start": lambda data, rng: flipped(data, rng, 600),
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "longer": lambda data, rng: data + rng.randbytes(rng.randint(1, 40)),
    "blank": blank,
    "swapped parts": swapped,
    "another header": another_header,
    "other json": lambda data, rng: json.dumps(rng.choice(JSON)).encode(),
    "deep json": lambda data, rng: rng.choice([b"[", b'{"a":']) * 100_000,
    "no text": lambda data, rng: rng.randbytes(rng.randrange(300)),
}
TOML: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "deep": lambda data, rng: b"template = " + rng.choice([b"[", b"{a=", b"[[a."]) * 5000,
    "digits": lambda data, rng: b"template = " + rng.choice("123456789").encode() * 5000,
}
STORED = {name: damage for name, damage in DAMAGES.items() if "another" not in name}


def damaged(path: Path, rng: random.Random, *more: str) -> str | None:
    """Damage a file and describe it; None if this file cannot be damaged in the drawn way.

    ``more`` are other ways: one of TOML, "stored" for one of DAMAGES, "pipe".
    """
    name = rng.choice([*GENERAL, *more, "folder"])
    if name == "stored":
        name = rng.choice([*STORED])
        try:
            STORED[name](path)
        except ValueError:  # the file does not hold the word to damage
            return None
    elif name in ("pipe", "folder"):
        path.unlink()
        path.mkdir() if name == "folder" else os.mkfifo(path)
    else:
        path.write_bytes((GENERAL | TOML)[name](path.read_bytes(), rng))
    return f"{path.name}: {name}"


@contextmanager
def refused_or(case: str | None, *refusals: type[Exception]) -> Iterator[None]:
    """Inside, the refusals end the block, and other errors but assertions are faults."""
    try:
        yield
    except AssertionError:
        raise
    except refusals:
        pass
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:200]}") from error


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=scene().folder))


def rows_metrics() -> list[al.Metric]:
    return [al.Accuracy(), al.AttentionAUCROC()]


@cache
def whole() -> tuple[Path, dict[str, Any]]:
    """The folder of a run that ended, and its results."""
    run_folder = folder()
    return run_folder, al.run(
        scene().model, scene().batches, rows_metrics(), folder=run_folder, **QUICK
    )


def damaged_rows(rng: random.Random) -> None:
    """Damage a file in a folder of ``al.run``, and run again in that folder."""
    stored, expected = whole()
    run_folder = shutil.copytree(stored, folder() / "rows")
    path = rng.choice(sorted(run_folder.iterdir()))
    case = damaged(path, rng, "pipe", *["stored"] * 4 * (path.suffix == ".safetensors"))
    if case is None:
        return
    with refused_or(case, StoreError):
        results = al.run(scene().model, scene().batches, rows_metrics(), folder=run_folder, **QUICK)
        assert same(results, expected), f"{case}: other numbers"


def damaged_record(rng: random.Random) -> None:
    setup = scene()
    record = rng.choice([*setup.results.values(), setup.beta, setup.isolation])
    path = record.save(folder() / "record.safetensors")
    case = f"{type(record).__name__}, {damaged(path, rng)}"
    with refused_or(case, StoreError):
        loaded = type(record).load(path)
        loaded.to_frame()
        equal = same({"": loaded}, {"": record}) and loaded.info == record.info
        assert equal, f"{case}: loads, with other numbers"


def damaged_context(rng: random.Random) -> None:
    setup = scene()
    path = setup.context.save(folder() / "context.safetensors")
    case = damaged(path, rng)
    with refused_or(case, AnchorlensError):
        logits = al.contexts.CompressedContext.load(path).logits(setup.model, setup.batch)
        expected = setup.context.logits(setup.model, setup.batch)
        assert torch.equal(logits, expected), f"{case}: loads, with other numbers"


def forged(value: Any, rng: random.Random) -> Any:
    """The value with another value somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        changed = {**value, name: forged(value[name], rng)}
        if rng.random() < 0.2:
            del changed[name]
        return changed
    return rng.choice([*JSON, -1, 1e300, "9" * 50, [[]], {"": None}])


def forged_tensors(tensors: dict[str, torch.Tensor], rng: random.Random) -> dict[str, torch.Tensor]:
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    others = [tensor.double(), tensor.long(), tensor[None], torch.tensor(7), tensor.flatten()[:0]]
    others += [tensor.flatten()[:1], torch.cat([tensor, tensor]) if tensor.ndim else tensor]
    changed = {**tensors, name: rng.choice(others)}
    if rng.random() < 0.2:
        changed[name + "x"] = changed.pop(name)
    return changed


def forged_files(rng: random.Random) -> None:
    """A file of another content with a right digest: an error with its name, or it can be used."""
    setup = scene()
    kind = rng.choice(["record", "context", "prefix", "prompt", "adapter"])
    path = folder() / "forged.safetensors"
    saved: Any = {
        "record": setup.results["anchor_distances"],
        "context": setup.context,
        "prefix": setup.prefix,
        "prompt": setup.hard_prompt,
        "adapter": setup.prefix,
    }[kind]
    if kind == "adapter":
        path = (
            al.contexts.context_to_peft(saved, setup.model, path.parent)
            / "adapter_model.safetensors"
        )
    else:
        saved.save(path)
    header, tensors = read_with_digest(path)
    if rng.random() < 0.5:
        header = forged(header, rng)
        header = header if isinstance(header, dict) else {"": header}
    else:
        tensors = forged_tensors(tensors, rng)
    header.pop("digest", None)
    path.write_bytes(to_bytes_with_digest(header, tensors))
    with refused_or(f"{kind}, {header}", AnchorlensError):
        if kind == "record":
            repr(al.load_record(path).to_frame())
        elif kind == "adapter":
            al.contexts.context_from_peft(path.parent, setup.model).logits(setup.model, setup.batch)
        else:
            loaded = al.contexts.load_context(path)
            repr(loaded)
            loaded.logits(setup.model, setup.batch)


def odd_settings(rng: random.Random) -> None:
    """A settings file of another program, damaged: the task of a command, a peft adapter."""
    setup = scene()
    kind = rng.choice(["toml", "adapter"])
    if kind == "toml":
        path = folder() / "task.toml"
        path.write_text('template = "{text}{label}"\nlabels = [" a", " b"]\nprefix = "P"\n')
        case = damaged(path, rng, *TOML)
        read: Callable[[], Any] = partial(read_entries, path)
    else:
        al.contexts.context_to_peft(setup.prefix, setup.model, folder_of_adapter := folder())
        path = folder_of_adapter / "adapter_config.json"
        case = damaged(path, rng, "pipe")
        read = partial(al.contexts.context_from_peft, path.parent, setup.model)
    with refused_or(case):
        try:
            read()
        except AnchorlensError as error:
            assert path.parent.name in str(error), f"{case}: no file is named: {error}"


def written(kind: str) -> Path:
    """Write some examples into a new file."""
    import pandas as pd

    examples = scene().examples[:20]
    frame = pd.DataFrame([{"text": example.text, "label": example.label} for example in examples])
    path = folder() / f"data.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=kind == "jsonl", force_ascii=False)
    return path


def damaged_data(rng: random.Random) -> None:
    """A changed text cannot be detected. The result must be examples with classes, or an error."""
    path = written(rng.choice(["jsonl", "json", "csv", "parquet"]))
    description = damaged(path, rng)
    # In a separate process, because the library that reads the file may end the whole process.
    status, ending = end_of(forked(lambda: examples_of(path)))
    if status != 0:
        raise AssertionError(f"{description}: the process ended with the status {status}")
    if ending not in ("right", "refused"):
        raise AssertionError(f"{description}: {ending}")


def examples_of(path: Path) -> str:
    """Read the examples of a file and return how that ended."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        examples = al.load_examples(path)
    except DataError as error:
        return "refused" if path.name in str(error) else f"no file is named: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    wrong = [
        example
        for example in examples
        if type(example.text) is not str or type(example.label) is not int
    ]
    return f"{wrong[0]!r}" if wrong else "right"
