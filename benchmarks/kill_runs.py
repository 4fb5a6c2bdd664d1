"""Kills runs, starts them again, and counts those that end with the same results and files.

    python benchmarks/kill_runs.py [--random 100] [--steps 999]

SIGKILL at random moments; SIGKILL at every write (after half of it), fsync and rename; Ctrl-C and
SIGTERM to the command. A resumed run must give the same numbers, intervals and files bit for bit,
and leave no other files. Exit status 1 if one does not.

Everything is imported once, and each run is a fork of this process.
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import anchorlens as al
from anchorlens.cli import commands as command_line
from anchorlens.system import files
from tests.support.tiny_models import byte_level_tokenizer, questions, tiny_gpt2

METRICS: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC()]
Work = Callable[[Path], str]


def digest_of(results: dict[str, Any]) -> str:
    """A digest of all numbers of all results, and of their intervals."""
    digest = hashlib.sha256()
    for name, record in sorted(results.items()):
        for values in (record.tensors(), record.intervals):
            for key, value in sorted(values.items()):
                digest.update(f"{name} {key} {tuple(value.shape)}".encode())
                digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def forked(work: Callable[[], str]) -> tuple[int, int]:
    """Start ``work`` in a new process; return its process id and a pipe with its result."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, work().encode())
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    return pid, read


def end_of(child: tuple[int, int]) -> tuple[int, str]:
    """Exit status of a process (minus the signal if one killed it), and its result."""
    pid, pipe = child
    with os.fdopen(pipe) as text:
        result = text.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), result


