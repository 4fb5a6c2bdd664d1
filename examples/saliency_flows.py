"""Where label words collect, and where the target reads them: the flows S_wp, S_pq, S_ww by layer.

python examples/saliency_flows.py --model gpt2
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
    options = parser.parse_args()

    model = al.load_model(options.model)
    batches = al.sample_prompts(model, options.task, queries=options.queries)
    record = al.run(model, batches, [al.SaliencyFlows()])["saliency_flows"]

    flows = record.axis_names("flow") or ()
    print("layer  " + "".join(f"share of {name}  " for name in flows) + "S_pq / S_tq")
    for layer, shares in enumerate(record.share.tolist()):
        cells = "".join(f"{share:<13.2f}" for share in shares)
        print(f"{layer:<7}{cells}{record.estimate('pq_over_tq', layer)}")
    record.plot().write_html("saliency_flows.html")


if __name__ == "__main__":
    main()
