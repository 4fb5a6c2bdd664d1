"""Each part of the appendix, compared with the package's functions or with hooks by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.replication import paper_parts
from anchorlens.replication.paper_parts import PaperNumber, PaperSetting
from tests.support.asked import ask
from tests.support.tiny_models import randomize, tiny_gpt2

EXAMPLES = al.load_examples("sentiment")
TASK = al.TASKS["sst2"]
QUIET: dict[str, Any] = {"progress": False, "resamples": 0}

pytestmark = pytest.mark.filterwarnings(
    "ignore:in . of . sets", "ignore:in layers", "ignore:some pairs"
)


@pytest.fixture(scope="module")
def model(byte_level: Any) -> Any:
    """Its context takes eight demonstrations per class, and it predicts both classes."""
    weights = randomize(tiny_gpt2(len(byte_level), n_positions=1024), seed=2, scale=0.8)
    return al.load_model(weights, tokenizer=byte_level)


@pytest.fixture(scope="module")
def setting(model: Any) -> PaperSetting:
    demos = al.sample_demonstrations(EXAMPLES, 1, 3)
    queries = al.sample_queries(EXAMPLES, 12, 3, exclude=demos)
    pool = [example for example in EXAMPLES if example not in queries]
    return PaperSetting(model, TASK, demos, [], queries, pool, depth=2, draws=2, seed=3)


def values(numbers: Sequence[PaperNumber], part: str, row: str, column: str) -> list[float]:
    return [
        number.value
        for number in numbers
        if (number.part, number.row, number.column) == (part, row, column)
    ]


def compare(
    numbers: Sequence[PaperNumber], variant: str, model: Any, batches: list[al.PromptBatch]
) -> None:
    """Compare flows and isolation in a variant of the setting with their functions."""
    flows = al.run(model, batches, [al.SaliencyFlows()], **QUIET)["saliency_flows"]
    shares = values(numbers, f"{variant}: Figure 3", "S_wp", "share")
    assert shares == pytest.approx(flows.share[:, 0].tolist(), rel=1e-4)
    sweep = al.EdgeSweep.isolation({"isolated": al.Site([0, 1])}, draws=2)
    record = ask(model, batches, sweep, **QUIET)
    part, row = f"{variant}: Figure 4", "label words, first 2 layers"
    assert values(numbers, part, row, "word loyalty") == [float(record.word_loyalty)]
    assert record.word_loyalty < 1
    names = {number.part for number in numbers}
    assert {f"{variant}: Figure {k}" for k in (3, 4, 5, 6)} <= names
    assert all(name.startswith(f"{variant}: ") for name in names)


def test_depths_equal_an_isolation_of_each(model: Any, setting: PaperSetting) -> None:
    """The depths are 1, 3, 5 and 7 layers, up to the number that the model has."""
    numbers = list(paper_parts.depths(setting))
    sites = {"first layer": [0], "last layer": [2], "first 3 layers": range(3)}
    assert {number.row for number in numbers} == {
        f"{words} words, {site}"
        for words in ("label", "random")
        for site in (*sites, "last 3 layers")
    }
    assert paper_parts.DEPTHS == (1, 3, 5, 7)
    for site, layers in sites.items():
        sweep = al.EdgeSweep.isolation({"isolated": al.Site(layers)}, draws=2)
        record = ask(model, setting.prompts(), sweep, **QUIET)
        loyalties = values(
            numbers, "Appendix, isolation depths", f"label words, {site}", "word loyalty"
        )
        assert loyalties == [float(record.word_loyalty)]


def test_two_shots_equal_runs_on_their_prompts(model: Any, setting: PaperSetting) -> None:
    numbers = list(paper_parts.two_shots(setting))
    demos = al.sample_demonstrations(setting.pool, 2, 3)
    assert len(demos) == 4 and not set(demos) & set(setting.queries)
    batches = al.build_prompts(model.tokenizer, TASK, demos, setting.queries)
    compare(numbers, "Appendix, two shots", model, batches)


def test_letters_replace_the_label_words(
    model: Any, setting: PaperSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts have letters as label words. The numbers are tested with two shots."""
    calls: list[tuple[PaperSetting, str]] = []

    def record_call(setting: PaperSetting, variant: str) -> list[PaperNumber]:
        calls.append((setting, variant))
        return []

    monkeypatch.setattr(paper_parts, "_repeated", record_call)
    assert list(paper_parts.letters(setting)) == []
    [(changed, variant)] = calls
    assert variant == "Appendix, letters as labels, 8 shots"
    assert replace(changed, task=TASK, demonstrations=setting.demonstrations) == setting
    demos = al.sample_demonstrations(setting.pool, 8, 3)
    assert len(demos) == 16 and not set(demos) & set(setting.queries)
    lines = "".join(f"Review: {demo.text}\nSentiment: {'AB'[demo.label or 0]}\n" for demo in demos)
    expected = {f"{lines}Review: {query.text}\nSentiment:" for query in setting.queries}
    batches = changed.prompts()
    rows = [
        tokens[mask]
        for batch in batches
        for tokens, mask in zip(batch.tokens, batch.attention_mask, strict=True)
    ]
    assert {model.tokenizer.decode(row) for row in rows} == expected


