"""A wrong metric raises an error that names it, before the model runs."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import ArgumentError, HookError, MetricError
from anchorlens.metrics.edge_sums import EdgeSets
from anchorlens.runs.study import Study
from tests.runs.test_mixes import MeanRecord
from tests.support.measures import does_not_run
from tests.support.tiny_models import questions


@dataclass(frozen=True)
class Mine(al.Metric):
    name: Any = "mine"
    read: Any = field(default_factory=dict)

    def reads(self, batch: al.PromptBatch) -> Any:
        return self.read(batch) if callable(self.read) else self.read

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, torch.Tensor]:
        return {"v": torch.ones(len(batch))}

    def result(self, rows: Any) -> Any:
        return MeanRecord(mean=rows["v"].mean())


def observe_nothing(tensor: torch.Tensor, hook: Any) -> None:
    pass


def hooked(*hooks: Any, backward: Any = ()) -> Mine:
    """A metric with hooks of its own.

    Some hooks are wrong. If they were used at import, the check of types would raise its error.
    """
    return Mine(read=lambda batch: {"it": al.reads.Hooks(None, hooks, backward)})


def at(*read: Any, **options: Any) -> Mine:
    return Mine(read=lambda batch: {"it": al.reads.At(*read, **options)})


PATTERN = "blocks.0.attn.hook_pattern"
MISSING = "blocks.9.attn.hook_pattern"
OTHERS = r"'accuracy'(, 'isolation')?"
TARGET, ANCHORS = al.edges.target, al.edges.anchors
BARE: Any = al.edges.pq
SETS: Any = lambda batch: EdgeSets([al.edges.pq(batch)])  # noqa: E731
MISTAKES: list[tuple[Any, type[Exception], str]] = [
    *(
        (
            Mine(name=wrong),
            MetricError,
            rf"needs a string for a name without \"/\"; got \[{re.escape(repr(wrong))}, {OTHERS}\]",
        )
        for wrong in (7, None, ["a"], "", "a/b")
    ),
    *(
        (wrong, HookError, f"no hook point '{MISSING}', which mine names; see model.hook_dict")
        for wrong in (
            hooked((MISSING, observe_nothing)),
            hooked((PATTERN, observe_nothing), (MISSING, observe_nothing)),
            hooked(backward=[(MISSING, observe_nothing)]),
        )
    ),
    (
        at("blocks.{}.hook_nowhere", TARGET),
        HookError,
        r"no hook point 'blocks\.0\.hook_nowhere', which mine names; see model\.hook_dict",
    ),
    (hooked(PATTERN), ArgumentError, "hooks of Hooks must be a list of"),
    (hooked((PATTERN, None)), ArgumentError, "hooks of Hooks must be"),
    (hooked(backward=7), ArgumentError, "backward_hooks of Hooks.* got 7"),
    (Mine(read=None), MetricError, r"reads of mine give what is read by name, such as .*NoneType"),
    (Mine(read=[al.reads.At("pattern", TARGET)]), MetricError, "by name, such as .*; got a list"),
    (Mine(read={"it": al.reads.At}), MetricError, "reads of mine give what is read by name"),
    (at("patterns", TARGET), MetricError, r"'pattern', 'slope', .* hook point .* got 'patterns'"),
    (at("queries", TARGET, ANCHORS), MetricError, "only a 'pattern' or a 'slope' .* 'queries' has"),
    (at("blocks.{}.hook_z", TARGET, ANCHORS), MetricError, r"only a .* 'blocks\.\{\}\.hook_z' has"),
    (at("pattern", TARGET, pairs=True), MetricError, "pairs=True joins each query with a key"),
    (
        at("slope", TARGET, ANCHORS, pairs=True),
        MetricError,
        "mine reads pairs of queries and keys, but gave 1 queries and 6 keys",
    ),
    (
        at("pattern", al.edges.query),
        MetricError,
        r"queries of mine must be as many .*; got \d+ to \d+; read a block \(al\.re",
    ),
    (
        at("pattern", TARGET, al.edges.query),
        MetricError,
        r"^keys of mine must be as many positions",
    ),
    (
        at("pattern", lambda batch: batch.tokens),
        MetricError,
        r"queries of mine must give a tensor of True and False .*; got torch.int64",
    ),
    (at("pattern", lambda: TARGET), ArgumentError, "queries of mine must be a function of the bat"),
    (at("pattern", lambda batch: batch.tokens < 0), MetricError, "at least one for each of 4 pr"),
    (at("pattern", torch.tensor([[-1], [0]] * 2)), MetricError, "must be positions .batch, chosen"),
    (at("pattern", torch.tensor([[1], [2], [3]])), MetricError, "must be positions .batch, chosen"),
    (
        at("pattern", torch.tensor([[9999], [0]] * 2)),
        MetricError,
        r"positions below \d+, .* got 9999",
    ),
    (
        Mine(read=lambda batch: {"it": al.reads.Sums(lambda a, _: a, SETS(batch))}),
        MetricError,
        "a weight is a function of .* to a number for each edge, of the shape",
    ),
    (
        Mine(read=lambda batch: {"it": al.reads.Sums(al.weights.signed, BARE(batch))}),
        ArgumentError,
        "sets of Sums must be",
    ),
]


@pytest.mark.parametrize(("metric", "error", "message"), MISTAKES)
def test_a_wrong_metric_raises_an_error_before_any_pass(
    gpt2: Any, metric: Any, error: type[Exception], message: str
) -> None:
    batches, metrics = questions(gpt2, 4), [metric, al.Accuracy()]
    for asked in (metrics, [*metrics, al.EdgeSweep.isolation({"a": al.Site(0)})]):
        with pytest.raises(error, match=message), does_not_run(gpt2):
            al.run(gpt2, batches, asked, progress=False)


def test_hooks_on_gradients_need_a_gradient(gpt2: Any) -> None:
    metric = hooked(backward=[(PATTERN, observe_nothing)])
    message = "mine needs a gradient, and passes here have none"
    study = Study(gpt2, questions(gpt2, 2), {}, progress=False)
    with pytest.raises(MetricError, match=message), does_not_run(gpt2), study.entered():
        study.passes([metric], loss=None)


def test_functions_may_select_hook_points(gpt2: Any) -> None:
    """A function of the name selects hook points, but not none: its hook would do nothing."""
    seen = []
    selected = (lambda name: name == PATTERN, lambda tensor, hook: seen.append(hook.name))
    options: dict[str, Any] = {"progress": False, "resamples": 0}
    result = al.run(gpt2, questions(gpt2, 2), [hooked(selected)], **options)["mine"]
    assert float(result.mean) == 1 and PATTERN in seen
    nothing = (lambda name: False, observe_nothing)
    for metric, what in (
        (hooked(selected, nothing), "hooks that observe"),
        (hooked(selected, backward=[nothing]), "hooks on gradients"),
    ):
        message = f"{what} did nothing, .* points: any that a function selects"
        with pytest.raises(HookError, match=message):
            al.run(gpt2, questions(gpt2, 2), [metric], progress=False)


@pytest.mark.parametrize("slope", [False, True])
def test_a_function_of_blocks_that_gives_no_number_for_each_prompt_is_named(
    slope: bool, gpt2: Any
) -> None:
    functions: list[Any] = [lambda block: None, lambda block: block.pattern.sum()]
    for of in (*functions, lambda block: torch.ones(7)):
        metric = Mine(read={"it": al.reads.Blocks(of, slope=slope)})
        message = r"gives a tensor \[batch, \.\.\.\] for \d prompts, .*; that of mine"
        with pytest.raises(MetricError, match=message):
            al.run(gpt2, questions(gpt2, 2), [metric], progress=False)
