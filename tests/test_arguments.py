"""Every public function refuses arguments of another type than its signature has.

The calls are generated: for each parameter, values of other types, beside arguments that fit.
Nothing runs, because an argument is refused before the function begins.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import datasets
import numpy as np
import pandas as pd
import pytest
import torch

import anchorlens as al
from anchorlens.contexts import hard_prompts
from anchorlens.errors import ArgumentError
from anchorlens.results.saved import Saved
from anchorlens.system.arguments import as_hint, checked
from tests.attack.attack_scene import Scene, scene
from tests.support.public import public

NOTHING = object()
LISTS = (Sequence, Collection, Iterable, list, tuple)
# What a study calls itself, for each batch, and what the package makes: records and their parts.
NOT_CALLED_BY_USERS = {
    *("reads", "contributions", "result", "check", "sets_of", "of_run", "further", "of_batch"),
    *("once", "segment_scores"),
}
NOT_OF_USERS = (BaseException, Enum, al.prompts.EdgeSet, al.contexts.KeyValues)
MADE_BY_THE_PACKAGE = (
    *(al.Record, al.records.PromptFlows, al.records.AnswerFlows, al.records.Claim, al.Results),
    *(al.records.GenerationTrace, al.contexts.StoredContext),
    *(al.contexts.ReweightedContext, al.contexts.QueryPass, al.PromptBatch, al.prompts.EdgeSet),
    *(al.reads.Block, al.reads.Seen),
)
INTERNAL = {
    *("PrefixEffect.query_pass", "Task.score", "ChatTask.score", "Verbalizer.score"),
    *("losses.NextTokenCrossEntropy", "losses.NextTokenCrossEntropy.positions"),
    *("losses.WordCrossEntropy", "losses.WordCrossEntropy.continuations"),
    *("losses.before_segment", "losses.gold_of", "losses.needs_positions"),
    "losses.refuse_other_losses",
    *("reads.At.columns", "reads.At.same_before", "reads.Sums.same_before"),
    *(f"reads.{kind}.why_whole" for kind in ("Sums", "Blocks", "Hooks")),
    "reads.Sums.why_no_kernel",
    "weights.refuse_values",
}


def is_protocol(hint: Any) -> bool:
    return Protocol in getattr(hint, "__bases__", ())


def public_functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name, value in public().items():
        if isinstance(value, ModuleType):
            members = vars(value).items()
            own = {key: each for key, each in members if _is_from(each, value.__name__)}
            for key, each in own.items():
                found |= _of(f"{name}.{key}", each)
        else:
            found |= _of(name, value)
    return {name: function for name, function in found.items() if name not in INTERNAL}


def _is_from(value: Any, module: str) -> bool:
    is_defined = inspect.isfunction(value) or inspect.isclass(value)
    return is_defined and value.__module__ == module and value.__name__[0] != "_"


def _of(name: str, value: Any) -> dict[str, Callable[..., Any]]:
    if inspect.isfunction(value):
        return {name: value}
    if not inspect.isclass(value) or is_protocol(value) or issubclass(value, NOT_OF_USERS):
        return {}
    methods: dict[str, Any] = {
        f"{name}.{key}": getattr(value, key)
        for key in (*vars(value), *(vars(Saved) if Saved in value.__bases__ else ()))
        if key[0] != "_" and key not in NOT_CALLED_BY_USERS
    }
    if not issubclass(value, MADE_BY_THE_PACKAGE):
        methods |= {name: value.__init__}
    routines = {key: each for key, each in methods.items() if inspect.isroutine(each)}
    return {key: each for key, each in routines.items() if callable(each) and _parameters(each)}


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters that take one value."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = inspect.signature(function).parameters.values()
    hints = get_type_hints(function)
    return {
        each.name: hints[each.name]
        for each in named
        if each.kind not in several and each.name in hints and each.name not in ("self", "cls")
    }


FUNCTIONS = public_functions()
api: Any = al  # for calls with wrong arguments


def is_checked(function: Callable[..., Any]) -> bool:
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_qualname == "checked.<locals>.call":
            return True
        function = getattr(function, "__wrapped__", None)  # type: ignore[assignment]
    return False


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_compares_its_arguments_with_its_signature(name: str) -> None:
    function = FUNCTIONS[name]
    assert is_checked(getattr(function, "__func__", function)), f"put @checked on al.{name}"
    hints = _parameters(function)
    parameters = inspect.signature(function).parameters
    right = {key: right_for(hint) for key, hint in hints.items()}
    if "self" in parameters:
        right["self"] = None
    for key, hint in hints.items():
        for wrong in wrong_for(hint):
            with pytest.raises(ArgumentError, match=rf"^{key} of .* must be .*; got "):
                function(**right | {key: wrong})


def test_most_functions_are_found() -> None:
    names = {"run", "saliency", "Task", "edges.wp", "Record.save", "PromptBatch.prompt"}
    assert names <= FUNCTIONS.keys() and len(FUNCTIONS) > 150


def wrong_for(hint: Any) -> list[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return []
    if origin in (Union, UnionType):
        first, *others = ([*map(_key, wrong_for(arg))] for arg in args)
        both = set(first).intersection(*others)
        return [value for arg in args for value in wrong_for(arg) if _key(value) in both]
    if origin in (Callable, Literal):
        return [None, 3, "text", [], {}, True, NOTHING]
    if origin is not None and issubclass(origin, Mapping):
        return [None, 3, "text", [], {3: 3}, True, NOTHING, len]
    if origin is Iterable and args[0] is Any:
        return [None, 3, 2.5, "text", b"bytes", True, {}, NOTHING, len]
    if origin in LISTS:
        return [None, 3, 2.5, "text", b"bytes", True, {}, [NOTHING], NOTHING, len]
    if hint in PLAIN:
        return PLAIN[hint]
    return [None, 3, 2.5, "text", b"bytes", [], {}, [None], True, NOTHING, len]


def _key(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value)


PLAIN: dict[Any, list[Any]] = {
    int: [None, 2.5, 1.0, "3", b"3", [], {}, True, float("nan"), np.bool_(1), NOTHING, len],
    float: [None, "3", b"3", [], {}, True, 1j, NOTHING, len],
    bool: [None, 0, 1, "False", "", b"", [], {}, NOTHING, len],
    str: [None, 3, 2.5, b"bytes", [], {}, True, Path("text"), NOTHING, len],
    Path: [None, 3, 2.5, "text", b"bytes", [], {}, True, NOTHING, len],
    NoneType: [3, 2.5, "text", b"bytes", [], {}, True, NOTHING, len],
}


def right_for(hint: Any) -> Any:
    """A value of the type of an annotation; which one it is does not matter."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar) or hint is NoneType:
        return None
    if origin in (Union, UnionType):
        return right_for(args[0])
    if origin is Literal:
        return args[0]
    if origin is Callable:
        return len
    if origin is not None and issubclass(origin, Mapping):
        return {}
    if origin in LISTS:
        return tuple(map(right_for, args)) if origin is tuple and Ellipsis not in args else []
    if hasattr(hint, "array_type"):
        return torch.zeros(2)
    if hint in SIMPLE:
        return SIMPLE[hint]
    # Nothing runs, so that an object of the class needs no values.
    abstract = dict.fromkeys(getattr(hint, "__abstractmethods__", ()))
    kind: Any = type(hint.__name__, (hint,), abstract) if abstract or is_protocol(hint) else hint
    return kind.__new__(kind)


