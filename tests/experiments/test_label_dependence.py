"""What predictions follow, against loops over single prompts and predictors whose rule is known."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

import anchorlens as al
from anchorlens.experiments import label_dependence as experiment
from anchorlens.runs.study import Study
from tests.references import states

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TASK, EXAMPLES = al.TASKS["trec"], al.load_examples("questions")
DEMOS = al.sample_demonstrations(EXAMPLES, shots=3, seed=1)
QUERIES = [example for example in EXAMPLES if example not in DEMOS]
RELABELINGS = {
    "gold": al.relabeling.gold,
    "random": al.relabeling.random(0),
    "flipped": al.relabeling.flipped(),
    "symbols": al.relabeling.symbols([" A", " B", " C", " D", " E", " F"]),
}
HALF = al.relabeling.flipped(share=0.5, seed=1)


def likeliest(model: Any, prompts: Any, words: torch.Tensor) -> int:
    [(tokens, *_)] = prompts
    return int(states.logits_at_end(model, tokens)[words].argmax())


def given_classes(demos: Sequence[al.Example], how: Any, label: int | None) -> set[int | None]:
    pairs = zip(demos, al.relabeling.relabel(demos, TASK, how)[1], strict=True)
    return {new.label for old, new in pairs if old.label == label}


def shares_by_hand(model: Any, sets: Any, queries: Any, how: Any) -> dict[str, float]:
    answers: dict[str, list[bool]] = {name: [] for name in ("truth", "prior", "prompt", "override")}
    tokenizer = model.tokenizer
    for demos, query in zip(sets, queries, strict=True):
        plain = al.build_prompts(tokenizer, TASK, demos, [query])
        task, changed = al.relabeling.relabel(demos, TASK, how)
        prompt = al.build_prompts(tokenizer, task, changed, [query])
        z = likeliest(model, states.queries_alone(plain), plain[0].label_token_ids)
        y = likeliest(model, states.alone(prompt), prompt[0].label_token_ids)
        answers["truth"].append(y == query.label)
        answers["prior"].append(y == z)
        given = given_classes(demos, how, query.label)
        if len(given) == 1:
            answers["prompt"].append(given == {y})
            if given != {query.label}:
                answers["override"].append(given == {y} and y != z)
    return {name: sum(of) / len(of) if of else torch.nan for name, of in answers.items()}


@pytest.mark.slow("many passes")
@pytest.mark.parametrize("shots", [1, 2])
def test_it_equals_loops_over_single_prompts(shots: int, model: Any) -> None:
    queries, seeds = QUERIES[:7], range(7) if shots == 1 else [1] * 7
    sets = [al.sample_demonstrations(EXAMPLES, shots=shots, seed=seed) for seed in seeds]
    given = sets if shots == 1 else sets[0]
    record = al.label_dependence(model, TASK, given, queries, RELABELINGS, batch_size=3, **QUIET)
    for k, how in enumerate(RELABELINGS.values()):
        for name, expected in shares_by_hand(model, sets, queries, how).items():
            assert float(getattr(record, name)[k]) == pytest.approx(expected, nan_ok=True), name
    assert torch.equal(record.change, record.truth - record.truth[0])
    torch.testing.assert_close(record.correct.mean(0), record.truth)


Rule = Callable[[int, set[int | None], int], int]  # of g, the classes given to it, and z


def answered(
    monkeypatch: pytest.MonkeyPatch, model: Any, rule: Rule
) -> al.records.LabelDependenceRecord:
    hows, alone = [*RELABELINGS.values(), HALF], (torch.arange(31) % 6).tolist()
    asked, rows = [*zip((query.label or 0 for query in QUERIES[:31]), alone, strict=True)], [alone]
    for how in hows:
        rows.append([rule(label, given_classes(DEMOS, how, label), z) for label, z in asked])
    answers = iter(map(torch.tensor, rows))

    def predictions(study: Study, alone: bool) -> torch.Tensor:
        with study.entered():
            return next(answers)

    monkeypatch.setattr(experiment, "_predictions", predictions)
    names = {**RELABELINGS, "half": HALF}
    return al.label_dependence(model, TASK, DEMOS, QUERIES[:31], names, resamples=3, progress=False)


@pytest.mark.slow("many passes")
def test_predictors_whose_rule_is_known(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gold, random, flipped, symbols, half = range(5)
    answered_by = partial(answered, monkeypatch, gpt2)
    ignores = answered_by(lambda g, given, z: z)
    assert ignores.prior.tolist() == [1] * 5 and ignores.override[flipped] == 0
    assert ignores.change.tolist() == [0] * 5
    right = answered_by(lambda g, given, z: g)
    assert right.truth.tolist() == [1] * 5 and right.prompt[flipped] == 0
    copies = answered_by(lambda g, given, z: min(given) or 0)  # type: ignore[type-var]
    assert copies.prompt[flipped] == 1 and copies.truth[flipped] == 0
    assert float(copies.override[flipped]) == pytest.approx(1 - float(copies.prior[flipped]))
    assert 0 < float(copies.override[flipped]) < 1
    for record in (ignores, right, copies):
        for k in (gold, symbols):
            assert record.prompt[k] == record.truth[k] and isnan(record.override[k])
    # Some classes of half flipped labels have one label, and only their queries count.
    known = sum(len(given_classes(DEMOS, HALF, query.label)) == 1 for query in QUERIES[:31])
    assert 0 < known < 31 and copies.prompt[half] == 1
    exact = binomtest(known, known).proportion_ci(method="wilson")
    assert copies.intervals["prompt"][:, half].tolist() == pytest.approx([exact.low, exact.high])
    # In 600 random orders a copier is right as often as by chance, with one demonstration a class.
    demos = al.sample_demonstrations(EXAMPLES, seed=1)
    hows = map(al.relabeling.random, range(600))
    share = sum(given_classes(demos, how, 3) == {3} for how in hows) / 600
    assert abs(share - 1 / 6) < 4 * (1 / 6 * 5 / 6 / 600) ** 0.5 and random == 1
