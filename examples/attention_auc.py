"""Does the attention to a label word tell that its class is predicted? AUCROC by layer, and R_l.

python examples/attention_auc.py --model gpt2
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
    record = al.run(model, batches, [al.AttentionAUCROC()])["attention_aucroc"]

    print("layer  AUCROC (0.5 is chance)  R_l")
    for layer, share in enumerate(record.r.tolist()):
        print(f"{layer:<7}{record.estimate('aucroc', layer)!s:<24}{share:.2f}")
    record.plot().write_html("attention_auc.html")


if __name__ == "__main__":
    main()
