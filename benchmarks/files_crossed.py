"""How many files of the package a run crosses, and how often it moves from one to another.

    python benchmarks/files_crossed.py

A tiny random GPT-2 computes without intervals. A move is a call or a return after which the code
of another file of the package runs. Code with fewer files and moves is easier to follow. What one
batch more takes is the difference of a run over some batches and one over one batch less.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import anchorlens as al
from tests.support.tiny_models import byte_level_tokenizer, questions, tiny_gpt2

PACKAGE = str(Path(al.__file__).parent)


class Moves:
    """Counts the files of the package that run, and the moves from one to another."""

    def __init__(self) -> None:
        self.visits: Counter[str] = Counter()
        self.stack: list[str] = []
        self.now = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = frame.f_code.co_filename.removeprefix(PACKAGE + "/")
        if event == "call":
            self.stack.append(file)
            self._enter(file)
            return
        self.stack.pop()
        if self.stack:
            self._enter(self.stack[-1])

    def _enter(self, file: str) -> None:
        if file != self.now:
            self.visits[file] += 1
        self.now = file


def moves_of(
    model: Any, batches: list[al.PromptBatch], asked: Callable[[], al.Question]
) -> Counter[str]:
    """How often each file is entered during a run over the batches."""
    moves = Moves()
    sys.setprofile(moves)
    try:
        al.run(model, batches, [asked()], resamples=0, progress=False)
    finally:
        sys.setprofile(None)
    return moves.visits


def contexts() -> al.Question:
    """Two contexts, whose times are not measured."""
    compared: dict[str, Any] = {"none": al.contexts.NoContext(), "anchors only": al.compress}
    return al.ContextComparison(compared, repeats=0)


def counted() -> dict[str, Counter[str]]:
    """How often each file is entered, for each of the figures."""
    tokenizer = byte_level_tokenizer()
    model = al.load_model(tiny_gpt2(len(tokenizer)), tokenizer=tokenizer)
    batches = questions(model, count=16, batch_size=4)

    def of_one_more(asked: Callable[[], al.Question]) -> Counter[str]:
        moves_of(model, batches, asked)  # files that are imported at first use run then
        return moves_of(model, batches, asked) - moves_of(model, batches[:-1], asked)

    return {
        "flows, one batch more": of_one_more(al.SaliencyFlows),
        "flows, a run of one batch": moves_of(model, batches[:1], al.SaliencyFlows),
        "two contexts, one batch more": of_one_more(contexts),
    }


def main() -> None:
    for name, visits in counted().items():
        print(f"\n{name}: {len(visits)} files, {sum(visits.values())} moves")
        for file, count in visits.most_common():
            print(f"{count:4} {file}")


if __name__ == "__main__":
    main()
