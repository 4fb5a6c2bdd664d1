"""What must not matter to a number, and what must, in one table: a new question is one row.

Whole prompts in one batch are the reference. Tokens that prompts share may run once, long prompts
without a pattern, blocks again in the backward pass, in other batches, in another order, and with
padding on the other side: the numbers are the same. A run that goes on in its folder computes only
what is missing there, bit for bit, and other settings and prompts are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.runs import way
from anchorlens.system import row_pieces
from tests.ablation.test_likelihood import written
from tests.conftest import shared
from tests.experiments import test_head_effects, test_retrieval_heads
from tests.questions.test_edge_sweep import forerunners_read
from tests.questions.test_faithfulness import weights_of
from tests.questions.test_questions import Moved
from tests.references import plain
from tests.runs.test_hooks_on_edges import CUTS, OTHERS, Change, by_length, longer_queries
from tests.support.asked import scored
from tests.support.measures import assert_same, difference, hooks_on
from tests.support.own_parts import EveryRead
from tests.support.printed_code import printed
from tests.support.tiny_models import questions

pytestmark = pytest.mark.filterwarnings(
    *("ignore:some pairs of classes have no prompts", "ignore:in layers", "ignore:in .* of .* set"),
    *("ignore:1 queries are in both", "ignore:the answers of"),
)
BOTH = ("gpt2", "gemma3")
Records = Mapping[str, al.Record]
Batches = list[al.PromptBatch]


@dataclass(frozen=True)
class Cut:
    batch_size: int = 12
    padding_side: Any = "right"
    reverse: bool = False

    def questions(self, model: Any, count: int = 3, seed: int = 1) -> Batches:
        return self.of(partial(questions, model, count, seed))

    def of(self, build: Callable[..., Batches]) -> Batches:
        batches = build(batch_size=self.batch_size, padding_side=self.padding_side)
        return batches[::-1] if self.reverse else batches


def of_one_set(model: Any, cut: Cut) -> Batches:
    return cut.questions(model)


def of_two_sets(model: Any, cut: Cut) -> Batches:
    return cut.questions(model, 2) + cut.questions(model, 2, seed=7)


def of_a_set_and_one_prompt(model: Any, cut: Cut) -> Batches:
    return cut.questions(model, 2) + cut.questions(model, 1, seed=7)


def of_long_and_short_queries(model: Any, cut: Cut) -> Batches:
    batches = cut.questions(model, 6)
    assert {True, False} == {each for batch in batches for each in longer_queries(batch).tolist()}
    return batches


def of_segments(model: Any, cut: Cut) -> Batches:
    """Prompts that share no tokens."""
    return cut.of(partial(test_retrieval_heads.documents, model))


def of_answers(model: Any, cut: Cut) -> Batches:
    batch = written(model, cut.padding_side)
    return [batch.prompts(0, 2)] if cut.batch_size > 2 else [batch.prompt(1), batch.prompt(0)]


@dataclass(frozen=True)
class Asked:
    questions: Sequence[al.Question]
    hooks: Change | None = None
    prompts: Callable[[Any, Cut], Batches] = of_one_set
    loss: Any = al.losses.label_cross_entropy

    def __call__(self, model: Any, cut: Cut, **options: Any) -> Records:
        options |= {"loss": self.loss, "progress": False}
        if self.hooks is not None:
            options["hooks"] = partial(self.hooks, model)
        batches = self.prompts(model, cut)
        return al.run(model, batches, self.questions, **options)


Call = Callable[..., Records]  # of a model, a cut and the options of a run


@dataclass(frozen=True)
class Row:
    """A call, and what must be another run in its folder.

    ``shares`` and ``fuses`` say whether tokens run once, and long prompts without a pattern: where
    they do not, these ways are the reference itself. None is for records that do not say it.
    """

    call: Call
    others: Sequence[Call] = ()
    models: Sequence[str] = ("gpt2",)
    shares: bool | None = True
    fuses: bool | None = True


def asking(question: Any, *changes: dict[str, Any], prompts: Any = of_one_set, **row: Any) -> Row:
    """A question, and the same question with other settings."""
    others = [Asked([replace(question, **change)], prompts=prompts) for change in changes]
    return Row(Asked([question], prompts=prompts), others, **row)


def head_effects(model: Any, cut: Cut, of_mean: slice = slice(3), **options: Any) -> Records:
    """Shuffled labels differ by set."""
    prompts, mixed = partial(test_head_effects.prompts, model), test_head_effects.MIXED
    shuffled = prompts(slice(6, 9), mixed, (0, 1), **built(cut))
    right = prompts(of_mean, **built(cut))
    return {"head_effects": al.head_effects(model, right, shuffled, progress=False, **options)}


def task_vectors(model: Any, cut: Cut, tested: slice = slice(3, 9), **options: Any) -> Records:
    prompts, how = test_head_effects.prompts, built(cut)
    asked = prompts(model, tested, seeds=(0, 1), **how)
    read = prompts(model, slice(3), **how)
    return {"task_vectors": al.task_vectors(model, read, asked, progress=False, **options)}


def retrieval_heads(model: Any, cut: Cut, null: str = "N/A", **options: Any) -> Records:
    prompts = test_retrieval_heads.demonstrations
    batches, others = prompts(model, **built(cut)), prompts(model, [null] * 5, **built(cut))
    record = al.retrieval_heads(model, batches, others, progress=False, **options)
    return {"retrieval_heads": record}


def retrieval_from_documents(model: Any, cut: Cut, **options: Any) -> Records:
    prompts, right = test_retrieval_heads.documents, test_retrieval_heads.RIGHT
    batches, others = prompts(model, **built(cut)), prompts(model, " N/A", **built(cut))
    record = al.retrieval_heads(model, batches, others, right=right, progress=False, **options)
    return {"retrieval_heads": record}


def label_dependence(model: Any, cut: Cut, of: slice = slice(5), **options: Any) -> Records:
    """In its own batches; names of relabelings may have a slash."""
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    asked = [example for example in examples if example not in demos][of]
    how = {"gold": al.relabeling.gold, "gold/again": al.relabeling.gold}
    options |= {"batch_size": cut.batch_size, "progress": False}
    record = al.label_dependence(model, al.TASKS["trec"], demos, asked, how, **options)
    return {"label_dependence": record}


def at_target(model: Any, batch: al.PromptBatch) -> Any:
    """Hooks that do nothing in the tokens that prompts share."""
    targets = batch.target_positions[:, None].expand(-1, 6)
    return al.isolate_labels(model, replace(batch, label_positions=targets), 0)


def reweighted(model: Any, batch: al.PromptBatch) -> Any:
    return al.reweight_anchors(model, batch, BETA)


STATES = "blocks.{}.hook_resid_post"
Read = Callable[[al.PromptBatch], Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class NumbersRecord(al.Record):
    total: Float[torch.Tensor, " layer"] = al.kinds.mean("total")
    numbers: Float[torch.Tensor, "prompt layer number"] = al.kinds.of_prompts("numbers")


@dataclass(frozen=True)
class Numbers(al.Metric):
    read: Read
    name: str = "numbers"
    record: ClassVar[type[al.Record]] = NumbersRecord

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"it": self.read(batch)}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, torch.Tensor]:
        numbers = seen["it"].flatten(2)
        return {"numbers": numbers, "total": numbers.sum(2)}


def first_forerunner(batch: al.PromptBatch) -> torch.Tensor:
    return al.edges.forerunners(batch).cumsum(1).eq(1) & al.edges.forerunners(batch)


def target_then_labels(batch: al.PromptBatch) -> torch.Tensor:
    return torch.cat([batch.target_positions[:, None], batch.label_positions], dim=1)


def largest_of_rows(batch: al.PromptBatch, block: al.reads.Block) -> torch.Tensor:
    is_token = batch.attention_mask[:, block.rows].to(block.pattern)
    return torch.einsum("bhq,bq->b", block.pattern.amax(3), is_token)[:, None]


def most_attended(block: al.reads.Block) -> torch.Tensor:
    """The sum of all rows decides, so that those of a part say nothing."""
    return block.pattern.sum(2).amax(2)


def early(batch: al.PromptBatch) -> torch.Tensor:
    """A position of the demonstrations, which differs between prompts."""
    return (9 + batch.index % 3)[:, None]


def first_labels(batch: al.PromptBatch) -> torch.Tensor:
    """As many positions of the demonstrations, but each prompt has them in an order of its own."""
    pairs = zip(batch.index.tolist(), batch.label_positions, strict=True)
    return torch.stack([labels.roll(number) for number, labels in pairs])


# A read by its name.
READS: dict[str, Read] = {
    "labels": lambda batch: al.reads.At("pattern", al.edges.anchors, first_forerunner),
    "slopes": lambda batch: al.reads.At("slope", batch.label_positions, first_forerunner),
    "states": lambda batch: al.reads.At(STATES, al.edges.anchors),
    "in any order": lambda batch: al.reads.At(STATES, target_then_labels(batch)),
    "rows": lambda batch: al.reads.Blocks(partial(largest_of_rows, batch)),
    "layers": lambda batch: al.reads.Blocks(most_attended, whole=True),
    "differing pattern": lambda batch: al.reads.At("pattern", early(batch), first_forerunner),
    "differing states": lambda batch: al.reads.At(STATES, first_labels(batch)),
    "differing keys": lambda batch: al.reads.At("keys", early(batch)),
    "differing slope": lambda batch: al.reads.At("slope", early(batch), first_forerunner),
    "differing keys of target": lambda b: al.reads.At("pattern", al.edges.target, first_labels(b)),
}
# For these, prompts share no tokens, and for that one long prompts have a pattern.
OF_WHOLE_PROMPTS = {"rows", "layers", "differing pattern", "differing states", "differing keys"}
OF_WHOLE_PROMPTS |= {"differing slope"}
OF_WHOLE_PATTERNS = {"layers"}


def anchors_before_long_queries(batch: al.PromptBatch) -> torch.Tensor:
    """The shared tokens alone do not show which prompts have long queries."""
    return al.edges.anchors(batch) & longer_queries(batch)[:, None]


def other_demonstrations(batch: al.PromptBatch) -> torch.Tensor:
    return al.edges.demonstrations(batch) & ~al.edges.anchors(batch)


def labels_read_forerunners(batch: al.PromptBatch) -> torch.Tensor:
    return al.edges.between(al.edges.anchors(batch), al.edges.forerunners(batch))


def start_of_query(batch: al.PromptBatch) -> torch.Tensor:
    return al.edges.at(batch, batch.query_start[:, None])


def built(cut: Cut) -> dict[str, Any]:
    return {"batch_size": cut.batch_size, "padding_side": cut.padding_side}


SEGMENTS = ["text", "label", "target"]
METRICS: list[al.Question] = [
    al.SaliencyFlows(),
    al.SaliencyFlows(weight=al.weights.saliency_of_heads, name="of heads"),
    al.SegmentFlows(SEGMENTS),
    al.SegmentAttention(SEGMENTS, apart=1),
    al.AttentionAUCROC(),
    al.AnchorDistances(2),
    al.LabelHeads(draws=2),
    al.Accuracy(),
]
OF_SETS = [question for question in METRICS if question.name != "anchor_distances"]
OF_TEXTS: list[al.Question] = [al.SegmentFlows(), al.SegmentAttention()]
WORDS = [[300 + label, *range(310, 310 + label % 3)] for label in range(6)]  # of 1 to 3 tokens
WITH_LOSS: list[al.Question] = [al.SegmentFlows(), al.SaliencyFlows()]
SITES = {"first": al.Site(0), "head": al.Site([1, 2], heads=1), "last": al.Site(-1)}
OTHER_SITES = [
    *(al.Site(1), al.Site(0, heads=0)),
    *(al.Site(0, renormalize=False), al.Site(0, keep_bos=True)),
]
WHOLE_WORDS = al.EdgeSweep.isolation(SITES, whole_words=True)
PARTS = {"anchors": anchors_before_long_queries, "rest": other_demonstrations}
DIFFERING: dict[al.Question, bool] = {  # whether sums are of each batch anew
    al.SaliencyFlows(edges={"long": by_length, "pq": al.edges.pq}): True,
    al.SegmentFlows(PARTS): True,
    al.SegmentAttention(PARTS, apart=1): False,
}
# Queries begin alike, with tokens that run once until they are removed.
BESIDE_TEXT: dict[str, Any] = {
    "start": start_of_query,
    "rest": lambda batch: al.edges.query(batch) & ~start_of_query(batch),
    "text": partial(al.edges.segment, name="text"),
}
BETA = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
SUPPRESSION = printed("own_question.md", "Suppression")
SCORES: dict[str, Any] = {
    "given": weights_of(3, 6),
    "signed": al.SegmentFlows(weight=al.weights.helpful),
    "one by one": al.subsets.one_by_one,
}
CONTEXTS: dict[str, Any] = {"none": al.contexts.NoContext(), "anchors only": al.compress}
LASSO = al.subsets.lasso(8)
KEPT = partial(al.compress, select=al.contexts.selection.everything)

UNSAID: dict[str, Any] = {"shares": None, "fuses": None}
ROWS: dict[str, Row] = {
    "metrics": Row(Asked(METRICS), models=BOTH),
    "metrics of several sets": Row(Asked(OF_SETS, prompts=of_two_sets)),
    "metrics of a set of one prompt": Row(Asked(OF_SETS, prompts=of_a_set_and_one_prompt)),
    "metrics of texts": Row(
        Asked(OF_TEXTS, prompts=of_segments, loss=al.losses.span_cross_entropy("query")),
        shares=False,
    ),
    "changed metrics": Row(Asked([*METRICS, al.Loyalty()], CUTS["detached and cut"]), models=BOTH),
    **{name: Row(Asked([METRICS[0], METRICS[-1]], cut)) for name, cut in CUTS.items()},
    **{name: Row(Asked([METRICS[0]], other), fuses=False) for name, other in OTHERS.items()},
    "scale in other models": Row(
        Asked(
            [METRICS[0]],
            lambda m, b: (
                al.scale_edges(m, b, al.edges.wp, 0.3, 0)
                + al.scale_edges(m, b, al.edges.wp, 0.3, al.Site([1, 2], renormalize=False))
            ),
        ),
        models=("gemma3",),
        fuses=False,
    ),
    "at the target": Row(Asked([al.Loyalty()], at_target)),
    "reweighted": Row(Asked([al.Loyalty()], reweighted), fuses=False),
    "loss of a span": Row(Asked(WITH_LOSS, loss=al.losses.span_cross_entropy("target"))),
    "loss of words": Row(Asked(WITH_LOSS, loss=al.losses.word_cross_entropy(WORDS)), fuses=False),
    "loss of what would be shared": Row(
        Asked(WITH_LOSS, loss=al.losses.span_cross_entropy("label")), shares=False
    ),
    **{
        name: Row(
            Asked([Numbers(read)], prompts=of_two_sets),
            shares=name not in OF_WHOLE_PROMPTS,
            fuses=name not in OF_WHOLE_PATTERNS,
        )
        for name, read in READS.items()
    },
    **{
        f"{question.name} that differs": Row(
            Asked([question], prompts=of_long_and_short_queries), shares=shares
        )
        for question, shares in DIFFERING.items()
    },
    "every read": Row(Asked([EveryRead(has_hooks=False)], prompts=of_two_sets)),
    "every read and hooks": Row(Asked([EveryRead(has_hooks=True)]), shares=False),
    "every read of a changed run": Row(
        Asked([EveryRead(has_hooks=False), al.Loyalty()], CUTS["a named set"], of_two_sets)
    ),
    "prefix effect": asking(al.PrefixEffect(), {"rows": al.edges.target}, models=("gpt2", "llama")),
    "isolation": asking(
        al.EdgeSweep.isolation(SITES, draws=2),
        *({"draws": 1}, {"seed": 1}, {"edges": WHOLE_WORDS.edges}),
        models=BOTH,
    ),
    "edges": asking(
        al.EdgeSweep(al.edges.pq, SITES, draws=1),
        {"edges": forerunners_read},
        {"control": al.edges.random_edges},
        *({"sites": SITES | {"first": site}} for site in OTHER_SITES),
        models=("llama",),
    ),
    "edges of labels": asking(al.EdgeSweep(labels_read_forerunners, SITES, draws=2)),
    "read forerunners": asking(al.EdgeSweep(forerunners_read, SITES, draws=2)),
    "a question of one's own": asking(Moved(), {"layers": (2,)}, prompts=of_two_sets),
    "integrated flows": asking(al.IntegratedFlows(["label"], steps=2), {"steps": 3}, shares=False),
    "parts of scores": asking(
        al.ScoreParts(1, heads=[0]), *({"layer": 0}, {"heads": [1]}, {"by": "head"}), shares=False
    ),
    "suppression": asking(SUPPRESSION(("label", "query")), {"segments": ("label",)}, models=BOTH),
    "attribution": asking(scored(LASSO, seed=3), {"scores": {"lasso": al.subsets.lasso(9)}}),
    "attribution by text": asking(scored(LASSO, segments=BESIDE_TEXT, remove=al.removal.text)),
    "attribution of an answer": asking(scored(answer="answer"), prompts=of_answers, shares=False),
    "faithfulness": asking(
        al.Faithfulness(SCORES, subsets=8),
        *({"top": 2}, {"scores": SCORES | {"one by one": al.subsets.lasso(8)}}),
        {"scores": SCORES | {"given": weights_of(3, 6, seed=1)}},
    ),
    "contexts": asking(
        al.ContextComparison(CONTEXTS, draws=2, repeats=1),
        {"contexts": dict(reversed(CONTEXTS.items()))},
        {"contexts": CONTEXTS | {"anchors only": KEPT}},
        {"draws": 1},
        {"seed": 1},
        {"positions": al.contexts.placement.restarted},
    ),
    "head effects": Row(head_effects, [partial(head_effects, of_mean=slice(3, 6))], fuses=False),
    "task vectors": Row(task_vectors, [partial(task_vectors, tested=slice(9, 15))], **UNSAID),
    "retrieval heads": Row(retrieval_heads, [partial(retrieval_heads, null="Nothing")]),
    "retrieval from documents": Row(retrieval_from_documents, shares=False),
    "label dependence": Row(
        label_dependence, [partial(label_dependence, of=slice(1, 6))], **UNSAID
    ),
}


@pytest.fixture
def exact(of: str, request: pytest.FixtureRequest, hooked: Any) -> Any:
    return shared(request, of, exact=True)


@pytest.fixture(scope="module")
def references() -> dict[Any, Records]:
    return {}


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pattern counts as large, and its rows come in several pieces."""
    monkeypatch.setattr(way, "LARGE", 0)
    monkeypatch.setattr(row_pieces, "PIECE", 20_000)


