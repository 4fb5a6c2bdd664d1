"""How many files of the package one batch of ``al.run`` with a gradient crosses, and how often.

    python benchmarks/files_crossed.py

A tiny random GPT-2 computes saliency flows without intervals, once for some batches and once for
one batch more. The difference belongs to one batch. A move is a call or a return after which the
code of another file of the package runs. Code with fewer files and moves is easier to follow.
"""

import sys
from collections import Counter
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


def moves_of(model: Any, batches: list[al.PromptBatch]) -> Counter[str]:
    """How often each file is entered during a run over the batches."""
    moves = Moves()
    sys.setprofile(moves)
    try:
        al.run(model, batches, [al.SaliencyFlows()], resamples=0, progress=False)
    finally:
        sys.setprofile(None)
    return moves.visits


def of_one_batch() -> Counter[str]:
    """How often each file is entered for one batch."""
    tokenizer = byte_level_tokenizer()
    model = al.load_model(tiny_gpt2(len(tokenizer)), tokenizer=tokenizer)
    batches = questions(model, count=16, batch_size=4)
    moves_of(model, batches)  # files that are imported at first use run then
    return moves_of(model, batches) - moves_of(model, batches[:-1])


def main() -> None:
    visits = of_one_batch()
    for file, count in visits.most_common():
        print(f"{count:4} {file}")
    print(f"{len(visits)} files, {sum(visits.values())} moves")


if __name__ == "__main__":
    main()
