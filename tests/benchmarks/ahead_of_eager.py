"""What could be gained at most by attention that forms no patterns, and by bfloat16.

    PYTHONPATH=tests python tests/benchmarks/ahead_of_eager.py --model M --train F --test F

Plain transformers without any hook. An AUCROC that forms target rows only and leaves the rest to
fused attention cannot be faster than fused attention that forms none.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from speed import in_turns, prompts, queries_behind_demonstrations, say

import anchorlens as al
from anchorlens.models import read_weights
from anchorlens.sharing import shared_passes


def whole_prompts(weights: Any, batches: Any) -> None:
    with torch.no_grad():
        for batch in batches:
            hidden = weights.base_model(
                batch.tokens, attention_mask=batch.attention_mask.long()
            ).last_hidden_state
            weights.get_output_embeddings()(
                hidden[torch.arange(len(batch)), batch.target_positions]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--train", default="questions", help="examples for demonstrations (TREC)")
    parser.add_argument("--test", default="questions", help="examples for queries (TREC)")
    options = parser.parse_args()
    model = al.load_model(options.model, dtype=torch.float32)
    train, test = al.load_examples(options.train), al.load_examples(options.test)

    def weights_in(dtype: torch.dtype, attention: str) -> Any:
        weights, _ = read_weights(options.model, None, dtype)
        weights.set_attn_implementation(attention)
        return weights.eval().requires_grad_(False)

    kinds = {
        "eager, float32": weights_in(torch.float32, "eager"),
        "fused, float32": weights_in(torch.float32, "sdpa"),
        "eager, bfloat16": weights_in(torch.bfloat16, "eager"),
    }

    def batches_of(shots: int, count: int, size: int) -> list[al.PromptBatch]:
        demos = al.sample_demonstrations(train, shots=shots, seed=42)
        queries = [one for one in test if one not in demos][:count]
        return al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries, batch_size=size)

    many, long = batches_of(1, 16, 16), batches_of(8, 2, 2)
    passes = shared_passes(model, many)
    measured: tuple[tuple[str, Any, Callable[..., None]], ...] = (
        ("queries behind shared demonstrations", many, queries_behind_demonstrations),
        ("whole prompts", long, lambda weights, _, batches: whole_prompts(weights, batches)),
    )
    for title, batches, work in measured:
        ways = {
            name: lambda weights=weights, work=work, batches=batches: work(weights, passes, batches)
            for name, weights in kinds.items()
        }
        seconds = in_turns(ways, repeats=3)
        say(f"{title}: {prompts(batches)}", seconds, "eager, float32", "")


if __name__ == "__main__":
    main()
