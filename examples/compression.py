"""Tables 2 and 3: how well compressed demonstrations work, and the time that they save.

python examples/compression.py --model gpt2
"""

import argparse
from typing import Any

import anchorlens as al

TASK = al.TASKS["trec"]


def row(record: al.CompressionRecord, prefix: str = "") -> list[Any]:
    """Label loyalty, word loyalty, accuracy (means over draws) and stored bytes."""
    names = ("label_loyalty", "word_loyalty", "accuracy")
    return [*(getattr(record, prefix + name).mean() for name in names), record.bytes_kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--queries", type=int, default=48)
    parser.add_argument("--draws", type=int, default=20, help="random controls")
    parser.add_argument("--seed", type=int, default=42, help="seed of the demonstrations")
    options = parser.parse_args()

    model = al.load_model(options.model)
    examples = al.load_examples("questions", split="train")
    demos = al.sample_demonstrations(examples, seed=options.seed)
    queries = al.load_examples("questions", split="test")[: options.queries]
    batches = al.build_prompts(model.tokenizer, TASK, demos, queries)

    anchors = al.compression_loyalty(model, batches, draws=options.draws)
    words = al.compression_loyalty(model, batches, al.selection.label_words, draws=1, resamples=0)
    empty = al.text_anchor_prompts(model.tokenizer, TASK, demos, queries)
    whole_logits = al.target_logits(model, batches, progress=False)
    text_logits = al.target_logits(model, empty, progress=False)
    text = al.loyalty(whole_logits, text_logits, empty[0].label_token_ids)
    answers = al.run(model, empty, [al.Accuracy()], resamples=0, progress=False)["accuracy"]
    text_bytes = anchors.bytes_whole * empty[0].query_start[0] / batches[0].query_start[0]

    table = {
        "whole prompt": (1, 1, anchors.whole_accuracy, anchors.bytes_whole),
        "Text_anchor": (text.label_loyalty, text.word_loyalty, answers.accuracy, text_bytes),
        f"Hidden_random, mean of {options.draws}": row(anchors, "random_"),
        f"Hidden_random-top of {options.draws}": row(anchors, "top_"),
        "Hidden_anchor": row(anchors),
        "label words only": row(words),
    }
    print(f"{'':25}  label loyalty  word loyalty  accuracy  KB stored")
    for name, (label, word, accuracy, size) in table.items():
        print(f"{name:25}  {label:13.2f}  {word:12.2f}  {accuracy:8.2f}  {size / 1000:9.0f}")
    for name in ("label", "word"):
        gap, (low, high) = getattr(anchors, f"{name}_gap"), anchors.intervals[f"{name}_gap"]
        print(f"Hidden_anchor over Hidden_random, {name} loyalty, paired [95 %]: ", end="")
        print(f"{gap:+.2f} [{low:+.2f}, {high:+.2f}]")
    anchors.plot().write_html("compression.html")

    print("\nmilliseconds for a query, one query at a time")
    print("shots  whole prompt  cached  compressed  whole / compressed")
    for shots in (1, 2, 4):
        demos = al.sample_demonstrations(examples, shots=shots, seed=options.seed)
        try:
            batches = al.build_prompts(model.tokenizer, TASK, demos, queries[:8], batch_size=1)
            times = al.answer_times(model, batches)
        except al.AnchorlensError as error:  # with more shots prompts may be too long
            print(f"{shots:5}  {error}")
            continue
        ms = [1000 * float(time) for time in (times.whole, times.cached, times.compressed)]
        print(f"{shots:5}  {ms[0]:12.1f}  {ms[1]:6.1f}  {ms[2]:10.1f}  {times.speed_up:18.1f}")


if __name__ == "__main__":
    main()