SIMPLE: dict[Any, Any] = {
    **{int: 1, float: 1.0, bool: True, str: "text", Path: Path("file")},
    **{torch.device: torch.device("cpu"), torch.dtype: torch.float32},
}


def scene_without_warnings() -> Scene:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few queries
        return scene()


TEXTS = ["Who wrote it?", "What is it?", "Where is it?"]


@pytest.mark.parametrize(
    "queries",
    [
        TEXTS,
        tuple(TEXTS),
        (text for text in TEXTS),
        np.array(TEXTS),
        pd.Series(TEXTS),
        pd.DataFrame({"text": TEXTS}),
        datasets.Dataset.from_dict({"text": TEXTS}),
        [{"text": text} for text in TEXTS],
        [al.Example(text) for text in TEXTS],
        dict.fromkeys(TEXTS).keys(),
    ],
    ids=lambda queries: type(queries).__name__,
)
def test_a_list_can_be_whatever_has_rows(queries: Any) -> None:
    setup = scene_without_warnings()
    prompts = [
        al.build_prompts(setup.tokenizer, setup.task, setup.demos, each, max_length=10**6)
        for each in (queries, TEXTS)
    ]
    assert torch.equal(prompts[0][0].tokens, prompts[1][0].tokens)


def test_labels_of_a_table_are_those_of_examples() -> None:
    setup = scene_without_warnings()
    columns: dict[str, Any] = {
        "text": [demo.text for demo in setup.demos],
        "label": [demo.label for demo in setup.demos],
    }
    frame, labels = pd.DataFrame(columns), np.array(columns["label"])
    tables: list[Any] = [
        *(frame, datasets.Dataset.from_dict(columns), frame.to_dict("records")),
        (al.Example(text, label) for text, label in zip(columns["text"], labels, strict=True)),
    ]
    seed: Any = np.int64(3)
    drawn = al.sample_demonstrations(setup.demos, seed=seed)
    for table in tables:
        assert al.sample_demonstrations(table, seed=3) == drawn
    assert api.sample_demonstrations(frame.assign(source="x"), seed=3) == drawn
    for other in (frame.rename(columns={"label": "kind"}), frame[["label"]]):
        with pytest.raises(al.AnchorlensError, match=r"its columns text and label; got .*load_ex"):
            api.sample_demonstrations(other)
    shown = api.sample_demonstrations(frame.assign(image="a.png", source="x"))
    assert {each.image for each in shown} == {"a.png"}
    # Texts are examples without a class.
    assert api.sample_queries(["a", "a"], 1) == [al.Example("a")]


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (al.block_edges, "layers", r"write site=al.Site\(layers=0\)$"),
        (al.block_edges, "heads", r"write site=al.Site\(heads=0\)$"),
        (al.isolate_labels, "layer", r"write site=al.Site\(layers=0\)$"),
        (al.replace_heads, "layers", r"write site=al.Site\(layers=0\)$"),
        (al.EdgeSweep, "layers", r"write sites= \(Layers and heads"),
        (al.Site, "head", r"write heads= \(Heads"),
        (al.Site.of_heads, "pairs", r"of_heads has no argument 'pairs'; it takes heads$"),
        (al.sample_prompts, "seed", "write seeds="),
        (al.sample_prompts, "n", r"'n'; it takes model, task, examples, queries, shots, seeds,"),
        (al.load_model, "model", "write source="),
    ],
)
def test_an_unknown_argument_names_the_one_that_is_meant(
    function: Any, given: str, message: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"has no argument '{given}'; ") as error:
        function(**{given: 0})
    assert re.search(message, str(error.value))


