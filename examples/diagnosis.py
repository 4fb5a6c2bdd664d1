"""Figure 6: which classes are confused, and do the keys of their label words predict it?

python examples/diagnosis.py --model gpt2
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
    for seed in (42, 43):  # two orders, because on rotary models distance depends on position
        demos = al.sample_demonstrations(examples, seed=seed)
        batches += al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)
    distances = al.run(model, batches, [al.AnchorDistances()])["anchor_distances"]
    diagnosis = al.diagnose(distances)

    layer = int(diagnosis.layer)
    print(diagnosis.pairs().round(2).to_string(index=False))
    print(f"accuracy {distances.accuracy:.2f}")
    print(
        f"rank correlation in layer {layer}: {diagnosis.correlation[layer]:.2f}, "
        f"p = {diagnosis.p_value[layer]:.2g}"
    )
    print(f"correlation of distance with position: {diagnosis.position_correlation[layer]:.2f}")
    diagnosis.plot().write_html("diagnosis.html")


if __name__ == "__main__":
    main()
