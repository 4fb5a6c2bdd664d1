"""The numbers of ``paper`` against the package's functions on the same draws, or transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_models import randomize, tiny_gpt2

import anchorlens as al
from anchorlens.errors import DataError
from anchorlens.replication import paper_parts
from anchorlens.replication.paper_parts import Number, Setting, table_3

EXAMPLES = al.load_examples("emotions")
EMOTIONS = {"emotions": (EXAMPLES, EXAMPLES)}
TASK = al.TASKS["emo"]
FORMAT = "Dialogue:\nEmotion:{}\n"
SEEDS = (3, 4)
QUICK: dict[str, Any] = {"queries": 12, "depth": 1, "draws": 2, "progress": False}
QUIET: dict[str, Any] = {"progress": False, "resamples": 0}

pytestmark = [
    pytest.mark.without_jaxtyping,
    pytest.mark.filterwarnings("ignore:in 1 of 1 sets", "ignore:in layers"),
]
over_seeds = pytest.mark.parametrize("seed", SEEDS)


def weights_for(tokenizer: Any) -> Any:
    """A context that takes five demonstrations a class, and weights that predict all classes."""
    return randomize(tiny_gpt2(len(tokenizer), n_layer=2, n_positions=1024), seed=1, scale=0.5)


@pytest.fixture(scope="module")
def model(byte_level: Any) -> Any:
    return al.load_model(weights_for(byte_level), tokenizer=byte_level)


Given = tuple[list[al.PromptBatch], al.Beta, list[al.PromptBatch]]


@pytest.fixture(scope="module")
def found(model: Any) -> tuple[pd.DataFrame, list[Given]]:
    """All numbers, and what re-weighting was tested with."""
    given: list[Given] = []

    def keep(model: Any, batches: Any, beta: Any, more: Any, **options: Any) -> Any:
        given.append((batches, beta, more))
        return al.reweighting_accuracy(model, batches, beta, more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_parts, "reweighting_accuracy", keep)
        return al.paper(model, EMOTIONS, seeds=SEEDS, **QUICK), given


@pytest.fixture(scope="module")
def numbers(found: tuple[pd.DataFrame, list[Given]]) -> pd.DataFrame:
    return found[0]


Draws = tuple[list[al.Example], list[al.Example], list[al.Example]]


def drawn(seed: int) -> Draws:
    """Demonstrations, training examples and queries."""
    demos = al.sample_demonstrations(EXAMPLES, 1, seed)
    training = al.sample_demonstrations(
        [example for example in EXAMPLES if example not in demos], 4, seed
    )
    queries = al.sample_queries(EXAMPLES, 12, seed, exclude=[*demos, *training])
    assert len({example.text for example in (*demos, *training, *queries)}) == 4 + 16 + 12
    return demos, training, queries


def prompts(model: Any, seed: int) -> list[al.PromptBatch]:
    demos, _, queries = drawn(seed)
    return al.build_prompts(model.tokenizer, TASK, demos, queries)


def values(numbers: pd.DataFrame, seed: int, part: str, row: str, column: str) -> list[float]:
    fields = {"seed": seed, "part": part, "row": row, "column": column}
    chosen = numbers[(numbers[[*fields]] == pd.Series(fields)).all(axis=1)]
    return list(chosen.sort_values("layer").value)


def plain_answers(weights: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Logits of the label words, from strings through plain transformers."""
    ids = [tokenizer(word)["input_ids"][0] for word in TASK.labels]
    with torch.no_grad():
        rows = [
            weights(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1] for text in texts
        ]
    return torch.stack(rows)[:, ids]


def test_each_row_is_a_number(numbers: pd.DataFrame) -> None:
    assert list(numbers) == ["task", "seed", "part", "row", "column", "layer", "value"]
    assert set(numbers.task) == {"emotions"} and set(numbers.seed) == set(SEEDS)
    names = ["task", "seed", "part", "row", "column", "layer"]
    assert not numbers.duplicated(names).any()
    assert not numbers[names].isna().any(axis=None) and not (numbers[names] == "").any(axis=None)


@over_seeds
def test_figures_3_5_and_6(numbers: pd.DataFrame, model: Any, seed: int) -> None:
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances()]
    results = al.run(model, prompts(model, seed), metrics, **QUIET)
    flows, attention = results["saliency_flows"], results["attention_aucroc"]
    diagnosis = al.diagnose(results["anchor_distances"])
    for row, column, part, expected in [
        *((f"S_{name}", "share", "Figure 3", flows.share[:, k])
          for k, name in enumerate(("wp", "pq", "ww"))),
        ("S_pq / S_tq", "ratio", "Figure 3", flows.pq_over_tq),
        ("AUCROC_l", "area", "Figure 5", attention.aucroc),
        ("R_l", "share", "Figure 5", attention.r),
        ("rank correlation", "rho", "Figure 6", diagnosis.correlation),
        ("p-value", "share", "Figure 6", diagnosis.p_value),
    ]:  # fmt: skip
        found = values(numbers, seed, part, row, column)
        assert found == pytest.approx(expected.tolist(), rel=1e-4, nan_ok=True), row
        assert len(found) == 2
    for kind in ("predicted", "actual"):
        for a, first in enumerate(("Others", "Happy", "Sad", "Angry")):
            for b, second in enumerate(("Others", "Happy", "Sad", "Angry")):
                expected = getattr(diagnosis, kind)[a, b]
                found = values(numbers, seed, f"Figure 6, {kind}", first, second)
                assert found == pytest.approx([float(expected)], nan_ok=True)


