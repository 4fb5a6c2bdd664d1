"""The numbers of ``paper``, compared with the package's functions or with transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch

import anchorlens as al
from anchorlens.errors import DataError
from anchorlens.replication import paper_parts
from anchorlens.replication.paper_parts import (
    PaperNumber,
    PaperSetting,
    table_2_baselines,
    table_3,
)
from tests.support.asked import ask
from tests.support.tiny_models import randomize, tiny_gpt2

EXAMPLES = al.load_examples("emotions")
EMOTIONS = {"emotions": (EXAMPLES, EXAMPLES)}
TASK = al.TASKS["emo"]
FORMAT = "Dialogue:\nEmotion:{}\n"
SEEDS = (3, 4)
QUICK: dict[str, Any] = {"queries": 12, "depth": 1, "draws": 2, "progress": False}
QUIET: dict[str, Any] = {"progress": False, "resamples": 0}

pytestmark = pytest.mark.filterwarnings("ignore:in 1 of 1 sets", "ignore:in layers")
over_seeds = pytest.mark.parametrize("seed", SEEDS)


def weights_for(tokenizer: Any) -> Any:
    """A model whose context takes five demonstrations a class, and that predicts all classes."""
    return randomize(tiny_gpt2(len(tokenizer), n_layer=2, n_positions=1024), seed=1, scale=0.5)


@pytest.fixture(scope="module")
def model(byte_level: Any) -> Any:
    return al.load_model(weights_for(byte_level), tokenizer=byte_level)


@pytest.fixture(scope="module")
def found(model: Any) -> tuple[pd.DataFrame, list[al.contexts.Beta]]:
    """All numbers, and the betas that were learned in two rounds of ten."""
    betas: list[al.contexts.Beta] = []

    def train(
        model: Any, batches: list[al.PromptBatch], training: al.contexts.Training
    ) -> al.contexts.Beta:
        assert training == al.contexts.Training(seed=training.seed, progress=False)
        betas.append(al.contexts.train_reweighting(model, batches, replace(training, steps=32)))
        return betas[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_parts, "train_reweighting", train)
        patch.setattr(paper_parts, "TIMED_PASSES", 2)
        return al.paper(model, EMOTIONS, seeds=SEEDS, **QUICK), betas


@pytest.fixture(scope="module")
def numbers(found: tuple[pd.DataFrame, list[al.contexts.Beta]]) -> pd.DataFrame:
    return found[0]


Draws = tuple[list[al.Example], list[al.Example], list[al.Example]]


def draw_examples(seed: int) -> Draws:
    """Demonstrations, training examples and queries."""
    demos = al.sample_demonstrations(EXAMPLES, 1, seed)
    training = al.sample_demonstrations(
        [example for example in EXAMPLES if example not in demos], 4, seed
    )
    queries = al.sample_queries(EXAMPLES, 12, seed, exclude=[*demos, *training])
    assert len({example.text for example in (*demos, *training, *queries)}) == 4 + 16 + 12
    return demos, training, queries


def prompts(model: Any, seed: int) -> list[al.PromptBatch]:
    demos, _, queries = draw_examples(seed)
    return al.build_prompts(model.tokenizer, TASK, demos, queries)


def values(numbers: pd.DataFrame, seed: int, part: str, row: str, column: str) -> list[float]:
    fields = {"seed": seed, "part": part, "row": row, "column": column}
    chosen = numbers[(numbers[[*fields]] == pd.Series(fields)).all(axis=1)]
    return list(chosen.sort_values("layer").value)


def plain_answers(weights: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Logits of the label words that plain transformers gives for these texts."""
    ids = [tokenizer(word)["input_ids"][0] for word in TASK.labels]
    with torch.no_grad():
        rows = [
            weights(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1] for text in texts
        ]
    return torch.stack(rows)[:, ids]


def test_each_row_names_one_number(numbers: pd.DataFrame) -> None:
    assert list(numbers) == ["task", "seed", "part", "row", "column", "layer", "value"]
    assert set(numbers.task) == {"emotions"} and set(numbers.seed) == set(SEEDS)
    names = ["task", "seed", "part", "row", "column", "layer"]
    assert not numbers.duplicated(names).any()
    assert (numbers[numbers.part == "Table 3"].value > 0).all()
    assert not numbers[names].isna().any(axis=None) and not (numbers[names] == "").any(axis=None)


