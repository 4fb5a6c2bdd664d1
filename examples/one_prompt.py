"""Figure 1: the strongest flows between the tokens of one prompt, layer by layer.

python examples/one_prompt.py --model gpt2
"""

import argparse

import anchorlens as al


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    options = parser.parse_args()

    model = al.load_model(options.model)
    demos = al.sample_demonstrations(al.load_examples("sentiment", split="train"), seed=42)
    query = al.load_examples("sentiment", split="test")[0]
    [batch] = al.build_prompts(model.tokenizer, al.TASKS["sst2"], demos, [query])
    figure = al.figures.token_arcs(
        [model.tokenizer.decode([token]) for token in batch.tokens[0].tolist()],
        al.saliency(model, batch)[0],
        label_positions=batch.label_positions[0].tolist(),
        target_position=int(batch.target_positions[0]),
        title="Strongest flows of one prompt",
    )
    figure.write_html("one_prompt.html")
    print("one_prompt.html")


if __name__ == "__main__":
    main()