@over_seeds
def test_figure_4(numbers: pd.DataFrame, model: Any, seed: int) -> None:
    batches = prompts(model, seed)
    for site, layers in (("first layer", [0]), ("last layer", [1])):
        record = al.isolation_loyalty(model, batches, layers, draws=2, **QUIET)
        for kind in ("label", "word"):
            label = values(numbers, seed, "Figure 4", f"label words, {site}", f"{kind} loyalty")
            random = values(numbers, seed, "Figure 4", f"random words, {site}", f"{kind} loyalty")
            assert label == [float(getattr(record, f"{kind}_loyalty"))]
            expected = getattr(record, f"random_{kind}_loyalty")
            assert len(expected) == 2 and random == pytest.approx([float(expected.sum()) / 2])


@over_seeds
def test_table_1(numbers: pd.DataFrame, model: Any, byte_level: Any, seed: int) -> None:
    """Vanilla and more shots against plain transformers, from strings."""
    demos, training, queries = drawn(seed)
    weights = weights_for(byte_level)
    gold = torch.tensor([query.label for query in queries])
    for name, shots in (("vanilla", demos), ("more shots", [*demos, *training])):
        lines = [TASK.demonstration(one.text, int(one.label or 0)) for one in shots]
        texts = ["\n".join([*lines, TASK.query(query.text)]) for query in queries]
        right = plain_answers(weights, byte_level, texts).argmax(1) == gold
        found = values(numbers, seed, "Table 1", name, "accuracy")
        assert found == pytest.approx([float(right.double().mean())])
    assert values(numbers, seed, "Table 1, shots", "more shots", "a class") == [5]


def test_beta_is_learned_from_the_training_examples(
    found: tuple[pd.DataFrame, list[Given]], model: Any
) -> None:
    numbers, given = found
    assert len(given) == len(SEEDS)
    seed, (batches, beta, _) = SEEDS[1], given[1]
    demos, training, queries = drawn(seed)
    lessons = al.build_prompts(model.tokenizer, TASK, demos, training, batch_size=1)
    expected = al.train_reweighting(model, lessons, seed=seed, progress=False)
    assert torch.equal(beta.beta, expected.beta) and expected.beta.abs().max() > 0.1
    logits = al.target_logits(
        model,
        prompts(model, seed),
        hooks=lambda batch: al.reweight_anchors(model, batch, expected),
        progress=False,
    )
    gold = torch.tensor([query.label for query in queries])
    right = logits[:, batches[0].label_token_ids].argmax(1) == gold
    accuracy = values(numbers, seed, "Table 1", "re-weighted", "accuracy")
    assert accuracy == pytest.approx([float(right.double().mean())])


@over_seeds
def test_table_2(numbers: pd.DataFrame, model: Any, byte_level: Any, seed: int) -> None:
    batches = prompts(model, seed)
    record = al.compression_loyalty(model, batches, seed=seed, **QUIET)
    alone = al.compression_loyalty(model, batches, al.selection.label_words, draws=1, **QUIET)
    demos, _, queries = drawn(seed)
    weights = weights_for(byte_level)
    bare = "".join(FORMAT.format(TASK.labels[int(one.label or 0)]) for one in demos)
    answers = plain_answers(weights, byte_level, [bare + TASK.query(q.text) for q in queries])
    lines = "".join(TASK.demonstration(one.text, int(one.label or 0)) + "\n" for one in demos)
    whole = plain_answers(weights, byte_level, [lines + TASK.query(q.text) for q in queries])
    gold = torch.tensor([query.label for query in queries])

    def share(right: torch.Tensor) -> float:
        return float(right.double().mean())

    expected: dict[str, list[Any]] = {
        "ICL": [1, 1, share(whole.argmax(1) == gold), 1],
        "Text_anchor": [share(answers.argmax(1) == whole.argmax(1)), None,
                        share(answers.argmax(1) == gold)],
        "Hidden_random": [record.random_label_loyalty.mean(), record.random_word_loyalty.mean(),
                          record.random_accuracy.mean()],
        "Hidden_random-top": [record.top_label_loyalty, record.top_word_loyalty,
                              record.top_accuracy],
        "Hidden_anchor": [record.label_loyalty, record.word_loyalty, record.accuracy,
                          record.bytes_kept / record.bytes_whole],
        "label words alone": [alone.label_loyalty, alone.word_loyalty, alone.accuracy,
                              alone.bytes_kept / alone.bytes_whole],
    }  # fmt: skip
    assert len(record.random_accuracy) == 20
    for name, row in expected.items():
        columns = ("label loyalty", "word loyalty", "accuracy", "cache kept")[: len(row)]
        for column, value in zip(columns, row, strict=True):
            found = values(numbers, seed, "Table 2", name, column)
            assert value is None or found == pytest.approx([float(value)]), (name, column)
    demonstrations = batches[0].prompt(0).before(int(batches[0].prompt(0).query_start[0]))
    count = len(demonstrations.tokens[0])
    kept = int(al.selection.anchors_and_format(demonstrations).sum())
    assert values(numbers, seed, "Table 2", "Hidden_anchor", "cache kept") == [kept / count]


