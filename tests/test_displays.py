"""What a person sees of every public object: one line, and small HTML in a notebook."""

import io
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import pytest
import torch

import anchorlens as al
from anchorlens import errors
from anchorlens.errors import AnchorlensError, RunError
from anchorlens.printable import printable
from anchorlens.report.claims import Claim, Claims, Control, Verdict
from anchorlens.results.estimate import Estimate, values_in_short
from anchorlens.results.text_tables import Section, aligned
from anchorlens.runs.study import Study
from tests.support.asked import scored
from tests.support.html_checks import Parsed
from tests.support.made_up_records import made_up_record
from tests.support.public import public
from tests.support.tiny_models import questions
from tests.support.trained_contexts import trained

LARGE = {"layer": 48, "head": 25, "prompt": 200, "draw": 10, "class": 6}


def public_classes() -> set[type]:
    """Classes of which people have instances; protocols and errors are not."""
    kinds = {value for value in public().values() if isinstance(value, type)}
    without = {kind for kind in kinds if Protocol in kind.__bases__ or issubclass(kind, Exception)}
    return kinds - without - {al.Record, al.Metric, al.Question, al.contexts.StoredContext}


def all_records(**changes: Any) -> list[al.Record]:
    kinds = [kind for kind in public_classes() if issubclass(kind, al.Record)]
    kinds.sort(key=lambda kind: kind.__name__)
    return [replace(made_up_record(kind, LARGE), **changes) for kind in kinds]


def reads_of(batch: al.PromptBatch) -> Iterator[Any]:
    yield al.reads.At("pattern", al.edges.target, batch.label_positions.repeat(1, 99))
    sets = al.reads.EdgeSets([al.edges.ww(batch)] * 99)
    segments = al.reads.Segments(batch.attention_mask[:, None])
    yield from (sets, segments, al.reads.Sums(al.weights.attention, sets))
    yield al.reads.Blocks(lambda block: block.pattern.sum(3), slope=True)
    yield al.reads.Block(3, slice(0, 9), slice(0, 99), torch.ones(1, 1, 9, 99), None)
    hooks = [("hook_embed", lambda tensor, hook: None)] * 99
    yield from (al.reads.Hooks({}, hooks), al.reads.Hooks({"a": torch.ones(99)}, (), hooks))


def questions_with_passes(model: Any, batch: al.PromptBatch) -> Iterator[Any]:
    sites = al.sites.first_and_last(model, [1, 2]) | al.sites.windows(model, 1)
    yield from (al.EdgeSweep.isolation(sites), al.EdgeSweep(al.edges.pq, sites))
    names = [f"segment {number}" for number in range(40)]
    yield from (al.IntegratedFlows(), al.IntegratedFlows(names))
    yield scored(al.subsets.lasso(9))
    yield from (
        al.ScoreParts(1, heads=range(99), by="head"),
        al.Loss(al.losses.label_cross_entropy),
    )
    yield al.Faithfulness({name: al.SegmentFlows(name=name) for name in names})
    context = al.compress(model, batch)
    yield al.PrefixEffect(context=context)
    yield al.ContextComparison({name: context for name in names}, draws=20)
    yield al.Further([lambda batch: []] * 99, range(99), [al.Accuracy()] * 99)


def made_without_arguments() -> Iterator[Any]:
    for kind in public_classes():
        with suppress(TypeError):  # an argument is missing
            yield kind()


