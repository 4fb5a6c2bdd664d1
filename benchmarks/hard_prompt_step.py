"""Time of a step of PEZ, compared with a plain forward and backward pass of the same tokens.

    python benchmarks/hard_prompt_step.py --model M

Prints the median ratio of times that were measured in turns in one run. A step is the projection,
the gradient at the projected tokens and the optimizer's step. The plain pass runs the same tokens
with their gradient at the input of block 0. The batch has 16 queries, as in the paper.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import anchorlens as al
from anchorlens.contexts.embedded import embeddings_of
from anchorlens.contexts.hard_prompt_search import NearestTokens, SearchedTokens
from anchorlens.contexts.protocol import bos_of, queries_after
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.passes.forward import run_pass
from anchorlens.prompts.token_texts import plain_tokens


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    model = al.load_model(arguments.model)
    examples = al.load_examples("sentiment")
    demos = al.sample_demonstrations(examples)
    queries = [example for example in examples if example not in demos][:16]
    task = al.TASKS["sst2"]
    (batch,) = al.build_prompts(model.tokenizer, task, demos, queries, batch_size=16)
    bos, words = bos_of(batch), al.contexts.hard_prompts.class_words([batch])
    ids = torch.tensor([words[position % len(words)] for position in range(10)])
    plain = plain_tokens(model.tokenizer, len(model.W_E))
    with frozen_in_eval_mode(model):
        embeddings = embeddings_of(model, batch, torch.cat([bos, ids]))[len(bos) :]
        trainable = SearchedTokens(
            model,
            bos,
            embeddings.requires_grad_(),
            1.0,  # the unit of noise, of which PEZ has none
            NearestTokens.of(model, plain),
            al.contexts.hard_prompts.PEZ,
            steps=1,
            seed=0,
            example=batch.prompt(0),
        )
        optimizer = al.contexts.hard_prompts.PEZ.optimizer([embeddings])

        def step() -> None:
            trainable.backward(model, batch, al.losses.label_cross_entropy)
            optimizer.step()
            trainable.after_step(0)

        def floor() -> None:
            queries = queries_after(batch, torch.cat([bos, ids]))
            run_pass(model, queries, loss=al.losses.label_cross_entropy)

        pairs = [(seconds(step), seconds(floor)) for _ in range(arguments.repeats + 1)][1:]
    steps, floors = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(first / second for first, second in pairs)
    print(f"step {steps:.2f} s, plain pass {floors:.2f} s, median ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
