"""Runs with a folder: a metric that counts its batches, and equality bit for bit."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.runs.store import Store
from anchorlens.system.digest_file import read_with_digest
from tests.support.tiny_models import questions


class Killed(BaseException):
    """Ends a run like a job that is out of time."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitsRecord(al.Record):
    logits: Float[Tensor, "prompt class"]


@dataclass(frozen=True)
class Logits(al.Metric):
    """A user's metric: the label words' logits. It counts its batches and may be killed in one."""

    seen: list[int] = field(default_factory=list, repr=False, compare=False)
    dies_in: int | None = field(default=None, repr=False, compare=False)
    scale: float = 1.0
    name: ClassVar[str] = "logits"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        if len(self.seen) == self.dies_in:
            raise Killed
        self.seen.append(len(batch))
        return {"logits": self.scale * seen.logits[:, batch.label_token_ids].cpu()}

    def result(self, rows: Any) -> LogitsRecord:
        return LogitsRecord(logits=rows["logits"])


def run(model: Any, metric: Logits, folder: Path | None, **options: Any) -> dict[str, Any]:
    batches = options.pop("batches", None) or questions(model, count=4, batch_size=1)
    metrics = options.pop("metrics", [metric, al.SaliencyFlows(), al.AttentionAUCROC()])
    return al.run(model, batches, metrics, folder=folder, progress=False, resamples=5, **options)


def stored_run(folder: Path, **changes: str) -> Store:
    """The store of a folder as its run opens it, with changes to the fingerprint."""
    header, _ = read_with_digest(next(folder.glob("rows-*.safetensors")))
    functions = header["functions"]
    return Store(folder, header["run"] | changes, functions, frozenset(functions))
