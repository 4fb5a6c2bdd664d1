"""Tiny models with a known answer: the truth in plain transformers, and cells of the findings."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.questions.faithfulness import default_scores
from anchorlens.results.estimate import in_digits
from benchmarks.known_answers import (
    COLUMNS,
    KNOWN,
    METHODS,
    WORDS,
    Grade,
    Known,
    grade,
    line,
    paths_but,
    real_prompt,
    scores_of,
    tokenizer,
)

PAGE = (Path(__file__).parents[1] / "docs" / "findings.md").read_text("utf-8")
SECTION = PAGE.partition("## Which score may I trust when\n")[2].partition("\n## ")[0]
HEADER, _, *ROWS = re.findall(r"^\|.*", SECTION, re.MULTILINE)
OTHER_WORDS = str.maketrans("abcxyzL", "defdefM")
each_model = pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)


def logits_of(weights: Any, known: Known, removed: Any = (), changed: Any = ()) -> Tensor:
    """Plain transformers, which masks the tokens of removed segments.

    Segments that are changed have other words, of the same length in the residual stream.
    """
    texts, names = list[str](), list[str | None]()
    for name, text in known.prompt:
        texts.append(text.translate(OTHER_WORDS) if name in changed else text)
        names += [name] * len(text.split())
    ids = torch.tensor([tokenizer()("".join(texts))["input_ids"]])
    mask = torch.tensor([[int(name is None or name not in removed) for name in names]])
    places = torch.arange(len(names))[None]
    with torch.no_grad():
        options = {"attention_mask": mask, "position_ids": places, "use_cache": False}
        return weights(ids, **options).logits[0, -1]


def log_odds(*args: Any, **options: Any) -> float:
    """Those of "y"."""
    return float(logits_of(*args, **options).softmax(0)[WORDS.index("y")].logit())


@each_model
def test_what_an_answer_rests_on_in_plain_transformers(known: Known) -> None:
    weights, names = known.weights(), [name for name, _ in known.prompt if name]
    assert {*known.rests_on, *known.against} <= {*names}
    whole, of = log_odds(weights, known), partial(log_odds, weights, known)
    assert logits_of(weights, known).argmax() == WORDS.index("y")
    lost = whole - of(removed=known.rests_on)
    assert lost == pytest.approx(known.lost, abs=1e-6) and lost > 0.5
    assert abs(whole - of(changed=known.rests_on)) > 0.5
    for name in known.against:
        assert of(removed=[name]) > whole + 1
    others = [name for name in names if name not in (*known.rests_on, *known.against)]
    for some in ([name] for name in others):
        assert abs(whole - of(changed=some)) < 1e-6
    assert abs(whole - of(changed=others)) < 1e-6
    is_redundant = known.name == "two redundant paths"
    for name in known.rests_on:
        assert (abs(whole - of(changed=[name])) < 1e-6) == is_redundant
        assert (abs(whole - of(removed=[name])) < 1e-6) == is_redundant


@each_model
def test_the_findings_state_the_grades_of_each_score(known: Known) -> None:
    weights, names = known.weights(), [name for name, _ in known.prompt if name]
    model = al.load_model(known.weights(), tokenizer=tokenizer())
    scores = scores_of(model, known.prompt)
    assert scores.keys() == {*COLUMNS}
    whole = log_odds(weights, known)
    for number, name in enumerate(names):
        lost = whole - log_odds(weights, known, removed=[name])
        assert float(scores["one by one"][number]) == pytest.approx(lost, abs=1e-9)
    grades = {name: grade(scores[name], known.truth) for name in COLUMNS}
    assert line(known.name, grades) in ROWS


def test_the_findings_have_no_other_rows() -> None:
    assert HEADER.split(" | ")[1:] == [*COLUMNS[:-1], f"{COLUMNS[-1]} |"]
    names = [row.split(" | ")[0].removeprefix("| ") for row in ROWS]
    assert names[:-1] == [known.name for known in KNOWN] and names[-1].startswith("Gemma 3 270M")


@pytest.mark.parametrize("known", [KNOWN[0], KNOWN[6]], ids=lambda known: known.name)
def test_scores_are_those_of_faithfulness(known: Known) -> None:
    model = al.load_model(known.weights(), tokenizer=tokenizer())
    names = [name for name, _ in known.prompt if name]
    given: Any = default_scores() | {name: of(len(names)) for name, of in METHODS.items()}
    asked = al.Faithfulness(given, segments=names, answer="answer", subsets=0)
    [batch] = al.build_segments(model.tokenizer, [[*known.prompt, ("answer", " y")]])
    record: Any = al.run(model, [batch], [asked], progress=False, resamples=0)[asked.name]
    ours = scores_of(model, known.prompt)
    assert {*given} | {"integrated", "ScoreParts"} == ours.keys()
    for number, name in enumerate(given):
        assert (record.scores[number] - ours[name]).abs().max() < 1e-6, name


@pytest.mark.slow_cases("six segments", "position")
@each_model
def test_what_the_answer_rests_on_is_told_with_what_it_loses(known: Known) -> None:
    weights, texts = known.weights(), {name: text for name, text in known.prompt if name}
    options: dict[str, Any] = {"segments": [*texts], "answer": "answer"}
    whole = log_odds(weights, known)
    lost = {name: whole - log_odds(weights, known, removed=[name]) for name in texts}
    model = al.load_model(known.weights(), tokenizer=tokenizer())
    [batch] = al.build_segments(model.tokenizer, [[*known.prompt, ("answer", " y")]])

    def answered(subsets: int, **scores: Any) -> tuple[Any, Any]:
        asked = al.Faithfulness(scores, subsets=subsets, **options)
        record = al.run(model, [batch], [asked], progress=False, resamples=0)[asked.name]
        [row] = record.rests_on().reset_index().to_dict("records")
        assert in_digits(row["value"]) in str(record.rests_on())
        return record, row

    last: dict[str, Any] = {"last": lambda _: torch.eye(len(texts))[-1:]}
    for others in (dict[str, Any](), last):
        record, row = answered(4, **others, alone=al.subsets.one_by_one)
        assert max(lost.values()) - lost[row["segment"]] < 1e-9
        assert row["value"] == pytest.approx(lost[row["segment"]], abs=1e-9)
        assert (row["prompt"], row["answer"]) == (0, "y") and row["score"] == "alone"
        assert row["text"] == texts[row["segment"]].strip()
        told = f'most on {row["segment"]}, "{row["text"]}": without it, its log-odds fall by '
        told += f"{in_digits(row['value'])}."
        if known.name == "two redundant paths":
            told = "on no single segment: without any one, its log-odds do not fall."
        told = f'Prompt 0, "{row["query"]}": the answer "y" rests {told}'
        assert record.answer("").prompts == [told]

    # Where nothing was removed one by one, of the score with the highest LDS.
    end = [*texts][-1]
    record, row = answered(4, **last)
    told = f'on {end}, "{texts[end].strip()}", which has the highest score by last, 1.00.'
    assert record.answer("").prompts[0].endswith(told)
    record, row = answered(4, **last, other=al.subsets.shapley())
    best = int(record.lds[:2].nan_to_num(-2).argmax())
    assert row["score"] == ("last", "other")[best]
    assert row["value"] == record.scores_of_prompts[0, best].max()
    record, row = answered(0, other=al.subsets.shapley(), **last)  # without a test
    assert row["score"] == "other" and record.answer("") is None


def test_grades() -> None:
    truth = torch.tensor([1, 0, -1])
    assert grade(torch.tensor([3.0, 0.0, -1.0]), truth) == Grade(True, 1.0)
    assert grade(torch.tensor([2.0, 1.0, 1.0]), truth) == Grade(True, 0.25)
    assert grade(torch.tensor([1.0, 1.0, 0.0]), truth) == Grade(False, 0.5)
    assert grade(torch.tensor([1e-7, 0.0, 0.0]), truth) == Grade(False, 0.0)


def test_in_the_real_case_no_other_document_reaches_the_answer(exact_model: Any) -> None:
    """A model of random weights as well: nothing of the others arrives, but they are read."""
    asked, cut = 1, partial(paths_but, 1, exact_model)
    prompt = real_prompt(0, asked)
    [batch] = al.build_segments(exact_model.tokenizer, [prompt])
    changes = {}
    for number in range(4):
        changed = batch.tokens.masked_fill(batch.segments == number, 7)
        logits = [
            exact_model.run_with_hooks(tokens, fwd_hooks=cut(batch))[0, -1].detach()
            for tokens in (batch.tokens, changed)
        ]
        changes[number] = float((logits[0] - logits[1]).abs().max())
    assert changes.pop(asked) > 1e-3 and not any(changes.values())
    scores = scores_of(exact_model, prompt, cut)
    others = torch.arange(4) != asked
    for name in ("rollout", "saliency", "signed", *METHODS):
        assert scores[name][others].abs().max() < 1e-6 < scores[name][asked].abs(), name
    assert (scores["attention"][others][:2] > 0.1).all()