def instances(model: Any) -> Iterator[Any]:
    batch = questions(model, 2)[0]
    yield from (*all_records(), *made_without_arguments(), *questions_with_passes(model, batch))
    segments: Any = {f"segment {k}": al.edges.anchors for k in range(40)}
    yield from (al.SegmentAttention(segments), al.SegmentFlows(segments))
    yield al.trace_generation(model, "Who?", max_new_tokens=20, stop_at_eos=False)
    yield from (*al.TASKS.values(), al.Example("What is it?", 1))
    yield al.ChatTask("{text}{label}", ["no", "yes"], score=torch.amax)
    yield al.prompts.Verbalizer([[1, 2], [5]])
    yield from (al.Site(range(5)), al.Site(-1, heads=[0, 1], keep_bos=True))
    yield from (batch, batch.before(9), context := al.compress(model, batch), al.edges.ww(batch))
    beta = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, 6)
    yield al.contexts.reweight_demonstrations(model, batch, beta)
    yield al.contexts.NoContext().query_pass(model, batch)
    yield from (trained(model, steps=0), trained(model, steps=0).prefix, *reads_of(batch))
    yield al.reads.Seen({}, {"states": torch.ones(99)}, {}, torch.ones(99, 99), None, n_heads=1)
    with Study(model, [batch], {"experiment": "depths " * 99}, progress=False).entered() as study:
        yield from (study.passes(), study.passes([al.Accuracy()], share_prefix=False))
        yield study.passes([al.Accuracy(f"accuracy {number}") for number in range(99)])
    training, held_out = questions(model, 2, batch_size=1)
    how = al.contexts.Training(steps=0, progress=False)
    prompt = al.train_soft_prompt(model, [training], how, held_out=[held_out])
    yield from (how, prompt, prompt.prefix)
    yield al.contexts.hard_prompts.of_tokens(model, [300] * 99, held_out=[held_out])
    flows = al.run(model, [batch], [al.SaliencyFlows()], resamples=0, progress=False)
    yield from (*al.claims(flows), Verdict.AGREES, al.records.Answer("What?", "words " * 99))
    yield al.plot_prompt(model, batch)
    yield al.plot_answer(al.step_flows(model, batch.prompt(0), "text"))
    yield al.Contributions({f"number {k}": torch.ones(3) for k in range(40)})
    labels = tuple(f"{number}\n" * 40 for number in range(6))
    yield replace(batch, labels=labels, first_query=9)
    info = {name: str(value) * 99 for name, value in context.info.items() if value}
    yield replace(context, info={**info, "selected": {}})
    yield from all_records(info={"model": labels})


@pytest.mark.slow("many passes")
@pytest.mark.filterwarnings("ignore:intervals of")
def test_every_public_object_prints_one_short_line(gpt2: Any) -> None:
    shown = list(instances(gpt2))
    for line in map(repr, shown):
        assert len(line) <= 200 and "\n" not in line and "tensor(" not in line, line
        assert line.lstrip("<")[:5] != "ancho", f"the default repr says nothing: {line}"
    assert {type(instance) for instance in shown} >= public_classes()


# A model, a segment, a class, a file or an error can have any text, also one that is a script of a
# page, or that changes colours or the title of a terminal, turns the line around, or looks like
# another.
SCRIPT = '<script>alert("x")</script>\n& more'
COMMANDS = (
    "a\x1b[31m \x9d0;title\x07 \u202e \u2066 \u200f \u061c \u200b \u200d \ufeff \r \x85 \udce9"
)


def hostile_things(model: Any, hostile: str) -> Iterator[Any]:
    """Objects with a text of somebody else in each place that has one."""
    info = {"model": hostile, "prompts": hostile, "labels": [hostile]}
    batch = questions(model, 2)[0]
    records = all_records(info=info | {hostile: hostile * 999})
    yield from (each for each in records if type(each).__str__ is object.__str__)
    yield al.Results({f"{hostile}{number}": each for number, each in enumerate(records)})
    yield replace(batch, labels=(hostile, hostile))
    yield al.EdgeSweep(al.edges.pq, {hostile: al.Site(0)}, name=hostile)
    yield al.IntegratedFlows([hostile])
    with Study(model, [batch], {}, progress=False, resamples=0).entered() as study:
        yield study.passes([al.Accuracy(hostile.replace("/", ""))])
    yield replace(al.compress(model, batch), info=info | {"positions": hostile})
    yield replace(trained(model, steps=0), info={"model": hostile, "dtype": hostile})
    yield al.reads.At(f"{{}}{hostile}", al.edges.target)
    yield al.reads.Seen({}, {hostile: 1}, {}, torch.ones(2, 3), None, n_heads=1)
    yield replace(al.plot_prompt(model, batch), heading=hostile)
    flows = al.step_flows(model, batch.prompt(0), "text")
    yield replace(al.plot_answer(flows), heading=hostile)
    text = batch.show(model.tokenizer)
    yield replace(text, tokens=[hostile] * len(text.tokens))
    trace = al.trace_generation(model, "Who?", max_new_tokens=2, stop_at_eos=False)
    yield replace(trace, text=hostile)
    yield al.Contributions({hostile: torch.ones(3)})
    yield al.SegmentFlows({hostile: al.edges.anchors})
    yield al.SegmentFlows(name=hostile)
    yield al.Example(hostile, 1)
    yield al.ChatTask("{text}{label}" + hostile, ["no", "yes"])
    claim = Claim(
        *(f"{hostile}.", hostile, Estimate(1.0), 0.0, hostile, hostile),
        *(Verdict.AGREES, hostile, [Control(hostile, Estimate(1.0))]),
    )
    yield from (claim, Claims([claim]))
    yield Section(hostile, {(hostile, hostile): {hostile: hostile}}, hostile, hostile)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    yield from (
        kind(hostile, {}) if kind is RunError else kind(hostile)
        for kind in kinds
        if issubclass(kind, AnchorlensError)
    )


