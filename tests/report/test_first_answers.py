"""What stands first: each command's sentence, its number and interval, and what cannot be told."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.report.answer import answer_of
from anchorlens.report.claims import LIMITS, NEEDED
from anchorlens.results.answer import Answer
from tests.support.made_up_records import made_up_record
from tests.support.tiny_models import questions, tiny_gpt2, tiny_llama


@pytest.mark.slow("many passes")
@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:intervals of", "ignore:some")
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_nothing_is_told_of_random_weights(make: Any, byte_level: Any, hooked: Any) -> None:
    model = hooked(make(len(byte_level)), byte_level)
    asked: list[Any] = [
        al.ContextComparison({"none": al.contexts.NoContext(), "label words": al.compress}),
        al.Faithfulness({"one by one": al.subsets.one_by_one}, subsets=4),
        al.Accuracy(),
    ]
    records = al.run(model, questions(model, 12), asked, progress=False, resamples=20)
    right = records["accuracy"].estimate("accuracy").percent()
    for name in ("contexts", "faithfulness"):
        answer: Any = answer_of([records[name], records["accuracy"]], [])
        assert "one set of demonstrations: intervals do not speak of other sets" in answer.limits
        alone: Any = answer_of([records[name]], [])  # without accuracy nothing is known of it
        if name == "contexts":
            assert answer.sentence.startswith("This cannot be told: the model")
            assert "is not known: run Accuracy" in alone.sentence
        else:  # the answer is explained, right or wrong
            assert "Random scores have" in answer.sentence == alone.sentence
            assert "Scores explain the predicted label, right or wrong: the mo" in answer.limits
            assert f"the accuracy, {right}, is not" in answer.limits
            assert "is not known: run Accuracy" in alone.limits
    # Of a model that does the task, the same records tell.
    contexts, faithfulness = records["contexts"], records["faithfulness"]
    whole = contexts.estimate("whole_accuracy").percent()
    of_contexts, told = (each.answer("").sentence for each in (contexts, faithfulness))  # type: ignore[union-attr]
    assert of_contexts.startswith(f"After the demonstrations {whole} of the queries")
    assert f"one by one {faithfulness.estimate('lds', 0)}" in told and "Random scores have" in told


def test_across_models_the_answer_names_the_models_that_do_the_task() -> None:
    count, statements = 4, list(LIMITS)
    number = torch.full((count, len(statements)), 0.25, dtype=torch.double)
    verdict = torch.full_like(number, 2).long()
    verdict[:2, statements.index(NEEDED)] = torch.tensor([0, 1])
    record = al.records.AcrossModelsRecord(
        number=number,
        verdict=verdict,
        limit=torch.zeros(len(statements)),
        accuracy=torch.tensor([0.9, 0.8, 0.5, torch.nan]),
        intervals={"number": torch.stack([number - 0.125, number + 0.125])},
        info={
            "models": ["a", "b", "c", "d"],
            "claims": statements,
            "reasons": [["why; for others"] * len(statements)] * count,
            "missing": {"c": "unable", "d": "failed: no file"},
        },
    )
    assert record.answer("").sentence.endswith(
        "Of 4 models 2 do the task. Isolating the label words in the first layers changes a larger "
        "share of predictions than isolating random words: yes for a (+0.25 [+0.12, +0.38]); no "
        "for b (+0.25 [+0.12, +0.38])."
    )
    record.info["missing"].update({"a": "unable", "b": "unable"})
    assert record.answer("").sentence.endswith(
        "naming the commonest class: a (90 % right), b (80 % right), c (50 % right) and d (failed)."
    )
    record.number[2:] = torch.nan
    cells = [record.table().iloc[k, 1] for k in (2, 3)]
    assert cells == ["? no number: why", "? no number: the model failed"]


def test_faithfulness_names_the_scores_that_are_above_random_ones() -> None:
    def told(*values: float, low: float) -> str:
        lds = torch.tensor([*values, 0.1, 0.9])
        info = {"scores": ["a", "b", "random", "best possible"], "prompts": 1}
        record: Any = made_up_record(al.records.FaithfulnessRecord)
        ends = {"lds": torch.stack([lds - low, lds + low])}
        return str(replace(record, lds=lds, intervals=ends, info=info).answer("").sentence)

    clear = "(LDS), more than random scores: b 0.80 [0.75, 0.85]; not clearly more: a 0.12 ["
    assert clear in told(0.12, 0.8, low=0.05)
    vague = "none is clearly above random scores: b 0.80 [0.40, 1.20] and a 0.12 [-0.28, 0.52]. Ran"
    assert f"(LDS), {vague}dom scores have 0.10" in told(0.12, 0.8, low=0.4)


def test_a_report_begins_with_the_answer_given_or_of_a_record(gpt2: Any, tmp_path: Any) -> None:
    record = al.run(gpt2, questions(gpt2, 4), [al.Accuracy()], resamples=0, progress=False)
    given = Answer("Which?", "This & that.", "Of these.", next="try:\n  anchorlens run")
    for results, name in ((dict(record), ""), ({"task": dict(record)}, "task")):
        page = al.write_report(results, tmp_path / "page.html", answers={name: given}).read_text()
        texts = ['<p class="headline">This &amp; that.</p>', ">Of these.</p>", "<h3>Which?</h3>"]
        places = [page.index(text) for text in [texts[2], *texts[:2], "</strong> try:"]]
        assert places == sorted(places) and '<pre tabindex="0">anchorlens run</pre>' in page

    class Own(al.records.AccuracyRecord):
        def answer(self, unable: str) -> Answer:
            return replace(given, sentence=unable[:12])

    own = Own(**{name: getattr(record["accuracy"], name) for name in Own.axes()})
    page = al.write_report({"own": own}, tmp_path / "page.html").read_text()
    assert '<p class="headline">whether the </p>' in page
