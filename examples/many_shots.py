"""How the anchors change with the number of demonstrations of each class.

python examples/many_shots.py --model M --task trec --data FOLDER --shots 1 4 16 64

For each number of shots: accuracy, what the target reads from label words and from other words
(S_pq / S_tq in the deep layers), AUCROC of the attention to label words, and loyalty with label
words isolated in the first and in the last layers, beside random words. The same call after an
interruption continues.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

import anchorlens as al

# The record of each number, its name there, and of isolation the site.
SHOWN: dict[str, tuple[Any, ...]] = {
    "accuracy": ("accuracy", "accuracy"),
    "S_pq / S_tq, deep layers": ("saliency_flows", "deep_pq_over_tq"),
    "AUCROC, deep layers": ("attention_aucroc", "deep_aucroc"),
    "label loyalty, first layers": ("isolation", "label_loyalty", 0),
    "label loyalty, random words in first layers": ("isolation", "control_label_loyalty", 0),
    "word loyalty, first layers": ("isolation", "word_loyalty", 0),
    "word loyalty, random words in first layers": ("isolation", "control_word_loyalty", 0),
    "label loyalty, last layers": ("isolation", "label_loyalty", 1),
    "label loyalty, random words in last layers": ("isolation", "control_label_loyalty", 1),
}

DRAWN = [
    "accuracy",
    "AUCROC, deep layers",
    "word loyalty, first layers",
    "word loyalty, random words in first layers",
]


def analysed(
    model: Any,
    batches: list[al.PromptBatch],
    few: list[al.PromptBatch],
    options: argparse.Namespace,
    folder: Path,
) -> al.Results:
    """The records of one number of shots. Flows need a gradient, and get fewer prompts."""
    depth = options.depth
    keep_bos = batches[0].begins_with_bos
    sites = {
        "first": al.Site(range(depth), keep_bos=keep_bos),
        "last": al.Site(range(-depth, 0), keep_bos=keep_bos),
    }
    sweep = al.EdgeSweep.isolation(sites, draws=options.draws)
    asked = [al.Accuracy(), al.AttentionAUCROC(), sweep]
    results = al.run(model, batches, asked, folder=folder / "forward")
    results.update(al.run(model, few, [al.SaliencyFlows()], folder=folder / "flows"))
    for name, record in results.items():
        record.save(folder / f"{name}.safetensors")
    return results


def figure_of(records: dict[int, al.Results]) -> go.Figure:
    """Accuracy, AUCROC and word loyalty by the number of shots, with their intervals."""

    def bar(of_shots: al.Results, name: str) -> list[float]:
        record, *number = SHOWN[name]
        estimate = of_shots[record].estimate(*number)
        ends = (estimate.low, estimate.high) if estimate.has_interval else [estimate.value] * 2
        return [ends[0], estimate.value, ends[1]]

    bars = [[bar(of_shots, name) for name in DRAWN] for of_shots in records.values()]
    low, values, high = torch.tensor(bars).unbind(-1)
    figure = al.figures.bars(
        values[None],
        ["share"],
        [str(shots) for shots in records],
        DRAWN,
        title="Anchors and many demonstrations",
        low=low[None],
        high=high[None],
    )
    figure.update_xaxes(title="demonstrations of each class")
    return figure.update_layout(legend={"orientation": "h", "y": -0.3})  # fits a phone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--data", type=Path, help="folder with TASK/train.jsonl and test.jsonl")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--queries", type=int, default=24, help="for each seed")
    parser.add_argument("--flow-queries", type=int, default=8, help="of these, for flows")
    parser.add_argument("--depth", type=int, default=5, help="layers isolated at each end")
    parser.add_argument("--draws", type=int, default=10, help="random controls")
    parser.add_argument("--out", type=Path, default=Path("many-shots"))
    options = parser.parse_args()

    model = al.load_model(options.model)
    task = al.TASKS[options.task]
    pool, tests = (
        al.load_examples(options.data / options.task / f"{split}.jsonl")
        if options.data
        else al.load_examples(options.task, split)
        for split in ("train", "test")
    )
    by_shots: dict[int, al.Results] = {}
    for shots in options.shots:
        batches: list[al.PromptBatch] = []
        few: list[al.PromptBatch] = []
        for seed in options.seeds:
            demos = al.sample_demonstrations(pool, shots, seed)
            queries = al.sample_queries(tests, options.queries, seed, exclude=demos)
            size = options.flow_queries
            of_seed = al.build_prompts(model.tokenizer, task, demos, queries, batch_size=size)
            batches += of_seed
            few += of_seed[:1]
        records = analysed(model, batches, few, options, options.out / f"{shots} shots")
        by_shots[shots] = records
        tokens = max(batch.tokens.shape[1] for batch in batches)
        print(f"\n{shots} shots of each class, prompts of up to {tokens} tokens")
        for name, (record, *number) in SHOWN.items():
            print(f"  {name:44} {records[record].estimate(*number)}", flush=True)
    figure_of(by_shots).write_html("many_shots.html")


if __name__ == "__main__":
    try:
        main()
    except al.AnchorlensError as error:  # the data cannot be loaded without a network, for example
        sys.exit(f"error: {error}")
