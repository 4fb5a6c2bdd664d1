"""The records of ``paper``, against other functions or transformers, and how its parts run."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import anchorlens as al
from anchorlens.errors import DataError, HookError, MetricError, RunError, StoreError
from anchorlens.replication.paper import DrawnTask, drawn_of
from tests.support.asked import ask
from tests.support.measures import assert_same, counted_passes
from tests.support.tiny_models import randomize, tiny_gpt2

papers: Any = importlib.import_module("anchorlens.replication.paper")
EXAMPLES = al.load_examples("emotions")
EMOTIONS = {"emotions": (EXAMPLES, EXAMPLES)}
TASK = al.TASKS["emo"]
FORMAT = "Dialogue:\nEmotion:{}\n"
SEEDS = (3, 4)
QUIET: dict[str, Any] = {"progress": False, "resamples": 0}
QUICK: dict[str, Any] = {"queries": 12, "depth": 1, "draws": 2, "random_weights": False, **QUIET}

pytestmark = pytest.mark.filterwarnings("ignore:.*in . of . sets", "ignore:.*in layers")


def weights_for(tokenizer: Any) -> Any:
    """A model whose context takes five demonstrations a class, and that predicts all classes."""
    return randomize(tiny_gpt2(len(tokenizer), n_layer=2, n_positions=1024), seed=1, scale=0.5)


@pytest.fixture(scope="module")
def model(byte_level: Any) -> Any:
    return al.load_model(weights_for(byte_level).double(), tokenizer=byte_level)


@pytest.fixture(scope="module")
def computed(model: Any) -> tuple[al.Results, list[al.contexts.Beta]]:
    """The records of both seeds, and the betas that were learned in two rounds of ten."""
    betas: list[al.contexts.Beta] = []

    def train(model: Any, batches: Any, training: al.contexts.Training) -> al.contexts.Beta:
        assert training == al.contexts.Training(seed=training.seed, progress=False)
        betas.append(al.contexts.train_reweighting(model, batches, replace(training, steps=32)))
        return betas[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(papers, "train_reweighting", train)
        patch.setattr(papers, "TIMED_PASSES", 2)
        found = al.paper(model, EMOTIONS, seeds=SEEDS, **QUICK)
    assert list(found) == ["emotions"]
    return found["emotions"], betas


@pytest.fixture(scope="module")
def found(computed: tuple[al.Results, list[al.contexts.Beta]]) -> al.Results:
    return computed[0]


Draws = tuple[list[al.Example], list[al.Example], list[al.Example]]


def draw_examples(seed: int) -> Draws:
    demos = al.sample_demonstrations(EXAMPLES, 1, seed)
    rest = [example for example in EXAMPLES if example not in demos]
    training = al.sample_demonstrations(rest, 4, seed)
    queries = al.sample_queries(EXAMPLES, 12, seed, exclude=[*demos, *training])
    assert len({example.text for example in (*demos, *training, *queries)}) == 4 + 16 + 12
    return demos, training, queries


def prompts(model: Any, *seeds: int) -> list[al.PromptBatch]:
    batches = []
    for demos, _, queries in map(draw_examples, seeds):
        batches += al.build_prompts(model.tokenizer, TASK, demos, queries)
    return batches


def plain_answers(weights: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    ids = [tokenizer(word)["input_ids"][0] for word in TASK.labels]
    with torch.no_grad():
        given = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        rows = [weights(tokens).logits[0, -1] for tokens in given]
    return torch.stack(rows)[:, ids]


@pytest.mark.slow("many passes")
def test_the_figures_are_the_records_of_all_seeds(found: al.Results, model: Any) -> None:
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances()]
    expected = al.run(model, prompts(model, *SEEDS), metrics, **QUIET)
    expected["diagnosis"] = al.diagnose(expected["anchor_distances"])
    sites = {"first layer": al.Site([0]), "last layer": al.Site([1])}
    sweep = al.EdgeSweep.isolation(sites, draws=2)
    expected["isolation"] = ask(model, prompts(model, *SEEDS), sweep, **QUIET)
    for name, record in expected.items():
        assert_same(found[name], record, 1e-8)
    assert found["isolation"].info["demonstration_sets"] == 2
    assert [*found][:3] == [each.name for each in metrics]
    assert [*found][3:] == ["isolation", "diagnosis", "accuracies", "contexts", "times"]


@pytest.mark.slow("many passes")
def test_table_1_equals_plain_transformers(found: al.Results, byte_level: Any) -> None:
    weights, right = weights_for(byte_level), dict[str, list[torch.Tensor]]()
    for seed in SEEDS:
        demos, training, queries = draw_examples(seed)
        gold = torch.tensor([query.label for query in queries])
        for name, shots in (("vanilla", demos), ("more shots", [*demos, *training])):
            lines = [TASK.demonstration(demo.text, int(demo.label or 0)) for demo in shots]
            texts = ["\n".join([*lines, TASK.query(query.text)]) for query in queries]
            correct = plain_answers(weights, byte_level, texts).argmax(1) == gold
            right.setdefault(name, []).append(correct)
        right.setdefault("always the commonest class", []).append(gold == gold.mode().values)
    record = found["accuracies"]
    for name, of_seeds in right.items():
        method = record.info["methods"].index(name)
        share = torch.cat(of_seeds).double().mean()
        assert float(record.accuracy[method]) == pytest.approx(float(share))
    assert record.info["more_shots"] == [5, 5] and record.info["prompts"] == 24
    assert float(record.gain[2]) == pytest.approx(float(record.accuracy[2] - record.accuracy[0]))


@pytest.mark.slow("many passes")
def test_beta_is_learned_from_the_training_examples(
    computed: tuple[al.Results, list[al.contexts.Beta]], model: Any
) -> None:
    found, betas = computed
    right = list[torch.Tensor]()
    for seed, beta in zip(SEEDS, betas, strict=True):
        demos, training, queries = draw_examples(seed)
        steps = al.build_prompts(model.tokenizer, TASK, demos, training, batch_size=1)
        how = al.contexts.Training(steps=32, seed=seed, progress=False)
        expected = al.contexts.train_reweighting(model, steps, how)
        assert torch.equal(beta.beta, expected.beta) and expected.beta.abs().max() > 0.1
        hooks = partial(al.reweight_anchors, model, beta=expected)
        logits = al.target_logits(model, prompts(model, seed), hooks=hooks, progress=False)
        gold = torch.tensor([query.label for query in queries])
        right.append(logits[:, steps[0].label_token_ids].argmax(1) == gold)
    record = found["accuracies"]
    assert record.info["methods"][2] == "re-weighted"
    assert torch.equal(record.correct[:, 2], torch.cat(right).double())


@pytest.mark.slow("many passes")
def test_table_2_equals_plain_transformers(found: al.Results, model: Any, byte_level: Any) -> None:
    selection = al.contexts.selection
    contexts: dict[str, Any] = {
        "ICL": partial(al.compress, select=selection.everything),
        "Hidden_anchor": al.compress,
        "Hidden_anchor, separately": partial(al.compress, separately=True),
        "label words alone": partial(al.compress, select=selection.label_words),
    }
    asked = al.ContextComparison(contexts, draws=20, seed=SEEDS[0], repeats=0)
    expected = ask(model, prompts(model, *SEEDS), asked, **QUIET)
    ours, times = found["contexts"], found["times"]
    assert (times.seconds > 0).all() and times.whole_seconds > 0 and times.info["timed_batch"] == 1
    assert ours.info["contexts"] == [*contexts, "Text_anchor"] and len(ours.random_accuracy) == 20
    for name in ("label_loyalty", "word_loyalty", "accuracy", "bytes_stored"):
        torch.testing.assert_close(getattr(ours, name)[:4], getattr(expected, name))
    for name in ("random_label_loyalty", "random_word_loyalty", "top_accuracy", "whole_accuracy"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name))
    assert ours.accuracy[0] == ours.whole_accuracy and ours.label_loyalty[0] == 1
    kept, right = [], []
    for seed in SEEDS:
        demos, _, queries = draw_examples(seed)
        weights = weights_for(byte_level)
        bare = "".join(FORMAT.format(TASK.labels[int(demo.label or 0)]) for demo in demos)
        answers = plain_answers(weights, byte_level, [bare + TASK.query(q.text) for q in queries])
        lines = "".join(TASK.demonstration(d.text, int(d.label or 0)) + "\n" for d in demos)
        whole = plain_answers(weights, byte_level, [lines + TASK.query(q.text) for q in queries])
        kept.append(answers.argmax(1) == whole.argmax(1))
        right.append(answers.argmax(1) == torch.tensor([query.label for query in queries]))
    assert torch.equal(ours.label_kept[:, 4], torch.cat(kept).double())
    assert torch.equal(ours.correct[:, 4], torch.cat(right).double())


def drawn(seed: int = 3) -> DrawnTask:
    [found] = drawn_of(EMOTIONS, {}, 12, [seed])["emotions"]
    return found


def test_no_text_is_drawn_twice() -> None:
    twice = [*EXAMPLES, *(replace(example) for example in EXAMPLES)]
    draws = drawn_of({"emotions": (twice, EXAMPLES)}, {}, 12, SEEDS)["emotions"]
    for draw in draws:
        demos, training, queries, rest = (
            [example.text for example in examples]
            for examples in (draw.demonstrations, draw.training, draw.queries, draw.rest)
        )
        assert len({*demos, *queries}) == 4 + 12
        assert not {*demos, *queries} & {*training} and not {*queries} & {*rest}
        assert {*demos, *training} <= {*rest} and len({*rest}) == len(EXAMPLES) - 12
    first, second = draws
    assert first.queries != second.queries and first.demonstrations != second.demonstrations


def test_table_3_times_the_first_queries_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[al.PromptBatch] = []

    def run(model: Any, batches: list[al.PromptBatch], asked: Any, **options: Any) -> Any:
        timed.extend(batches)
        assert asked[0].repeats == 24
        return al.Results()

    monkeypatch.setattr(papers, "run", run)
    al.paper(model, EMOTIONS, seeds=SEEDS, parts=["table 3"], **QUICK)
    assert all(len(batch) == 1 for batch in timed) and len(timed) == 16
    assert sorted(int(batch.index[0]) for batch in timed) == sorted([*range(8)] * 2)


@pytest.mark.parametrize("limited", ["model", "tokenizer"])
def test_more_shots_takes_as_many_demonstrations_as_fit(
    byte_level: Any, limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three per class fit if the context is too short for five, as on AGNews in the paper."""
    weights = tiny_gpt2(len(byte_level), n_layer=1, n_positions=1024)
    model = al.load_model(weights, tokenizer=byte_level)
    base = drawn()
    of_labels = [[each for each in base.training if each.label == label] for label in range(4)]
    chosen = [examples[:2] for examples in of_labels]
    expected = [example for example in base.training if any(example in group for group in chosen)]
    three = base._replace(demonstrations=[*base.demonstrations, *expected]).prompts(model)
    longest = max(int(batch.attention_mask.sum(1).max()) for batch in three)
    if limited == "model":
        monkeypatch.setattr(model.cfg, "n_ctx", longest)
    else:
        monkeypatch.setattr(model.tokenizer, "model_max_length", longest)
    batches = papers._more_shots(model, base)
    assert len(batches) == len(three)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, three, strict=True))
    if limited == "model":
        monkeypatch.setattr(model.cfg, "n_ctx", 60)
        with pytest.raises(DataError, match="not even two demonstrations a class fit"):
            papers._more_shots(model, base)


