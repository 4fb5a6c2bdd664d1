"""From which of two documents does an answer come? One of them holds it.

python examples/documents.py --model gpt2
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch

import anchorlens as al

# A sentence and a question, and pairs of a name and its value: each pair is asked for once, and the
# next pair is the other document.
FACTS = [
    (
        "The {} opens at {} o'clock.",
        "When does the {} open?",
        " at",
        [
            ("museum", "ten"), ("library", "nine"), ("market", "six"), ("theatre", "seven"),
            ("bakery", "five"), ("school", "eight"), ("garden", "eleven"), ("bank", "three"),
            ("cinema", "four"), ("station", "two"),
        ],
    ),
    (
        "{} lives in {}.",
        "Where does {} live?",
        " in",
        [
            ("Anna", "Paris"), ("Peter", "London"), ("Maria", "Rome"), ("Tom", "Berlin"),
            ("Julia", "Madrid"), ("David", "Vienna"), ("Laura", "Athens"), ("Simon", "Dublin"),
            ("Helen", "Lisbon"), ("Mark", "Prague"),
        ],
    ),
    (
        "The colour of the {} is {}.",
        "What is the colour of the {}?",
        " is",
        [
            ("door", "red"), ("car", "blue"), ("house", "green"), ("hat", "black"),
            ("bag", "white"), ("chair", "yellow"), ("boat", "brown"), ("coat", "grey"),
            ("cup", "pink"), ("box", "orange"),
        ],
    ),
    (
        "{} works as a {}.",
        "What does {} work as?",
        " a",
        [
            ("Eva", "doctor"), ("Paul", "teacher"), ("Nina", "lawyer"), ("Jack", "farmer"),
            ("Rosa", "nurse"), ("Adam", "pilot"), ("Clara", "singer"), ("Leo", "baker"),
            ("Emma", "painter"), ("Karl", "driver"),
        ],
    ),
    (
        "The {} eats {}.",
        "What does the {} eat?",
        " eats",
        [
            ("horse", "grass"), ("cat", "fish"), ("dog", "meat"), ("bird", "seeds"),
            ("bear", "honey"), ("mouse", "cheese"), ("rabbit", "carrots"), ("monkey", "fruit"),
            ("cow", "hay"), ("duck", "bread"),
        ],
    ),
]  # fmt: skip


def prompts() -> list[list[tuple[str | None, str]]]:
    """Two documents, a question and its answer; the right document is first in every other one."""
    written: list[list[tuple[str | None, str]]] = []
    for sentence, question, cue, pairs in FACTS:
        for number, (name, value) in enumerate(pairs):
            documents = [
                ("right document", sentence.format(name, value) + "\n"),
                ("wrong document", sentence.format(*pairs[(number + 1) % len(pairs)]) + "\n"),
            ]
            asked = [("question", f"Question: {question.format(name)}\nAnswer:{cue}")]
            ordered = documents if number % 2 == 0 else documents[::-1]
            written.append([*ordered, *asked, ("answer", f" {value}")])
    return written


def print_row(name: str, right: torch.Tensor, wrong: torch.Tensor) -> None:
    """Means over prompts, the difference with its 95 % interval, and how often right is more."""
    difference = right - wrong
    half = 1.96 * float(difference.std()) / len(difference) ** 0.5
    mean = float(difference.mean())
    print(
        f"{name:16}  {float(right.mean()):8.4f}  {float(wrong.mean()):8.4f}  "
        f"{mean:+8.4f} [{mean - half:+.4f}, {mean + half:+.4f}]  "
        f"{int((difference > 0).sum()):3} of {len(difference)}"
    )


def answered(flows: Sequence[al.records.StepFlowsRecord]) -> int:
    """How many answers have a mean probability of their tokens above a half."""
    return sum(float((-record.loss).exp().mean()) > 0.5 for record in flows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--queries", type=int, default=50, help="questions, at most 50")
    options = parser.parse_args()

    model = al.load_model(options.model)
    batches = al.build_segments(model.tokenizer, prompts()[: options.queries], batch_size=1)
    parts = ["right document", "wrong document", "question", "answer"]
    flows = [al.step_flows(model, batch, "answer", segments=parts) for batch in batches]
    # What the position before each token of the answer reads, mean over tokens: [prompt, layer].
    right, wrong = (
        torch.stack([record.read[:, :, part].mean(0) for record in flows]) for part in (0, 1)
    )
    print(f"{len(flows)} questions; mean saliency of an edge, in nats")
    print(f"{'read in layers':16}  {'right':>8}  {'wrong':>8}  difference, 95 % interval   more")
    layers = right.shape[1]
    for start, stop in pairwise(layers * third // 3 for third in range(4)):
        inside = slice(start, stop)
        print_row(f"{start} to {stop - 1}", right[:, inside].mean(1), wrong[:, inside].mean(1))
    print(f"answers with a probability above 0.5: {answered(flows)} of {len(flows)}")
    figure = al.figures.lines_by_layer(
        torch.stack([right.mean(0), wrong.mean(0)]),
        ["right document", "wrong document"],
        title="What the prediction of the answer reads",
        y_title="mean saliency of an edge, in nats",
    )
    figure.write_html("documents.html")


if __name__ == "__main__":
    main()
