"""Figure 3: where information flows, by layer.

python examples/flows.py --model gpt2
"""

import argparse

import anchorlens as al


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--queries", type=int, default=24)
    options = parser.parse_args()

    model = al.load_model(options.model)
    demos = al.sample_demonstrations(al.load_examples("questions", split="train"), seed=42)
    queries = al.load_examples("questions", split="test")[: options.queries]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)
    flows = al.run(model, batches, [al.SaliencyFlows()])["saliency_flows"]

    print("layer   S_wp   S_pq   S_ww   S_pq/S_tq")
    for layer, (share, ratio) in enumerate(zip(flows.share, flows.pq_over_tq, strict=True)):
        print(f"{layer:5}  " + "  ".join(f"{value:5.2f}" for value in share) + f"  {ratio:9.2f}")
    flows.plot().write_html("flows.html")


if __name__ == "__main__":
    main()
