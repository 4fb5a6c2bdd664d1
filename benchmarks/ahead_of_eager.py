"""The largest possible gain from attention that forms no patterns.

    python benchmarks/ahead_of_eager.py

A random GPT-2 in plain transformers, without hooks. An AUCROC that forms only target rows, and
leaves the rest to fused attention, cannot be faster than fused attention that forms no pattern.
"""

import torch
from transformers import GPT2Config, GPT2Model

from benchmarks.speed import in_turns, print_seconds


def main() -> None:
    model = (
        GPT2Model(GPT2Config(vocab_size=1000, bos_token_id=0, eos_token_id=0))
        .eval()
        .requires_grad_(False)
    )

    def passes(attention: str, tokens: torch.Tensor) -> None:
        model.set_attn_implementation(attention)
        model(tokens)

    for count, length in ((16, 16), (8, 128), (2, 900)):
        tokens = torch.randint(1000, (count, length))
        variants = {
            attention: lambda a=attention, t=tokens: passes(a, t) for attention in ("eager", "sdpa")
        }
        print_seconds(f"{count} prompts of {length}", in_turns(3, variants), "eager", "")


if __name__ == "__main__":
    main()
