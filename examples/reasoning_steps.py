"""Does an answer come from the written steps? Problems of two steps, in order and shuffled.

python examples/reasoning_steps.py --model gpt2
"""

import argparse
import random
from functools import partial
from itertools import pairwise
from typing import Any

import anchorlens as al

NAMES = ["Anna", "Peter", "Maria", "Tom", "Julia", "David", "Laura", "Simon", "Helen", "Mark"]
THINGS = ["apples", "books", "coins", "shells", "cards"]


def problem(generator: random.Random, shuffled: bool) -> list[tuple[str | None, str]]:
    """A question, two steps and the answer; shuffled, the second step comes first."""
    name, things = generator.choice(NAMES), generator.choice(THINGS)
    first, more, away = (generator.randint(*limits) for limits in ((2, 5), (2, 4), (1, 3)))
    steps: list[tuple[str | None, str]] = [
        ("step 1", f" {first} + {more} = {first + more}."),
        ("step 2", f" {first + more} - {away} = {first + more - away}."),
    ]
    question = (
        f"{name} has {first} {things}. {name} gets {more} more, and gives {away} away. "
        f"How many {things} does {name} have?"
    )
    ordered = steps[::-1] if shuffled else steps
    cue: tuple[str | None, str] = ("cue", " The answer is")
    return [("question", question), *ordered, cue, ("answer", f" {first + more - away}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--queries", type=int, default=40, help="problems")
    parser.add_argument("--seed", type=int, default=42, help="of the drawn problems")
    options = parser.parse_args()

    model = al.load_model(options.model)
    loss = al.losses.span_cross_entropy("answer")
    parts: dict[str, Any] = {
        name: partial(al.edges.segment, name=name) for name in ("question", "step 1", "step 2")
    }
    parts["prediction"] = loss.positions  # the tokens that predict those of the answer
    for order, shuffled in {"in order": False, "shuffled": True}.items():
        # The same problems in both.
        generator = random.Random(options.seed)
        problems = [problem(generator, shuffled) for _ in range(options.queries)]
        batches = al.build_segments(model.tokenizer, problems)
        metrics = [al.SegmentFlows(parts)]
        flows = al.run(model, batches, metrics, loss=loss)["segment_flows"]
        print(
            f"\nsteps {order}: what the prediction of the answer reads, mean of its edges, in nats"
        )
        print(f"{'layers':8}" + "".join(f"{f'from {part}':>28}" for part in list(parts)[:3]))
        low, high = flows.intervals["flow"]
        layers = flows.flow.shape[0]
        for start, stop in pairwise(layers * third // 3 for third in range(4)):
            cells = []
            for part in range(3):
                numbers = (of[start:stop, 3, part].mean() for of in (flows.flow, low, high))
                mean, lower, upper = (float(number) for number in numbers)
                cells.append(f"{mean:10.4f} [{lower:.4f}, {upper:.4f}]")
            print(f"{start:2} to {stop - 1:<2}" + "".join(f"{cell:>28}" for cell in cells))
        flows.plot().write_html(f"reasoning_steps_{order.replace(' ', '_')}.html")


if __name__ == "__main__":
    main()
