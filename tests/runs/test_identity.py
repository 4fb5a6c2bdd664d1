"""What was computed by something else than what is asked now is refused, or computed again.

Which values are another is in test_identity_sources.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.passes.forward import run_pass
from anchorlens.runs.study import Study
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def scaled(factor: float) -> Callable[[al.PromptBatch], Any]:
    return lambda batch: [("blocks.0.hook_resid_post", lambda x, hook: x * factor)]


def test_an_experiment_of_the_user_whose_code_changed_is_refused(gpt2: Any, tmp_path: Path) -> None:
    """Its options are the same, and so are the rows of the first batch."""
    batches = questions(gpt2, count=2, batch_size=1)

    def collected(factor: float) -> Tensor:
        def of_batch(batch: al.PromptBatch) -> dict[str, Tensor]:
            scale = factor if int(batch.index.min()) >= 1 else 1.0
            return {"x": scale * run_pass(gpt2, batch).amax(1).cpu()}

        with Study(gpt2, batches, {"experiment": "x"}, folder=tmp_path, **QUIET).entered() as study:
            return study.collect(of_batch)["x"]

    first = collected(1.0)
    assert torch.equal(collected(1.0), first)
    with pytest.raises(StoreError, match="was computed by another function"):
        collected(2.0)