class DiesAtStep:
    """Kills its own process at a given write, fsync or rename of ``anchorlens.system.files``."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0
        self.real: dict[str, Callable[..., None]] = {"fsync": os.fsync, "replace": os.replace}
        vars(files)["open"] = self.open
        vars(os).update({name: partial(self.after_a_step, name) for name in self.real})

    def after_a_step(self, name: str, *arguments: Any) -> None:
        self.step()
        self.real[name](*arguments)

    def step(self) -> None:
        self.count += 1
        if self.count == self.number:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def open(self, path: Path, mode: str) -> Iterator["WritesInTwo"]:
        with open(path, mode) as file:
            yield WritesInTwo(file, self.step)


@dataclass
class WritesInTwo:
    """A file that calls ``between`` after the first half of each write."""

    file: Any
    between: Callable[[], None]

    def write(self, data: bytes) -> None:
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        self.between()
        self.file.write(data[len(data) // 2 :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Trials:
    """Runs of one setting, each in its own folder, compared with an uninterrupted run."""

    def __init__(self, work: Work, root: Path) -> None:
        self.work, self.root, self.number = work, root, 0
        whole = self.folder()
        started = time.monotonic()
        status, self.expected = end_of(forked(lambda: work(whole)))
        assert status == 0
        self.duration = time.monotonic() - started
        self.files = contents(whole)

    def folder(self) -> Path:
        self.number += 1
        return self.root / str(self.number)

    def resumes(self, folder: Path) -> bool:
        """Whether the run that was killed in ``folder`` resumes and ends as expected."""
        status, result = end_of(forked(lambda: self.work(folder)))
        return (status, result) == (0, self.expected) and contents(folder) == self.files

    def at_random(self, kills: int, seed: int = 0) -> tuple[int, Counter[int]]:
        """Kill runs at random moments: how many resume as expected, and their numbers of files."""
        moments, equal, killed, file_counts = random.Random(seed), 0, 0, Counter[int]()
        while killed < kills:
            folder = self.folder()
            child = forked(lambda folder=folder: self.work(folder))  # type: ignore[misc]
            time.sleep(moments.random() * self.duration)
            os.kill(child[0], signal.SIGKILL)
            if end_of(child)[0] == -signal.SIGKILL:  # it had not ended before
                killed += 1
                file_counts[len(contents(folder)) if folder.exists() else 0] += 1
                equal += self.resumes(folder)
        return equal, file_counts

    def steps(self) -> int:
        """Number of writes, fsyncs and renames of a run."""

        def count() -> str:
            dying = DiesAtStep(0)
            self.work(folder)
            return str(dying.count)

        folder = self.folder()
        return int(end_of(forked(count))[1])

    def at_step(self, step: int) -> bool:
        """Whether a run that was killed at this step resumes as expected."""

        def die() -> str:
            DiesAtStep(step)
            return self.work(folder)

        folder = self.folder()
        status, _ = end_of(forked(die))
        assert status == -signal.SIGKILL, f"step {step} was not reached"
        return self.resumes(folder)


def command(
    arguments: list[str], out: Path, signal_number: int = 0, awaited: str = ""
) -> tuple[int, str]:
    """Exit status and output of the command; it gets the signal as soon as a file exists."""

    def work() -> str:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output  # pytest has replaced them
        sys.argv = ["anchorlens", *arguments, "--out", str(out)]
        command_line.main()
        return ""

    with tempfile.TemporaryFile("w+") as output:
        child = forked(work)
        if signal_number:
            while not any(out.glob(awaited)):
                time.sleep(0.002)
            os.kill(child[0], signal_number)
        status, _ = end_of(child)
        output.seek(0)
        return status, output.read()


def numbers_in(folder: Path) -> dict[str, Any]:
    """Files of rows as bytes; records as contents, because the order in their header varies."""
    numbers: dict[str, Any] = contents(folder / "rows")
    assert len(numbers) > 2 * 12
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            tensors = {name: file.get_tensor(name).numpy().tobytes() for name in names}
            numbers[path.name] = file.metadata(), tensors
    return numbers


def commands(root: Path) -> bool:
    """Whether the command, stopped by each signal, says so, resumes and ends as expected."""
    model = root / "model"
    tokenizer = byte_level_tokenizer()
    tiny_gpt2(len(tokenizer), n_layer=2).save_pretrained(model)
    tokenizer.save_pretrained(model)
    arguments = ["run", "--model", str(model), "--task", "questions", "--queries", "12"]
    arguments += ["--batch-size", "1", "--depth", "1", "--draws", "2", "--device", "cpu"]
    status, output = command(arguments, root / "whole")
    assert status == 0, output
    expected, right = numbers_in(root / "whole" / "questions"), True
    for stop, part in ((signal.SIGINT, "metrics"), (signal.SIGTERM, "isolation*")):
        out = root / stop.name
        status, output = command(arguments, out, stop, f"questions/rows/{part}/rows-00002*")
        last = output.strip().splitlines()[-1]
        print(f"{stop.name}: exit status {status}: {last}")
        line = f"stopped; what was computed is stored in {out}; the same command goes on from there"
        right &= status == 128 + stop and last == line and "Traceback" not in output
        right &= not any(out.rglob("*.tmp")) and not (out / "report.html").exists()
        status, output = command(arguments, out)
        equal = status == 0 and numbers_in(out / "questions") == expected
        print(f"{stop.name}: resumed and ended {'equal' if equal else f'otherwise: {output}'}")
        right &= equal
    return right


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    warnings.simplefilter("ignore", UserWarning)
    tokenizer = byte_level_tokenizer()
    model = al.load_model(tiny_gpt2(len(tokenizer)), tokenizer=tokenizer)
    batches = questions(model, count=12, batch_size=2)

    def work(folder: Path) -> str:
        results = al.run(model, batches, METRICS, folder=folder, resamples=5, progress=False)
        return digest_of(results)

    with tempfile.TemporaryDirectory() as root:
        right = commands(Path(root))
        trials = Trials(work, Path(root) / "trials")
        equal, file_counts = trials.at_random(options.random)
        print(
            f"killed at random moments of {trials.duration:.2f} s: "
            f"{equal} of {options.random} resumed"
        )
        print(f"files written before, of {len(trials.files)}: {dict(sorted(file_counts.items()))}")
        right &= equal == options.random
        count = trials.steps()
        chosen = sorted(random.Random(1).sample(range(1, count + 1), min(count, options.steps)))
        equal = sum(trials.at_step(step) for step in chosen)
        print(f"killed at {len(chosen)} of {count} writes, fsyncs and renames: {equal} resumed")
        right &= equal == len(chosen) > 0
    return 0 if right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=100, help="kills at random moments")
    parser.add_argument("--steps", type=int, default=999, help="largest number of kills at steps")
    sys.exit(main(parser.parse_args()))