@pytest.mark.slow("many passes")
@pytest.mark.filterwarnings("ignore:intervals of")
def test_no_text_of_somebody_else_commands_a_terminal(gpt2: Any) -> None:
    for instance in hostile_things(gpt2, COMMANDS):
        texts = {"repr": repr(instance), "str": str(instance), "format": f"{instance}"}
        if isinstance(instance, Section):
            texts = {"text": instance.text(), "in a narrow terminal": instance.text(20)}
        for how, text in texts.items():
            is_shown = text.replace("\n", "").isprintable() and r"\x1" in text
            assert is_shown, f"{how} of {type(instance).__name__}: {text!r}"


@pytest.mark.slow("many passes")
@pytest.mark.filterwarnings("ignore:intervals of")
def test_html_is_small_valid_and_escaped_and_has_the_colours_of_the_page(gpt2: Any) -> None:
    pictures = al.records.PromptFlows | al.records.AnswerFlows  # pages in frames of their own
    things = [each for each in hostile_things(gpt2, SCRIPT) if not isinstance(each, pictures)]
    shown = [each for each in things if hasattr(each, "_repr_html_")]
    kinds = {type(each).__name__ for each in shown}
    assert kinds >= {"PromptBatch", "PromptView", "CompressedContext", "PrefixContext", "Results"}
    for instance in shown:
        html = instance._repr_html_()
        parsed = Parsed(html)
        assert "<scr" in parsed.text, type(instance)
        assert not parsed.tags & {"script", "img", "link", "iframe"}
        assert len(html) < 20_000, f"{type(instance).__name__}: {len(html)}"
        colours = re.findall(r"(?<![-\w])(?:color|background): ([^;}]+)", html)
        fixed = {value for value in colours if not value.endswith("%)")}
        assert fixed <= {"inherit", "none", "Canvas", "CanvasText"} and "url(" not in html


