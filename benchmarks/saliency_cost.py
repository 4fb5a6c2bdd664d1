"""Cost of saliency flows of all layers, compared with plain passes over the same batches.

    python benchmarks/saliency_cost.py --model M

Prints median ratios of times that were measured in turns in one run. Flows are compared with a
plain forward and backward pass of the same hooked model, and of transformers alone. Both have
frozen parameters and compute only the logits of target positions. A random model of GPT-2's size
with 1000 tokens shows the ratios without a large vocabulary.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import anchorlens as al
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.models.read_weights import read_weights
from anchorlens.passes.forward import run_pass


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 1000 tokens, trained here."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<e>"], initial_alphabet=alphabet, show_progress=False
    )
    texts = [example.text for example in al.load_examples("questions")]
    words = [f"Answer Type:{word}" for word in al.TASKS["trec"].labels] * 20
    core.train_from_iterator([*texts, *words], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>", pad_token="<e>")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_transformers(weights: Any, batches: Sequence[al.PromptBatch]) -> None:
    """Forward and backward pass in plain transformers, with logits only at target positions."""
    for batch in batches:
        embedded = weights.get_input_embeddings()(batch.tokens).detach().requires_grad_()
        hidden = weights.base_model(
            inputs_embeds=embedded, attention_mask=batch.attention_mask.long()
        ).last_hidden_state
        rows = torch.arange(len(batch))
        logits = weights.get_output_embeddings()(hidden[rows, batch.target_positions])
        al.losses.label_cross_entropy(logits, batch).sum().backward()


def compare(name: str, weights: Any, tokenizer: Any, repeats: int, prompts: int) -> None:
    plain = copy.deepcopy(weights).eval()
    plain.set_attn_implementation("eager")
    plain.requires_grad_(False)
    model = al.load_model(weights, tokenizer=tokenizer)
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples)
    queries = [example for example in examples if example not in demos][:prompts]
    batches = al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries)

    def floor() -> None:
        with frozen_in_eval_mode(model):
            for batch in batches:
                run_pass(model, batch, loss=al.losses.label_cross_entropy)

    def flows() -> None:
        al.run(model, batches, [al.SaliencyFlows()], resamples=0, progress=False)

    variants = {
        "flows": flows,
        "hooked": floor,
        "plain": lambda: plain_transformers(plain, batches),
    }
    seconds(lambda: [work() for work in variants.values()])  # warm-up
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(repeats):
        for variant, work in variants.items():
            times[variant].append(seconds(work))
    median = {variant: statistics.median(values) for variant, values in times.items()}
    for variant in ("hooked", "plain"):
        ratios = [a / b for a, b in zip(times["flows"], times[variant], strict=True)]
        print(
            f"{name}, {prompts} prompts: saliency flows cost {statistics.median(ratios):.2f} times "
            f"{'the same hooked model' if variant == 'hooked' else 'plain transformers'} "
            f"(from {min(ratios):.2f} to {max(ratios):.2f}; {median['flows']:.1f} s against "
            f"{median[variant]:.1f} s)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    weights, tokenizer = read_weights(options.model, None, "cpu", torch.float32)
    compare(options.model, weights, tokenizer, options.repeats, options.prompts)
    small = byte_level_tokenizer()
    config = GPT2Config(vocab_size=1000, bos_token_id=0, eos_token_id=0)
    compare("GPT-2 size", GPT2LMHeadModel(config), small, options.repeats, options.prompts)


if __name__ == "__main__":
    main()
