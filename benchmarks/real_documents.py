"""Real texts as documents: which score tells what a written answer rests on, and which heads find
the document that is asked for. All numbers with 95 % intervals.

python benchmarks/real_documents.py answers --model M --texts agnews/test.jsonl
python benchmarks/real_documents.py heads --model M --texts agnews/test.jsonl
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anchorlens as al
from anchorlens.questions.faithfulness import default_scores

COUNT, WORDS = 5, 9  # documents of a prompt, and words of each
TOPS, DRAWS = (4, 8, 16), 5  # heads that are masked, and draws of as many random heads
Pieces = list[tuple[str | None, str]]
NAMES = [f"document {k}" for k in range(1, COUNT + 1)]


def told(path: Path, prompts: int) -> list[list[str]]:
    """The beginnings of other texts for each prompt; number k asks for its text k modulo COUNT."""
    texts = [" ".join(each.text.split()[:WORDS]) for each in al.load_examples(path)]
    plain = [text for text in texts if not set(text) & set('&<>#=\\"')]
    random.Random(0).shuffle(plain)
    return [plain[COUNT * k : COUNT * (k + 1)] for k in range(prompts)]


def pieces(documents: Sequence[str], about: str) -> Pieces:
    """Documents and a question; many heads attend to the first token, which is in no document."""
    named: Pieces = [(name, f"- {text}\n") for name, text in zip(NAMES, documents, strict=True)]
    asked = f'Question: What is the news about "{about}"?\nAnswer: The news is that'
    return [(None, "News:\n"), *named, ("query", asked)]


def asking(documents: Sequence[str], number: int) -> Pieces:
    return pieces(documents, " ".join(documents[number % COUNT].split()[:3]))


def answers(model: Any, options: argparse.Namespace) -> None:
    """Scores of documents against what the whole answer that the model writes loses."""
    written: list[Pieces] = []
    for number, documents in enumerate(told(options.texts, 3 * options.prompts)):
        prompt = asking(documents, number)
        trace = al.trace_generation(model, prompt, max_new_tokens=8)
        answer = trace.text.partition("\n")[0]
        if answer.strip() and len(written) < options.prompts:
            written.append([*prompt, ("answer", answer)])
            print(number % COUNT + 1, repr(answer), flush=True)
        if len(written) == options.prompts:
            break
    batches = al.build_segments(model.tokenizer, written, batch_size=4)
    lengths = [int(al.edges.segment(batch, "answer").sum()) for batch in batches]
    print(f"{sum(lengths) / len(written):.1f} tokens an answer", flush=True)
    scores = default_scores() | {"lasso": al.subsets.lasso(16)}
    asked = al.Faithfulness(scores, segments=NAMES, answer="answer", subsets=16)
    record: Any = al.run(model, batches, [asked], folder=options.out / "rows")["faithfulness"]
    record.save(options.out / "faithfulness.safetensors")
    print(record.table().to_string())


def heads(model: Any, options: argparse.Namespace) -> None:
    """Retrieval heads, and what is lost on other prompts if the query cannot read by them."""
    n = options.prompts
    documents = told(options.texts, 2 * n)
    prompts = [asking(each, number) for number, each in enumerate(documents)]
    null = al.build_segments(model.tokenizer, [pieces(each, "N/A") for each in documents[:n]])
    first, others = (al.build_segments(model.tokenizer, of) for of in (prompts[:n], prompts[n:]))
    right = [NAMES[k % COUNT] for k in range(n)]
    found = al.retrieval_heads(model, first, null, right=right, folder=options.out / "rows")
    found.save(options.out / "retrieval_heads.safetensors")
    width = found.score.shape[1]
    for k in found.score.flatten().argsort(descending=True)[:8].tolist():
        at = divmod(k, width)
        numbers = "  ".join(
            f"{name} {found.estimate(name, *at)}" for name in ("score", "raw", "found")
        )
        print(f"head {at[0]}.{at[1]}  {numbers}", flush=True)
    for top in TOPS:
        masking = replace(found.masking(top, draws=DRAWS), name=f"top {top}")
        lost: Any = al.run(model, others, [masking], folder=options.out / f"top {top}")[
            f"top {top}"
        ]
        lost.save(options.out / f"masking {top}.safetensors")
        for name in ("label_loyalty", "word_loyalty", "kl"):
            control, gap = getattr(lost, f"random_{name}"), ""
            if name != "kl":
                gap = f"  gap {lost.estimate(name.replace('loyalty', 'gap'), 0)}"
            ends = f"{control.mean():.2f} ({control.min():.2f} to {control.max():.2f})"
            print(f"top {top}  {name} {lost.estimate(name, 0)}  random {ends}{gap}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["answers", "heads"])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--texts", type=Path, required=True, help="a file with a column text")
    parser.add_argument("--prompts", type=int, default=24, help="for heads, as many again")
    parser.add_argument(
        "--out", type=Path, default=Path("real-documents"), help="stored as it goes"
    )
    options = parser.parse_args()
    options.out = options.out / options.part
    (answers if options.part == "answers" else heads)(al.load_model(options.model), options)


if __name__ == "__main__":
    main()
