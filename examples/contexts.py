"""What stands before a query: demonstrations, label words and trained prefixes, compared.

python examples/contexts.py --model gpt2 --steps 300
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import anchorlens as al


def trained(
    model: Any, training: list[al.PromptBatch], options: dict[str, Any], length: int
) -> dict[str, Any]:
    """Soft and hard prompts, a prefix, and one from the label words if their positions can move."""
    words = training[0].label_token_ids.tolist()  # the first token of each label word
    contexts: dict[str, Any] = {
        "soft prompt": al.train_soft_prompt(model, training, length=length, **options),
        "hard prompt": al.train_hard_prompt(model, training, length=length, start=words, **options),
        "prefix": al.train_prefix(model, training, length=length, **options),
    }
    print(f"hard prompt: {contexts['hard prompt'].text!r}")
    try:
        start = al.compress(model, training[0], positions=al.placement.rebased)
    except al.errors.ModelError as error:  # learned positions cannot be moved
        print(f"no prefix from the anchors: {error}")
    else:
        contexts["prefix from anchors"] = al.train_prefix(model, training, start=start, **options)
    return contexts


def print_effects(model: Any, batches: list[al.PromptBatch], contexts: dict[str, Any]) -> None:
    """What each context does to the attention of the query: means over layers (and heads).

    In brackets: the means of the lower and of the upper bounds of the layers' 95 % intervals.
    """
    print(
        f"\n{'effect on attention':20}  {'stolen':17}  {'direct':17}  {'indirect':17}  directions"
    )
    for name, context in contexts.items():
        made = context if isinstance(context, al.Context) else context(model, batches[0])
        effect = al.prefix_effect(model, batches, made, progress=False)
        cells = []
        for quantity in ("stolen", "direct", "indirect"):
            low, high = (float(bound.nanmean()) for bound in effect.intervals[quantity])
            mean = float(getattr(effect, quantity).nanmean())
            cells.append(f"{mean:.2f} [{low:.2f}, {high:.2f}]")
        cells.append(f"{float(effect.effective_rank.nanmean()):10.1f}")
        print("{:20}  {:17}  {:17}  {:17}  {}".format(name, *cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--tasks", nargs="+", default=["questions", "sentiment"])
    parser.add_argument("--data-folder", type=Path, help="with TASK/train.jsonl, test.jsonl")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--training", type=int, default=32, help="queries for training")
    parser.add_argument("--held-out", type=int, default=16, help="queries to choose the best step")
    parser.add_argument("--length", type=int, default=10, help="positions of a trained context")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--draws", type=int, default=3, help="random controls")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()

    model = al.load_model(options.model)
    for name in options.tasks:
        task = al.TASKS[name]
        pool, tests = (
            al.load_examples(options.data_folder / name / f"{split}.jsonl")
            if options.data_folder
            else al.load_examples(name)
            for split in ("train", "test")
        )
        seed = options.seed
        demos = al.sample_demonstrations(pool, seed=seed)
        others = al.sample_queries(pool, options.training + options.held_out, seed, exclude=demos)
        queries = al.sample_queries(tests, options.queries, seed, exclude=[*demos, *others])
        parts = (others[: options.training], others[options.training :], queries)
        training, held_out, batches = (
            al.build_prompts(model.tokenizer, task, demos, part, batch_size=8) for part in parts
        )
        beta = al.train_reweighting(model, training)
        random_words = {
            f"random words, draw {draw}": partial(
                al.compress, keep=al.selection.random_and_format(draw)
            )
            for draw in range(options.draws)
        }
        how = {"held_out": held_out, "steps": options.steps, "seed": seed}
        contexts: dict[str, Any] = {
            "none": al.NoContext(),
            "1 shot": partial(al.compress, keep=al.selection.everything),
            "anchors only": al.compress,
            **random_words,
            "re-weighted": partial(al.reweight_demonstrations, beta=beta),
            **trained(model, training, how, options.length),
        }
        record = al.compare_contexts(model, batches, contexts)
        print(f"\n{name}: {len(queries)} queries; numbers in brackets are 95 % intervals")
        print(record.table().T.to_string())
        print_effects(model, batches, contexts)
        record.plot().write_html(f"contexts_{name}.html")


if __name__ == "__main__":
    main()
