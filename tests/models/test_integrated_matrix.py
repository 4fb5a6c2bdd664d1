"""The integrated gradient of every architecture sums to what the output loses without a layer.

The reference is plain transformers in float64, one prompt, with the pattern of a layer times 0.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.models.head_outputs import FrozenNorms
from anchorlens.models.hooked import hooks_by_layer, pattern_name
from anchorlens.models.model_state import added_hooks, frozen_in_eval_mode
from anchorlens.passes.forward import run_pass
from anchorlens.questions.integrated_flows import mean_gradient, output_with
from tests.models.test_matrix import cases, hooked
from tests.references import plain
from tests.references.comparison import batch_of, precise, weights_of
from tests.support.asked import ask
from tests.support.measures import difference

# Other experts are chosen on the path. No number of steps helps, and the function warns where the
# error is above a tenth.
INCOMPLETE = ("Qwen3-MoE", "OLMoE", "GPT-OSS", "DeepSeek V2")
WARNED = ("GPT-OSS", "DeepSeek V2")
# A norm of what the attention gives out, of all heads before that, or of the sum with the residual.
NORMS = ("Gemma 2", "Gemma 4 (shared)", "OLMo 2", "BitNet", "OPT (norms after)")
FLOAT64 = torch.float64
CASES = cases("bridge", every_kind=NORMS)


def losses(logits: torch.Tensor, batch: al.PromptBatch) -> torch.Tensor:
    return logits.log_softmax(-1)[:, 5]


def change_of(name: str, prompt: al.PromptBatch, layer: int) -> torch.Tensor:
    weights, [same] = weights_of(name, FLOAT64), plain.prompts_of(prompt)
    with precise(FLOAT64):
        count = len(plain.observe(weights, same).attention)
        factor = torch.ones(count, 1, 1, 1, dtype=FLOAT64)
        factor[layer] = 0
        clean, without = (
            run.log_softmax(-1)[5]
            for run in (
                plain.logits_of(weights, same),
                plain.with_edits(weights, same, factor=factor),
            )
        )
        return clean - without


@pytest.mark.slow_cases("whole models", "OSS")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_attributions_of_the_last_layer_sum_to_the_change_of_the_output(
    name: str, kind: str
) -> None:
    model, prompt = hooked(name, FLOAT64, kind), batch_of("right").prompt(1)
    layer = model.cfg.n_layers - 1
    expected = change_of(name, prompt, layer)
    with precise(FLOAT64), frozen_in_eval_mode(model):
        patterns: dict[int, Any] = {}
        norms = FrozenNorms(model)
        store = hooks_by_layer(model, pattern_name, patterns.__setitem__)
        with added_hooks(model, of_modules=norms.observers()):
            clean = run_pass(model, prompt, observers=store)
        pattern = patterns[layer]
        output = partial(output_with, model, prompt, losses, layer, None)
        with added_hooks(model, of_modules=norms.hooks_of(layer)):
            # With the divisor of the clean run the whole pattern gives the clean output.
            assert difference(output(pattern), losses(clean, prompt)) <= 1e-9
            change = output(pattern) - output(pattern * 0)
            error = float((pattern * mean_gradient(output, pattern, 8)).sum() - change)
    limit = 1e-9 if kind == "bridge" else 1e-6
    assert difference(change[0], expected) <= limit
    assert (abs(error) > 0.05 * abs(expected)) == (name in INCOMPLETE)


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("name", ["Gemma 3", "OLMo 2", "BitNet", *WARNED])
def test_a_layer_is_complete_or_named_in_a_warning(name: str) -> None:
    model, prompt = hooked(name, FLOAT64, "bridge"), batch_of("right").prompt(1)
    layer = model.cfg.n_layers - 1
    with precise(FLOAT64), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = ask(
            model,
            [prompt],
            al.IntegratedFlows(["text", "label"], output=losses, steps=6),
            resamples=0,
            progress=False,
        )
    assert difference(record.change[layer], change_of(name, prompt, layer)) <= 1e-9
    error = (record.attributed - record.change).abs()
    wrong = (error > 0.1 * torch.maximum(record.change.abs(), record.attributed.abs())).nonzero()
    texts = [str(one.message) for one in caught if "do not sum to F(A)" in str(one.message)]
    named = f"in layers {wrong.flatten().tolist()} the attributions do not sum to F(A) - F(0)"
    assert len(texts) == bool(len(wrong)) and all(named in text for text in texts)
    assert (layer in wrong.flatten().tolist()) == (name in WARNED)
