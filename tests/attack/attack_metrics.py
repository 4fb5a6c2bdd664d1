"""Metrics and hooks that misbehave raise an error, or do not change the other results.

An error that the metric itself raises is passed on unchanged. The other metrics give the numbers of
a run without the metric, or no numbers. The model is as before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, RunError
from tests.attack.attack_scene import QUICK, scene
from tests.support.measures import same


class AuthorError(Exception):
    """An error that the author of a metric raises."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SomeRecord(al.Record):
    value: Float[Tensor, ""]


Change = Callable[[Tensor], Any]


def nothing(tensor: Tensor) -> None:
    return None


def zeros(rows: Any) -> SomeRecord:
    return SomeRecord(value=rows["rows"].double().mean())


@dataclass(frozen=True)
class Odd(al.Metric):
    """A metric in which each part can be replaced."""

    title: str
    read: Change = nothing
    point: ClassVar[str] = "blocks.1.attn.hook_pattern"
    rows: Callable[[Tensor], Any] = lambda logits: {"rows": logits[:, 0].detach().clone()}
    finish: Callable[[Any], Any] = zeros
    backward: Change | None = None
    name: str = "odd"
    also: Callable[[al.PromptBatch], Any] = lambda batch: None

    def reads(self, batch: al.PromptBatch) -> Any:
        hooks = [(self.point, lambda tensor, hook: self.read(tensor))]
        backward_hooks = (
            [(self.point, lambda tensor, hook: change(tensor))] if (change := self.backward) else []
        )
        reads: Any = {"hooks": al.reads.Hooks(None, hooks, backward_hooks)}
        also = self.also(batch)
        return reads if also is None else reads | {"also": also}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> Any:
        return self.rows(seen.logits)

    def result(self, rows: Any) -> Any:
        return self.finish(rows)


def fails(*_: Any) -> Any:
    raise AuthorError


def halved(tensor: Tensor) -> None:
    tensor.mul_(0.5)


def emptied(tensor: Tensor) -> None:
    tensor.data.zero_()


def edited(logits: Tensor) -> dict[str, Tensor]:
    logits.zero_()
    return {"rows": torch.zeros(len(logits))}


def edited_rows(rows: Any) -> SomeRecord:
    for values in rows.values():
        values.zero_()
    return zeros(rows)


At, Sums, Blocks = al.reads.At, al.reads.Sums, al.reads.Blocks


def sums_of(weight: Any) -> Callable[[al.PromptBatch], Any]:
    return lambda batch: Sums(weight, al.reads.EdgeSets([al.edges.ww(batch)]))


def blocks_of(of: Any) -> Callable[[al.PromptBatch], Any]:
    return lambda batch: Blocks(of, slope=True)


# tests/metrics/test_metric_mistakes.py has what is refused before any pass, and
# tests/runs/test_bad_returns.py what no method may return.
ODD: list[Odd] = [
    Odd("a hook that edits in place", read=halved),
    Odd("a hook that edits the data in place", read=emptied),
    Odd("a hook that returns a tensor", read=lambda pattern: pattern * 0.5),
    Odd("a hook that fails", read=fails),
    Odd("a gradient that is changed", backward=lambda gradient: gradient * 2),
    Odd("a gradient that is emptied", backward=emptied),
    Odd("a gradient that fails", backward=fails),
    Odd("rows edit the logits", rows=edited),
    Odd("rows edit the data", rows=lambda logits: edited(logits.data)),
    Odd("rows fail", rows=fails),
    Odd("rows are empty", rows=lambda logits: {}),
    Odd("rows are numbers", rows=lambda logits: {"rows": 0.5}),
    Odd("rows are of another length", rows=lambda logits: {"rows": torch.zeros(len(logits) + 1)}),
    Odd("rows are of no length", rows=lambda logits: {"rows": torch.tensor(0.5)}),
    Odd("rows have a name that is no string", rows=lambda logits: {3: torch.zeros(len(logits))}),
    Odd("rows have a name with a slash", rows=lambda logits: {"../rows": torch.zeros(len(logits))}),
    Odd(
        "rows differ in shape", rows=lambda logits: {"rows": torch.zeros(len(logits), len(logits))}
    ),
    Odd("rows differ in type", rows=lambda logits: {"rows": logits[:, 0] > 0}),
    Odd("rows differ in names", rows=lambda logits: {f"rows{len(logits)}": logits[:, 0]}),
    Odd("rows are complex", rows=lambda logits: {"rows": logits[:, 0].to(torch.complex64)}),
    Odd("the result fails", finish=fails),
    Odd("the result fails with an interval", finish=lambda rows: [fails, zeros][len(rows)](rows)),
    Odd("the result edits the rows", finish=edited_rows),
    Odd("reads fail", also=fails),
    Odd("positions are edges", also=lambda batch: At("pattern", al.edges.ww)),
    Odd("positions fail", also=lambda batch: At("pattern", fails)),
    Odd("positions differ in number", also=lambda batch: At("pattern", al.edges.query)),
    Odd("the weight is none", also=sums_of(lambda pattern, slope: None)),
    Odd("the weight is of one axis", also=sums_of(lambda pattern, slope: pattern.sum((1, 2, 3)))),
    Odd("the weight is not finite", also=sums_of(lambda pattern, slope: (pattern * 0).log()[:, 0])),
    Odd("the weight fails", also=sums_of(fails)),
    Odd("the weight edits", also=sums_of(lambda pattern, slope: pattern.mul_(0.5).sum(1))),
    Odd("blocks fail", also=blocks_of(fails)),
    Odd("blocks edit", also=blocks_of(lambda block: block.pattern.mul_(0.5).sum((1, 2, 3)))),
    Odd("blocks edit the slope", also=blocks_of(lambda block: block.slope.zero_().sum((1, 2, 3)))),
]


@cache
def expected_results() -> dict[str, Any]:
    """The results next to a valid metric of the same kind, which needs the same passes."""
    others: list[Any] = [Odd("right"), al.Accuracy(), al.SaliencyFlows(), al.AttentionAUCROC()]
    results = al.run(scene().model, scene().batches, others, **QUICK)
    del results["odd"]
    return results


def check_with_odd_metric(odd: Odd, first: bool) -> None:
    setup = scene()
    others: list[Any] = [al.Accuracy(), al.SaliencyFlows(), al.AttentionAUCROC()]
    expected = expected_results()
    metrics = [odd, *others] if first else [*others, odd]
    before = setup.state()
    results: Mapping[str, Any] | None = None
    try:
        results = al.run(setup.model, setup.batches, metrics, **QUICK)
    except RunError as error:
        results = error.results
    except (AnchorlensError, AuthorError):
        pass
    except Exception as error:
        text = str(error).partition("\n")[0][:160]
        raise AssertionError(f"{odd.title}: {type(error).__name__}: {text}") from error
    setup.check(before, odd.title)
    if results is None:
        return
    rest = {name: record for name, record in results.items() if name in expected}
    assert same(rest, expected), f"{odd.title}: the numbers of other metrics changed, first={first}"
