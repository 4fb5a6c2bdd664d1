"""A damaged file must give an error that names it, or the numbers that were stored."""

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
from damages import DAMAGES
from stored_runs import same

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from kill_runs import end_of, forked

import anchorlens as al
from anchorlens.errors import AnchorlensError, DataError, StoreError
from anchorlens.prompts.task_file import read_entries
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest

Damage = Callable[[Path, random.Random], None]

JSON: list[Any] = [
    *(None, 3, "text", [], {}, [1, 2], {"digest": "x"}, {"run": {}}, {"digest": None}, True),
    *({"anchorlens": 1}, {"info": []}, {"record": "SaliencyFlowsRecord"}),
]


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 5])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_near_the_start(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(min(len(data), 600))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 40)))


def blank(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    count = min(len(data) - start, rng.choice([1, 16, 512]))
    data[start : start + count] = bytes(count)
    path.write_bytes(data)


def swap_parts(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    first, second = sorted(rng.sample(range(len(data)), 2))
    path.write_bytes(data[second:] + data[first:second] + data[:first])


def other_json(path: Path, rng: random.Random) -> None:
    path.write_text(json.dumps(rng.choice(JSON)))


def deep_json(path: Path, rng: random.Random) -> None:
    path.write_text(rng.choice(["[", '{"a":']) * 100_000)


def not_text(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randrange(300)))


def a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def another_header(path: Path, rng: random.Random) -> None:
    """Change a letter or a digit of the header."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    positions = [k for k in range(8, end) if chr(data[k]).isalnum()] or [0]
    position = rng.choice(positions)
    path.write_bytes(
        data[:position] + rng.choice(b"0123456789abcF").to_bytes() + data[position + 1 :]
    )


def a_pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def deep_toml(path: Path, rng: random.Random) -> None:
    path.write_text("template = " + rng.choice(["[", "{a=", "[[a."]) * 5000)


def many_digits(path: Path, rng: random.Random) -> None:
    path.write_text("template = " + rng.choice("123456789") * 5000)


TOML: list[Damage] = [deep_toml, many_digits]
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
    run_folder = folder()
    return run_folder, al.run(
        scene().model, scene().batches, rows_metrics(), folder=run_folder, **QUICK
    )


def damaged_rows(rng: random.Random) -> None:
    """Damage a file in a folder of ``al.run``, and run again in that folder."""
    stored, expected = whole()
    run_folder = shutil.copytree(stored, folder() / "rows")
    paths = sorted(run_folder.iterdir())
    path, damage = rng.choice(paths), rng.choice([*GENERAL, a_pipe])
    if path.suffix == ".safetensors" and rng.random() < 0.3:
        # The damages with "another" need more batches.
        name = rng.choice([key for key in DAMAGES if "another" not in key])
        damage = lambda path, rng: DAMAGES[name](path)  # noqa: E731
        damage.__name__ = name
    description = apply_damage(path, damage, rng)
    if description is None:
        return
    try:
        results = al.run(scene().model, scene().batches, rows_metrics(), folder=run_folder, **QUICK)
    except StoreError:
        return
    except Exception as error:
        raise AssertionError(
            f"{description}: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    if not same(results, expected):
        raise AssertionError(f"{description}: other numbers")


def apply_damage(path: Path, damage: Damage, rng: random.Random) -> str | None:
    """Damage a file and describe the damage; None if this file cannot be damaged in this way."""
    try:
        damage(path, rng)
    except ValueError:  # the file does not hold the word to damage
        return None
    return f"{path.name}: {damage.__name__}"


def damaged_record(rng: random.Random) -> None:
    setup = scene()
    record = rng.choice([*setup.results.values(), setup.beta, setup.isolation])
    path = record.save(folder() / "record.safetensors")
    description = apply_damage(path, rng.choice(GENERAL), rng)
    try:
        loaded = type(record).load(path)
        equal = same({"": loaded}, {"": record}) and loaded.info == record.info
        loaded.to_frame()
    except StoreError:
        return
    except Exception as error:
        raise AssertionError(
            f"{type(record).__name__}, {description}: {type(error).__name__}: {error}"
        ) from error
    if not equal:
        raise AssertionError(f"{type(record).__name__}, {description}: loads, with other numbers")


def damaged_context(rng: random.Random) -> None:
    setup = scene()
    path = setup.context.save(folder() / "context.safetensors")
    description = apply_damage(path, rng.choice(GENERAL), rng)
    try:
        loaded = al.CompressedContext.load(path)
        logits = loaded.logits(setup.model, setup.batch)
    except AnchorlensError:
        return
    except Exception as error:
        raise AssertionError(
            f"context, {description}: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    if not torch.equal(logits, setup.context.logits(setup.model, setup.batch)):
        raise AssertionError(f"context, {description}: loads, with other numbers")


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
        path = al.context_to_peft(saved, setup.model, path.parent) / "adapter_model.safetensors"
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
    try:
        if kind == "record":
            repr(al.load_record(path).to_frame())
        elif kind == "adapter":
            al.context_from_peft(path.parent, setup.model).logits(setup.model, setup.batch)
        else:
            loaded = al.load_context(path)
            repr(loaded)
            loaded.logits(setup.model, setup.batch)
    except AnchorlensError:
        return
    except Exception as error:
        raise AssertionError(
            f"{kind}, {header}: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def odd_settings(rng: random.Random) -> None:
    """A settings file of another program, damaged: the task of a command, a peft adapter."""
    setup = scene()
    kind = rng.choice(["toml", "adapter"])
    if kind == "toml":
        path = folder() / "task.toml"
        path.write_text('template = "{text}{label}"\nlabels = [" a", " b"]\nprefix = "P"\n')
        damages = [*GENERAL, *TOML]
    else:
        al.context_to_peft(setup.prefix, setup.model, folder_of_adapter := folder())
        path, damages = folder_of_adapter / "adapter_config.json", [*GENERAL, a_pipe]
    description = apply_damage(path, rng.choice(damages), rng)
    try:
        if kind == "toml":
            read_entries(path)
        else:
            al.context_from_peft(path.parent, setup.model)
    except AnchorlensError as error:
        if path.parent.name not in str(error):
            raise AssertionError(f"{description}: no file is named: {error}") from error
        return
    except Exception as error:
        raise AssertionError(
            f"{description}: {type(error).__name__}: {str(error)[:200]}"
        ) from error


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
    description = apply_damage(path, rng.choice(GENERAL), rng)
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