def setting(model: Any, seed: int = 3) -> Setting:
    demos, training, queries = drawn(seed)
    rest = [example for example in EXAMPLES if example not in queries]
    return Setting(model, TASK, demos, training, queries, rest, depth=1, draws=2, seed=seed)


def test_texts_are_drawn_once(model: Any) -> None:
    """Also if a text occurs twice, or in the examples for queries too."""
    seen: list[Setting] = []

    def record(setting: Setting) -> Iterator[Number]:
        seen.append(setting)
        yield Number("Mine", "a", "b", 0.5)

    twice = [*EXAMPLES, *(replace(one) for one in EXAMPLES)]
    al.paper(model, {"emotions": (twice, EXAMPLES)}, seeds=SEEDS, parts=[record], **QUICK)
    for one in seen:
        demos, training, queries, pool = (
            [example.text for example in some]
            for some in (one.demonstrations, one.training, one.queries, one.pool)
        )
        assert len({*demos, *queries}) == 4 + 12
        assert not {*demos, *queries} & {*training} and not {*queries} & {*pool}
        assert {*demos, *training} <= {*pool} and len({*pool}) == len(EXAMPLES) - 12
    first, second = seen
    assert first.queries != second.queries and first.demonstrations != second.demonstrations


def test_table_3(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the first eight queries, one at a time."""
    timed: list[al.PromptBatch] = []

    def times(model: Any, batches: list[al.PromptBatch]) -> al.AnswerTimesRecord:
        timed.extend(batches)
        names = ("whole", "cached", "compressed", "speed_up", "speed_up_over_cached")
        numbers: Any = {name: torch.tensor(float(k)) for k, name in enumerate(names)}
        return al.AnswerTimesRecord(**numbers)

    monkeypatch.setattr(paper_parts, "answer_times", times)
    found = {number.row: number.value for number in table_3(setting(model))}
    demos, _, queries = drawn(3)
    lines = "".join(TASK.demonstration(one.text, int(one.label or 0)) + "\n" for one in demos)
    lengths = [len(model.tokenizer(TASK.query(query.text))["input_ids"]) for query in queries[:8]]
    assert found == {
        "against the whole prompt": 3,
        "against a cached prefix": 4,
        "tokens of the demonstrations": len(model.tokenizer(lines)["input_ids"]),
        "tokens of a query": sum(lengths) / 8,
    }
    assert all(len(batch) == 1 for batch in timed)
    assert sorted(int(batch.index[0]) for batch in timed) == list(range(8))


def test_times_are_measured(numbers: pd.DataFrame) -> None:
    assert (numbers[numbers.part == "Table 3"].value > 0).all()


@pytest.mark.parametrize("limited", ["model", "tokenizer"])
def test_more_shots_are_as_many_as_fit(
    byte_level: Any, limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three per class if the context is too short for five, as on AGNews in the paper."""
    model = al.load_model(
        tiny_gpt2(len(byte_level), n_layer=1, n_positions=1024), tokenizer=byte_level
    )
    here = setting(model)
    chosen = [[one for one in here.training if one.label == label][:2] for label in range(4)]
    expected = [one for one in here.training if any(one in some for some in chosen)]
    three = here.prompts([*here.demonstrations, *expected])
    longest = max(int(batch.attention_mask.sum(1).max()) for batch in three)
    if limited == "model":
        monkeypatch.setattr(model.cfg, "n_ctx", longest)
    else:
        monkeypatch.setattr(model.tokenizer, "model_max_length", longest)
    count, batches = paper_parts._more_shots(here)
    assert count == 3
    assert [batch.tokens.tolist() for batch in batches] == [one.tokens.tolist() for one in three]
    if limited == "model":
        monkeypatch.setattr(model.cfg, "n_ctx", 60)
        with pytest.raises(DataError, match="not even two demonstrations a class fit"):
            paper_parts._more_shots(here)
