"""Search for hard prompts with PEZ and its baselines, compare what they answer, and transfer them.

python examples/hard_prompts.py --model gpt2 gpt2-medium --steps 300

Prompts are searched with the first model. Their text is also answered from by the others.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch

import anchorlens as al
from anchorlens.replication.beside_published import TASK_NAMES, published

METHODS = {
    "PEZ": al.contexts.hard_prompts.PEZ,
    "AutoPrompt": al.contexts.hard_prompts.AUTOPROMPT,
    "PEZ as published": al.contexts.hard_prompts.PEZ_AS_PUBLISHED,
}


def right_answers(
    model: Any, batches: list[al.PromptBatch], contexts: Sequence[al.contexts.Context]
) -> torch.Tensor:
    """1 for each right answer of each context, else 0: [query, context]."""
    scores = [
        torch.cat([batch.label_scores(context.logits(model, batch)) for batch in batches])
        for context in contexts
    ]
    gold = torch.cat([batch.gold for batch in batches if batch.gold is not None])
    return (torch.stack(scores, 1).argmax(-1) == gold[:, None]).double()


def with_interval(numbers: torch.Tensor, lowest: float) -> str:
    """The mean of a number of each query, from ``lowest`` to 1, with its 95 % interval.

    Both ends count as one more query each (Bonett and Price): equal numbers are not certain.
    """
    more = torch.cat([numbers, torch.tensor([lowest, 1.0], dtype=numbers.dtype, device="cpu")])
    mean, half = float(more.mean()), 1.96 * float(more.std()) / len(more) ** 0.5
    low, high = max(lowest, mean - half), min(1.0, mean + half)
    return f"{float(numbers.mean()):5.2f} [{low:5.2f}, {high:5.2f}]"


def accuracy_as_text(
    model: Any, batches: list[al.PromptBatch], prompt: al.contexts.HardPrompt
) -> torch.Tensor:
    """Accuracy of a user who copies the text of a prompt, which encodes to other tokens."""
    tokens = prompt.encoded[len(prompt.info["bos"]) :].tolist()
    return al.contexts.hard_prompts.of_tokens(
        model, tokens, held_out=batches
    ).training.best_accuracy


def print_table(
    model: Any, batches: list[al.PromptBatch], groups: Mapping[str, Sequence[Any]]
) -> None:
    """Accuracy of each group of contexts, the gain over no prompt, and what the texts answer."""
    right_of = {name: right_answers(model, batches, groups[name]) for name in groups}
    print(f"{'':18}  {'accuracy':19}  {'gain over empty':19}  lowest to highest  as text")
    for name, contexts in groups.items():
        right, gain = right_of[name], right_of[name] - right_of["empty"]
        accuracies = right.mean(0)
        cells = [f"{name:18}", with_interval(right.mean(1), 0.0)]
        cells.append(with_interval(gain.mean(1), -1.0))
        cells.append(f"{float(accuracies.min()):6.2f} to {float(accuracies.max()):.2f}    ")
        prompts = [context for context in contexts if isinstance(context, al.contexts.HardPrompt)]
        if prompts:
            back = [prompt.encodes_back for prompt in prompts]
            texts = [
                accuracies[number] if back[number] else accuracy_as_text(model, batches, prompt)
                for number, prompt in enumerate(prompts)
            ]
            mean = float(torch.stack(texts).mean())
            cells.append(f"{mean:.2f} ({sum(back)} of {len(back)} encode back)")
        print("  ".join(cells))


def loss_curves(groups: Mapping[str, Sequence[Any]]) -> go.Figure:
    """Loss of held-out queries by step, a line for each search."""
    lines = {
        f"{name}, search {number}": (prompt.training.checked_steps, prompt.training.held_out_loss)
        for name in METHODS
        for number, prompt in enumerate(groups[name], 1)
    }
    title, y_title = "Searches for hard prompts", "mean loss of held-out queries, in nats"
    return al.figures.lines_by_step(lines, title=title, y_title=y_title)


def transferred(
    prompt: al.contexts.HardPrompt, model: Any, batches: Sequence[al.PromptBatch], draws: int
) -> dict[str, str]:
    """What the text of a prompt does in a model, beside nothing and random tokens."""
    text = al.contexts.hard_prompts.of_text(model, prompt, held_out=batches)
    length = len(text.ids)
    random = al.contexts.hard_prompts.random(model, held_out=batches, length=length, draws=draws)
    contexts = {"nothing": al.contexts.NoContext(), "text": text}
    asked = al.ContextComparison(contexts, random=random, repeats=0)
    record = al.run(model, batches, [asked], progress=False)["contexts"]
    of_draws = record.random_accuracy
    return {
        "tokens": str(length),
        "accuracy": str(record.estimate("accuracy", 1)),
        "empty": str(record.estimate("accuracy", 0)),
        "random": f"{of_draws.mean():.2f} ({of_draws.min():.2f} to {of_draws.max():.2f})",
        "gain over empty": str(record.estimate("gain_over_first", 1)),
        "gain over random": str(record.estimate("gain_over_random", 1)),
    }


def print_transfer(
    models: Mapping[str, Any],
    prompts: Mapping[str, Sequence[al.contexts.HardPrompt]],
    make_prompts: Callable[[Any], Sequence[al.PromptBatch]],
    draws: int,
) -> None:
    """What the text of each prompt does in each model."""
    print("\nThe texts in each model; numbers in brackets are 95 % intervals over queries")
    cells: dict[tuple[str, int, str], dict[str, str]] = {}
    for method, searched in prompts.items():
        for (number, prompt), name in product(enumerate(searched, 1), models):
            try:
                cells[method, number, name] = transferred(
                    prompt, models[name], make_prompts(models[name].tokenizer), draws
                )
            except al.AnchorlensError as error:  # a text that this model cannot read
                cells[method, number, name] = {"what is missing": str(error)}
    table = pd.DataFrame.from_dict(cells, orient="index").fillna("")
    print(table.rename_axis(["method", "search", "model"]).to_string())


def print_published() -> None:
    """The accuracies that the paper reports, with their ±."""
    for model, rows in published("hard_prompts", "transfer").items():
        for name, values in rows.items():
            for task, (value, spread) in values.items():
                more = "" if isnan(spread) else f" ± {spread:.2f}"
                print(f"published, {model}, {TASK_NAMES[task]}: {name:16}  {value:.2f}{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model",
        nargs="+",
        required=True,
        help="hub names, local folders or .gguf files; prompts are searched with the first",
    )
    parser.add_argument("--tasks", nargs="+", default=["questions", "sentiment"])
    parser.add_argument("--data-folder", type=Path, help="with TASK/train.jsonl, test.jsonl")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--training", type=int, default=32, help="queries for training")
    parser.add_argument("--held-out", type=int, default=16, help="queries to choose the best step")
    parser.add_argument("--length", type=int, default=10, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="queries of a step")
    parser.add_argument("--draws", type=int, default=20, help="random prompts")
    parser.add_argument("--searches", type=int, default=3, help="seeds of each method")
    parser.add_argument("--folder", type=Path, default=Path("hard_prompts"), help="to continue")
    options = parser.parse_args()

    if len({*options.model}) < len(options.model):
        parser.error("a model is given twice")
    models = {name: al.load_model(name) for name in options.model}
    model = models[options.model[0]]
    for name in options.tasks:
        task = al.TASKS[name]
        pool, tests = (
            al.load_examples(options.data_folder / name / f"{split}.jsonl")
            if options.data_folder
            else al.load_examples(name)
            for split in ("train", "test")
        )
        demos = al.sample_demonstrations(pool, seed=42)
        others = al.sample_queries(pool, options.training + options.held_out, 42, exclude=demos)
        queries = al.sample_queries(tests, options.queries, 42, exclude=[*demos, *others])
        parts = (others[: options.training], others[options.training :], queries)
        build = partial(
            al.build_prompts, task=task, demonstrations=demos, batch_size=options.batch_size
        )
        training, held_out, batches = (build(model.tokenizer, queries=part) for part in parts)

        search = partial(
            al.train_hard_prompt,
            model,
            training,
            held_out=held_out,
            length=options.length,
            start=training[0].label_token_ids.tolist(),  # the first token of each label word
        )
        stored = options.folder / name
        seeds = range(1, options.searches + 1)
        groups: dict[str, Sequence[Any]] = {
            "empty": [al.contexts.NoContext()],
            "random tokens": al.contexts.hard_prompts.random(
                model, held_out=held_out[:1], length=options.length, draws=options.draws
            ),
            "start": [search(training=al.contexts.Training(steps=0))],
            **{
                title: [
                    search(
                        method=method,
                        training=al.contexts.Training(
                            steps=options.steps, seed=seed, folder=stored / f"{title} {seed}"
                        ),
                    )
                    for seed in seeds
                ]
                for title, method in METHODS.items()
            },
            "demonstrations": [
                al.compress(model, batches[0], select=al.contexts.selection.everything)
            ],
        }
        print(f"\n{name}: {len(queries)} queries; numbers in brackets are 95 % intervals")
        print_table(model, batches, groups)
        for method in METHODS:
            for prompt in groups[method]:
                print(f"{method}: {prompt.text!r}")
        prompts = {method: groups[method] for method in METHODS}
        print_transfer(models, prompts, partial(build, queries=queries), options.draws)
        loss_curves(groups).write_html(f"hard_prompts_{name}.html")
    print_published()


if __name__ == "__main__":
    main()
