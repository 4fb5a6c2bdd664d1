"""Are classes whose label words have similar keys confused? Distances of keys and confusions.

python examples/anchor_distances.py --model gpt2
"""

import argparse
from pathlib import Path

import anchorlens as al

WEIGHTS = Path(".venv/weights/gemma-3-270m-q4_k_m.gguf")  # of make demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = str(WEIGHTS) if WEIGHTS.exists() else "gpt2"
    parser.add_argument("--model", default=default, help="hub name, local folder or .gguf file")
    parser.add_argument("--task", default="questions", help="questions or sentiment")
    parser.add_argument("--queries", type=int, default=40)
    options = parser.parse_args()

    model = al.load_model(options.model)
    batches = al.sample_prompts(model, options.task, queries=options.queries)
    distances = al.run(model, batches, [al.AnchorDistances()])["anchor_distances"]
    record = al.diagnose(distances)  # with a permutation test over the classes

    correlation = record.estimate("correlation", int(record.layer))
    print(f"layer {record.layer}: rank correlation of distances with confusions: {correlation}")
    print(record.pairs().to_string(index=False))
    record.plot().write_html("anchor_distances.html")


if __name__ == "__main__":
    main()