def test_every_public_function_refuses_an_unknown_argument() -> None:
    for function in FUNCTIONS.values():
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            with pytest.raises(ArgumentError, match=r"has no argument 'no_such'; "):
                function(no_such=0)


SEGMENTS = r"write batches = al.build_segments\(model, {}\); batches\[0\] is a batch"
ONE = SEGMENTS.format(r"\[text\]")
SAMPLED = r"write batches = al.sample_prompts\(model, 'sentiment'\); batches\[0\] is a batch"
PAIRS = "write edges by number as al.edges.pairs"


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda s: api.saliency(s.model, "a text"), ONE),
        (lambda s: api.saliency(s.model, ["a text", "b"]), SEGMENTS.format("texts")),
        (lambda s: api.run(s.model, ["a text"], []), ONE),
        (lambda s: api.analyse(s.model, "sentiment"), SAMPLED),
        (lambda s: api.saliency(s.model, "sentiment"), SAMPLED),
        (lambda s: api.saliency(s.model, torch.ones(1, 3)), "write al.PromptBatch.from_segments"),
        (lambda s: api.block_edges(s.model, s.batch, [(3, 1)]), PAIRS),
        (lambda _: api.edges.between([3], [1]), PAIRS),
        (lambda _: api.PromptBatch.from_segments([[3.5]]), "convert it with torch.as_tensor"),
        (lambda _: api.PromptBatch.from_segments([3]), "its axes are 1"),
        (lambda _: api.sample_prompts(0, "sst2", "a.csv"), r"read it: al.load_examples\('a.csv'"),
        (lambda _: api.sample_prompts(0, "sst2", "sst2"), r"read it: al.load_examples\('sst2'\)"),
        (lambda s: api.build_segments(s.model, [("q", "Who?"), ("a", " I.")]), "write it in brac"),
        (lambda _: api.sample_queries([("Fun.", 1)], 1), r"write al.Example\('Fun.', 1\)"),
        (lambda _: api.sample_queries({"train": []}, 1), "give its rows: one of several splits"),
        (lambda s: api.PromptBatch(s.batch.tokens), r".*al.PromptBatch.from_segments\("),
        (lambda s: api.PromptBatch([[3]]), r"write al.PromptBatch.from_segments\("),
        (lambda s: api.PromptBatch("a"), ONE),
        (lambda s: api.run(s.model, s.batches, al.Accuracy()), ".*in brackets"),
        (
            lambda s: api.block_edges(s.model, s.batch, api.edges.pq, layer=1, head=0),
            r"write site=al.Site\(layers=1, heads=0\)",
        ),
        (
            lambda s: api.block_edges(s.model, s.batch, api.edges.pq, 1, heads=0),
            r"write site=al.Site\(1, heads=0\)$",
        ),
    ],
)
def test_what_stands_in_place_of_an_argument_has_its_cure(call: Any, cure: str) -> None:
    with pytest.raises(ArgumentError, match=rf"(got|takes|has no) .*; {cure}"):
        call(scene_without_warnings())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: api.head_effects(s.model, s.batches),
            "head_effects takes model, batches, shuffled, resamples, folder, progress; missing is "
            "shuffled, Prompts from build_prompts whose demonstrations have labels in a random",
        ),
        (
            lambda s: s.batch.prompts(step=2),
            "PromptBatch.prompts takes start, stop, step; missing is start; stop",
        ),
    ],
)
def test_an_argument_that_is_missing_is_named(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(scene_without_warnings())


def test_guessed_calls_give_the_numbers_of_the_long_ones() -> None:
    s = scene_without_warnings()
    model, batch = s.model, s.batch
    for build, given in (
        (api.build_segments, [["a text"]]),
        (api.build_prompts, [s.task, s.demos, ["Who?"]]),
        (api.build_pairs, [[("hot", "cold")], [("old", "new")]]),
        (api.sample_pairs, ["antonyms"]),
    ):
        of_model, of_tokenizer = (build(each, *given)[0] for each in (model, model.tokenizer))
        assert torch.equal(of_model.tokens, of_tokenizer.tokens)
    assert str(batch.show(model)) == str(batch.show(model.tokenizer))
    assert torch.equal(api.edges.at(batch, range(2, 4)), api.edges.at(batch, torch.tensor([2, 3])))
    query = int(batch.starts.max()) + 9
    two = api.edges.between(api.edges.at(batch, [query]), api.edges.at(batch, [query - 2]))
    assert torch.equal(api.edges.read_by([query - 2], [query])(batch).stored(), two.stored())
    assert two.stored().sum() == len(batch)
    shape = (model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_head)
    tokens, site = batch.tokens, api.Site(1, heads=[0])
    for number in (0.0, 0.5):
        logits = [
            model.run_with_hooks(tokens, fwd_hooks=api.replace_heads(model, batch, outputs, site))
            for outputs in (number, torch.full(shape, number))
        ]
        assert torch.equal(*logits) and not torch.equal(logits[0], model(tokens))


@pytest.mark.parametrize(
    "number",
    [np.int64(2), np.uint8(2), torch.tensor(2), np.array(2)],
    ids=lambda number: str(type(number)),
)
def test_whole_numbers_of_other_libraries_are_whole_numbers(number: Any) -> None:
    value = as_hint(number, int)
    assert type(value) is int and value == 2
    assert type(as_hint(np.float32(0.5), float)) is float
    assert as_hint(np.bool_(True), bool) is True
    assert as_hint(range(3), Sequence[int]) == range(3)
    assert as_hint(torch.arange(3), Iterable[int] | int) == (0, 1, 2)


def test_what_needs_no_change_is_the_same_object() -> None:
    values = [1, 2]
    rows = {"a": values}
    assert as_hint(values, Sequence[int]) is values
    assert as_hint(rows, Mapping[str, Sequence[int]]) is rows


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (Literal["left", "right"], "left", "above"),
        (Sequence[int], [1, 2], ["1", "2"]),
        (Mapping[str, int], {"a": 1}, {"a": "1"}),
        (Sequence[int] | str, [1, 2], [1, "2"]),
        (tuple[int, str], (1, "a"), ("a", 1)),
    ],
    ids=str,
)
def test_after_a_right_value_a_wrong_one_of_the_same_type_is_refused(
    hint: Any, right: Any, wrong: Any
) -> None:
    def returned(value: Any) -> Any:
        return value

    returned.__annotations__["value"] = hint
    function = checked(returned)
    assert function(right) == function(value=right) == right
    with pytest.raises(ArgumentError, match="value of"):
        function(wrong)
    with pytest.raises(ArgumentError, match="value of"):
        function(value=wrong)