def whole_prompts(name: str, model: Any, large: int = 2**31, **options: Any) -> Records:
    """The records of whole prompts in one batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(way, "shared_lengths", lambda *of, **least: {})
        patch.setattr(way, "LARGE", large)
        records = ROWS[name].call(model, Cut(), resamples=3, **options)
    assert all(each.startswith("off") for each in said(records, "shared_prefix"))
    return records


def as_whole_prompts(
    name: str, of: str, model: Any, references: Any, cut: Cut, tolerance: float = 1e-9
) -> Records:
    before = hooks_on(model), implementation_of(model)
    # The softmax of GPT-2 is in the type of the model, and others are in float32.
    with nullcontext() if of == "gpt2" else plain.everything_in_float64():
        if (name, of) not in references:
            references[name, of] = whole_prompts(name, model)
        records = ROWS[name].call(model, cut, resamples=3)
    same(records, references[name, of], tolerance)
    assert (hooks_on(model), implementation_of(model)) == before
    return records


def check_other_batches(name: str, of: str, model: Any, known: Any, tolerance: float) -> None:
    cut = Cut(2, "left", reverse=True)
    records = as_whole_prompts(name, of, model, known, cut, tolerance)
    shares = {"run once" in each for each in said(records, "shared_prefix")}
    assert shares == {ROWS[name].shares} - {None}


def same(ours: Records, theirs: Records, tolerance: float) -> None:
    """The same values and intervals, but for what was timed, and rounding that a record shows."""
    assert [*ours] == [*theirs]
    for name, record in ours.items():
        other = theirs[name]
        left_out = {n for n in other.tensors() if "seconds" in n or n == "invariance"}
        theirs_there: Any = {name: getattr(other, name) for name in left_out}
        assert_same(replace(record, **theirs_there), other, tolerance)
        for field, bounds in record.intervals.items():
            both = [values.nan_to_num() for values in (bounds, other.intervals[field])]
            assert difference(*both) <= tolerance, (name, field)


def implementation_of(model: Any) -> str:
    original = getattr(model, "original_model", None)
    return "" if original is None else str(original.config._attn_implementation)


def said(records: Records, what: str) -> list[str]:
    return [record.info[what] for record in records.values() if what in record.info]


EVERY = [(name, model) for name, row in ROWS.items() for model in row.models]
IN_EVERY_KIND = ["metrics", "changed metrics", *CUTS, *OTHERS, "isolation", "read forerunners"]
IN_EVERY_KIND += ["reweighted", "loss of a span", "loss of words", "metrics of texts"]


@pytest.mark.slow_cases("many passes", "llama", "gemma3")
@pytest.mark.every_kind
@pytest.mark.parametrize(("name", "of"), [case for case in EVERY if case[0] in IN_EVERY_KIND])
def test_in_every_kind_of_model_shared_tokens_batches_order_and_padding_change_nothing(
    name: str, of: str, exact: Any, references: dict[Any, Records], kind_of_model: str
) -> None:
    tolerance = 1e-9 if kind_of_model == "bridge" else 1e-6
    check_other_batches(name, of, exact, references, tolerance)


@pytest.mark.slow_cases(
    *("many passes", "llama", "gemma3", "faithfulness", "contexts", "integrated", "several sets"),
    *("edges of labels", "attribution", "prefix effect", "suppression"),
)
@pytest.mark.parametrize(("name", "of"), [case for case in EVERY if case[0] not in IN_EVERY_KIND])
def test_shared_tokens_batches_order_and_padding_change_nothing(
    name: str, of: str, exact: Any, references: dict[Any, Records]
) -> None:
    check_other_batches(name, of, exact, references, 1e-9)


@pytest.mark.slow_cases(
    *("many passes", "llama", "gemma3", "metrics-", "faithfulness", "forerunners"),
    *("isolation", "edges of labels", "retrieval", "task vectors", "contexts", "attribution"),
    *("several sets", "integrated", "head effects"),
)
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(("name", "of"), EVERY)
def test_long_prompts_have_the_numbers_of_whole_patterns(
    name: str, of: str, exact: Any, references: dict[Any, Records]
) -> None:
    records = as_whole_prompts(name, of, exact, references, Cut(2))
    fuses = {each.startswith("fused: ") for each in said(records, "attention")}
    assert fuses == {ROWS[name].fuses} - {None}


CHECKPOINTED = [*(("metrics", of) for of in BOTH), ("changed metrics", "gpt2")]
CHECKPOINTED += [("metrics of texts", "gpt2"), ("every read and hooks", "gpt2")]


@pytest.mark.slow_cases("many passes", "-0", "llama", "gemma3")
@pytest.mark.parametrize("large", [0, 2**31])
@pytest.mark.parametrize(("name", "of"), CHECKPOINTED)
def test_blocks_that_run_again_for_their_gradient_change_nothing(
    name: str, large: int, exact: Any
) -> None:
    once = whole_prompts(name, exact, large)
    same(whole_prompts(name, exact, large, gradient_checkpointing=True), once, 1e-12)


STORED = [(name, row.models[0], False) for name, row in ROWS.items() if row.others]


@pytest.mark.quick_cases("many passes", "suppression")
@pytest.mark.parametrize(
    ("name", "of", "is_long"), [*STORED, ("metrics", "gpt2", False), ("metrics", "gpt2", True)]
)
def test_a_run_goes_on_with_what_is_missing_and_refuses_other_settings(
    name: str, is_long: bool, exact: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    row = ROWS[name]
    options: dict[str, Any] = {"resamples": 3, "folder": tmp_path}
    if is_long:  # each prompt has a file
        request.getfixturevalue("long")

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*")}

    whole = row.call(exact, Cut(2), **options)
    stored = written()
    last = max(stored)
    last.unlink()
    same(row.call(exact, Cut(2), **options), whole, 0)
    now = written()
    assert [path for path in now if now[path] != stored[path]] == [last]
    for other in row.others:
        with pytest.raises(StoreError, match="another run"):
            other(exact, Cut(2), **options)
    assert written() == now
