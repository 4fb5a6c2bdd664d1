"""Results equal those of the paper's published code, on two tiny models.

tests/golden/README.md describes the numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

import anchorlens as al
from anchorlens.passes.forward import run_pass
from tests.support.asked import ask
from tests.support.measures import centred, contributed, difference
from tests.support.tiny_models import tiny_gpt2

pytestmark = pytest.mark.every_kind

TOLERANCE = 1e-5
GOLDEN = Path(__file__).parents[1] / "golden"


class GoldenCase:
    def __init__(self, name: str) -> None:
        folder = GOLDEN / name
        self.meta = json.loads((folder / "meta.json").read_text())
        self.numbers = load_file(folder / "numbers.safetensors")
        self.weights = load_file(folder / "gpt2.safetensors")

    def transformers_model(self) -> GPT2LMHeadModel:
        model = tiny_gpt2(**self.meta["config"])
        weights = self.weights | {"lm_head.weight": self.weights["transformer.wte.weight"]}
        model.load_state_dict(weights, strict=False)
        return model

    def batch(self, side: str) -> tuple[al.PromptBatch, list[int]]:
        rows = [self.numbers[f"{n}.input_ids"] for n in range(5)]
        length = max(len(row) for row in rows)
        starts = [length - len(row) if side == "left" else 0 for row in rows]
        tokens = torch.zeros(5, length, dtype=torch.long)
        mask = torch.zeros(5, length, dtype=torch.bool)
        positions, classes = [], []
        for n, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[n, start : start + len(row)] = row
            mask[n, start : start + len(row)] = True
            by_class = self.meta["cases"][n]["label_positions_by_class"]
            order = sorted(range(len(by_class)), key=by_class.__getitem__)
            positions.append([by_class[k] + start for k in order])
            classes.append(order)
        batch = al.PromptBatch.from_positions(
            tokens,
            label_positions=positions,
            label_classes=classes,
            label_token_ids=self.meta["label_token_ids"],
            gold=[case["gold"] for case in self.meta["cases"]],
            attention_mask=mask,
        )
        return batch, starts


@pytest.fixture(scope="module", params=["sentiment", "questions"])
def golden(request: pytest.FixtureRequest) -> GoldenCase:
    return GoldenCase(request.param)


@pytest.fixture(scope="module")
def model(golden: GoldenCase, byte_level: Any, hooked: Any) -> Any:
    return hooked(golden.transformers_model(), byte_level)


def assert_equal(golden: GoldenCase, ours: torch.Tensor, name: str) -> None:
    theirs = [golden.numbers[f"{n}.{name}"] for n in range(5)]
    if name.endswith("logits"):
        ours, theirs = centred(ours), [centred(logits) for logits in theirs]
    worst = max(difference(ours[n], theirs[n]) for n in range(5))
    assert worst <= TOLERANCE, f"{name} is off by {worst:.1e} of its maximum"


def observed(model: Any, batch: al.PromptBatch, metric: al.Metric) -> dict[str, torch.Tensor]:
    return contributed(model, batch, metric)[1][0]


def isolated(model: Any, batch: al.PromptBatch, layers: range) -> torch.Tensor:
    return run_pass(model, batch, hooks=al.isolate_labels(model, batch, layers))


def attention(model: Any, batch: al.PromptBatch) -> torch.Tensor:
    return observed(model, batch, al.AttentionAUCROC())["attention"].sum(2)


def anchor_keys(model: Any, batch: al.PromptBatch) -> torch.Tensor:
    keys = observed(model, batch, al.AnchorDistances())["keys"]
    return keys.unflatten(-1, (model.cfg.n_heads, -1)).transpose(2, 3)


OURS: dict[str, Callable[[Any, al.PromptBatch], torch.Tensor]] = {
    "flows": lambda m, b: ask(m, [b], al.SaliencyFlows(), resamples=0, progress=False).per_prompt,
    "query_to_label_attention": attention,
    # The published code flattens the same numbers class by class.
    "sim_attn_published_order": lambda m, b: attention(m, b).mT.flatten(1),
    "anchor_keys": anchor_keys,
    "logits": run_pass,
    "isolated_first2.logits": lambda m, b: isolated(m, b, range(2)),
    "isolated_last2.logits": lambda m, b: isolated(m, b, range(-2, 0)),
    "isolated_all.logits": lambda m, b: isolated(m, b, range(m.cfg.n_layers)),
}


@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_equal_the_published_code(golden: GoldenCase, model: Any, side: str) -> None:
    batch, starts = golden.batch(side)
    for name, number in OURS.items():
        assert_equal(golden, number(model, batch), name)
    # The published beta is ordered by class, ours by appearance. Here all prompts have one order.
    assert (batch.label_classes == batch.label_classes[0]).all()
    beta = golden.numbers["beta"][:, :, batch.label_classes[0]]
    logits = run_pass(model, batch, hooks=al.reweight_anchors(model, batch, beta))
    assert_equal(golden, logits, "reweighted.logits")
    cases, maps = golden.meta["cases"], al.saliency(model, batch)
    predicted = observed(model, batch, al.AttentionAUCROC())["probabilities"].argmax(1)
    assert predicted.tolist() == [case["predicted"] for case in cases]
    losses = torch.tensor([case["loss"] for case in cases])
    ours = al.losses.label_cross_entropy(run_pass(model, batch), batch)
    assert difference(ours, losses) <= TOLERANCE
    for n, start in enumerate(starts):
        reference = golden.numbers[f"{n}.saliency"]
        stop = start + reference.shape[-1]
        assert difference(maps[n, :, start:stop, start:stop], reference) <= TOLERANCE
        # Saliency from and to padding is zero.
        assert torch.isclose(maps[n].sum(), maps[n, :, start:stop, start:stop].sum())
