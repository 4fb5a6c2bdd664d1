"""Figure 5: does the attention to the label words predict the answer, and in which layers?

python examples/attention.py --model gpt2
"""

import argparse

import anchorlens as al


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--queries", type=int, default=48)
    options = parser.parse_args()

    model = al.load_model(options.model)
    demos = al.sample_demonstrations(al.load_examples("questions", split="train"), seed=42)
    queries = al.load_examples("questions", split="test")[: options.queries]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)
    attention = al.run(model, batches, [al.AttentionAUCROC()])["attention_aucroc"]

    print("layer  AUCROC_l    R_l")
    for layer, (value, total) in enumerate(zip(attention.aucroc, attention.r, strict=True)):
        print(f"{layer:5}  {value:8.2f}  {total:5.2f}")
    attention.plot().write_html("attention.html")


if __name__ == "__main__":
    main()
