"""Figure 4: isolate the label words in the first and in the last layers, with random controls.

python examples/isolation.py --model gpt2 --depth 5
"""

import argparse

import anchorlens as al


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--queries", type=int, default=24)
    parser.add_argument("--depth", type=int, default=5, help="layers isolated at each end")
    parser.add_argument("--draws", type=int, default=10, help="random controls")
    options = parser.parse_args()

    model = al.load_model(options.model)
    demos = al.sample_demonstrations(al.load_examples("questions", split="train"), seed=42)
    queries = al.load_examples("questions", split="test")[: options.queries]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)
    sites = al.sites.first_and_last(model, [options.depth])
    records = al.isolation_sweep(model, batches, sites, draws=options.draws)
    for site, record in records.items():
        print(
            f"{site}: word loyalty {record.word_loyalty:.2f}, "
            f"random words {record.random_word_loyalty.mean():.2f}"
        )
    al.plot_isolation(records).write_html("isolation.html")


if __name__ == "__main__":
    main()