@pytest.mark.parametrize(
    "wrong",
    [None, 3, 2.5, "text", b"bytes", [], {}, [None], NOTHING, int, len],
    ids=lambda wrong: type(wrong).__name__,
)
def test_models_and_tokenizers_of_another_type_are_refused(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their signatures take anything that has the methods of one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a text names a model
    setup = scene_without_warnings()
    held_out = setup.batches
    calls: list[Callable[[], Any]] = [
        lambda: al.prepare_model(wrong),
        lambda: al.restore_model(wrong),
        lambda: al.build_prompts(wrong, setup.task, setup.demos, ["x"]),
        lambda: al.prompts.text_anchor_prompts(wrong, setup.task, setup.demos, setup.queries),
        lambda: al.build_segments(wrong, [[("a", "x")]]),
    ]
    if wrong is not None:  # the model's own
        calls += [
            lambda: al.load_model(wrong),
            lambda: hard_prompts.of_tokens(setup.model, [300], held_out=held_out, tokenizer=wrong),
            lambda: hard_prompts.random(setup.model, held_out=held_out, tokenizer=wrong),
            lambda: setup.batch.show(wrong),
        ]
    for call in calls:
        with pytest.raises(al.AnchorlensError):
            call()


class Called(Protocol):
    """Something that is called."""

    def __call__(self) -> int: ...


def test_a_protocol_of_a_function_needs_a_function() -> None:
    @checked
    def use(call: Called) -> int:
        return call()

    assert use(lambda: 3) == 3
    with pytest.raises(ArgumentError, match="which has no __call__: Something that is called"):
        use(3)  # type: ignore[arg-type]
