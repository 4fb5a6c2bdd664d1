"""Task vectors against loops with raw hooks over single prompts and layers."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, HookError
from tests.experiments.test_head_effects import MIXED, QUIET, prompts
from tests.references import plain, states
from tests.support.made_up_records import made_up_record

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
    """Which prompts are right with the vectors of each layer."""

    def hooks(layer: int, tokens: Tensor, words: list[int]) -> Any:
        return [states.written(name_of(layer), positions(tokens, words), vectors[layer])]

    layers = range(model.cfg.n_layers)
    return [states.answers(model, asked(), classes, partial(hooks, layer)) for layer in layers]


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_it_equals_loops_with_raw_hooks(exact_model: Any, kind_of_model: str) -> None:
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


def test_queries_of_both_lists_are_warned_of(gpt2: Any) -> None:
    with pytest.warns(UserWarning, match="2 queries are in both lists"):
        al.task_vectors(gpt2, prompts(gpt2, READ), prompts(gpt2, READ), **QUIET)