def test_top_words_equal_those_of_single_prompts(model: Any, setting: PaperSetting) -> None:
    """The reference runs one prompt at a time, with hooks by hand."""
    numbers = list(paper_parts.top_words(setting))
    assert len(numbers) == 3 * 3 * 5
    for query in setting.queries[:3]:
        (batch,) = al.build_prompts(model.tokenizer, TASK, setting.demonstrations, [query])
        for name, hooks in (
            ("clean", []),
            ("label words isolated", al.isolate_labels(model, batch, [0, 1])),
            ("random words isolated", al.hooks.isolate_random(model, batch, [0, 1], seed=3)),
        ):
            with torch.no_grad():
                logits = model.run_with_hooks(batch.tokens, fwd_hooks=hooks)[0, -1].double()
            best = logits.softmax(-1).sort(descending=True)
            words = [model.tokenizer.decode([int(token)]) for token in best.indices[:5]]
            top = [number for number in numbers if number.row == f"{name}: {query.text}"]
            assert [number.column for number in top] == [
                f"{k + 1}. {w!r}" for k, w in enumerate(words)
            ]
            expected = best.values[:5].tolist()
            assert [number.value for number in top] == pytest.approx(expected, rel=1e-4)
    clean, isolated = (
        {number.value for number in numbers if number.row.startswith(name)}
        for name in ("clean", "label")
    )
    assert clean != isolated


def test_directions_equal_anchor_distances_with_as_many_directions(
    model: Any, setting: PaperSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of directions that need more queries are left out."""
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, 1, 3)
    queries = al.sample_queries(examples, 12, 3, exclude=demos)
    questions = replace(setting, task=al.TASKS["trec"], demonstrations=demos, queries=queries)
    assert paper_parts.DIRECTIONS == (5, 10, 20, 50, 100, 200)
    monkeypatch.setattr(paper_parts, "DIRECTIONS", (1, 3, 11, 12))
    numbers = list(paper_parts.directions(questions))
    assert [number.row for number in numbers] == ["M = 1", "M = 3", "M = 11"]
    for count, number in zip((1, 3, 11), numbers, strict=True):
        [record] = al.run(model, questions.prompts(), [al.AnchorDistances(count)], **QUIET).values()
        assert number.value == pytest.approx(float(record.correlation[2]))
    assert numbers[0].value != numbers[1].value


def test_demonstrations_that_do_not_fit_are_a_warning(
    byte_level: Any, setting: PaperSetting
) -> None:
    small = al.load_model(
        tiny_gpt2(len(byte_level), n_layer=2, n_positions=256), tokenizer=byte_level
    )
    examples = {"sentiment": (EXAMPLES, EXAMPLES)}
    parts = [paper_parts.letters, paper_parts.top_words]
    options: dict[str, Any] = {"queries": 12, "seeds": [3], "depth": 1, "draws": 1}
    with pytest.warns(UserWarning, match="sentiment, seed 3, letters: a prompt has .* is 256"):
        numbers = al.paper(small, examples, parts=parts, progress=False, **options)
    assert set(numbers.part) == {"Appendix, top words"}
    names = [part.__name__ for part in al.replication.PAPER_APPENDIX]
    assert names == ["depths", "two_shots", "letters", "top_words", "directions"]
