"""What a function of the user returns is compared, where it is received, with what it must give."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from jaxtyping import Float

import anchorlens as al
from anchorlens.errors import AnchorlensError
from anchorlens.system.arguments import called
from tests.support.asked import scored
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
NONE = al.contexts.NoContext()
PAPER = al.load_examples("questions")
Given = Callable[..., Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class OneRecord(al.Record):
    caption: ClassVar[str] = "One number."
    one: Float[torch.Tensor, ""] = al.kinds.mean("one")


class Shown(OneRecord):
    given: ClassVar[dict[str, Given]] = {}

    def plot(self) -> go.Figure:
        return self.given.get("plot", go.Figure)()

    def table(self) -> pd.DataFrame:
        return self.given.get("table", pd.DataFrame)()

    def answer(self, unable: str) -> Any:
        return self.given.get("answer", lambda: None)()


@dataclass(frozen=True)
class Asked(al.Metric):
    given: Any
    name: str = "asked"
    record: ClassVar[type[al.Record]] = OneRecord

    def reads(self, batch: al.PromptBatch) -> Any:
        return self.given.get("reads", lambda batch: {})(batch)

    def contributions(self, batch: al.PromptBatch, seen: Any) -> Any:
        return self.given.get("contributions", lambda *_: {"one": torch.ones(len(batch))})()

    def of_run(self, model: Any, batches: Any) -> Any:
        return self.given.get("of_run", lambda: self)()

    def further(self, model: Any, batches: Any) -> Any:
        return self.given.get("further", al.Further)()

    def once(self, passes: Any, contributions: Any) -> Any:
        return self.given.get("once", dict)()

    def result(self, contributions: Any) -> Any:
        return self.given.get("result", lambda: OneRecord.of(contributions))()


@dataclass(frozen=True)
class Own(al.contexts.Context, al.contexts.Trainable):
    given: Any

    @property
    def size(self) -> Any:
        return self.given.get("size", lambda: 0)()

    @property
    def parameters(self) -> Any:
        return self.given["parameters"]()

    def query_pass(self, model: Any, batch: al.PromptBatch) -> Any:
        return self.given.get("query_pass", lambda: NONE.query_pass(model, batch))()


def asked(name: str, *inside: str) -> Any:
    def call(model: Any, batches: Any, given: Given) -> Any:
        made = (lambda *_: {inside[0]: given()}) if inside else given
        return al.run(model, batches, [Asked({name: made})], **QUIET)

    return call


def of_reads(read: Callable[[Given], Any]) -> Any:
    def call(model: Any, batches: Any, given: Given) -> Any:
        metric = Asked({"reads": lambda batch: {"it": read(given)}})
        return al.run(model, batches, [metric], **QUIET)

    return call


def asks(question: Callable[[Given], Any], **options: Any) -> Any:
    return lambda model, batches, given: al.run(model, batches, [question(given)], **QUIET)


def of_kind(declare: Callable[[Given], Any]) -> Any:
    def call(model: Any, batches: Any, given: Given) -> Any:
        @dataclass(frozen=True, eq=False, kw_only=True)
        class OfKind(OneRecord):
            other: Float[torch.Tensor, ""] = declare(given)

        metric = Asked({"result": lambda: None})
        object.__setattr__(metric, "result", OfKind.of)
        return al.run(model, batches, [metric], **QUIET)

    return call


def compressed(**options: Callable[[Given], Any]) -> Any:
    def call(model: Any, batches: Any, given: Given) -> Any:
        return al.compress(model, batches[0], **{k: of(given) for k, of in options.items()})

    return call


def reported(name: str) -> Any:
    def call(model: Any, batches: Any, given: Given, path: Any) -> Any:
        kind = type("Shown", (Shown,), {"given": {name: given}})
        return al.write_report({"shown": kind(one=torch.ones(()))}, path / "page.html")

    return call


def keys_norm(cache: Any, seen: Any) -> torch.Tensor:
    return cache.keys[1].norm(dim=-1)


TWO: Any = {"segments": ["text", "label"]}
ROWS: dict[str, Any] = {
    "hooks": lambda m, b, f: al.target_logits(m, b, hooks=f, progress=False),
    "a hook": lambda m, b, f: al.target_logits(
        m, b, hooks=lambda batch: [("blocks.0.attn.hook_pattern", f)], progress=False
    ),
    "loss": lambda m, b, f: al.saliency(m, b[0], loss=f),
    "weights of a loss": lambda m, b, f: al.saliency(
        m, b[0], loss=al.losses.next_token_cross_entropy(f)
    ),
    "weight": asks(lambda f: al.SegmentFlows(weight=f)),
    "weight of values": asks(lambda f: al.SegmentFlows(weight=al.weights.WithValues(f))),
    "weight of maps": lambda m, b, f: al.saliency(m, b[0], weight=f),
    "segments": asks(lambda f: al.SegmentFlows({"a": f})),
    "rows": asks(lambda f: al.PrefixEffect(rows=f)),
    "edges": lambda m, b, f: al.block_edges(m, b[0], f),
    "control": asks(lambda f: al.EdgeSweep(al.edges.pq, {"a": al.Site(0)}, control=f, draws=1)),
    "remove": asks(lambda f: scored(al.subsets.one_by_one, remove=f, **TWO)),
    "draw": asks(lambda f: scored(al.subsets.Method("x", f, lambda kept, y: y[:2]), **TWO)),
    "scores": asks(
        lambda f: scored(
            al.subsets.Method("x", lambda count, generator: torch.eye(count) > 0, f), **TWO
        )
    ),
    "a score": asks(lambda f: al.Faithfulness({"mine": f}, **TWO)),
    "reads": asked("reads"),
    "positions": of_reads(lambda f: al.reads.At("pattern", f)),
    "blocks": of_reads(lambda f: al.reads.Blocks(f)),
    "contributions": asked("contributions"),
    "contributions of caches": lambda m, b, f: al.caches.from_caches(
        [Asked({"contributions": f})], b, ((torch.ones(len(each), 9), {}) for each in b)
    ),
    "a contribution": asked("contributions", "one"),
    "result": asked("result"),
    "of_run": asked("of_run"),
    "further": asked("further"),
    "once": asked("once"),
    "info of once": asked("once", "info"),
    "a mean": of_kind(lambda f: al.kinds.mean(f)),
    "a statistic": of_kind(lambda f: al.kinds.statistic(f)),
    "a ratio": of_kind(lambda f: al.kinds.ratio(f)),
    "a derived field": of_kind(lambda f: al.kinds.derived(f)),
    "a table of a record": of_kind(lambda f: al.kinds.table(f)),
    "a context's maker": asks(lambda f: al.ContextComparison({"mine": f}, draws=1, repeats=1)),
    "query_pass": lambda m, b, f: Own({"query_pass": f}).logits(m, b[0]),
    "size": asks(lambda f: al.ContextComparison({"mine": Own({"size": f})}, draws=1, repeats=1)),
    "parameters": lambda m, b, f: al.contexts.train_context(
        m,
        Own({"parameters": f}),
        b[:1],
        al.contexts.Training(steps=1, progress=False),
        held_out=b[1:],
    ),
    "optimizer": lambda m, b, f: al.contexts.train_reweighting(
        m, b, al.contexts.Training(steps=1, optimizer=f, progress=False)
    ),
    "select": compressed(select=lambda f: f),
    "placement": compressed(positions=lambda f: f),
    "the keys' positions": compressed(positions=lambda f: lambda selected: (f(), 3)),
    "the query's position": compressed(
        positions=lambda f: lambda selected: (selected.nonzero()[:, 0], f())
    ),
    "score of keys": compressed(select=lambda f: al.contexts.selection.ByScore(f, keep=60)),
    "keep": compressed(select=lambda f: al.contexts.selection.ByScore(keys_norm, keep=f)),
    "score of words": lambda m, b, f: al.Task("{text}:{label}", [[" a", " b"], [" c"]], score=f),
    "how": lambda m, b, f: al.relabeling.relabel(PAPER[:6], al.TASKS["trec"], f),
    "demonstrations of how": lambda m, b, f: al.relabeling.relabel(
        PAPER[:6], al.TASKS["trec"], lambda task, demonstrations: (task, f())
    ),
    "plot": reported("plot"),
    "table": reported("table"),
    "answer": reported("answer"),
}


def ended() -> Any:
    return next(iter(()))


LINE = ended.__code__.co_firstlineno + 1
ENDED = re.compile(rf"ended \(.*test_bad_returns\.py, line {LINE}\) raised StopIteration")

WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "text",
    "object": object,
    "generator": lambda: (number for number in (1, 2)),
    "complex": lambda: torch.tensor([[[[[[1.0, 2.0]]]]]]).to(torch.complex64),
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "ended": ended,
}
MAY_BE_NONE = ("a hook", "answer")  # it changes nothing, or says nothing


@pytest.mark.slow_cases("many passes", "size")
@pytest.mark.parametrize("name", ROWS)
def test_what_does_not_fit_raises_an_error_of_the_package(
    name: str, gpt2: Any, tmp_path: Any
) -> None:
    batches, call = questions(gpt2, 4, batch_size=2), ROWS[name]
    path = {"path": tmp_path} if name in ("plot", "table", "answer") else {}
    for kind, wrong in WRONG.items():
        if kind == "None" and name in MAY_BE_NONE:
            continue
        with pytest.raises(AnchorlensError) as error:
            call(gpt2, batches, lambda *_, **__: wrong(), **path)  # noqa: B023
        if wrong is ended and name != "optimizer":
            assert ENDED.search(str(error.value)), name
        # A run names errors that are none of the package by their type.
        assert not re.search(r"no result for \w+: \w*Error: ", str(error.value)), (name, kind)


class Later(torch.optim.SGD):
    """An optimizer that ends after the trial of a training, which is of one number."""

    def step(self, closure: Any = None) -> Any:
        return ended() if self.param_groups[0]["params"][0].numel() > 1 else None


def test_a_step_whose_iterator_ended_is_named(gpt2: Any) -> None:
    first, second = questions(gpt2, 2, batch_size=1)
    training = al.contexts.Training(steps=1, optimizer=Later, progress=False)
    with pytest.raises(AnchorlensError, match=ENDED):
        al.train_prefix(gpt2, [first], training, held_out=[second], length=2)
    assert torch.is_grad_enabled()


def test_what_users_build_has_the_types_of_its_fields(gpt2: Any) -> None:
    built: list[Callable[[], Any]] = [
        lambda: al.contexts.KeyValues(3, (), torch.ones(1, 1) > 0, torch.ones(1), 1),  # type: ignore[arg-type]
        lambda: al.contexts.QueryPass(questions(gpt2, 2)[0], None, hooks=3),  # type: ignore[arg-type]
        lambda: al.reads.EdgeSets([]),
        lambda: al.reads.EdgeSets([torch.ones(1, 2, 2) > 0]),  # type: ignore[list-item]
    ]
    for build in built:
        with pytest.raises(AnchorlensError, match=r"(must be a list of|takes sets of) .*; got "):
            build()


def test_a_mistake_inside_a_function_of_the_user_is_their_own() -> None:
    def add(pattern: Any, gradient: Any) -> Any:
        return pattern + "1"

    with pytest.raises(TypeError, match="unsupported operand"):
        called("weight", add, "(pattern, gradient)", 1, 2)
    with pytest.raises(al.errors.ArgumentError, match=r"a function of \(pattern\); got add, which"):
        called("weight", add, "(pattern)", 1)
