"""Hooks of this package in your own run_with_hooks: the target cannot read the label words.

python examples/own_hook.py --model gpt2
"""

import argparse
from pathlib import Path

import torch

import anchorlens as al

WEIGHTS = Path(".venv/weights/gemma-3-270m-q4_k_m.gguf")  # of make demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = str(WEIGHTS) if WEIGHTS.exists() else "gpt2"
    parser.add_argument("--model", default=default, help="hub name, local folder or .gguf file")
    parser.add_argument("--task", default="questions", help="questions or sentiment")
    options = parser.parse_args()

    model = al.load_model(options.model)  # or al.prepare_model(a bridge of your own)
    [batch] = al.sample_prompts(model, options.task, queries=8)
    tokens, mask = (each.to(model.cfg.device) for each in (batch.tokens, batch.attention_mask))
    cut = al.block_edges(model, batch, al.edges.pq)  # in all layers, or give some
    shares, of_each = list[torch.Tensor](), torch.arange(len(batch))
    for hooks in ([], cut):
        with torch.no_grad():
            logits = model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks).cpu()
        words = logits[of_each, batch.target_positions][:, batch.label_token_ids].softmax(-1)
        shares.append(words[of_each, batch.gold])
    print(f"share of the right label word: {shares[0].mean():.2f}, cut: {shares[1].mean():.2f}")
    names, values = [f"prompt {number}" for number in of_each], torch.stack(shares, 1)[None].float()
    figure = al.figures.bars(values, ["share"], names, ["as it is", "cut"], title="Right word")
    figure.write_html("own_hook.html")


if __name__ == "__main__":
    main()