def test_shots_and_letters_are_other_prompts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "analyse", analysed := Mock(return_value=al.Results()))
    al.paper(model, EMOTIONS, seeds=[3], parts=["two shots", "letters as labels"], **QUICK)
    draw, given = drawn(), [call.args[1] for call in analysed.call_args_list]
    for batches, shots, words in zip(given, (2, 8), (TASK.first_words, "ABCD"), strict=True):
        demos = al.sample_demonstrations(draw.rest, shots, 3)
        assert len(demos) == 4 * shots and not set(demos) & set(draw.queries)
        lines = [f"{demo.text}\nEmotion: {words[demo.label or 0].strip()}\n" for demo in demos]
        whole = "".join(f"Dialogue: {line}" for line in lines)
        expected = {f"{whole}Dialogue: {query.text}\nEmotion:" for query in draw.queries}
        rows = [zip(each.tokens, each.attention_mask, strict=True) for each in batches]
        texts = [model.tokenizer.decode(tokens[mask]) for row in rows for tokens, mask in row]
        assert set(texts) == expected


@pytest.mark.slow("many passes")
def test_other_depths_and_directions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths that the model does not have, and directions without as many queries, are left out."""
    assert papers.DEPTHS == (1, 3, 5, 7) and papers.DIRECTIONS == (5, 10, 20, 50, 100, 200)
    monkeypatch.setattr(papers, "DIRECTIONS", (1, 3, 12))
    found = al.paper(model, EMOTIONS, seeds=[3], parts=["other settings"], **QUICK)
    records = found["emotions (other settings)"]
    assert len(found) == 1 and [*records] == ["isolation", "1 directions", "3 directions"]
    assert records["isolation"].axis_names("site") == ("first layer", "last layer")
    for count in (1, 3):
        [record] = al.run(model, prompts(model, 3), [al.AnchorDistances(count)], **QUIET).values()
        assert_same(records[f"{count} directions"], record, 1e-8)


QUICK_ONE: dict[str, Any] = {**QUICK, "seeds": [1]}


@pytest.fixture(scope="module")
def small(byte_level: Any) -> Any:
    return al.load_model(tiny_gpt2(len(byte_level), n_layer=2), tokenizer=byte_level)


def part_that_raises(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    def fail(asked: Any) -> Any:
        raise error

    monkeypatch.setattr(papers._PartsOfTask, name.replace(" ", "_"), fail)


@pytest.mark.slow("many passes")
def test_a_part_that_fails_leaves_the_others(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part_that_raises(monkeypatch, "table 1", MetricError("no more"))
    part_that_raises(monkeypatch, "table 2", torch.OutOfMemoryError("CUDA out of memory"))
    kept: list[tuple[str, str]] = []
    parts = ["table 1", "table 3", "table 2"]
    with pytest.raises(RunError) as raised:
        keep: Any = lambda *given: kept.append(given[:2])  # noqa: E731
        al.paper(small, EMOTIONS, parts=parts, keep=keep, **QUICK_ONE)
    failures = "emotions, table 1: no more; emotions, table 2: CUDA out of memory"
    assert str(raised.value) == f"no result, or not all, for {failures}"
    found = raised.value.results
    assert [*found] == ["emotions"] and [*found["emotions"]] == ["times"]
    assert kept == [("emotions", "times")]


@pytest.mark.slow("many passes")
def test_what_is_stored_is_read_and_another_run_is_refused(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "TRAINING", 1)
    parts = ["figures", "table 1", "table 2"]
    passes: list[int] = []

    def found(**options: Any) -> al.Results:
        with counted_passes() as ran:
            records = al.paper(small, EMOTIONS, parts=parts, folder=tmp_path, **QUICK_ONE | options)
        passes.append(len(ran))
        return records["emotions"]

    first, again = found(), found()
    assert passes[1] < passes[0] * 3 / 4  # of each run two batches are computed again
    for name, record in first.items():
        assert again[name].to_frame().equals(record.to_frame()), name
    with pytest.raises(StoreError, match="holds 'isolation' of another run"):
        found(draws=3)
    with pytest.raises(StoreError, match="holds the contributions of another run"):
        found(seeds=[2])


OTHERS = [example for example in EXAMPLES if not example.label]
FEW = [example for example in EXAMPLES if example.label] + OTHERS[:4]


@pytest.mark.parametrize(
    ("tasks", "options", "words"),
    [
        ({"imdb": (EXAMPLES, EXAMPLES)}, {}, "there is no task 'imdb'; choose one of sst2, trec"),
        (EMOTIONS, {"queries": 10}, "more queries than its 10 directions; got 10"),
        (EMOTIONS, {"queries": 999}, r"emotions: 999 queries are asked for, but only \d+"),
        ({"emotions": (FEW, EXAMPLES)}, {}, r"emotions: class 0 has 3 examples, but 4 of each"),
        ({"questions": (EXAMPLES, EXAMPLES)}, {}, "questions: there are 6 classes, but 4 in the"),
        (EMOTIONS, {"seeds": (1, 1)}, r"different seeds, .* got .* emotions, and seeds \[1, 1\]"),
        (EMOTIONS, {"seeds": ()}, "the examples of a task at least, and different seeds"),
        ({}, {}, "the examples of a task at least, .* got examples of no task"),
        (EMOTIONS, {"parts": ()}, r"parts are different ones of figures, table 1, .*; got \[\]"),
        (EMOTIONS, {"parts": ["table 4"]}, r"parts are .*, other settings; got \['table 4'\]"),
        (EMOTIONS, {"parts": ["figures"] * 2}, "parts are different ones of"),
        (EMOTIONS, {"depth": 3}, "depths are from 1 to 2 layers; got 3"),
        (EMOTIONS, {"draws": 0}, "draws must be"),
    ],
)
def test_mistakes_are_errors_before_anything_runs(
    small: Any, tasks: Any, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*papers.MAIN, *papers.APPENDIX):
        part_that_raises(monkeypatch, name, AssertionError("it ran"))
    all_tasks = {**EMOTIONS, **tasks} if tasks else tasks
    error = HookError if {"depth", "draws"} & {*options} else DataError
    with pytest.raises(error, match=words):
        al.paper(small, all_tasks, **{**QUICK, "seeds": SEEDS, **options})


@pytest.mark.slow("many passes")
def test_bars_name_task_and_part(small: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(papers, "TRAINING", 1)
    parts = ["table 1", "table 2"]
    al.paper(small, EMOTIONS, parts=parts, **{**QUICK_ONE, "progress": True})
    shown = capsys.readouterr().err
    for name in ("training", "vanilla", "more shots", "re-weighted"):
        assert f"emotions, table 1: seed 1, {name} (" in shown
    assert "emotions, table 2 (2 of 2): 100%" in shown
    al.paper(small, EMOTIONS, parts=parts, **QUICK_ONE)
    assert not capsys.readouterr().err