@over_seeds
def test_figures_3_5_and_6_equal_the_metrics(numbers: pd.DataFrame, model: Any, seed: int) -> None:
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances()]
    results = al.run(model, prompts(model, seed), metrics, **QUIET)
    flows, attention = results["saliency_flows"], results["attention_aucroc"]
    diagnosis = al.diagnose(results["anchor_distances"])
    both = [batch for each in SEEDS for batch in prompts(model, each)]
    of_all = al.run(model, both, [al.AttentionAUCROC()], **QUIET)["attention_aucroc"]
    for row, column, part, expected in [
        *((f"S_{name}", "share", "Figure 3", flows.share[:, k])
          for k, name in enumerate(("wp", "pq", "ww"))),
        ("S_pq / S_tq", "ratio", "Figure 3", flows.pq_over_tq),
        ("AUCROC_l", "area", "Figure 5", attention.aucroc),
        ("R_l", "share", "Figure 5", of_all.r),
        ("KL from attention", "nats", "Equation 6", attention.kl),
        ("KL from uniform shares", "nats", "Equation 6", attention.uniform_kl.expand(2)),
        ("slope", "calibration", "Equation 6", attention.calibration),
        ("rank correlation", "rho", "Figure 6", diagnosis.correlation),
        ("p-value", "share", "Figure 6", diagnosis.p_value),
    ]:  # fmt: skip
        ours = values(numbers, seed, part, row, column)
        assert ours == pytest.approx(expected.tolist(), rel=1e-4, nan_ok=True), row
        assert len(ours) == 2
    for k, name in enumerate(("S_wp / S_ww", "S_pq / S_ww")):
        ours = values(numbers, seed, "Section 2.1", "median over layers", name)
        assert ours == [pytest.approx(float(flows.over_ww[k]), rel=1e-4)]
    for kind in ("predicted", "actual"):
        for a, first in enumerate(("Others", "Happy", "Sad", "Angry")):
            for b, second in enumerate(("Others", "Happy", "Sad", "Angry")):
                expected = getattr(diagnosis, kind)[a, b]
                ours = values(numbers, seed, f"Figure 6, {kind}", first, second)
                assert ours == pytest.approx([float(expected)], nan_ok=True)


@over_seeds
def test_figure_4_equals_an_isolation_of_each_site(
    numbers: pd.DataFrame, model: Any, seed: int
) -> None:
    batches = prompts(model, seed)
    for site, layers in (("first layer", [0]), ("last layer", [1])):
        sweep = al.EdgeSweep.isolation({"isolated": al.Site(layers)}, draws=2)
        record = ask(model, batches, sweep, **QUIET)
        for kind in ("label", "word"):
            label = values(numbers, seed, "Figure 4", f"label words, {site}", f"{kind} loyalty")
            random = values(numbers, seed, "Figure 4", f"random words, {site}", f"{kind} loyalty")
            assert label == [float(getattr(record, f"{kind}_loyalty"))]
            expected = getattr(record, f"random_{kind}_loyalty")
            assert len(expected) == 2 and random == pytest.approx([float(expected.sum()) / 2])


@over_seeds
def test_table_1_equals_plain_transformers(
    numbers: pd.DataFrame, model: Any, byte_level: Any, seed: int
) -> None:
    """Vanilla and more shots are compared with plain transformers."""
    demos, training, queries = draw_examples(seed)
    weights = weights_for(byte_level)
    gold = torch.tensor([query.label for query in queries])
    for name, shots in (("vanilla", demos), ("more shots", [*demos, *training])):
        lines = [TASK.demonstration(demo.text, int(demo.label or 0)) for demo in shots]
        texts = ["\n".join([*lines, TASK.query(query.text)]) for query in queries]
        correct = plain_answers(weights, byte_level, texts).argmax(1) == gold
        ours = values(numbers, seed, "Table 1", name, "accuracy")
        assert ours == pytest.approx([float(correct.double().mean())])
    assert values(numbers, seed, "Table 1, shots", "more shots", "a class") == [5]


def test_beta_is_learned_from_the_training_examples(
    found: tuple[pd.DataFrame, list[al.contexts.Beta]], model: Any
) -> None:
    numbers, betas = found
    assert len(betas) == len(SEEDS)
    seed, beta = SEEDS[1], betas[1]
    demos, training, queries = draw_examples(seed)
    training_batches = al.build_prompts(model.tokenizer, TASK, demos, training, batch_size=1)
    training_of_seed = al.contexts.Training(steps=32, seed=seed, progress=False)
    expected = al.contexts.train_reweighting(model, training_batches, training_of_seed)
    assert torch.equal(beta.beta, expected.beta) and expected.beta.abs().max() > 0.1
    logits = al.target_logits(
        model,
        prompts(model, seed),
        hooks=lambda batch: al.reweight_anchors(model, batch, expected),
        progress=False,
    )
    gold = torch.tensor([query.label for query in queries])
    correct = logits[:, training_batches[0].label_token_ids].argmax(1) == gold
    accuracy = values(numbers, seed, "Table 1", "re-weighted", "accuracy")
    assert accuracy == pytest.approx([float(correct.double().mean())])


