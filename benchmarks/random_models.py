"""Verdicts for models with random weights: none may agree with a claim of the paper.

python benchmarks/random_models.py --models 20
"""

import argparse
import warnings
from collections import Counter
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import anchorlens as al
from anchorlens.report.claims import Verdict
from tests.support.tiny_models import byte_level_tokenizer, randomize, sentencepiece_like_tokenizer

LAYERS = 9
SCALES = (0.02, 0.25)  # as new weights are drawn, and so large that the layers do something
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def model_of(number: int) -> Any:
    """The model with random weights of this number."""
    kind, scale = number % 3, SCALES[number % len(SCALES)]
    tokenizer = byte_level_tokenizer() if kind == 0 else sentencepiece_like_tokenizer()
    weights: Any
    if kind == 0:
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        sizes = {"n_positions": 512, "n_embd": 64, "n_layer": LAYERS, "n_head": 4}
        config = GPT2Config(vocab_size=len(tokenizer), **sizes, **dropouts)
        weights = GPT2LMHeadModel(config)
    elif kind == 1:
        weights = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES, **HEADS))
    else:
        options = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512}
        config = Gemma3TextConfig(vocab_size=len(tokenizer), **SIZES, **HEADS, **options)
        weights = Gemma3ForCausalLM(config)
    return al.load_model(randomize(weights, seed=number, scale=scale), tokenizer=tokenizer)


def claims_of(model: Any, task: str, template: str, seed: int) -> list[al.records.Claim]:
    """The claims of one set of demonstrations and 24 queries."""
    examples = al.load_examples(task)
    demos = al.sample_demonstrations(examples, seed=seed)
    queries = al.sample_queries(examples, 24, seed, exclude=demos)
    batches = al.build_prompts(model.tokenizer, al.TASKS[template], demos, queries)
    isolation = al.EdgeSweep.isolation({"first 3 layers": al.Site(range(3))}, draws=3)
    asked = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(), isolation]
    return al.claims(al.run(model, batches, asked, resamples=100, progress=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    count = parser.parse_args().models
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    for number in range(count):
        model = model_of(number)
        for task, template in (("questions", "trec"), ("sentiment", "sst2")):
            found = claims_of(model, task, template, seed=number)
            total.update(claim.verdict.value for claim in found)
            print(number, task, *(f"{claim.estimate} {claim.verdict};" for claim in found))
    print(f"{count} models:", dict(total))
    if total[Verdict.AGREES.value]:
        raise SystemExit("a model with random weights agrees with a claim of the paper")


if __name__ == "__main__":
    main()
