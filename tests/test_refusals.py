"""What cannot be answered is refused before any pass, in words that say what came and the cure.

A row is a call, what is wrong in it, and words of the message. A refusal that needs much of its
own before it stays beside what it needs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens import edges, errors
from anchorlens.contexts import hard_prompts, selection
from anchorlens.contexts.selection import by_score
from anchorlens.contexts.stored import key_values_at_start
from anchorlens.errors import AnchorlensError, DataError, HookError, MetricError, PromptError
from anchorlens.passes.forward import run_pass
from anchorlens.prompts.prompt_html import token_spans
from anchorlens.prompts.segment_names import OTHER
from anchorlens.questions import edge_sweep
from tests.support.asked import ask, scored
from tests.support.measures import does_not_run
from tests.support.tiny_models import LONG_LABELS, questions, raw_model, tiny_gpt2, tiny_llama
from tests.support.trained_contexts import CONTEXTS, TRAINERS, split, trained
from tests.support.unchanged import changed, state_of

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
NAN, INF = float("nan"), float("inf")
METRICS: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(5)]
SST2, TREC = al.TASKS["sst2"], al.TASKS["trec"]
BAD, GOOD = al.Example("bad", 0), al.Example("good", 1)
LABELS = [" Negative", " Positive"]
SEVERAL = [[" Negative", " Sad"], [" Positive"]]
DEMOS = al.sample_demonstrations(al.load_examples("questions"), seed=1)
BARE = [al.Example("", 0), *(al.Example("What is it?", k) for k in range(1, 6))]
PIECES = [("document", "The museum opens at ten. "), ("question", "When does it open? At")]
OWN: dict[str, Any] = {
    "tokens": torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30], [0, 0, 17, 4, 25, 9, 60, 12, 33]]),
    "segments": [[0, 0, 0, -1, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 1, 1, 2, 2, 2]],
    "names": ["question", "step", "answer"],
    "attention_mask": torch.tensor([[1] * 9, [0, 0, *[1] * 7]]),
}
FIRST = al.PromptBatch.from_segments(OWN["tokens"][:1], [[0] + [1] * 8], ["first", "rest"])
# In one prompt all tokens of the demonstrations are label words.
TIGHT = al.PromptBatch.from_positions(
    torch.tensor([[9, 5, 6, 8]]),
    label_positions=[[1, 2]],
    label_classes=[[0, 1]],
    label_token_ids=[5, 6],
)
OTHER_WORDS = al.prompts.Verbalizer([[token] for token in range(6)])
PAIR, LOGITS = torch.tensor([0, 1]), torch.eye(3, 8)
POSITIONS: dict[str, Any] = {
    "tokens": torch.tensor([[5, 1, 6, 2, 7, 8]]),
    "label_positions": [[1, 3]],
    "label_classes": [[0, 1]],
    "label_token_ids": [1, 2],
}
NO_TOKENIZER = SimpleNamespace(tokenizer=None)
CHAT: Any = partial(al.ChatTask, "{text}{label}", LABELS)
NONE, NO_CONTEXT = al.contexts.NoContext(), al.contexts.NoContext
MISSING = "blocks.9.attn.hook_pattern"
UNHOOKED: Any = [(MISSING, lambda x: x)]
A_CLASS: Any = int
A_NAME: Any = "gpt2"
VALUES: Any = al.weights.value_norm
HUGE, LONG = 10**18, "Why? " * 999
BEYOND = al.prompts.Verbalizer([[1, 10**6], [2]])  # no model has this token
ISOLATION: dict[str, Any] = {"edges": edges.wp, "control": edge_sweep.random_words}
OUTPUTS = torch.zeros(3, 2, 12)
ONES, EDGE = torch.ones(2, 3, 3), torch.ones(1, 3, 3).bool()
BETWEEN: Any = edges.between
CLASSES = al.subsets.Method("classes", A_CLASS, A_CLASS)
GOLD = al.losses.word_cross_entropy()
CORRECT = {"given": torch.ones(2, 6)}
FIRST_OF_QUERY = {"a": lambda batch: batch.positions == batch.query_start[:, None]}
OVERLAPPING = {"a": edges.anchors, "b": edges.demonstrations}
# The BOS is not the first token, there is no other, and there are gaps.
STARTS: list[Any] = [
    lambda demonstrations: edges.anchors(demonstrations)[0],
    lambda demonstrations: edges.bos(demonstrations)[0],
    selection.label_words,
]
NOT_ALLOWED = torch.zeros(3000, dtype=torch.bool)
NO_LABEL = lambda batch: replace(batch, gold=None)  # noqa: E731
TWO = lambda logits, b: logits.sum(1) if len(logits) == 4 else logits.sum()  # noqa: E731
FLIPPED = lambda batch: replace(batch, label_classes=batch.label_classes.flip(1))  # noqa: E731
TWO_CLASSES = [al.Example(demo.text, (demo.label or 0) % 2) for demo in DEMOS]
GOLD_ALONE = {"a": al.relabeling.gold}
KEEPS = "must keep the number of classes, and the demonstrations in their order"
IN_TURN = lambda batch: batch.attention_mask & (batch.index > 0)[:, None]  # noqa: E731
EQUAL = dict.fromkeys(("all", "answer"), lambda batch: batch.attention_mask)


def not_a_number(log_probs: torch.Tensor, axis: int) -> torch.Tensor:
    return (log_probs + 2).log().sum(axis)


LOGARITHM = al.prompts.Verbalizer([[4, 1], [2]], not_a_number)


class Scene:
    """What the calls take. The models may run here, and in no call."""

    def __init__(self, model: Any, llama: Any) -> None:
        self.model, self.llama, self.tokenizer = model, llama, model.tokenizer
        self.two, [self.batch] = questions(model, 2), questions(model, 3)
        self.own = al.PromptBatch.from_segments(**OWN)
        self.context = al.compress(model, self.batch)
        self.prefix, self.of_llama = trained(model, steps=0), trained(llama, steps=0)
        [of_llama] = questions(llama, 2)
        self.starts = [al.compress(llama, of_llama, select) for select in STARTS]
        self.tokens = hard_prompts.of_tokens(model, [300], held_out=self.two)
        self.of_five, _ = al.removal.text(model, self.batch, edges.demonstration(self.batch, 0))
        weights = tiny_gpt2(len(self.tokenizer))
        self.folded = al.prepare_model(raw_model("bridge", weights, self.tokenizer, fold=True))
        self.models = (model, llama, self.folded)

    def built(self, task: al.Task, demos: Any, queries: Any) -> list[al.PromptBatch]:
        return al.build_prompts(self.tokenizer, task, demos, queries)

    @cached_property
    def unlabelled(self) -> list[al.PromptBatch]:
        return self.built(TREC, DEMOS, ["Who?"])

    @cached_property
    def bare(self) -> list[al.PromptBatch]:
        """A demonstration has no text."""
        return self.built(TREC, BARE, [al.Example("Who?", 3)])

    @cached_property
    def several_sets(self) -> list[al.PromptBatch]:
        sets = [al.sample_demonstrations(al.load_examples("questions"), seed=k) for k in (1, 2)]
        return self.built(TREC, sets, [al.Example("Who wrote it?", 3)] * 2)

    @cached_property
    def long_words(self) -> list[al.PromptBatch]:
        """Label words have several tokens."""
        return self.built(LONG_LABELS, [BAD, GOOD], [GOOD])

    @cached_property
    def renamed(self) -> al.PromptBatch:
        return self.changed(segment_names=tuple("abcdef"))

    @cached_property
    def beyond(self) -> list[al.PromptBatch]:
        return [replace(self.long_words[0], verbalizer=BEYOND)]

    def changed(self, **changes: Any) -> al.PromptBatch:
        """The batch with other fields; a function makes one of the field as it is."""
        made = {key: new(getattr(self.batch, key)) for key, new in changes.items() if callable(new)}
        return replace(self.batch, **changes | made)

    def longer_prefix(self, count: int) -> al.contexts.PrefixContext:
        prefix = self.of_llama.prefix
        keys, values = (
            [each[:, :, :1].expand(-1, -1, count, -1) for each in of]
            for of in (prefix.keys, prefix.values)
        )
        tokens = torch.cat([self.of_llama.tokens[:1], torch.zeros(count - 1, dtype=torch.long)])
        return replace(self.of_llama, prefix=key_values_at_start(keys, values), tokens=tokens)

    def without_label_words(self) -> al.PromptBatch:
        none = torch.zeros(3, 0, dtype=torch.long)
        return self.changed(label_positions=none, label_ends=none, label_classes=none)


@pytest.fixture(scope="module")
def setup(hooked: Any, byte_level: Any, sentencepiece_like: Any) -> Iterator[Scene]:
    """No call leaves anything changed."""
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    made = Scene(model, hooked(tiny_llama(len(sentencepiece_like)), sentencepiece_like))
    states = [(each, state_of(each)) for each in made.models]
    yield made
    assert not [change for each, state in states for change in changed(state, state_of(each))]


def run(s: Scene, asked: Any, batches: Any = None, **options: Any) -> Any:
    return al.run(s.model, s.two if batches is None else batches, asked, **QUIET | options)


def sweep(s: Scene, change: dict[str, Any]) -> Any:
    options = {"edges": edges.pq, "sites": {"a": al.Site(0)}, **change}
    batches, beside = options.pop("batches", s.two), options.pop("beside", [])
    return run(s, [al.EdgeSweep(**options), *beside], batches)


def flows(s: Scene, given: tuple[al.Question, str]) -> Any:
    return run(s, given[:1], [s.own], loss=al.losses.span_cross_entropy(given[1]))


def weighted(s: Scene, weights: Any) -> Any:
    return al.saliency(s.model, s.own, loss=al.losses.next_token_cross_entropy(weights))


def words(s: Scene, words: Any) -> Any:
    return al.saliency(s.model, s.long_words[0], loss=al.losses.word_cross_entropy(words))


def train(kind: str, s: Scene, change: dict[str, Any]) -> Any:
    """A training of which an option is changed, or the last batch by a function of it."""
    call: dict[str, Any] = dict(zip(("batches", "held_out"), split(s.model), strict=True))
    for name, value in change.items():
        of_last = name in call and callable(value)
        call[name] = [*call[name][:-1], value(call[name][-1])] if of_last else value
    return TRAINERS[kind](s.model, **call)


def faithful(s: Scene, given: tuple[Any, dict[str, Any]]) -> Any:
    return run(s, [al.Faithfulness(given[0], **given[1])])


def mine(**changes: Any) -> dict[str, Any]:
    return {"method": replace(al.subsets.one_by_one, name="mine", **changes)}


def returning(*given: Any) -> dict[str, Any]:
    return {"remove": lambda model, batch, removed: given if len(given) != 1 else given[0]}


def blanked(model: Any, batch: al.PromptBatch, removed: torch.Tensor) -> Any:
    batch.tokens[removed] = 0
    return batch, []


def seeded(count: int, generator: torch.Generator) -> torch.Tensor:
    """Another number of subsets for each prompt."""
    return torch.ones(int(generator.initial_seed() % 7) + 1, count).bool()


def compared(s: Scene, batches: Any, **options: Any) -> Any:
    return run(s, [al.ContextComparison(**{"contexts": {"mine": al.compress}} | options)], batches)


def distances(s: Scene, count: int, change: dict[str, Any], **options: Any) -> Any:
    batches = [replace(each, **change) for each in questions(s.model, count, batch_size=count)]
    return run(s, [al.AnchorDistances(**options)], batches)


def names(s: Scene, **changes: Any) -> Any:
    return al.caches.names_filter(METRICS, s.model, s.changed(**changes))


def one_accuracy() -> al.Record:
    return al.metrics.compare_accuracies({"one": torch.ones(2)}, resamples=0)


def draw(s: Scene, how: Any) -> Any:
    asked, [batch] = al.PrefixEffect(context=s.context), questions(s.llama, 3)
    return how(asked, s.llama, batch, 0, 0)


def dependence(s: Scene, queries: Any, how: Any, **options: Any) -> Any:
    return al.label_dependence(s.model, TREC, DEMOS, queries, how, **QUIET | options)


Call = Callable[[Scene, Any], Any]
ERRORS = [each for each in vars(errors).values() if isinstance(each, type)]
# The call of each name; in a row of an error alone the call is what is wrong.
CALLS: dict[str, Call] = {
    **{error.__name__: lambda s, call: call(s) for error in ERRORS},
    "Task": lambda s, given: al.Task(*given),
    "ChatTask": lambda s, fields: CHAT(**fields),
    "Verbalizer": lambda s, ids: al.prompts.Verbalizer(ids),
    "Task by": lambda s, score: al.Task(SST2.template, SEVERAL, score=score),
    "Verbalizer by": lambda s, score: al.prompts.Verbalizer([[4, 1], [2]], score),
    "relabel": lambda s, given: al.relabeling.relabel(given[0], SST2, given[1]),
    "sample_prompts": lambda s, change: al.sample_prompts(
        **{"model": s.model, "task": "questions"} | change
    ),
    "sample_demonstrations": lambda s, given: al.sample_demonstrations(*given),
    "build_segments": lambda s, given: al.build_segments(s.tokenizer, given),
    "from_segments": lambda s, change: al.PromptBatch.from_segments(**OWN | change),
    "from_positions": lambda s, part: al.PromptBatch.from_positions(**POSITIONS | part),
    "accuracies": lambda s, given: al.metrics.compare_accuracies(
        {"first": torch.ones(2), "odd": torch.ones(2)} | given[0], **{"resamples": 0} | given[1]
    ),
    "show": lambda s, given: s.batch.show(*given),
    "compress": lambda s, change: al.compress(s.model, s.batch, **change),
    "compress of": lambda s, change: al.compress(s.model, s.changed(**change)),
    "keep": lambda s, make: al.compress(s.model, s.batch, make()),
    "hooks of a run": lambda s, hooks: run(s, METRICS[:1], hooks=hooks),
    "nothing cut": lambda s, change: run(s, [al.Accuracy()], hooks=partial(change, s.model)),
    "plot_pattern": lambda s, given: al.PrefixEffect().plot_pattern(s.model, s.batch, 0, **given),
    "ContextComparison": lambda s, change: compared(s, s.two, **change),
    "LabelHeads": lambda s, options: al.LabelHeads(**options),
    "loyalty": lambda s, given: al.metrics.loyalty(
        torch.zeros(given[0]), torch.zeros(given[1]), PAIR, top=given[2]
    ),
    "rollout": lambda s, shape: al.metrics.rollout(torch.zeros(shape)),
    "SegmentRollout": lambda s, change: run(s, [al.SegmentRollout(**change)]),
    "flows": flows,
    "weights of a loss": weighted,
    "words of a loss": words,
    **{kind: partial(train, kind) for kind in TRAINERS},
    "start": lambda s, make: trained(s.llama, start=make(s)),
    "SaliencyFlows": lambda s, mine: run(s, [al.SaliencyFlows({"mine": mine})], [s.batch]),
    "EdgeSweep": sweep,
    "Faithfulness": faithful,
    "trace_generation": lambda s, change: al.trace_generation(
        s.model, **{"prompt": PIECES} | change
    ),
    "step_flows": lambda s, change: al.step_flows(
        s.model, s.own.prompt(0), **{"segment": "answer"} | change
    ),
    "IntegratedFlows": lambda s, change: run(s, [al.IntegratedFlows(**change)], [s.own]),
    "ScoreParts": lambda s, change: run(s, [al.ScoreParts(**{"layer": 1} | change)], [s.batch]),
    "PrefixEffect": lambda s, change: run(s, [al.PrefixEffect(**change)], [s.batch]),
    "head_effects": lambda s, of: al.head_effects(s.model, of(s), s.two, **QUIET),
    "shuffled": lambda s, of: al.head_effects(s.model, s.two, of(s), **QUIET),
    "label_dependence": lambda s, how: dependence(s, [al.Example("W", 1)], how),
    "task_vectors": lambda s, change: al.task_vectors(
        s.model, s.two, **{"tested": s.two} | change, **QUIET
    ),
    "attribution": lambda s, options: run(s, [scored(**options)], [s.batch]),
    "site": lambda s, site: al.block_edges(s.model, s.batch, edges.wp, site),
    "detach_heads": lambda s, site: al.detach_heads(s.model, site),
    "scale_edges": lambda s, given: al.scale_edges(s.model, s.batch, edges.wp, *given),
    "replace_heads": lambda s, given: al.replace_heads(s.model, s.batch, *given),
    "a method of subsets": lambda s, make: make(),
    "without label words": lambda s, call: call(s, s.without_label_words()),
    "words beyond": lambda s, call: call(s, s.changed(label_positions=lambda old: old + 10_000)),
    "words before": lambda s, call: call(s, s.changed(label_positions=lambda old: old - 10_000)),
    "token beyond": lambda s, call: call(
        s.model, s.changed(tokens=lambda old: old.clamp(min=3000))
    ),
    "after a context": lambda s, change: s.context.logits(s.model, s.changed(**change)),
    "block edges": lambda s, given: al.block_edges(s.model, s.batch, given, 0),
    "scale edges": lambda s, given: al.scale_edges(s.model, s.batch, given, 0.5, 0),
    "folded values": lambda s, call: call(s.folded, questions(s.folded, 3)),
}
RAISES: dict[str, type[Exception]] = {
    **{error.__name__: error for error in ERRORS},
    **dict.fromkeys(
        (
            *("Task", "ChatTask", "Verbalizer", "Task by", "Verbalizer by", "relabel"),
            *("build_segments", "from_segments", "from_positions", "show", "compress"),
            *("compress of", "keep", "without label words", "words beyond", "words before"),
            *("token beyond", "block edges", "scale edges", "after a context"),
        ),
        PromptError,
    ),
    **dict.fromkeys(("sample_prompts", "sample_demonstrations"), DataError),
    **dict.fromkeys(
        (
            *("accuracies", "LabelHeads", "loyalty", "rollout", "weights of a loss"),
            *("words of a loss", "SaliencyFlows", "PrefixEffect", "a method of subsets"),
        ),
        MetricError,
    ),
    **dict.fromkeys(("nothing cut", "site", "detach_heads", "scale_edges"), HookError),
    "folded values": errors.ModelError,
}
NEEDS = "needs the true label"
OUTSIDE = "label_positions of prompt 0 has a position outside"
FOLDED = "biases of this model are folded"
BETA = torch.zeros(3, 2, 6)
AFTER = al.Site(0, renormalize=False)
WITH_ZERO = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]], requires_grad=True)

ROWS: list[tuple[str, Any, str]] = [
    # Tasks, texts and tokens.
    *(
        ("token beyond", call, "token 3000 is outside the model's vocabulary of 3000; .* another")
        for call in (
            al.saliency,
            run_pass,
            NONE.logits,
            lambda model, batch: al.run(model, [batch], METRICS[:1]),
            lambda model, batch: ask(model, [batch], al.EdgeSweep.isolation({"first": al.Site(0)})),
        )
    ),
    ("Task", ("no text:{label}", LABELS), r"contain \{text\} exactly once, but .* 0 times: 'no"),
    ("Task", ("{context} {text}{label}", LABELS), r"nothing would fill '\{context\}' in"),
    ("Task", ("{{text}} {{label}}", LABELS), r"nothing would fill '\{\{text\}\}' in"),
    ("Task", ("{text}", LABELS), r"contain \{label\} exactly once, but contains it 0 times"),
    ("Task", ("{text}{text}{label}", LABELS), r"\{text\} exactly once, but contains it 2 times"),
    ("Task", ("{text}{label}{label}", LABELS), r"\{label\} exactly once, but contains it 2 times"),
    ("Task", ("{label}: {text}", LABELS), r"\{text\} before \{label\}, because .*; got '\{label"),
    ("Task", ("{text}{label}", ["one"]), r"at least two classes; got \['one'\]"),
    ("Task", ("{text}{label}", []), r"at least two classes; got \[\]"),
    ("Task", ("{text}{label}", ["a", "b", "a"]), r"different and not blank; got \['a', 'b', 'a'\]"),
    ("Task", ("{text}{label}", ["a", " "]), r"different and not blank; got \['a', ' '\]"),
    ("Task", ("{text}{label}", [["a", "a"], ["b"]]), "different and not blank"),
    ("Task", ("{text}{label}", [["a", "b"], ["b"]]), "different and not blank"),
    ("Task", ("{text}{label}", [["a", " "], ["b"]]), "different and not blank"),
    ("Task", ("{text}{label}", [["a", "b"], []]), "different and not blank"),
    ("Task", ("{text}{label}", [["a", "b"]]), "at least two classes"),
    ("ChatTask", {"options": {"tokenize": True}}, r"options of a chat task are \{name: value\}"),
    ("ChatTask", {"options": {"tools": []}}, r"options of a chat task are \{name: value\}"),
    ("ChatTask", {"date": "today"}, "date of a chat task is a day such as '2024-07-26'"),
    ("ChatTask", {"date": "2024-13-01"}, "date of a chat task is a day such as '2024-07-26'"),
    ("Verbalizer", [], "whole numbers from 0, a list for each class"),
    ("Verbalizer", [[1], [-2]], "whole numbers from 0, a list for each class"),
    ("Verbalizer", [[1], []], "at least one for each class"),
    ("Verbalizer", [[1, 2], [2]], r"must be different, .*got \[\[1, 2\], \[2\]\]"),
    *(
        (f"{of} by", score, words)
        for of in ("Task", "Verbalizer")
        for score, words in (
            (torch.max, r"score max must give one number a prompt: .*got max; .*amax|got "),
            (lambda log_probs: log_probs.mean(-1), r"must take \(log probabilities, axis\)"),
            (lambda log_probs, axis: log_probs.mean(), r"the shape \(2,\); got .* \(\)"),
            (lambda log_probs, axis: log_probs, r"shape \(2, 1\) and axis -1 .* got .* \(2, 1\)"),
            (lambda log_probs, axis: 0.5, "got a float"),
        )
    ),
    (
        "MetricError",
        lambda s: run(s, METRICS[:1], loss=lambda logits, batch: logits),
        r"one number a prompt, shape \(2,\); got .*\(2, 3000\)",
    ),
    (
        "MetricError",
        lambda s: run(s, METRICS[:1], loss=lambda logits, batch: logits[0]),
        r"one number a prompt, shape \(2,\); got .*\(3000,\)",
    ),
    ("PromptError", lambda s: LOGARITHM.scores(torch.zeros(1, 9)), r"number gives NaN .*\(4, 1\)"),
    ("relabel", ([], al.relabeling.gold), "there are no demonstrations to relabel"),
    ("relabel", ([BAD, GOOD], lambda _, demos: demos), r"as many demonstrations as.*got \[Exa"),
    ("relabel", ([BAD, GOOD], lambda t, d: (t, d[:1])), "as many demonstrations as it got"),
    ("relabel", ([al.Example("x"), GOOD], al.relabeling.gold), r"have the labels \[None\], but"),
    ("relabel", ([BAD, al.Example("x", 2)], al.relabeling.random(0)), r"the labels \[2\], but"),
    ("relabel", ([BAD, GOOD], al.relabeling.flipped(0.5)), r"has the labels \[' (Pos|Neg).*more d"),
    ("relabel", ([BAD, GOOD], al.relabeling.symbols([" A"])), "at least two classes"),
    ("relabel", ([BAD, GOOD], al.relabeling.symbols([" A", " B", " C"])), "of the 2 classes; got"),
    ("relabel", ([BAD, GOOD], al.relabeling.symbols([" A", " A"])), "different and not blank"),
    ("sample_prompts", {"task": "nothing"}, "there is no task 'nothing'; choose one of sst2, trec"),
    ("sample_prompts", {"examples": []}, "there are no examples to draw"),
    ("sample_prompts", {"task": SST2}, "a task of your own needs examples to draw from"),
    ("sample_prompts", {"seeds": [1, 1]}, r"seeds are different .*; got \[1, 1\]"),
    ("sample_prompts", {"seeds": []}, r"at least one; got \[\]"),
    ("sample_prompts", {"queries": 0}, "count must be a whole number from 1 to 1,000,000; got 0"),
    ("PromptError", lambda s: al.sample_prompts(NO_TOKENIZER, "news"), "model has no tokenizer"),
    ("sample_demonstrations", ([BAD, GOOD], 0), "shots must be a whole number from 1 to .*; got 0"),
    ("sample_demonstrations", ([BAD, GOOD], 2), "class 0 has 1 examples, but 2 .*; lower shots or"),
    ("sample_demonstrations", ([al.Example("a", 2)],), "class 0 has 0 examples, but 1 of"),
    ("sample_demonstrations", ([BAD, al.Example("why?")],), r"need a label, .*'why\?' has none"),
    ("sample_demonstrations", ([],), "no examples to draw demonstrations from"),
    ("sample_demonstrations", ([BAD, al.Example("b", -1)],), "-1"),
    *(
        (
            "ArgumentError",
            lambda s, of=of: s.built(TREC, DEMOS, of),
            "^queries .* Examples or texts",
        )
        for of in ({"a": GOOD}, {"x"}, "x", GOOD, [GOOD, 3])
    ),
    ("ArgumentError", lambda s: s.built(TREC, {*DEMOS}, ["x"]), "^demons.*; a set has no order$"),
    ("build_segments", [], "prompts is a list of prompts"),
    ("build_segments", [[]], r"prompt 0 must be a list of \(name, text\)"),
    ("build_segments", [[("", "a")]], r"prompt 0 must be a list of \(name, text\)"),
    ("build_segments", [[("Who is it?\n", "a")]], r"a list of \(name, text\).*without spaces"),
    ("build_segments", [[("a" * 101, "a")]], r"a list of \(name, text\).*100 characters"),
    ("build_segments", [[("a", "")]], r"prompt 0 has no text; got \[\('a', ''\)\]"),
    ("build_segments", [[(None, "a")]], "prompt 0 has no piece with a name"),
    ("build_segments", [[("a", "x"), ("b", "")]], "the piece '' of segment 'b' in prompt 0 has no"),
    ("build_segments", [[("a", "wor"), ("b", ""), ("c", "ld")]], "of segment 'b' in prompt 0 has"),
    ("build_segments", [[("a", "half \ud800")]], "half of a surrogate pair"),
    ("from_segments", {"segments": [[0] * 9, [0] * 9]}, "prompt 1 has padding in a segment"),
    ("from_segments", {"segments": [[3] * 9, [-1] * 9]}, "segments are numbers from 0 to 2"),
    ("from_segments", {"segments": [[0] * 9]}, r"segments must have the shape .* = \(2, 9\)"),
    ("from_segments", {"segments": [[-2] * 9] * 2}, "numbers from 0 to 2, .*; got -2 to -2"),
    ("from_segments", {"names": ["a", "a", "b"]}, "segments have different names"),
    ("from_segments", {"names": []}, "segments have different names"),
    ("from_segments", {"target_positions": [8, 9]}, "has a position outside the prompt"),
    ("from_segments", {"target_positions": [8, 0]}, "has a position under padding"),
    ("from_segments", {"tokens": OWN["tokens"][0]}, "tokens must have the shape"),
    ("from_positions", {"tokens": LOGITS}, "tokens must be whole numbers .*got torch.float"),
    ("from_positions", {"tokens": torch.full((1, 6), -3)}, "whole numbers from 0, .*; got -3"),
    *(
        ("from_positions", {"attention_mask": torch.full((1, 6), value)}, "must hold 1 for tokens")
        for value in (NAN, 2)
    ),
    ("from_positions", {"label_positions": torch.tensor([[1j, 3]])}, "must be whole .*complex"),
    ("DataError", lambda s: al.sample_queries([BAD, GOOD], -1), "from 1 to 1,000,000; got -1"),
    ("DataError", lambda s: al.sample_queries([BAD, GOOD], 2, exclude=[BAD]), "only 1 examples"),
    ("show", (None, -1), "the prompts 0 to 2; got -1"),
    ("show", (None, 3), "the prompts 0 to 2; got 3"),
    ("PromptError", lambda s: s.batch.prompt(-1), "the prompts 0 to 2; got -1"),
    ("show", ("gpt2",), r"expected the tokenizer .*; got a str"),
    (
        "PromptError",
        lambda s: s.changed(tokens=lambda old: old + 3000).show(s.tokenizer),
        r"tokenizer has 3000 tokens, but .* token \d+; pass",
    ),
    # Fields, or arguments, that do not fit one another.
    ("PromptError", lambda s: s.batch.prompts(HUGE, 2), f"no prompt is in {HUGE}:2:1 of a b.* 3"),
    ("PromptError", lambda s: s.changed(tokens=lambda old: old[0]).prompt(0), "have the shape"),
    ("PromptError", lambda s: names(s, tokens=lambda old: old[:, 1:]), "mask must have the shape"),
    ("ArgumentError", lambda s: names(s, verbalizer=PAIR), "a Verbalizer or None; got tensor"),
    (
        "ArgumentError",
        lambda s: edges.between(s.batch.attention_mask[:2], s.batch.attention_mask),
        "keys of between must have as long an axis 'batch' as queries, 2; got 3",
    ),
    (
        "ArgumentError",
        lambda s: al.weights.saliency(ONES[None], torch.ones(1, 2, 3, 4)),
        "gradient of saliency must have as long an axis 'key' as pattern, 3; got 4",
    ),
    (
        "ArgumentError",
        lambda s: al.losses.label_cross_entropy(torch.ones(2, 900), s.batch),
        "batch of label_cross_entropy must have as long an axis 'batch' as logits, 2; got 3",
    ),
    ("PromptError", lambda s: al.relabeling.derangement(1, 0), "from 2 to 1,000,000; got 1"),
    ("PromptError", lambda s: token_spans(["a", "b"], [OTHER]), "a segment; got 2 and 1 segments"),
    ("PromptError", lambda s: token_spans(["a"], [6]), r"segments are numbers from 0 to 5.*got 6"),
    ("PromptError", lambda s: edges.segment(s.batch, "labels"), "'labels'; the segments are other"),
    ("PromptError", lambda s: edges.segment(s.renamed, "label"), r"'label'; .* as al.SegmentFlows"),
    ("PromptError", lambda s: run(s, [al.Accuracy()], s.beyond), "token 1000000 is outside"),
    ("MetricError", lambda s: al.metrics.loyalty(LOGITS, LOGITS, BEYOND), r"got \[1, 1000000, 2\]"),
    # A run of any questions.
    ("MetricError", lambda s: run(s, []), "nothing to compute: give at least one"),
    ("MetricError", lambda s: run(s, [al.Accuracy()] * 2), r"got \['accuracy', 'accuracy'\]"),
    ("PromptError", lambda s: run(s, METRICS, []), "no batches to run"),
    *(
        (
            "PromptError",
            lambda s, other=other: run(s, METRICS, [s.batch, s.changed(verbalizer=other)]),
            "same label words; run each task by itself",
        )
        for other in (lambda words: OTHER_WORDS, lambda words: replace(words, score=torch.amax))
    ),
    ("hooks of a run", lambda batch: None, "what hooks returns must be a list .*; got None"),
    ("hooks of a run", lambda batch: [(MISSING, lambda x, hook: x)], f"no hook point '{MISSING}'"),
    ("hooks of a run", lambda batch: UNHOOKED, r"\(x\).*: Write def .*, hook\)"),
    ("hooks of a run", lambda batch: [(MISSING, torch.relu)], "does not say what it takes: Write"),
    ("ArgumentError", lambda s: al.reads.Hooks({}, UNHOOKED), "Write def function"),
    (
        "ArgumentError",
        lambda s: run(s, METRICS, hooks=al.isolate_labels(s.model, s.batch, 0)),
        "hooks of run must be a function or None; got .*; write lambda batch: and then what makes",
    ),
    ("MetricError", lambda s: run(s, METRICS, resamples=-3), "resamples must be a whole .* got -3"),
    ("ArgumentError", lambda s: run(s, METRICS, s.batch), "batches of run must be a list .*; w"),
    ("ArgumentError", lambda s: run(s, [al.AttentionAUCROC]), "an instance is needed, Atten"),
    ("ArgumentError", lambda s: run(s, [object()]), "questions of run must be .* Questions"),
    ("ArgumentError", lambda s: al.run(A_NAME, [], METRICS), "A TransformerBridge or .* as ``al.l"),
    ("ArgumentError", lambda s: al.isolate_labels(s.model, s.two, 0), "one element of the list"),
    (
        "MetricError",
        lambda s: run(s, METRICS[1:2], gradient_checkpointing=True),
        "attention_aucroc",
    ),
    ("MetricError", lambda s: run_pass(s.model, s.batch, gradient_checkpointing=True), "no loss"),
    ("HookError", lambda s: al.analyse(s.model, s.two, depth=4), "are from 1 to 3 layers; got 4"),
    ("StoreError", lambda s: run(s, [al.Accuracy()], folder="\0"), "a folder of .*embedded null"),
    ("StoreError", lambda s: one_accuracy().save("\0"), "cannot be written: .*embedded null"),
    ("StoreError", lambda s: al.write_report({"one": one_accuracy()}, "\0"), "written: .*null"),
    ("StoreError", lambda s: type(one_accuracy()).load("\0"), "cannot be read: .*embedded null"),
    (
        "PromptError",
        lambda s: s.batch.label_scores(torch.zeros(3, 3)),
        "logits of 3 tokens; give all",
    ),
    ("ArgumentError", lambda s: s.changed(verbalizer=PAIR).prompt(0), "a Verbalizer or None; got"),
    ("without label words", lambda s, b: al.isolate_labels(s.model, b, 0), "nothing to isolate"),
    ("without label words", lambda s, b: run(s, METRICS[:1], [b]), "at least one label word in ea"),
    ("words beyond", lambda s, b: al.isolate_labels(s.model, b, 0), OUTSIDE),
    ("words beyond", lambda s, b: al.hooks.isolate_random(s.model, b, 0, seed=1), OUTSIDE),
    ("words beyond", lambda s, b: al.reweight_anchors(s.model, b, BETA), OUTSIDE),
    ("words beyond", lambda s, b: edges.pq(b), OUTSIDE),
    ("words before", lambda s, b: al.isolate_labels(s.model, b, 0), OUTSIDE),
    ("words before", lambda s, b: edges.pq(b), OUTSIDE),
    ("folded values", lambda m, b: al.saliency(m, b[0]), rf"{FOLDED} .*_biases=False"),
    ("folded values", lambda m, b: al.run(m, b, METRICS[:1], progress=False), FOLDED),
    ("folded values", lambda m, b: al.reweight_anchors(m, b[0], BETA), FOLDED),
    ("folded values", lambda m, b: al.isolate_labels(m, b[0], AFTER), FOLDED),
    ("folded values", lambda m, b: al.block_edges(m, b[0], edges.wp, AFTER), FOLDED),
    ("folded values", lambda m, b: ask(m, b, al.IntegratedFlows(), **QUIET), FOLDED),
    # Metrics.
    ("LabelHeads", {"times": 0}, "times must be a number above 0.*got 0"),
    ("LabelHeads", {"times": NAN}, "times must be a number above 0.*got nan"),
    ("LabelHeads", {"draws": 0}, "draws must be a whole number from 1 to .*; got 0"),
    ("loyalty", ((2, 9), (3, 9), 5), r"\(batch, vocab\).*got \(2, 9\) and \(3, 9\)"),
    ("loyalty", ((0, 9), (0, 9), 5), r"one row a prompt; got .*0, 9"),
    ("loyalty", ((2, 9), (2, 9), 0), r"`top` is from 1 to the 9 tokens.*got 0"),
    *(
        ("MetricError", lambda s, a=a, b=b: al.metrics.loyalty(a, b, PAIR), "some are NaN or inf")
        for wrong in (torch.full((3, 8), value) for value in (NAN, INF, -INF))
        for a, b in ((wrong, LOGITS), (LOGITS, wrong))
    ),
    *(
        (
            "MetricError",
            lambda s, ids=ids: al.metrics.loyalty(LOGITS, LOGITS, torch.tensor(ids)),
            r"must be a row of different whole numbers from 0 to 7, .*; got",
        )
        for ids in ([0, 8], [-1, 1], [], [0.0, 1.0], [[0, 1]], [True, False], [1, 1])
    ),
    ("accuracies", ({"b": torch.ones(1)}, {}), r"got prompts: \{'first': 2, 'odd': 2, 'b': 1\}"),
    ("MetricError", lambda s: al.metrics.compare_accuracies({}), r"one; got prompts: \{\}"),
    ("accuracies", ({}, {"resamples": -1}), "resamples must be .* from 0 to 1,000,000; got -1"),
    ("accuracies", ({}, {"sets": torch.arange(3)}), r"of the 2 prompts; got the shape \(3,\)"),
    *(
        ("accuracies", ({"odd": odd}, {}), "the answers of 'odd' must be a tensor of 0 and 1, one")
        for odd in (*map(torch.tensor, ([0.5, 1], [2, 1], [NAN, 1])), torch.ones(2, 1))
    ),
    ("loyalty", ((2, 9), (2, 9), 10), r"`top` is from 1 to the 9 tokens.*got 10"),
    ("MetricError", lambda s: run(s, [al.Loyalty()]), r"nothing changes this run; give al.run\("),
    ("rollout", (2, 3, 3), r"those of whole prompts; got \("),
    ("rollout", (1, 2, 3, 4), r"those of whole prompts; got \("),
    ("SegmentRollout", {"queries": lambda b: edges.target(b) & False}, "got none in prompt 0; lea"),
    ("SegmentRollout", {"queries": edges.pq}, "'queries' of segment_rollout must give a tensor of"),
    ("SegmentRollout", {"segments": ["reply"]}, "there is no segment 'reply'"),
    ("SegmentRollout", {"segments": ["text", "text"]}, "segments are different names"),
    ("MetricError", lambda s: run(s, [al.SegmentAttention(["text", "label"])]), "apart=4 .* 2"),
    ("MetricError", lambda s: al.SegmentAttention(apart=0), "whole number from 1 to .*; got 0"),
    *(
        ("MetricError", lambda s, of=of, names=names: of(names), "segments are different names")
        for of in (al.SegmentFlows, al.SegmentAttention)
        for names in ([], ["a", "a"])
    ),
    ("flows", (al.SegmentFlows(["reply"]), "answer"), "no segment 'reply'; the segments are qu"),
    ("flows", (al.SegmentFlows(), "reply"), "there is no segment 'reply'"),
    ("flows", (al.SegmentFlows({"a": lambda b: b.tokens}), "answer"), "a tensor of True and False"),
    ("flows", (al.SegmentFlows(EQUAL), "answer"), r"0 of prompt 0 is in the segments \['all', 'a"),
    ("flows", (al.SegmentFlows(weight=lambda a, g: a), "answer"), "to a number for each edge, of"),
    ("flows", (al.SaliencyFlows(), "answer"), "these prompts have segments but no label words"),
    ("flows", (al.AttentionAUCROC(), "answer"), "these prompts have segments but no label words"),
    ("flows", (al.Accuracy(), "answer"), "label"),
    ("weights of a loss", lambda b: torch.zeros(2, 9), "prompt 0 has no token to predict"),
    ("weights of a loss", lambda b: torch.ones(2, 8), r"position\) = \(2, 9\); got .*\(2, 8\)"),
    ("weights of a loss", lambda b: torch.full((2, 9), NAN), "for each position.*; got NaN or inf"),
    ("weights of a loss", lambda b: torch.eye(9)[[8, 8]] > 0, "at position 8 of prompt 0, which"),
    ("weights of a loss", lambda b: torch.arange(9).expand(2, -1) % 6 == 2, "8 of prompt 0, which"),
    ("weights of a loss", lambda b: 3, "got a int"),
    ("words of a loss", [], "words are the token ids"),
    ("words of a loss", [[]], "words are the token ids"),
    ("words of a loss", [[1], [1]], "words are the token ids"),
    ("words of a loss", [[-1], [2]], "words are the token ids"),
    ("words of a loss", [[1], [2], [3]], "words of 3 classes, but these prompts have 2"),
    ("words of a loss", [[1], [100_000]], "have the token 100000, but the model has only"),
    ("PromptError", lambda s: words(s, [[1], [2] * s.model.cfg.n_ctx]), "the model's context is"),
    (
        "MetricError",
        lambda s: al.saliency(s.model, s.long_words[0], loss=GOLD, gradient_checkpointing=True),
        "which gradient_checkpointing=True does not store",
    ),
    ("MetricError", lambda s: al.saliency(s.model, NO_LABEL(s.long_words[0]), loss=GOLD), NEEDS),
    (
        "MetricError",
        lambda s: GOLD.continuations(replace(s.long_words[0], label_classes=torch.zeros(1, 2))),
        "must write the label word of class 0 in one way",
    ),
    (
        "MetricError",
        lambda s: GOLD.continuations(
            replace(s.long_words[0], verbalizer=al.prompts.Verbalizer([[1, 2], [3, 4]]))
        ),
        "one for each class; give their tokens",
    ),
    *(
        (trainer, {"loss": loss}, "needs the logits at several positions")
        for trainer in ("re-weighting", "prefix")
        for loss in (GOLD, al.losses.span_cross_entropy("target"))
    ),
    *(
        ("MetricError", call, "needs the true label of each query; give queries with labels")
        for call in (
            lambda s: al.saliency(s.model, s.unlabelled[0]),
            lambda s: run(s, METRICS[:1], s.unlabelled),
            lambda s: run(s, METRICS[:1], [s.batch, *s.unlabelled]),
        )
    ),
    ("SaliencyFlows", lambda batch: None, r"the edges \['mine'\] of .* got a NoneType"),
    ("SaliencyFlows", lambda batch: edges.pq(batch).float(), "got torch.float32"),
    ("SaliencyFlows", lambda b: edges.pq(b)[:, 1:], r"got torch.bool of the shape \(3, "),
    # Their saliency is 0, so that they would silently lower the mean: later tokens, the diagonal,
    # padding.
    ("SaliencyFlows", lambda b: edges.pq(b).transpose(1, 2), "must go from a token to an earlier"),
    (
        "SaliencyFlows",
        lambda b: edges.wp(b) | torch.eye(b.tokens.shape[1], dtype=torch.bool),
        r"the edges \['mine'\] of saliency_flows: edges must go from a token to an earlier",
    ),
    ("SaliencyFlows", lambda b: edges.between(b.tokens > -1, edges.anchors(b)), "to an earlier"),
    ("MetricError", lambda s: al.SaliencyFlows({}), "edges are functions of the batch by name"),
    # A mean key of several small sets would describe none of them.
    (
        "MetricError",
        lambda s: distances(s, 9, {"demonstrations_id": torch.arange(9) % 3}, directions=2),
        "at least 10 as there are several sets, but one has 3",
    ),
    ("MetricError", lambda s: distances(s, 10, {}), r"\(10\).* has 10; .*ces\(directions=9\)"),
    ("MetricError", lambda s: distances(s, 12, {"gold": None}), NEEDS),
    ("MetricError", lambda s: distances(s, 3, {}, directions=0), "number from 1 to .*; got 0"),
    (
        "MetricError",
        lambda s: distances(s, 12, {"label_classes": torch.arange(6).clamp(max=4).expand(12, -1)}),
        r"one: \[5\]",
    ),
    *(
        ("MetricError", call, rf"value_norm needs the values.* al\.{name} has not.*SegmentFlows\(")
        for name, call in {
            r"metrics\.flows": lambda s: al.metrics.flows(
                OUTPUTS[None], OUTPUTS[None], OUTPUTS[:1] > 0, weight=VALUES
            ),
            "step_flows": lambda s: al.step_flows(
                s.model, s.own.prompt(0), "answer", weight=VALUES
            ),
            "trace_generation": lambda s: al.trace_generation(s.model, "Who?", weight=VALUES),
            "IntegratedFlows": lambda s: al.IntegratedFlows(weight=VALUES),
        }.items()
    ),
    # Hooks.
    ("HookError", lambda s: al.reweight_anchors(s.model, s.batch, BETA.mT), r"got \(3, 6, 2\)"),
    (
        "HookError",
        lambda s: al.contexts.reweight_demonstrations(s.model, s.batch, BETA[..., :5]),
        r"\(layer, head, anchor\) = \(3, 2, 6\)",
    ),
    ("HookError", lambda s: al.hooks.isolate_random(s.model, TIGHT, 0, seed=0), "have 0 tokens"),
    ("site", [], "got none"),
    ("site", [0, -4], r"got \[-4\]"),
    ("site", al.Site(0, heads=99), r"heads must be numbers from 0 to 1.*got \[99\]"),
    ("site", al.Site(0, heads=[]), "got none"),
    ("site", al.Site(heads={0: [], 1: 0}), "got none"),
    ("site", al.Site(heads={1: 2}), r"got \[2\]"),
    ("HookError", lambda s: al.Site(0, heads={0: 1}), "leave layers out, or give heads for all"),
    ("site", (1, 0), r"may mean a head; write \[1, 0\] for these layers, al\.Site\(layer, he"),
    ("HookError", lambda s: al.hooks.isolate_random(s.model, s.batch, 99, seed=0), r"got \[99\]"),
    ("detach_heads", al.Site(9, heads=0), r"layers .*got \[9\]"),
    ("detach_heads", al.Site(0, heads=9), r"heads .*got \[9\]"),
    ("detach_heads", al.Site(heads={3: 0}), r"layers .*got \[3\]"),
    ("detach_heads", al.Site(0, keep_bos=True), "detach_heads cuts no edges"),
    ("detach_heads", AFTER, "detach_heads cuts no edges"),
    ("scale_edges", (-1.0, 0), r"from 0 up.*0 cuts, 1 changes.*got -1.0"),
    ("scale_edges", (NAN, 0), "from 0 up.*got nan"),
    ("scale_edges", (INF, 0), "from 0 up.*got inf"),
    ("scale_edges", (torch.ones(2, 3), 0), r"= \(3, 2\); got .*\(2, 3\)"),
    ("scale_edges", (torch.ones(2), 0), r"= \(3, 2\); got .*\(2,\)"),
    ("scale_edges", (torch.ones(3, 2).long(), 0), r"a float.*got torch.int64"),
    ("scale_edges", (0.5, 9), r"layers must be numbers .*got \[9\]"),
    ("scale_edges", (0.5, al.Site(0, heads=9)), r"heads must be numbers .*got \[9\]"),
    ("scale_edges", (WITH_ZERO, 1), "0 has no gradient .*renormalize=False"),
    (
        "HookError",
        lambda s: al.scale_edges(s.model, s.batch, torch.diag_embed(s.batch.attention_mask), 0.0),
        "itself cannot be multiplied by 0 .*Leave the diagonal out .*renormalize=False",
    ),
    (
        "nothing cut",
        lambda m, b: al.block_edges(m, b, edges.between(edges.anchors(b), edges.target(b)), 0),
        r"nothing is cut or scaled at blocks.0.attn.hook_attn_scores: no prompt has an edge",
    ),
    (
        "nothing cut",
        lambda m, b: (
            al.block_edges(m, b, edges.wp, 0)
            + al.scale_edges(m, b, edges.wp(b) & edges.pq(b), 2.0, 2)
        ),
        r"nothing is cut or scaled at blocks.2",
    ),
    *(
        (
            "PromptError",
            lambda s, draw=draw, wrong=wrong: draw(s.batch, wrong(s.batch, edges.pq(s.batch)), 0),
            message,
        )
        for draw in (edges.random_keys, edges.random_edges)
        for wrong, message in (
            (lambda b, e: e.float(), r"\(batch, query, key\) = .*got torch.float32"),
            (lambda b, e: e[:1], r"got torch.bool of the shape \(1, "),
            (lambda b, e: torch.eye(e.shape[1]).bool().expand_as(e), "to an earlier token"),
            (lambda b, e: torch.ones_like(e).triu(1), "token to an earlier token"),
            (lambda b, e: ~b.attention_mask[:, None] & e.table().logical_not().tril(-1), "padding"),
        )
    ),
    ("HookError", lambda s: al.Site.of_heads([]), "there is no head"),
    ("HookError", lambda s: al.sites.first_and_last(s.model, [4]), "from 1 to 3 layers; got 4"),
    ("HookError", lambda s: al.sites.windows(s.model, 0), "from 1 to 3 layers; got 0"),
    ("HookError", lambda s: al.sites.single_heads(s.model, 99), r"from 0 to 2, .* got \[99\]"),
    ("replace_heads", (OUTPUTS, []), "layers must be .*got none"),
    ("replace_heads", (OUTPUTS, [(0, 1)]), r"a list.; write al.Site.of_heads\(\[\(0, 1\)\]\)"),
    ("replace_heads", (OUTPUTS, al.Site(3, 0)), r"layers must be numbers from 0 to 2.*got \[3\]"),
    ("replace_heads", (OUTPUTS, al.Site(0, 2)), r"heads must be numbers from 0 to 1.*got \[2\]"),
    ("replace_heads", (OUTPUTS, al.Site(0, 0, keep_bos=True)), "replace_heads cuts no edges"),
    ("replace_heads", (OUTPUTS[1:], al.Site(0, 0)), r"beginning with \(3, 2\); got torch.fl"),
    *(
        ("ArgumentError", call, rf"{name}.* must be a function of .*; got \w+, which cannot be c")
        for name, call in (
            ("how", lambda s: al.relabeling.relabel([BAD, GOOD], SST2, A_CLASS)),
            ("weight", lambda s: run(s, [al.SegmentFlows(weight=A_CLASS)])),
            ("weight", lambda s: al.metrics.flows(ONES[None], ONES[None], EDGE, weight=A_CLASS)),
            ("remove", lambda s: run(s, [scored(remove=A_CLASS)])),
            ("draw", lambda s: run(s, [scored(CLASSES)])),
            ("'a' of segment_flows", lambda s: run(s, [al.SegmentFlows({"a": A_CLASS})])),
            ("'rows' of prefix_effect", lambda s: run(s, [al.PrefixEffect(rows=A_CLASS)])),
            ("edges", lambda s: al.block_edges(s.model, s.batch, A_CLASS)),
            ("edges", lambda s: al.block_edges(s.model, s.batch, BETWEEN)),
            ("loss", lambda s: al.saliency(s.model, s.batch, loss=A_CLASS)),
            ("hooks", lambda s: al.target_logits(s.model, s.two, hooks=A_CLASS, progress=False)),
            ("select", lambda s: al.compress(s.model, s.batch, A_CLASS)),
            ("positions", lambda s: al.compress(s.model, s.batch, positions=A_CLASS)),
        )
    ),
    *(
        ("AnchorlensError", call, rf"{name} must be a whole .* \d to 1,000,000; got {HUGE}")
        for name, call in (
            ("segments", lambda s: al.subsets.random(5, HUGE, torch.Generator())),
            ("count", lambda s: al.subsets.random(HUGE, 70, torch.Generator())),
            ("draws", lambda s: hard_prompts.random(s.model, held_out=s.two, draws=HUGE)),
        )
    ),
    *(
        (f"{hooks} edges", wrong, "edges must be a tensor of True and False .*; got")
        for hooks in ("block", "scale")
        for wrong in (torch.zeros(1, 4, 4), torch.zeros(1, 4, 4).long(), torch.ones(4, 4) > 2)
    ),
    ("HookError", lambda s: al.reweight_anchors(s.model, s.batch, BETA * NAN), "below infinity"),
    ("HookError", lambda s: al.reweight_anchors(s.model, s.batch, BETA + INF), "below infinity"),
    *(
        ("MetricError", call, "got torch.* which holds no numbers")
        for call in (
            lambda s: al.metrics.loyalty(torch.eye(3, 8), torch.eye(3, 8), PAIR.to("meta")),
            lambda s: al.metrics.loyalty(torch.eye(3, 8), torch.eye(3, 8, device="meta"), PAIR),
        )
    ),
    # Experiments.
    ("EdgeSweep", ISOLATION | {"batches": [TIGHT]}, "too few for a random control"),
    ("EdgeSweep", {"edges": lambda b: edges.pq(b).float()}, "edges must be a tensor of True and F"),
    ("EdgeSweep", {"edges": lambda b: edges.pq(b)[:, :5]}, r"= \(2, .*got torch.bool .* \(2, 5"),
    ("EdgeSweep", {"edges": lambda b: torch.ones_like(edges.pq(b))}, "token to an earlier token"),
    ("EdgeSweep", {"edges": lambda b: edges.pq(b) & False}, "nothing to cut: .* in any prompt$"),
    (
        "EdgeSweep",
        {"edges": lambda b: edges.between(edges.query(b), edges.demonstrations(b))},
        "too few for a random control; .*control=al.edges.random_edges",
    ),
    ("EdgeSweep", {"control": lambda b, e, seed: e[:1]}, "edges must be a tensor of True and"),
    ("EdgeSweep", {"sites": {"a": al.Site(9)}}, r"layers must be numbers .*got \[9\]"),
    ("EdgeSweep", {"sites": {"a": al.Site(0, keep_bos=True)}}, "do not begin with a BOS"),
    ("EdgeSweep", {"sites": {"a": al.Site([])}}, "got none"),
    ("EdgeSweep", {"beside": [al.AttentionAUCROC()] * 2}, "different names"),
    ("EdgeSweep", {"beside": [al.AttentionAUCROC(name="edge_sweep")]}, "different names"),
    ("EdgeSweep", {"beside": [al.Loyalty()]}, "nothing changes this run"),
    ("EdgeSweep", {"sites": {}}, "there is no site"),
    ("EdgeSweep", {"draws": 0}, "draws must be a whole number from 1 to .*; got 0"),
    ("Faithfulness", ({}, {}), r"scores are at least one, by name, .*; got \[\]"),
    ("Faithfulness", ({"random": torch.ones(2, 6)}, {}), "no name is empty, 'random' or 'best pos"),
    ("Faithfulness", ({"given": torch.ones(2, 5)}, {}), r"= \(2, 6\), .*of the shape \(2, 5\)"),
    ("Faithfulness", ({"given": torch.ones(3, 6)}, {}), "'given' must be numbers .*segment"),
    ("Faithfulness", ({"f": lambda b: torch.ones(len(b), 5)}, {}), r"'f' must be .* = \(2, 6\)"),
    ("Faithfulness", ({"f": lambda batch: 3}, {}), "'f' must be numbers .* got a int"),
    ("Faithfulness", ({"given": torch.full((2, 6), -INF)}, {}), "'given' must be finite, or NaN"),
    ("Faithfulness", ({"a": al.Accuracy()}, {}), "Accuracy has no segment_scores"),
    ("Faithfulness", ({"a": lambda b: b.tokens.fill_(1)[:, :6]}, {}), "'a' changed tokens .*in "),
    ("Faithfulness", ({"a": al.SegmentFlows(["label"])}, {}), "'a': the metric has segments of"),
    ("Faithfulness", ({"a": al.SegmentFlows}, {}), "'a' must be a tensor .*; got the class Segm"),
    ("Faithfulness", ({"a": al.subsets.lasso(65)}, {}), "there are 64 subsets of 6 segments"),
    ("Faithfulness", ({"a": al.SegmentAttention(apart=9)}, {}), "more than apart=9 segments.* 7"),
    ("Faithfulness", (CORRECT, {"top": 0}), "how many segments .*, from 1 to 6; got 0"),
    ("Faithfulness", (CORRECT, {"top": 7}), "from 1 to 6; got 7"),
    ("Faithfulness", (CORRECT, {"subsets": 2}), "correlation needs subsets=3 or more; got 2"),
    ("Faithfulness", (CORRECT, {"subsets": 65}), "there are 64 subsets of 6 segments"),
    ("Faithfulness", (CORRECT, {"answer": "text"}), "goes on after the answer has begun"),
    ("Faithfulness", (CORRECT, {"segments": ["reply"]}), "there is no segment 'reply'"),
    (
        "MetricError",
        lambda s: run(s, [al.Faithfulness({"given": torch.ones(5, 6)})], [*s.two, s.batch]),
        "two queries have one number after the same demon",
    ),
    ("PromptError", lambda s: run(s, [al.Faithfulness(CORRECT)], []), "there are no batches"),
    ("attribution", {"segments": []}, "segments are different names"),
    ("attribution", {"segments": ["nothing"]}, "there is no segment 'nothing'"),
    ("attribution", {"segments": ["text", "other"]}, "'other' of prompt 0 is empty, but"),
    ("attribution", {"segments": ["text", "target"]}, "is empty, but for the token"),
    ("attribution", {"segments": dict.fromkeys("ab", edges.query)}, r"segments \['a', 'b'\]"),
    ("attribution", {"answer": "nothing"}, "there is no segment 'nothing'"),
    ("attribution", {"answer": "other"}, "the answer, segment 'other', is empty in prompt 0"),
    ("attribution", {"answer": "text"}, "'demonstration 1' of prompt 0 goes on after the an"),
    ("attribution", {"answer": "query", "segments": ["text", "query"]}, "'query' of .* goes on"),
    ("attribution", {"answer": "format"}, "in prompt 0, or holds its first token"),
    (
        "AnchorlensError",
        lambda s: run(s, [scored()], [s.own]),
        "name the answer's segment.*='answer'",
    ),
    ("AnchorlensError", lambda s: run(s, [scored()], [s.batch, s.of_five]), "equally many"),
    ("attribution", returning(), "the batch that runs and a list of hooks.*tuple"),
    (
        "attribution",
        {"answer": "target", "remove": lambda m, b, r: (replace(b, tokens=b.tokens + 1), [])},
        "keep the prompts .* and the tokens of",
    ),
    ("attribution", returning(1), "must return the batch that runs and a list.*got a int"),
    ("attribution", {"remove": lambda m, b, r: (b.prompt(0), [])}, "keep the prompts .* and the"),
    ("attribution", {"remove": lambda m, b, r: (b, [])}, "=<lambda> removes nothing: it re"),
    (
        "attribution",  # as prompts that were built again
        {"remove": lambda m, b, r: (replace(b, index=b.index.flip(0)), [])},
        "must keep the prompts .* returned others",
    ),
    ("attribution", {"remove": blanked}, "blanked changed tokens that it was given in place"),
    ("attribution", {"method": al.subsets.lasso(65)}, "there are 64 subsets of 6 segments"),
    ("attribution", {"method": al.subsets.lasso(9), "segments": ["text", "label"]}, "4 subsets"),
    ("attribution", mine(draw=lambda n, _: torch.ones(n)), r"'mine' .*\(subset, 6\).*torch.float"),
    ("attribution", mine(draw=lambda n, _: torch.ones(2, n + 1) > 0), r"bool .*\(2, 7\)"),
    ("attribution", mine(draw=lambda n, _: torch.ones(0, n) > 0), r"bool .*\(0, 6\)"),
    ("attribution", mine(draw=seeded), r"equally many subsets each time; got .* and .*\("),
    ("attribution", mine(scores=lambda kept, y: y.mean()), r"'mine' \(<lambda>\).* of the 6"),
    ("attribution", mine(scores=lambda kept, y: y[1:] * NAN), r"finite .*-1 to 1, got \[nan"),
    ("attribution", mine(errors=lambda kept, y: y), r"errors of .* 'mine' .* torch.float64"),
    ("MetricError", lambda s: al.subsets.random(9, 3, torch.Generator()), "8 subsets of.*got 9"),
    ("MetricError", lambda s: al.subsets.lasso().draw(3, torch.Generator()), "are 8 subsets of 3"),
    ("a method of subsets", lambda: al.subsets.lasso(1), "subsets must be .* from 2 to .*; got 1"),
    ("a method of subsets", lambda: al.subsets.lasso(alpha=0.0), "alpha must be .* 0; got 0.0"),
    ("a method of subsets", lambda: al.subsets.lasso(alpha=NAN), "alpha must be .* 0; got nan"),
    ("a method of subsets", lambda: al.subsets.shapley(1), "permutations must .* from 2 .*; got 1"),
    ("trace_generation", {"prompt": [("answer", "Yes")]}, "piece of the prompt is called 'answer'"),
    ("trace_generation", {"prompt": ""}, "prompt 0 has no text"),
    ("trace_generation", {"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1"),
    ("trace_generation", {"max_new_tokens": 10_000}, "max_new_tokens=10000 does not fit"),
    ("trace_generation", {"tempratur": 0.5}, "'tempratur' is no option here; .* do_sample, top_k"),
    ("trace_generation", {"return_type": "str"}, "'return_type' is no option here"),
    ("trace_generation", {"weight": lambda a, g: a}, "to a number for each edge"),
    ("step_flows", {"segment": "reply"}, "there is no segment 'reply'"),
    ("step_flows", {"segments": ["reply"]}, "there is no segment 'reply'"),
    ("step_flows", {"weight": lambda a, g: a}, "to a number for each edge"),
    ("MetricError", lambda s: al.step_flows(s.model, FIRST, "first"), "no token that follows an"),
    ("PromptError", lambda s: al.step_flows(s.model, s.own, "answer"), "flows are of one prompt"),
    ("IntegratedFlows", {"steps": 0}, "steps must be a whole number from 1 to 1,000,000; got 0"),
    ("IntegratedFlows", {"output": lambda logits, _: logits.sum()}, "must give one number a prom"),
    ("IntegratedFlows", {"segments": ["nothing"]}, "there is no segment 'nothing'"),
    ("ScoreParts", {"layer": 9}, "layers must be numbers from 0 to 2"),
    ("ScoreParts", {"heads": 9}, "heads must be numbers from 0 to"),
    ("ScoreParts", {"keys": al.edges.target}, "got 1 queries and 1 keys in each prompt"),
    ("ScoreParts", {"queries": al.edges.anchors}, "got 6 queries and 6 keys in each prompt"),
    ("PrefixEffect", {"keys": {"query": edges.query}}, "lies in the query"),
    ("PrefixEffect", {"keys": FIRST_OF_QUERY}, "lies in the query"),
    ("PrefixEffect", {"keys": OVERLAPPING}, "is in two segments; every token can be in one"),
    ("PrefixEffect", {"keys": {"a": lambda b: edges.bos(b) & False}}, "hold no token of some pro"),
    ("PrefixEffect", {"keys": {"a": lambda b: b.attention_mask.float()}}, "'a' of .* tensor of Tr"),
    ("PrefixEffect", {"rows": edges.demonstrations}, "positions of every query"),
    ("PrefixEffect", {"rows": lambda b: edges.bos(b) & False}, "none in some prompt"),
    ("PrefixEffect", {"rows": lambda b: None}, "'rows' of prefix_effect must give .* a NoneType"),
    ("PrefixEffect", {"keys": {}}, "keys are functions by name"),
    ("ModelError", lambda s: draw(s, lambda of, model, b, *_: ask(model, [b], of)), "made with"),
    ("ModelError", lambda s: draw(s, al.PrefixEffect.plot_pattern), "made with"),
    ("ModelError", lambda s: draw(s, al.PrefixEffect.plot_directions), "made with"),
    ("plot_pattern", {"head": 7}, "heads must be numbers from 0 to 1"),
    ("plot_pattern", {"head": 0, "prompt": 3}, "the batch has the prompts 0 to 2"),
    ("head_effects", lambda s: [], "no batches to run"),
    ("shuffled", lambda s: [], "no batches to run"),
    ("shuffled", lambda s: s.unlabelled, "head_effects needs the true label of each query"),
    ("shuffled", lambda s: [s.own], "no label words"),
    ("PromptError", lambda s: al.task_vectors(s.model, [], s.two, **QUIET), "no batches to run"),
    ("MetricError", lambda s: al.task_vectors(s.model, s.two, s.unlabelled, **QUIET), NEEDS),
    *(
        (
            "PromptError",
            lambda s, into=into: al.task_vectors(s.model, s.two, s.two, into=[into(s)], **QUIET),
            "into must have the queries, classes and label words",
        )
        for into in (
            lambda s: s.batch,
            lambda s: replace(s.two[0], verbalizer=OTHER_WORDS),
            lambda s: replace(s.two[0], gold=s.two[0].gold.flip(0)),
        )
    ),
    ("task_vectors", {"positions": edges.anchors}, "at 6 positions in each .* anchors gives 0 in"),
    ("task_vectors", {"positions": IN_TURN}, "at as many positions in each prompt, but <lam"),
    ("task_vectors", {"positions": lambda b: 3}, "'positions' of states must give"),
    ("label_dependence", {}, r"relabelings are functions by name.*got \[\]"),
    ("label_dependence", {" ": al.relabeling.gold}, "relabelings are functions by name"),
    ("label_dependence", {"a": lambda task, demos: (task, demos[::-1])}, f"'a' {KEEPS}"),
    ("label_dependence", {"two": lambda task, demos: (SST2, TWO_CLASSES)}, f"'two' {KEEPS}"),
    ("label_dependence", {"same": al.relabeling.symbols([" A"] * 6)}, "' A'"),
    ("label_dependence", {"a": lambda t, d: (al.Task(LONG + t.template, t.labels), d)}, "tokens"),
    ("MetricError", lambda s: dependence(s, ["Who?"], GOLD_ALONE), "needs the true"),
    ("MetricError", lambda s: dependence(s, [BAD], GOLD_ALONE, resamples=-1), "resamples must be"),
    # Contexts.
    ("compress", {"select": lambda demos: PAIR > 0}, r"got torch.bool of the shape \(2,\)"),
    ("compress", {"select": lambda demos: edges.bos(demos)[0] & False}, ", all False"),
    ("compress", {"positions": lambda chosen: (chosen.nonzero()[:, 0] + 1, 9)}, "must leave k"),
    ("compress of", {"demonstrations_id": torch.arange(3)}, "have several; compress each"),
    ("compress of", {"segments": lambda old: old.clamp(max=OTHER)}, "not known which tokens of th"),
    ("keep", lambda: by_score("small keys", 0), "keep must be from 1 .* got keep=0, that is 0"),
    ("keep", lambda: by_score("small keys", 5000), r"to \d+, the positions .* got keep=5000"),
    ("keep", lambda: by_score("small keys", 1.5), "a share above 0 and up to 1.* got keep=1.5"),
    ("keep", lambda: by_score("small keys", NAN), "got keep=nan"),
    ("keep", lambda: by_score("most read", 7), r"from 8 \(BOS, instructions and the last 8 are"),
    ("keep", lambda: by_score("most read", 1.0, window=5000), "a window must be shorter"),
    ("keep", lambda: selection.ByScore(VALUES, last=-1), "a window must be shorter"),
    ("keep", lambda: selection.random_tokens(0, 5000), "got keep=5000"),
    ("keep", lambda: by_score("most read", window=0), "window must be a .* from 1; got 0"),
    ("ArgumentError", lambda s: by_score(A_CLASS), "score of by_score must be"),
    # Neither prompts of own positions nor of own segments have label words and format.
    *(
        ("PromptError", lambda s, of=of, k=k: al.compress(s.model, of(s), k), "not known which to")
        for of in (lambda s: TIGHT, lambda s: s.renamed)
        for k in (by_score("heavy hitters"), selection.random_tokens(0))
    ),
    (
        "PromptError",
        lambda s: by_score("heavy hitters", 40).of(
            s.model, s.changed(demonstrations_id=torch.arange(3))
        ),
        "these prompts have several",
    ),
    (
        "PromptError",
        lambda s: al.compress(s.model, s.bare[0], selection.random_and_format(0)),
        "has 0 text tokens to replace 1 of its label word",
    ),
    ("ContextComparison", {"contexts": {}}, "contexts are given by name, .*; got none"),
    ("ContextComparison", {"contexts": {" ": NONE}}, "name of a context must not be blank"),
    ("ContextComparison", {"contexts": {"a": NO_CONTEXT}}, "'a' must be a context, .*; got the cl"),
    ("ContextComparison", {"random": [NO_CONTEXT]}, "'random control 0' must be a co.* the class"),
    ("ContextComparison", {"draws": -1}, "draws must be a whole number from 0 to .*; got -1"),
    ("ContextComparison", {"repeats": -1}, "repeats must be a whole number from 0 to .*; got -1"),
    ("MetricError", lambda s: compared(s, s.unlabelled), "accuracy needs the true label"),
    (
        "PromptError",
        lambda s: compared(s, s.several_sets, contexts={"anchors": s.context}),
        "the context 'anchors': the prompts do not begin",
    ),
    ("ModelError", lambda s: compared(s, s.two, contexts={"a": s.of_llama}), "'a': .* made with"),
    ("PromptError", lambda s: compared(s, s.several_sets), "'mine' makes a context for each set"),
    (
        "PromptError",
        lambda s: compared(s, s.several_sets, contexts={"a": NONE}, draws=1),
        "call build_prompts for each set and join",
    ),
    # A later set is read before the first one runs.
    ("PromptError", lambda s: compared(s, [*s.two, *s.bare], draws=1), "has 0 text tokens"),
    *((kind, {"length": 0}, "length must be a whole .* got 0") for kind in CONTEXTS),
    *((kind, {"held_out": []}, "no held-out prompts") for kind in CONTEXTS),
    *((kind, {"batches": []}, "no training prompts") for kind in TRAINERS),
    *((kind, {"steps": -1}, "steps must be a whole number") for kind in TRAINERS),
    *((kind, {"clip": 0}, "clip must be a number above 0") for kind in TRAINERS),
    *((kind, {"batches": NO_LABEL}, NEEDS) for kind in TRAINERS),
    ("prefix", {"held_out": NO_LABEL}, "training needs the true label"),
    ("prefix", {"batches": lambda b: replace(b, begins_with_bos=True)}, "begin with one BOS"),
    ("prefix", {"clip": NAN}, "clip must be a number above 0"),
    ("prefix", {"check_every": 0}, "check_every must be a whole number from 1"),
    ("prefix", {"optimizer": torch.optim.LBFGS}, "whose step needs no arguments"),
    ("prefix", {"loss": lambda logits, _: logits.sum()}, "one number a prompt"),
    ("prefix", {"loss": TWO, "held_out": lambda b: b.prompts(0, 2)}, "one number a prompt"),
    ("prefix", {"length": 600}, "left after 600 positions"),
    ("soft prompt", {"start": []}, "got none"),
    ("soft prompt", {"start": [10**6]}, r"from 0 to 2999; got \[1000000\]"),
    ("soft prompt", {"length": 500}, "12 of the model's context of 512 are left"),
    ("hard prompt", {"allowed": NOT_ALLOWED}, "no token is allowed"),
    ("hard prompt", {"allowed": NOT_ALLOWED[:5]}, "each of the 3000 tokens"),
    ("hard prompt", {"start": [0]}, r"tokens \[0\] of the start are special"),
    ("hard prompt", {"start": [3000]}, "from 0 to 2999"),
    ("hard prompt", {"optimizer": torch.optim.SGD}, "the optimizer of a search is that of its me"),
    ("hard prompt", {"length": 1, "method": hard_prompts.FLUENT_PROMPT}, "has no fluency"),
    ("re-weighting", {"optimizer": partial(torch.optim.Adam, lr=-1.0)}, "Invalid le"),
    ("re-weighting", {"start": torch.zeros(3, 2, 5)}, r"r\) = \(3, 2, 6\).* got \(3, 2, 5\)"),
    ("re-weighting", {"batches": FLIPPED}, "train each set of demonstrations"),
    *(
        ("folded values", lambda m, _, of=of: of(m, split(m)[0], held_out=split(m)[1]), FOLDED)
        for of in TRAINERS.values()
    ),
    ("PromptError", lambda s: trained(s.model, held_out=split(s.model)[0][:1]), "4 held-out quer"),
    ("PromptError", lambda s: trained(s.llama, start=s.of_llama, length=3), "own .*; got length=3"),
    ("start", lambda s: s.longer_prefix(506), "left after 506 positions"),
    ("start", lambda s: s.prefix, "this context was made with"),
    ("start", lambda s: s.starts[0], "which a start must hold"),
    ("start", lambda s: s.starts[1], "more than the BOS"),
    ("start", lambda s: s.starts[2], "positions=al.contexts.placement.rebased, or select="),
    ("ModelError", lambda s: s.prefix.logits(s.llama, s.batch), "this context was made with"),
    ("after a context", {"tokens": lambda old: old.flip(0) + 1}, "prompt 0 differs at position 0"),
    ("after a context", {"target_positions": lambda old: old * 0 + 124}, "has its target at pos"),
    (
        "PromptError",
        lambda s: replace(s.context, query_position=510).logits(s.model, s.batch),
        "tokens, but 2 of the .* after this compressed context; use shorter queries",
    ),
    (
        "PromptError",
        lambda s: s.prefix.logits(s.model, s.changed(begins_with_bos=True)),
        "with no BOS, but these begin with the BOS",
    ),
    (
        "PromptError",
        lambda s: s.of_llama.logits(
            s.llama, replace(questions(s.llama, 2)[0], begins_with_bos=False)
        ),
        "begin with the BOS 1, but these begin with no BOS",
    ),
    (
        "PromptError",
        lambda s: replace(
            s.prefix, prefix=replace(s.prefix.prefix), tokens=torch.zeros(505, dtype=torch.long)
        ).query_pass(s.model, s.batch),
        "7 of the model's context of 512 are left after 505",
    ),
    ("PromptError", lambda s: s.tokens.insert(questions(s.llama, 2)[0]), "begin with no BOS"),
    ("PromptError", lambda s: hard_prompts.class_words(s.long_words), "word has several tokens"),
    ("MetricError", lambda s: replace(hard_prompts.PEZ, fluency=2), "from 0 to 1; got 2"),
]


@pytest.mark.filterwarnings("ignore:nothing is cut or scaled:UserWarning")
@pytest.mark.parametrize(("name", "wrong", "message"), ROWS)
def test_what_cannot_be_answered_is_refused_before_any_pass(
    name: str, wrong: Any, message: str, setup: Scene
) -> None:
    with ExitStack() as without_passes:
        for model in setup.models:
            without_passes.enter_context(does_not_run(model))
        with pytest.raises(RAISES.get(name, AnchorlensError), match=message):
            CALLS[name](setup, wrong)
