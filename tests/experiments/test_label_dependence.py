"""What predictions follow, against loops over single prompts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import anchorlens as al
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
