"""Metrics and hooks that misbehave: an error, or results of the others that are not touched.

What a metric itself raises comes out as it is. Whatever it does, the other metrics give the numbers
of a run without it, or none, and the model is as before.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from attack_scene import QUICK, scene
from attempts import Ending, Fault
from jaxtyping import Float
from stored_runs import same
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, RunError


class Own(Exception):
    """What the author of a metric raises."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SomeRecord(al.Record):
    value: Float[Tensor, ""]


Change = Callable[[Tensor], Any]


def nothing(tensor: Tensor) -> None:
    return None


def zeros(rows: Any) -> SomeRecord:
    return SomeRecord(value=rows["rows"].double().mean())


@dataclass(frozen=True)
class Odd:
    """A metric of which each part can do anything."""

    what: str
    look: Change = nothing
    point: Any = "blocks.1.attn.hook_pattern"
    rows: Callable[[Tensor], Any] = lambda logits: {"rows": logits[:, 0].detach().clone()}
    finish: Callable[[Any], Any] = zeros
    backward: Change | None = None
    name: Any = "odd"
    needs_gradient: Any = False
    observes: Callable[[], Any] | None = None

    def observe(self, model: Any, batch: al.PromptBatch) -> Any:
        if self.observes is not None:
            return self.observes()
        hooks = [(self.point, lambda tensor, hook: self.look(tensor))]
        later: Any = []
        if self.backward is not None:
            change = self.backward
            later = [(self.point, lambda tensor, hook: change(tensor))]
        return al.Observation(lambda logits, clean: self.rows(logits), hooks, later)

    def result(self, rows: Any) -> Any:
        return self.finish(rows)


def fails(*_: Any) -> Any:
    raise Own


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


ODD: list[Odd] = [
    Odd("looks in place", look=halved),
    Odd("looks in place at the data", look=emptied),
    Odd("looks and returns a tensor", look=lambda one: one * 0.5),
    Odd("looks and returns a number", look=lambda one: 3),
    Odd("looks and fails", look=fails),
    Odd("a gradient that is changed", backward=lambda one: one * 2, needs_gradient=True),
    Odd(
        "a gradient that is changed in place",
        backward=emptied,
        needs_gradient=True,
    ),
    Odd("a gradient that fails", backward=fails, needs_gradient=True),
    Odd("rows edit the logits", rows=edited),
    Odd("rows edit the data", rows=lambda one: edited(one.data)),
    Odd("rows fail", rows=fails),
    Odd("rows are none", rows=lambda one: None),
    Odd("rows are a list", rows=lambda one: [1]),
    Odd("rows are empty", rows=lambda one: {}),
    Odd("rows are numbers", rows=lambda one: {"rows": 0.5}),
    Odd("rows are of another length", rows=lambda one: {"rows": torch.zeros(len(one) + 1)}),
    Odd("rows are of no length", rows=lambda one: {"rows": torch.tensor(0.5)}),
    Odd("rows have a name that is no string", rows=lambda one: {3: torch.zeros(len(one))}),
    Odd("rows have a name with a slash", rows=lambda one: {"../rows": torch.zeros(len(one))}),
    Odd("rows differ in shape", rows=lambda one: {"rows": torch.zeros(len(one), len(one))}),
    Odd("rows differ in type", rows=lambda one: {"rows": one[:, 0] > 0}),
    Odd("rows differ in names", rows=lambda one: {f"rows{len(one)}": one[:, 0]}),
    Odd("rows are sparse", rows=lambda one: {"rows": one[:, 0].to_sparse()}),
    Odd("rows are on the device meta", rows=lambda one: {"rows": one[:, 0].to("meta")}),
    Odd("rows are complex", rows=lambda one: {"rows": one[:, 0].to(torch.complex64)}),
    Odd("the result is none", finish=lambda rows: None),
    Odd("the result is a tensor", finish=lambda rows: torch.zeros(1)),
    Odd("the result fails", finish=fails),
    Odd("the result fails with an interval", finish=lambda rows: [fails, zeros][len(rows)](rows)),
    Odd("the result edits the rows", finish=edited_rows),
    Odd("the name is none", name=None),
    Odd("the name is a number", name=3),
    Odd("the name is empty", name=""),
    Odd("the name has a slash", name="a/b"),
    Odd("the name is a list", name=["odd"]),
    Odd("the name is another's", name="accuracy"),
    Odd("the point does not exist", point="blocks.9.attn.hook_pattern"),
    Odd("the point is a number", point=3),
    Odd("the point is none", point=None),
    Odd("the observation is none", observes=lambda: None),
    Odd("the observation is a dict", observes=dict),
    Odd("the observation has no function", observes=lambda: al.Observation(None)),  # type: ignore[arg-type]
    Odd("the observation has odd hooks", observes=lambda: al.Observation(dict, [3])),  # type: ignore[list-item, arg-type]
    Odd("the observation fails", observes=fails),
    Odd("it needs a gradient and has no hook", needs_gradient=True),
    Odd("it needs a word", needs_gradient="yes"),
]


def odd_metrics(chance: random.Random) -> Ending:
    return with_odd_metric(chance.choice(ODD), first=chance.random() < 0.5)


@cache
def expected_results() -> dict[str, Any]:
    """Of a metric of the same kind that does nothing wrong, so that the same passes are made."""
    others: list[Any] = [Odd("right"), al.Accuracy(), al.SaliencyFlows(), al.AttentionAUCROC()]
    results = al.run(scene().model, scene().batches, others, **QUICK)
    del results["odd"]
    return results


def with_odd_metric(odd: Odd, first: bool) -> Ending:
    here = scene()
    others: list[Any] = [al.Accuracy(), al.SaliencyFlows(), al.AttentionAUCROC()]
    expected = expected_results()
    metrics = [odd, *others] if first else [*others, odd]
    before = here.state()
    found: Mapping[str, Any] | None = None
    try:
        found = al.run(here.model, here.batches, metrics, **QUICK)
    except RunError as error:
        found = error.results
    except (AnchorlensError, Own):
        pass
    except Exception as error:
        text = str(error).partition("\n")[0][:160]
        raise Fault(f"{odd.what}: {type(error).__name__}: {text}") from error
    if here.state() != before:
        raise Fault(f"{odd.what}: the model is not as before")
    if found is None:
        return "refused"
    rest = {name: record for name, record in found.items() if name in expected}
    if not same(rest, expected):
        raise Fault(f"{odd.what}: the numbers of other metrics changed, first={first}")
    return "right"
