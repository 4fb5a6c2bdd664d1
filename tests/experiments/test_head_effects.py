"""Effects of heads, task vectors and what predictions follow, against loops over single prompts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, HookError, StoreError
from tests.references import plain, states
from tests.support.made_up_records import made_up_record
from tests.support.measures import does_not_run

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TASK, EXAMPLES = al.TASKS["trec"], al.load_examples("questions")


def prompts(
    model: Any,
    queries: slice,
    how: Any = al.relabeling.gold,
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> list[al.PromptBatch]:
    """Prompts of each set of demonstrations, with these of the examples that are in no set."""
    sets = [al.sample_demonstrations(EXAMPLES, seed=seed) for seed in (0, 1)]
    rest = [example for example in EXAMPLES if not any(example in demos for demos in sets)][queries]
    return [
        batch
        for seed in seeds
        for batch in al.build_prompts(
            model.tokenizer, *al.relabeling.relabel(sets[seed], TASK, how), rest, **options
        )
    ]


MIXED = al.relabeling.random(seed=1)


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.every_kind
def test_it_equals_loops_with_raw_hooks(exact_model: Any, kind_of_model: str) -> None:
    """Also with grouped keys, BOS, and a norm after the attention."""
    model, tolerance = exact_model, 1e-10 if kind_of_model == "bridge" else 1e-7
    with plain.everything_in_float64():
        of_mean = prompts(model, slice(3), batch_size=2, padding_side="left")
        shuffled = prompts(model, slice(3, 6), MIXED, batch_size=2, padding_side="left")
        record = al.head_effects(model, of_mean, shuffled, **QUIET)
        assert record.info["not_started_late"] == {}
        outputs = states.mean_states(model, of_mean, lambda tokens, words: -1, "attn.hook_z")
        torch.testing.assert_close(record.outputs, outputs, rtol=tolerance, atol=tolerance)
        effects, of_probability = states.effects(model, shuffled, outputs)
        assert (effects.abs().amax(0) > 1e-3).all() and (effects > 0).any() and (effects < 0).any()
        options: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(record.effect_of_prompts, effects, **options)
        torch.testing.assert_close(record.effect, effects.mean(0), **options)
        torch.testing.assert_close(record.probability_effect, of_probability.mean(0), **options)


def test_the_largest_heads_of_each_sign() -> None:
    record: Any = made_up_record(al.records.HeadEffectsRecord)
    effect = record.effect - 0.5
    bounds = record.intervals | {"effect": torch.stack([effect - 0.1, effect + 0.1])}
    record = replace(record, effect=effect, intervals=bounds)
    table = record.largest(2)
    effects = sorted(record.effect.flatten().tolist())
    assert table["effect"].tolist() == effects[:-3:-1] + effects[:2]
    assert table["sign"].tolist() == [1, 1, -1, -1]
    for _, row in table.iterrows():
        index = int(row["layer"]), int(row["head"])
        estimate = record.estimate("effect", *index)
        assert (row["effect"], row["low"], row["high"]) == tuple(vars(estimate).values())[:3]
        assert row["probability_effect"] == float(record.probability_effect[index])
    bare = replace(record, intervals={})
    assert "low" not in bare.largest() and len(bare.largest(99)) == record.effect.numel()
    with pytest.raises(AnchorlensError, match="count"):
        record.largest(0)


@pytest.mark.slow("many passes")
def test_effects_belong_to_the_outputs_that_replace_heads(gpt2: Any, tmp_path: Path) -> None:
    shuffled = prompts(gpt2, slice(3, 6), MIXED)
    options: dict[str, Any] = {"folder": tmp_path, **QUIET}
    al.head_effects(gpt2, prompts(gpt2, slice(3)), shuffled, **options)
    al.forget_run(tmp_path / "outputs")
    with pytest.raises(StoreError, match="holds 'head_effects' of another run"):
        al.head_effects(gpt2, prompts(gpt2, slice(6, 9)), shuffled, **options)


def test_outputs_of_another_width_are_refused(gpt2: Any) -> None:
    [batch] = prompts(gpt2, slice(1))
    assert al.Site.of_heads([(2, 1), (0, 1), (2, 0)]).heads == {2: [1, 0], 0: [1]}
    for outputs in (torch.zeros(3, 2, 11), torch.ones(3, 2, 13)):
        with pytest.raises(AnchorlensError, match=r"layer 1 gives out 12 numbers; got 1[13]"):
            [(_, write)] = al.replace_heads(gpt2, batch, outputs, al.Site(1, 0))
            write(torch.zeros(1, batch.tokens.shape[1], 2, 12), hook=None)
    exact, wider = (
        al.replace_heads(gpt2, batch, values, al.Site.of_heads([(-2, 0), (1, 1)]))
        for values in (torch.ones(3, 2, 12), torch.nn.functional.pad(torch.ones(3, 2, 12), (0, 4)))
    )
    assert [name for name, _ in exact] == ["blocks.1.attn.hook_z"]
    z = torch.zeros(1, batch.tokens.shape[1], 2, 12)
    changed, same = (hooks[0][1](z, hook=None) for hooks in (exact, wider))
    assert changed is not None and same is not None and torch.equal(changed, same)
    assert changed[0, -1].all() and float(changed.sum()) == 24 and not z.any()


def test_heads_are_replaced_at_the_target_or_at_positions(gpt2: Any) -> None:
    """tests/questions/test_integrated_flows.py compares other positions with plain transformers."""
    batches = al.sample_prompts(gpt2, "questions", queries=4, batch_size=2)

    def hooks(batch: al.PromptBatch, **where: Any) -> list[Any]:
        return al.replace_heads(gpt2, batch, 0.0, al.Site(1, heads=[1]), **where)

    [(_, hook)] = hooks(batches[0], positions=al.edges.target)
    [(_, default)] = hooks(batches[0])
    z = torch.ones(*batches[0].tokens.shape, 2, 12)
    assert torch.equal(hook(z, hook=None), default(z, hook=None)) and not hook.is_for(batches[1])
    for where, message in (
        (torch.ones(1, 2), r"positions must be a tensor of True and False with the shape"),
        (lambda batch: al.edges.target(batch) & False, "positions are False in all tokens"),
    ):
        with pytest.raises(HookError, match=message), does_not_run(gpt2):
            hooks(batches[0], positions=where)


READ, ASKED = slice(2), slice(3, 15)
close: Any = torch.testing.assert_close


def name_of(layer: int) -> str:
    return f"blocks.{layer}.hook_resid_post"


def last(tokens: Tensor, words: list[int]) -> list[int]:
    return [tokens.shape[1] - 1]


def label_words(tokens: Tensor, words: list[int]) -> list[int]:
    return words


def answers_of_layers(
    model: Any, asked: Any, classes: Tensor, positions: Any, vectors: Tensor
) -> list[list[float]]:
    def hooks(layer: int, tokens: Tensor, words: list[int]) -> Any:
        return [states.written(name_of(layer), positions(tokens, words), vectors[layer])]

    layers = range(model.cfg.n_layers)
    return [states.answers(model, asked(), classes, partial(hooks, layer)) for layer in layers]


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_task_vectors_equal_loops_with_raw_hooks(exact_model: Any, kind_of_model: str) -> None:
    """Also with grouped keys, BOS, and a norm after the attention."""
    model, tolerance = exact_model, 1e-10 if kind_of_model == "bridge" else 1e-7
    with plain.everything_in_float64():
        batches = prompts(model, READ, batch_size=2, padding_side="left")
        tested = prompts(model, ASKED, batch_size=5, padding_side="left")
        record = al.task_vectors(model, batches, tested, **QUIET)
        vectors = states.mean_states(model, batches, last)
        close(record.vectors, vectors, rtol=tolerance, atol=tolerance)
        classes = tested[0].label_token_ids
        asked = partial(states.queries_alone, tested)
        right = answers_of_layers(model, asked, classes, last, vectors)
        assert record.correct.T.tolist() == right
        assert record.accuracy.tolist() == pytest.approx([sum(each) / len(each) for each in right])
        unchanged = states.answers(model, states.queries_alone(tested), classes)
        demonstrations = states.answers(model, states.alone(tested), classes)
        assert float(record.unchanged) == pytest.approx(sum(unchanged) / len(unchanged))
        assert float(record.demonstrations) == pytest.approx(sum(demonstrations) / len(unchanged))
        close(record.gain, record.accuracy - record.unchanged)
        assert len({tuple(each) for each in (*right, unchanged, demonstrations)}) > 2


@pytest.mark.slow("many passes")
def test_label_words_are_written_into_prompts_with_shuffled_labels(model: Any) -> None:
    batches = prompts(model, READ, padding_side="left")
    tested, shuffled = prompts(model, ASKED), prompts(model, ASKED, MIXED, batch_size=5)
    options: dict[str, Any] = {"positions": al.edges.anchors, **QUIET}
    record = al.task_vectors(model, batches, tested, into=shuffled, **options)
    vectors = states.mean_states(model, batches, label_words)
    assert vectors.shape[1] == 6
    close(record.vectors, vectors, rtol=1e-4, atol=1e-4)
    [(_, write)] = record.hooks(model, shuffled[0], 1, al.edges.anchors)
    changed: Any = write(torch.ones(*shuffled[0].tokens.shape, model.cfg.d_model), hook=None)
    for resid, words in zip(changed, shuffled[0].label_positions, strict=True):
        close(resid[words], record.vectors[1].float())
        assert int((resid == 1).all(1).sum()) == len(resid) - 6
    classes = tested[0].label_token_ids
    right = answers_of_layers(model, partial(states.alone, shuffled), classes, label_words, vectors)
    assert record.correct.T.tolist() == right
    unchanged = states.answers(model, states.alone(shuffled), classes)
    assert float(record.unchanged) == pytest.approx(sum(unchanged) / len(unchanged))
    # Their own label words change nothing: no label word depends on the query.
    same = al.task_vectors(model, batches, tested, into=tested, **options)
    assert same.accuracy.tolist() == [float(same.demonstrations)] * model.cfg.n_layers
    assert float(same.unchanged) == float(same.demonstrations) == float(record.demonstrations)


def test_hooks_write_the_vectors_of_a_layer(gpt2: Any) -> None:
    """Only the target changes, also where the shared tokens are run once for all."""
    batches = prompts(gpt2, READ)
    sizes: dict[str, Any] = {"batch_size": 12}
    [batch] = prompts(gpt2, ASKED, padding_side="left", **sizes)
    record = al.task_vectors(gpt2, batches, [batch], **QUIET)
    [(name, write)] = record.hooks(gpt2, batch, -2)
    assert name == name_of(1)
    resid = torch.ones(*batch.tokens.shape, 24)
    changed = write(resid, hook=None)
    assert changed is not None and (resid == 1).all()
    target = al.edges.target(batch)
    assert (changed[~target] == 1).all()
    close(changed[target], record.vectors[1, 0].float().expand(len(batch), -1))
    # The run of the package shares tokens, and writes at the same positions.
    left, right = (
        al.target_logits(
            gpt2,
            prompts(gpt2, ASKED, padding_side=side, **sizes),
            hooks=lambda batch: record.hooks(gpt2, batch, 1),
            progress=False,
        )
        for side in ("left", "right")
    )
    close(left, right)


def test_vectors_of_other_models_and_positions_are_refused(gpt2: Any, llama: Any) -> None:
    made: Any = made_up_record(al.records.TaskVectorsRecord)
    record, at_words = (replace(made, vectors=torch.zeros(3, n, 24).double()) for n in (1, 6))
    [batch, *_], [of_llama, *_] = prompts(gpt2, ASKED), prompts(llama, READ)
    message = r"= \(3, 32\); got torch.float64 of the shape \(3, 1, 24\)"
    with pytest.raises(HookError, match=message):
        record.hooks(llama, of_llama, 0)
    with pytest.raises(AnchorlensError, match="at 1 positions in each prompt, but anchors gives 6"):
        record.hooks(gpt2, batch, 0, al.edges.anchors)
    with pytest.raises(HookError, match="layers must be numbers from 0 to 2"):
        record.hooks(gpt2, batch, 3)
    after = batch.after(int(batch.label_ends.min()) + 1)
    with pytest.raises(HookError, match=f"positions before {after.first_query}, from which on"):
        at_words.hooks(gpt2, after, 0, al.edges.anchors)
    with pytest.warns(UserWarning, match="2 queries are in both lists"):
        al.task_vectors(gpt2, prompts(gpt2, READ), prompts(gpt2, READ), **QUIET)


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
def test_dependence_on_labels_equals_loops_over_single_prompts(shots: int, model: Any) -> None:
    queries, seeds = QUERIES[:7], range(7) if shots == 1 else [1] * 7
    sets = [al.sample_demonstrations(EXAMPLES, shots=shots, seed=seed) for seed in seeds]
    given = sets if shots == 1 else sets[0]
    record = al.label_dependence(model, TASK, given, queries, RELABELINGS, batch_size=3, **QUIET)
    for k, how in enumerate(RELABELINGS.values()):
        for name, expected in shares_by_hand(model, sets, queries, how).items():
            assert float(getattr(record, name)[k]) == pytest.approx(expected, nan_ok=True), name
    assert torch.equal(record.change, record.truth - record.truth[0])
    torch.testing.assert_close(record.correct.mean(0), record.truth)