@pytest.mark.slow("many passes")
def test_models_of_any_name_and_error_are_compared_without_commands(
    gpt2: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a table, in a warning, in the log with its traceback, and in the bar."""

    def load() -> Any:
        raise KeyError(COMMANDS) from OSError(COMMANDS)

    log, stream = logging.getLogger("anchorlens"), io.StringIO()
    # Without the handler of the tests, which makes an error of what is logged.
    handlers, log.handlers = log.handlers, [logging.StreamHandler(stream)]
    options: dict[str, Any] = {"queries": 12, "depth": 1, "draws": 1, "resamples": 0}
    try:
        with pytest.warns(UserWarning) as warned:
            models = {COMMANDS: load, f"ok {COMMANDS}": gpt2}
            record = al.replication.across_models(models, "questions", **options)
    finally:
        log.handlers = handlers
    logged = stream.getvalue()
    assert "Traceback" in logged and "OSError" in logged
    texts = [str(record), str(record.table()), logged, capsys.readouterr().err]
    texts += [str(each.message) for each in warned if "KeyError" in str(each.message)]
    assert len(texts) > 4
    for text in texts:
        assert re.sub(r"[\n\r]|\x1b\[A", "", text).isprintable(), repr(text)
        assert r"\x1b[31m" in text
    assert repr(record).isprintable()


def test_letters_that_need_a_joiner_keep_it() -> None:
    persian = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    emoji = "\U0001f469\u200d\U0001f52c"
    assert printable(persian) == persian and printable(emoji) == emoji
    assert printable("gp\u200dt2") == r"gp\u200dt2" and printable("a\tb\nc") == "a\tb\nc"


def test_a_record_shows_its_numbers_with_their_intervals() -> None:
    accuracy = al.records.AccuracyRecord(
        accuracy=torch.tensor(0.75),
        correct=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        intervals={"accuracy": torch.tensor([0.5, 0.9])},
        info={"prompts": 4, "model": "gpt2"},
    )
    text = Parsed(accuracy._repr_html_()).text
    assert text.startswith("AccuracyRecord: 4 prompts, gpt2Accuracy of the model's")
    assert "accuracy0.75 [0.50, 0.90]correctprompt 41.00, 0.00, 1.00, 1.00" in text
    assert "plot() draws them" in text
    results = al.Results(accuracy=accuracy)
    assert "accuracy 0.75 [0.50, 0.90]" in Parsed(results._repr_html_()).text


def test_a_record_of_ones_own_needs_no_docstring_and_no_plot() -> None:
    record = type("Own", (al.Record,), {"__doc__": None})()
    text = Parsed(record._repr_html_()).text
    assert text.startswith("Ownquantity") and "plot" not in text


def test_values_are_shown_in_short() -> None:
    nan = torch.nan
    assert values_in_short(torch.tensor(0.12345)) == "0.12"
    assert values_in_short(torch.tensor(123456)) == "123456"
    assert values_in_short(torch.tensor([1.0, nan, 3.0, 4.0])) == "1.00, nan, 3.00, 4.00"
    assert values_in_short(torch.arange(5.0)) == "0.00, 1.00, 2.00, …, 4.00"
    assert values_in_short(torch.full((3, 2), nan)) == "nan"
    assert values_in_short(torch.tensor([[-1.5, nan], [2.0, 0.0]])) == "-1.50 to 2.00"
    assert values_in_short(torch.ones(3, 2)) == "all 1.00"
    assert values_in_short(torch.zeros(0, 2)) == "none"
    number, ends = torch.tensor(0.375), torch.tensor([0.25, 0.5])
    assert values_in_short(number, *ends) == "0.38 [0.25, 0.50]"
    assert values_in_short(torch.zeros(3), *torch.zeros(2, 3)) == "0.00, 0.00, 0.00"


def test_results_are_a_dict_that_prints_a_line_for_each_record() -> None:
    kinds = {"b": al.contexts.Beta, "a": al.records.LoyaltyRecord}
    records: dict[str, Any] = {name: made_up_record(kind) for name, kind in kinds.items()}
    results = al.Results(records)
    assert results == records and {**results} == records and list(results) == ["b", "a"]
    assert isinstance(results, dict) and results | {"c": 1} == records | {"c": 1}
    title, *lines = repr(results).splitlines()
    assert title == "Results of 2 records"
    assert lines == [f"  b: {records['b']!r}", f"  a: {records['a']!r}"]


def test_a_context_shows_the_segments_of_its_tokens(gpt2: Any) -> None:
    batch = questions(gpt2, 2)[0]
    context = al.compress(gpt2, batch, select=al.contexts.selection.label_words)
    assert context.info["selected"] == {"label": len(batch.label_positions[0])}
    selected = f"positions 6 of {len(context.selected)}; segments label 6; cached these"
    assert selected in repr(context)
    both = al.compress(gpt2, batch)
    counted = {
        name: int((batch.segments[0, : len(both.selected)] == number)[both.selected].sum())
        for number, name in enumerate(("other", "text", "label", "format", "query", "target"))
    }
    assert both.info["selected"] == {name: count for name, count in counted.items() if count}


def test_a_long_cell_is_narrowed_before_a_column_goes_below_the_others() -> None:
    reason = "no number: there is no rank correlation of three pairs"
    table = {("", "a claim of the paper that is long"): {"this model": reason, "verdict": "x" * 14}}
    lines = [*aligned(table)]
    assert lines[0].split() == ["this", "model", "verdict"] and max(map(len, lines)) == 80
    wider = {key: texts | {"more": "y" * 24} for key, texts in table.items()}
    assert len([line for line in aligned(wider) if "long" in line]) == 2  # two blocks