@over_seeds
def test_table_2_equals_compression_and_plain_transformers(
    numbers: pd.DataFrame, model: Any, byte_level: Any, seed: int
) -> None:
    batches = prompts(model, seed)
    whole_cache, alone = (
        partial(al.compress, select=select)
        for select in (al.contexts.selection.everything, al.contexts.selection.label_words)
    )
    apart = partial(al.compress, separately=True)
    contexts: dict[str, Any] = {"anchors": al.compress, "alone": alone, "all": whole_cache}
    contexts["apart"] = apart
    record = ask(
        model, batches, al.ContextComparison(contexts, draws=20, seed=seed, repeats=0), **QUIET
    )
    demos, _, queries = draw_examples(seed)
    weights = weights_for(byte_level)
    bare = "".join(FORMAT.format(TASK.labels[int(demo.label or 0)]) for demo in demos)
    answers = plain_answers(weights, byte_level, [bare + TASK.query(q.text) for q in queries])
    lines = "".join(TASK.demonstration(demo.text, int(demo.label or 0)) + "\n" for demo in demos)
    whole = plain_answers(weights, byte_level, [lines + TASK.query(q.text) for q in queries])
    gold = torch.tensor([query.label for query in queries])

    def mean_of(correct: torch.Tensor) -> float:
        return float(correct.double().mean())

    expected: dict[str, list[Any]] = {
        "ICL": [1, 1, mean_of(whole.argmax(1) == gold), 1],
        "Text_anchor": [mean_of(answers.argmax(1) == whole.argmax(1)), None,
                        mean_of(answers.argmax(1) == gold)],
        "Hidden_random": [record.random_label_loyalty.mean(), record.random_word_loyalty.mean(),
                          record.random_accuracy.mean()],
        "Hidden_random-top": [record.top_label_loyalty, record.top_word_loyalty,
                              record.top_accuracy],
        "Hidden_anchor": [record.label_loyalty[0], record.word_loyalty[0], record.accuracy[0],
                          record.bytes_stored[0] / record.bytes_stored[2]],
        "Hidden_anchor, separately": [record.label_loyalty[3], record.word_loyalty[3],
                                      record.accuracy[3],
                                      record.bytes_stored[0] / record.bytes_stored[2]],
        "label words alone": [record.label_loyalty[1], record.word_loyalty[1], record.accuracy[1],
                              record.bytes_stored[1] / record.bytes_stored[2]],
    }  # fmt: skip
    assert len(record.random_accuracy) == 20
    for name, row in expected.items():
        columns = ("label loyalty", "word loyalty", "accuracy", "cache kept")[: len(row)]
        for column, value in zip(columns, row, strict=True):
            ours = values(numbers, seed, "Table 2", name, column)
            assert value is None or ours == pytest.approx([float(value)]), (name, column)
    demonstrations = batches[0].prompt(0).before(int(batches[0].prompt(0).query_start[0]))
    count = len(demonstrations.tokens[0])
    selected = int(al.contexts.selection.anchors_and_format(demonstrations).sum())
    assert values(numbers, seed, "Table 2", "Hidden_anchor", "cache kept") == [selected / count]


def test_baselines_of_table_2_are_contexts_by_score(model: Any) -> None:
    """As many positions as label words and format; the rows of the paper stay as they are."""
    numbers = [*table_2_baselines(setting(model))]
    assert {number.part for number in numbers} == {"Table 2"}
    ours = {(number.row, number.column): number.value for number in numbers}
    selection, one_set = al.contexts.selection, "one set for all layers and heads"
    names = ("small_keys", "large_values", "heavy_hitters", "most_read")
    contexts: dict[str, Any] = {"all": partial(al.compress, select=selection.everything)}
    contexts |= {name: partial(al.compress, select=getattr(selection, name)()) for name in names}
    contexts["anchors"] = al.compress
    draws: dict[str, Any] = {"draws": 20, "control": selection.random_tokens}
    asked = al.ContextComparison(contexts, seed=3, repeats=0, **draws)
    record = ask(model, setting(model).prompts(), asked, **QUIET)
    cached = record.bytes_stored / record.bytes_stored[0]
    for k, name in enumerate(names, 1):
        row = f"{name}, {one_set}"
        assert ours[row, "label loyalty"] == float(record.label_loyalty[k])
        assert ours[row, "word loyalty"] == float(record.word_loyalty[k])
        assert ours[row, "accuracy"] == float(record.accuracy[k])
        assert ours[row, "cache kept"] == float(cached[k]) == float(cached[-1]) < 1
    assert ours["random_tokens", "word loyalty"] == float(record.random_word_loyalty.mean())
    assert ours["random_tokens-top", "accuracy"] == float(record.top_accuracy)
    assert len(ours) == 4 * 4 + 2 * 3 and len(set(record.kl.tolist())) == 6


