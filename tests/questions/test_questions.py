"""Questions of one run: each has the numbers that it has alone, and mistakes in one are told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import kl_div

import anchorlens as al
from anchorlens.contexts.selection import random_tokens
from anchorlens.errors import MetricError
from anchorlens.runs.passes import Passes
from tests.support.asked import ask, scored
from tests.support.measures import assert_same, centred, counted_layers, does_not_run, logits_of
from tests.support.printed_code import printed
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
pytestmark = pytest.mark.filterwarnings(
    "ignore:intervals of", "ignore:in layers .* the attributions do not sum to F"
)

SWEEP = al.EdgeSweep.isolation({"all": al.Site(range(3)), "last": al.Site(-1)}, draws=2)
ATTRIBUTION = scored(al.subsets.lasso(8), name="scores")
SCORES: dict[str, Any] = {"saliency": al.SegmentFlows(), "one by one": al.subsets.one_by_one}
CONTEXTS: dict[str, Any] = {"none": al.contexts.NoContext(), "anchors": al.compress}
EXPERIMENTS: list[al.Question] = [
    SWEEP,
    al.Faithfulness(SCORES, subsets=8),
    ATTRIBUTION,
    printed("own_question.md", "Suppression")(("label", "query")),
    al.IntegratedFlows(["label", "target"], steps=2),
    al.PrefixEffect(),
    al.ScoreParts(1, heads=0),
    al.ContextComparison(CONTEXTS, draws=2, repeats=0),
]


def the_same(ours: al.Record, alone: al.Record) -> None:
    """Equal but for rounding in float64, which depends on the tokens that a pass runs over."""
    assert_same(ours, alone, 1e-12)
    for name, bounds in alone.intervals.items():
        allowed: Any = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
        torch.testing.assert_close(ours.intervals[name], bounds, **allowed)


@dataclass(frozen=True, eq=False, kw_only=True)
class MovedRecord(al.Record):
    kl: Float[Tensor, ""] = al.kinds.mean("kl", low=0, unit="nats")
    kl_of_prompts: Float[Tensor, " prompt"] = al.kinds.of_prompts("kl")
    logits: Float[Tensor, "prompt vocab"] = al.kinds.of_prompts("logits")


@dataclass(frozen=True)
class Moved(al.Question):
    """A question of a user: how far the prediction moves if label words are isolated in layers."""

    layers: tuple[int, ...] = (1, 2)
    begins_late: bool = True
    name: str = "moved"
    record: ClassVar = MovedRecord

    def hooks(self, model: Any, batch: al.PromptBatch) -> Sequence[Any]:
        return al.isolate_labels(model, batch, [*self.layers])

    def further(self, model: Any, batches: Any) -> al.Further:
        return al.Further([partial(self.hooks, model)], self.layers if self.begins_late else ())

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
        clean = passes.clean(batch).double().log_softmax(-1)
        logits = passes.logits(batch, partial(self.hooks, passes.model), "isolated")
        kl = (clean.exp() * (clean - logits.double().log_softmax(-1))).sum(-1)
        return {"kl": kl.cpu(), "logits": logits.cpu()}


class Disturbing(Moved):
    """Runs other prompts than those that it is asked about."""

    def of_batch(self, passes: Passes, batch: al.PromptBatch) -> dict[str, Tensor]:
        passes.clean(passes.batches[-1].prompt(0))
        return super().of_batch(passes, batch)


def logit_of_a_word(logits: Tensor, batch: al.PromptBatch) -> Tensor:
    return logits[:, 7]


class OfOneMorePass(al.Question):
    name, record, metric = "more", al.records.SaliencyFlowsRecord, al.SaliencyFlows()

    def further(self, model: Any, batches: Any) -> al.Further:
        return al.Further(metrics=[self.metric], loss=logit_of_a_word)

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
        return passes.further(self, batch)[self.metric.name]

    def result(self, contributions: al.Contributions) -> al.Record:
        return self.metric.result(contributions)


@pytest.mark.slow("many passes")
@pytest.mark.parametrize("share", [True, False])
def test_each_question_has_the_numbers_that_it_has_alone(exact_gpt2: Any, share: bool) -> None:
    batches = questions(exact_gpt2, 3, batch_size=2, padding_side="left")
    options: dict[str, Any] = {"resamples": 5, "progress": False, "share_prefix": share}
    # Two sweeps have the same names of sites and draws, under which shared tokens are stored.
    others = al.EdgeSweep(al.edges.pq, SWEEP.sites, control=al.edges.random_edges, draws=2)
    asked = [Disturbing((1,)), al.SaliencyFlows(), OfOneMorePass(), others, *EXPERIMENTS]
    alone = {each.name: ask(exact_gpt2, batches, each, **options) for each in asked}
    for order in (asked, asked[::-1]):
        results = al.run(exact_gpt2, batches, order, **options)
        assert [*results] == [question.name for question in order]
        for name, record in results.items():
            the_same(record, alone[name])
            assert record.info == alone[name].info
    of_word = ask(exact_gpt2, batches, al.SaliencyFlows(), loss=logit_of_a_word, **options)
    the_same(results["more"], of_word)
    assert not torch.allclose(of_word.flows, results["saliency_flows"].flows, rtol=1e-2)


def passes_for(model: Any, batches: Any, asked: Sequence[al.Question], **options: Any) -> int:
    """How many passes begin in the first layer; tiny ones, which find out what is possible, not."""
    al.run(model, batches, asked, **QUIET, **options)
    with counted_layers(model) as calls:
        al.run(model, batches, asked, **QUIET, **options)
    return calls[0]


@pytest.mark.quick_cases("many passes", "False")
@pytest.mark.parametrize("share", [True, False])
def test_a_late_start_gives_the_logits_of_whole_passes(exact_gpt2: Any, share: bool) -> None:
    batches = questions(exact_gpt2, 5, batch_size=2)
    options: dict[str, Any] = {"share_prefix": share, **QUIET}
    records, first_layer = [], []
    for asked in (Moved(), Moved(begins_late=False)):
        first_layer.append(passes_for(exact_gpt2, batches, [asked], share_prefix=share))
        records.append(ask(exact_gpt2, batches, asked, **options))
    assert first_layer[1] - first_layer[0] == len(batches)
    the_same(records[0], records[1])
    for batch in batches:
        expected = logits_of(exact_gpt2, batch, al.isolate_labels(exact_gpt2, batch, [1, 2]))
        ours = centred(records[0].logits[batch.index])
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        clean = logits_of(exact_gpt2, batch, []).log_softmax(-1)
        kl = kl_div(expected.log_softmax(-1), clean, log_target=True, reduction="none").sum(-1)
        assert (kl > 1e-9).all()
        torch.testing.assert_close(records[0].kl_of_prompts[batch.index], kl, rtol=1e-6, atol=0)


@pytest.mark.parametrize("question", [*EXPERIMENTS, Moved()], ids=lambda each: each.name)
def test_hooks_that_change_the_run_are_refused(gpt2: Any, question: al.Question) -> None:
    hooks: Callable[..., Any] = lambda batch: al.isolate_labels(gpt2, batch, 0)  # noqa: E731
    batches = questions(gpt2, 2)
    message = f"{question.name} makes passes of its own, which do not have the hooks"
    with pytest.raises(MetricError, match=message), does_not_run(gpt2):
        al.run(gpt2, batches, [al.Accuracy(), question], hooks=hooks, **QUIET)


@dataclass(frozen=True)
class Wrong(al.Question):
    what: str = ""
    name: ClassVar = "wrong"
    record: ClassVar = al.records.AccuracyRecord

    def of_run(self, model: Any, batches: Sequence[al.PromptBatch]) -> Any:
        return None if self.what == "no question" else self

    def further(self, model: Any, batches: Sequence[al.PromptBatch]) -> Any:
        return {"a list": [], "no layer": al.Further(layers=[99])}.get(self.what, al.Further())

    def of_batch(self, passes: Passes, batch: al.PromptBatch) -> dict[str, Tensor]:
        if self.what == "not read":
            passes.seen(self)
        if self.what == "not declared":
            passes.further(self, batch)
        if self.what == "a list as key":
            passes.logits(batch, key=[1])  # type: ignore[arg-type]
        return {"correct": torch.ones(len(batch))} if self.what == "once" else {}

    def once(self, passes: Passes, contributions: Any) -> Any:
        return None


class NoFields(al.Record):
    x: Float[Tensor, " layer"] = al.kinds.mean("x")


@dataclass(frozen=True, eq=False, kw_only=True)
class OfLayers(al.Record):
    x: Float[Tensor, " layer"] = al.kinds.mean("x")


@dataclass(frozen=True)
class OfWrongShape(al.Metric):
    record: Any = OfLayers  # type: ignore[misc]
    name: ClassVar = "shape"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        return {"x": torch.zeros(len(batch), 3, 2)}


class NoRecord(al.Question):
    name = "bare"

    def of_batch(self, passes: Passes, batch: al.PromptBatch) -> dict[str, Tensor]:
        raise AssertionError("it runs")


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Wrong("no question"), "of_run of wrong must return the question that .*got a NoneType"),
        (Wrong("a list"), r"what further of wrong returns must be a Further; got \["),
        (Wrong("no layer"), r"layers must be numbers from 0 to 2.*got \[99\]"),
        (Wrong("nothing"), "no result for wrong: contributions must be a dict of tensors; got an"),
        (Wrong("not read"), "nothing is read for 'wrong' here: passes.seen.self. is for a questi"),
        (Wrong("not declared"), r"no metrics observe a further pass of 'wrong': .* al\.Further"),
        (Wrong("a list as key"), "key must be hashable, such as a string.*got a list"),
        (Wrong("once"), "what once of wrong returns must be a dict; got None"),
        (NoRecord(), "bare has no record; write into its class: record = YourRecord.*got a NoneT"),
        (OfWrongShape(NoFields), "NoFields, the record of shape, has no fields yet; write @datac"),
        (OfWrongShape(), r"shape: the result is no valid OfLayers: x is .* of the shape \(3, 2\)"),
    ],
)
def test_mistakes_in_a_question_are_told(gpt2: Any, question: Any, message: str) -> None:
    with pytest.raises(al.AnchorlensError, match=message):
        al.run(gpt2, questions(gpt2, 2), [question], **QUIET)


def test_a_context_that_lacks_something_says_what(gpt2: Any) -> None:
    empty = type("Empty", (al.contexts.Context,), {})()
    with pytest.raises(al.AnchorlensError, match="the context Empty needs query_pass"):
        empty.logits(gpt2, questions(gpt2, 2)[0])
    with pytest.raises(al.AnchorlensError, match="the context Empty needs size"):
        al.ContextComparison({"none": empty})


SITE = {"head": al.Site(0, 1)}
DRAWING: list[al.Question] = [
    *EXPERIMENTS,
    al.LabelHeads(draws=2),
    al.EdgeSweep.isolation({"first": al.Site(0)}, whole_words=True, draws=2, name="whole words"),
    al.EdgeSweep(al.edges.pq, {"all": al.Site(range(3))}, draws=2, name="keys"),
    al.EdgeSweep(al.edges.wp, SITE, control=al.edges.random_edges, draws=2, name="edges"),
    al.EdgeSweep(al.edges.wp, SITE, control=al.sites.random_heads, draws=2, name="heads"),
    scored(al.subsets.shapley(4), name="shapley"),
    al.ContextComparison(CONTEXTS, draws=2, repeats=0, control=random_tokens, name="tokens"),
]


@pytest.mark.slow("many passes")
def test_no_number_depends_on_the_order_of_queries(exact_gpt2: Any) -> None:
    """Draws depend on seeds, on demonstrations and on the texts of prompts, as is said of them."""
    examples, task, order = al.load_examples("questions"), al.TASKS["trec"], [2, 0, 1]
    demos = al.sample_demonstrations(examples, seed=1)
    queries = al.sample_queries(examples, 3, seed=2, exclude=demos)
    records = []
    for chosen in (queries, [queries[k] for k in order]):
        batches = al.build_prompts(exact_gpt2.tokenizer, task, demos, chosen, batch_size=2)
        records.append(al.run(exact_gpt2, batches, DRAWING, **QUIET))
    for name, record in records[0].items():
        for field, value in record.tensors().items():
            prompts = [slice(None) if axis != "prompt" else order for axis in record.axes()[field]]
            both = records[1][name].tensors()[field], value[tuple(prompts)] if prompts else value
            allowed: Any = {"rtol": 1e-9, "atol": 1e-10, "equal_nan": True}
            torch.testing.assert_close(*both, **allowed, msg=f"{field} of {name}")


def test_repeated_texts_are_one_case(exact_gpt2: Any) -> None:
    """Intervals are those of the texts themselves: copies make none of them narrower."""
    texts = torch.randint(5, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    records = []
    for copies in (1, 3):
        segments = [[0] * 5 + [1] * 4] * 4 * copies
        batch = al.PromptBatch.from_segments(texts.repeat(copies, 1), segments, ["a", "b"])
        asked = al.SegmentFlows(weight=al.weights.attention)
        records.append(ask(exact_gpt2, [batch], asked, resamples=30, progress=False))
    one, several = records
    assert several.info["units"] == 4 and several.info["prompts"] == 12
    torch.testing.assert_close(several.total, one.total)
    for name, bounds in one.intervals.items():
        found = several.intervals[name]
        torch.testing.assert_close(found, bounds, equal_nan=True, msg=f"interval of {name}")
