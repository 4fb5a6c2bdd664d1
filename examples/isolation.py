"""What is lost if label words read nothing before them: loyalty, against as many random words.

python examples/isolation.py --model gpt2 --depth 5
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
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--depth", type=int, default=5, help="layers at each end")
    parser.add_argument("--draws", type=int, default=3, help="of random words")
    options = parser.parse_args()

    model = al.load_model(options.model)
    batches = al.sample_prompts(model, options.task, queries=options.queries)
    ends = {"first": range(options.depth), "last": range(-options.depth, 0)}
    sites = {f"{end} {options.depth} layers": al.Site(layers) for end, layers in ends.items()}
    asked = al.EdgeSweep.isolation(sites, draws=options.draws)
    record = al.run(model, batches, [asked])["isolation"]

    for k, site in enumerate(sites):
        names = "label_loyalty", "control_label_loyalty"
        kept, at_random = (record.estimate(name, k).percent() for name in names)
        print(f"{site}: {kept} of the predictions stay; with random words isolated {at_random}")
    record.plot().write_html("isolation.html")


if __name__ == "__main__":
    main()
