"""Figure 6: confusions predicted from the keys of the label words, beside the actual ones.

python examples/confusions.py --model gpt2
"""

import argparse

import anchorlens as al


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--queries", type=int, default=96)
    options = parser.parse_args()

    model = al.load_model(options.model)
    examples = al.load_examples("questions", split="train")
    queries = al.load_examples("questions", split="test")[: options.queries]
    batches = []
    for seed in (42, 43, 44):  # several orders: on rotary models distance follows position
        demos = al.sample_demonstrations(examples, seed=seed)
        batches += al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)
    distances = al.run(model, batches, [al.AnchorDistances()])["anchor_distances"]

    layer = int(distances.default_layer)
    print(f"accuracy {distances.accuracy:.2f}")
    print(f"rank correlation in layer {layer}: {distances.correlation[layer]:.2f}")
    print(f"of distance with position: {distances.position_correlation[layer]:.2f}")
    distances.plot().write_html("confusions.html")


if __name__ == "__main__":
    main()
