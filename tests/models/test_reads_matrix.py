"""What a metric reads is the same however a run is made, in every architecture.

The reference of queries and keys is what plain transformers multiplies in one unpadded prompt.
"""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.models.facts import facts_of
from anchorlens.runs.study import Study
from tests.models.test_matrix import cases, hooked
from tests.references import plain
from tests.references.comparison import batch_of, precise, weights_of
from tests.support.measures import difference

FLOAT64 = torch.float64
SITES = {
    "queries": "queries",
    "keys": "keys",
    "pattern": "pattern",
    "slope": "slope",
    "before": "blocks.{}.hook_resid_pre",
    "after": "blocks.{}.hook_resid_post",
    "outputs": "blocks.{}.attn.hook_z",
}
# The key heads that are read, where they are fewer than the query heads. The heads of JetMoe are
# copied before its attention; those of Gemma 4 (global keys) are 2 and 1.
KEY_HEADS = {"Falcon": 1, "GPTBigCode": 1, "Gemma": 1, "Gemma 4 (global keys)": 2, "JetMoe": 4}


class EverySite(al.Metric):
    name = "every_site"
    record = al.Record

    def __init__(self, model: Any) -> None:
        self.sites = {name: at for name, at in SITES.items() if at.format(0) in model.hook_dict}
        self.sites |= {name: at for name, at in SITES.items() if name == at}

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        chosen = torch.cat([batch.label_positions, batch.target_positions[:, None]], dim=1)
        return {name: al.reads.At(at, chosen) for name, at in self.sites.items()}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, torch.Tensor]:
        return dict(seen)


def read(model: Any, batch: al.PromptBatch, **options: Any) -> dict[str, torch.Tensor]:
    with Study(model, [batch], {}, resamples=0, progress=False).entered() as study:
        found = study.passes([EverySite(model)], **options).contributions(batch, ["every_site"])
    return {name.partition("/")[2]: values for name, values in found.items()}


def keep(batch: al.PromptBatch) -> Any:
    """A hook of the user, with which no pass is native."""
    return [("blocks.0.hook_resid_pre", lambda resid, hook: resid * 1.0)]


@pytest.mark.quick_cases("whole models", "Falcon (ALiBi)", "Llama")
@pytest.mark.parametrize(("name", "kind"), cases("bridge", every_kind=()))
def test_native_and_hooked_and_shared_runs_read_the_same(name: str, kind: str) -> None:
    model, batch = hooked(name, FLOAT64, kind), batch_of("right")
    # They are drawn in float32.
    weights = None if name.startswith("Toy") else weights_of(name, FLOAT64)
    with precise(FLOAT64):
        expected = read(model, batch, hooks=keep)
        for options in ({}, {"share_prefix": False}):
            found = read(model, batch, **options)
            assert found.keys() == expected.keys()
            for site, values in expected.items():
                assert found[site].shape == values.shape, site
                assert difference(found[site], values) <= 1e-7, site
        if weights is None:
            return
        prompts = plain.prompts_of(batch)
        observed = [plain.observe(weights, prompt) for prompt in prompts]
    keys, queries = expected["keys"], expected["queries"]
    heads = KEY_HEADS.get(name)
    assert heads is None or keys.shape[2] == heads
    for row, (prompt, of_prompt) in enumerate(zip(prompts, observed, strict=True)):
        at = [*prompt.anchors, prompt.target]
        for layer, operands in enumerate(facts_of(model).operands):
            copied = keys[row, layer].repeat_interleave(queries.shape[2] // keys.shape[2], dim=0)
            both = (queries[row, layer], of_prompt.queries[layer]), (copied, of_prompt.keys[layer])
            for ours, theirs in both:
                width = theirs.shape[-1]
                assert operands is not None and not ours[..., width:].any()
                assert difference(ours[..., :width], theirs[:, at]) <= 1e-7
