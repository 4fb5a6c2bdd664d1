"""Which score says what an answer rests on? Each against what happens when parts are removed.

python examples/faithfulness.py --model gpt2
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from documents import FACTS

import anchorlens as al

Pieces = list[tuple[str | None, str]]


def questions(documents: int) -> Iterator[Pieces]:
    """Documents, a question and its answer; the right document is at another place each time."""
    for turn in range(documents):
        for sentence, question, cue, pairs in FACTS:
            for number, (name, value) in enumerate(pairs):
                place = (number + turn) % documents
                others = [pairs[(number + k) % len(pairs)] for k in range(1, documents)]
                told = [*others[:place], (name, value), *others[place:]]
                texts = [sentence.format(*pair) + "\n" for pair in told]
                segments = [(f"document {k + 1}", text) for k, text in enumerate(texts)]
                header = (None, "Documents:\n")
                asked = [(None, f"Question: {question.format(name)}\nAnswer:{cue}")]
                yield [header, *segments, *asked, ("answer", f" {value}")]


@torch.no_grad()
def is_given(model: Any, pieces: Pieces) -> bool:
    """Whether the written answer is what the model says."""
    [prompt] = al.build_segments(model.tokenizer, [pieces])
    answer = al.edges.segment(prompt, "answer")[0]
    said = model(prompt.tokens)[0].argmax(-1)
    return torch.equal(said[:-1][answer[1:]], prompt.tokens[0][answer])


def prompts(
    model: Any, task: str, data: Path | None, seeds: list[int], queries: int, documents: int
) -> dict[str, list[al.PromptBatch]]:
    """Prompts whose parts are demonstrations, and prompts whose parts are documents."""
    examples = [
        al.load_examples(data / f"{split}.jsonl") if data else al.load_examples(task, split=split)
        for split in ("train", "test")
    ]
    # Many heads attend to the first token, which is then in no segment that is removed.
    told = replace(al.TASKS[task], instructions="Some examples:\n")
    count = queries // len(seeds)
    kinds = {"demonstrations": al.sample_prompts(model, told, examples, queries=count, seeds=seeds)}
    asked = islice(questions(documents), 5 * queries)
    answered = list(islice((each for each in asked if is_given(model, each)), queries))
    return kinds | ({"documents": al.build_segments(model.tokenizer, answered)} if answered else {})


def plot(records: dict[tuple[str, str], al.records.FaithfulnessRecord]) -> go.Figure:
    """The LDS of each score: a panel for each kind of parts, a colour for each model."""
    names = list(dict.fromkeys(name for _, name in records))
    kinds = [
        k for k in dict.fromkeys(k for k, _ in records) if all((k, m) in records for m in names)
    ]
    found = [[records[kind, name] for name in names] for kind in kinds]
    values = torch.stack([torch.stack([each.lds for each in of], dim=1) for of in found])
    bounds = [torch.stack([each.intervals["lds"] for each in of], dim=2) for of in found]
    low, high = torch.stack(bounds, dim=1)
    scores = found[0][0].axis_names("score") or ()
    title = "LDS: do scores predict what removals do to the answer?"
    return al.figures.bars(values, kinds, scores, names, title=title, low=low, high=high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", required=True, help="hub names, folders, .gguf files")
    parser.add_argument("--task", default="questions", help="demonstrations: a name in al.TASKS")
    parser.add_argument("--data", type=Path, help="a folder with its train.jsonl and test.jsonl")
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(42, 50)], help="of sets")
    parser.add_argument("--queries", type=int, default=64, help="prompts of each kind")
    parser.add_argument("--documents", type=int, default=6, help="in each prompt")
    parser.add_argument("--out", type=Path, default=Path("faithfulness"), help="stored as it goes")
    options = vars(parser.parse_args())
    models, out = options.pop("model"), options.pop("out")

    records: dict[tuple[str, str], al.records.FaithfulnessRecord] = {}
    for source in models:
        name, model = Path(source).stem, al.load_model(source)
        for kind, batches in prompts(model, **options).items():
            answer = "answer" if kind == "documents" else None
            asked = [al.Faithfulness(answer=answer)]
            record: Any = al.run(model, batches, asked, folder=out / name / kind)["faithfulness"]
            record.save(out / f"{name} {kind}.safetensors")
            print(f"\n{name}, {kind}, {sum(map(len, batches))} prompts")
            print(record.table())
            records[kind, name] = record
    plot(records).write_html("faithfulness.html")


if __name__ == "__main__":
    main()