def setting(model: Any, seed: int = 3) -> PaperSetting:
    demos, training, queries = draw_examples(seed)
    rest = [example for example in EXAMPLES if example not in queries]
    return PaperSetting(model, TASK, demos, training, queries, rest, depth=1, draws=2, seed=seed)


def test_no_text_is_drawn_twice(model: Any) -> None:
    """This holds also if a text occurs twice, or among the examples for queries."""
    settings: list[PaperSetting] = []

    def record(setting: PaperSetting) -> Iterator[PaperNumber]:
        settings.append(setting)
        yield PaperNumber("Mine", "a", "b", 0.5)

    twice = [*EXAMPLES, *(replace(example) for example in EXAMPLES)]
    al.paper(model, {"emotions": (twice, EXAMPLES)}, seeds=SEEDS, parts=[record], **QUICK)
    for draw in settings:
        demos, training, queries, pool = (
            [example.text for example in examples]
            for examples in (draw.demonstrations, draw.training, draw.queries, draw.pool)
        )
        assert len({*demos, *queries}) == 4 + 12
        assert not {*demos, *queries} & {*training} and not {*queries} & {*pool}
        assert {*demos, *training} <= {*pool} and len({*pool}) == len(EXAMPLES) - 12
    first, second = settings
    assert first.queries != second.queries and first.demonstrations != second.demonstrations


def test_table_3_has_the_times_and_lengths_of_the_first_queries(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first eight queries are timed, one at a time."""
    timed_batches: list[al.PromptBatch] = []

    def times(model: Any, batches: list[al.PromptBatch], asked: Any, **options: Any) -> Any:
        timed_batches.extend(batches)
        record: Any = al.run(model, batches, asked, **options)["contexts"]
        times = {"whole_seconds": torch.tensor(6.0), "seconds": torch.tensor([8.0, 2.0])}
        return {"contexts": replace(record, **times)}

    monkeypatch.setattr(paper_parts, "run", times)
    monkeypatch.setattr(paper_parts, "TIMED_PASSES", 2)
    ours = {number.row: number.value for number in table_3(setting(model))}
    demos, _, queries = draw_examples(3)
    lines = "".join(TASK.demonstration(demo.text, int(demo.label or 0)) + "\n" for demo in demos)
    lengths = [len(model.tokenizer(TASK.query(query.text))["input_ids"]) for query in queries[:8]]
    assert ours == {
        "against the whole prompt": 3,
        "against a cached prefix": 4,
        "tokens of the demonstrations": len(model.tokenizer(lines)["input_ids"]),
        "tokens of a query": sum(lengths) / 8,
    }
    assert all(len(batch) == 1 for batch in timed_batches)
    assert sorted(int(batch.index[0]) for batch in timed_batches) == list(range(8))


@pytest.mark.parametrize("limited", ["model", "tokenizer"])
def test_more_shots_takes_as_many_demonstrations_as_fit(
    byte_level: Any, limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three per class fit if the context is too short for five, as on AGNews in the paper."""
    model = al.load_model(
        tiny_gpt2(len(byte_level), n_layer=1, n_positions=1024), tokenizer=byte_level
    )
    base = setting(model)
    chosen = [
        [example for example in base.training if example.label == label][:2] for label in range(4)
    ]
    expected = [example for example in base.training if any(example in group for group in chosen)]
    three = base.prompts([*base.demonstrations, *expected])
    longest = max(int(batch.attention_mask.sum(1).max()) for batch in three)
    if limited == "model":
        monkeypatch.setattr(model.cfg, "n_ctx", longest)
    else:
        monkeypatch.setattr(model.tokenizer, "model_max_length", longest)
    count, batches = paper_parts._more_shots(base)
    assert count == 3
    assert [batch.tokens.tolist() for batch in batches] == [
        batch.tokens.tolist() for batch in three
    ]
    if limited == "model":
        monkeypatch.setattr(model.cfg, "n_ctx", 60)
        with pytest.raises(DataError, match="not even two demonstrations a class fit"):
            paper_parts._more_shots(base)
