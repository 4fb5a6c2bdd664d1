"""Task vectors by layer, effects of heads, and what cutting the largest does against random heads.

python benchmarks/heads.py --model M --task trec --data FOLDER

Four sets of demonstrations, one of each class. Heads are chosen on some queries and cut on others.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import anchorlens as al

SEEDS, SHUFFLE, DRAWS, CUT = range(42, 46), al.relabeling.random(seed=1), 6, 10


def prompts_of(
    model: Any,
    task: al.Task,
    pool: Sequence[al.Example],
    queries: Sequence[al.Example],
    change: Callable[..., Any] = al.relabeling.gold,
) -> list[al.PromptBatch]:
    """A part of the queries after each set of demonstrations, whose labels may be changed."""
    batches = []
    for number, seed in enumerate(SEEDS):
        demonstrations = al.sample_demonstrations(pool, seed=seed)
        relabelled = al.relabeling.relabel(demonstrations, task, change)
        part = queries[number :: len(SEEDS)]
        batches += al.build_prompts(model.tokenizer, *relabelled, part, batch_size=10)
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--task", default="trec", help="a name in al.TASKS")
    parser.add_argument("--data", type=Path, required=True, help="its train.jsonl and test.jsonl")
    parser.add_argument("--queries", type=int, default=80, help="for each of three purposes")
    options = parser.parse_args()

    model, task = al.load_model(options.model), al.TASKS[options.task]
    pool, tests = (al.load_examples(options.data / f"{split}.jsonl") for split in ("train", "test"))
    drawn = al.sample_queries(tests, 3 * options.queries, seed=0)
    prompts = partial(prompts_of, model, task, pool)
    for_means, asked, held_out = (drawn[part::3] for part in range(3))

    vectors = al.task_vectors(model, prompts(for_means), prompts(asked))
    print(f"queries alone {vectors.estimate('unchanged')}")
    print(f"demonstrations {vectors.estimate('demonstrations')}")
    for layer in range(model.cfg.n_layers):
        numbers = [vectors.estimate(name, layer) for name in ("accuracy", "gain")]
        print(f"layer {layer}: accuracy {numbers[0]}, gain {numbers[1]}")

    shuffled = prompts(asked[: len(asked) // 2], SHUFFLE)
    effects = al.head_effects(model, prompts(for_means), shuffled)
    largest = effects.largest(CUT)
    print(largest.round(3).to_string())

    every = list(product(*map(range, effects.effect.shape)))
    generator = torch.Generator().manual_seed(0)
    chosen = {
        name: largest.query(f"sign == {sign}")[["layer", "head"]].to_numpy().tolist()
        for name, sign in (("writers", 1), ("cancellers", -1))
    }
    for draw in range(DRAWS):
        order = torch.randperm(len(every), generator=generator)[:CUT].tolist()
        chosen[f"random {draw}"] = [every[k] for k in order]
    batches = prompts(held_out)
    everything: dict[str, list[Any]] = {"none": []} | chosen
    for name, heads in everything.items():
        site = al.Site.of_heads(heads) if heads else al.Site()
        cut = partial(al.replace_heads, model, outputs=effects.outputs, site=site)
        metrics = [al.Accuracy(), al.Loyalty()] if heads else [al.Accuracy()]
        results = al.run(model, batches, metrics, hooks=cut if heads else None)
        text = f"{name} at their means: accuracy {results['accuracy'].estimate('accuracy')}"
        if heads:
            text += f", label loyalty {results['loyalty'].estimate('label_loyalty')}"
        print(text)


if __name__ == "__main__":
    main()
