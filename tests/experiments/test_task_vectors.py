"""Task vectors against loops with raw hooks over single prompts and layers."""

from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, HookError
from tests.experiments.test_head_effects import EXAMPLES, MIXED, QUIET, TASK, prompts
from tests.references import states
from tests.support.measures import does_not_run, is_shared
from tests.support.tiny_models import randomize, tiny_gpt2

READ, ASKED = slice(2), slice(3, 15)
close: Any = torch.testing.assert_close


def name_of(layer: int) -> str:
    return f"blocks.{layer}.hook_resid_post"


def last(tokens: Tensor, words: list[int]) -> list[int]:
    return [tokens.shape[1] - 1]


def label_words(tokens: Tensor, words: list[int]) -> list[int]:
    return words


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_it_equals_loops_with_raw_hooks(hooked: Any, byte_level: Any, kind_of_model: str) -> None:
    # With larger weights other labels are predicted with the vectors of other layers.
    model = hooked(randomize(tiny_gpt2(len(byte_level)).double(), scale=0.5), byte_level)
    compare(model, 1e-10 if kind_of_model == "bridge" else 1e-7)


@pytest.mark.slow("many passes")
def test_it_equals_loops_in_other_architectures(model: Any) -> None:
    """Grouped keys, BOS, and a norm after the attention."""
    compare(model, 1e-4)


def compare(model: Any, tolerance: float) -> None:
    batches = prompts(model, READ, batch_size=2, padding_side="left")
    tested = prompts(model, ASKED, batch_size=5, padding_side="left")
    record = al.task_vectors(model, batches, tested, **QUIET)
    vectors = states.mean_states(model, batches, last)
    close(record.vectors, vectors, rtol=tolerance, atol=tolerance)
    classes = tested[0].label_token_ids
    right = [
        states.answers(
            model,
            states.queries_alone(tested),
            classes,
            lambda tokens, words, layer=layer: [
                states.written(name_of(layer), last(tokens, words), vectors[layer])
            ],
        )
        for layer in range(model.cfg.n_layers)
    ]
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
    changed = write(torch.ones(*shuffled[0].tokens.shape, model.cfg.d_model), hook=None)
    assert changed is not None
    for resid, words in zip(changed, shuffled[0].label_positions, strict=True):
        close(resid[words], record.vectors[1].float())
        assert int((resid == 1).all(1).sum()) == len(resid) - 6
    classes = tested[0].label_token_ids
    right = [
        states.answers(
            model,
            states.alone(shuffled),
            classes,
            lambda tokens, words, layer=layer: [
                states.written(name_of(layer), words, vectors[layer])
            ],
        )
        for layer in range(model.cfg.n_layers)
    ]
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
    hooks = {side: lambda batch: record.hooks(gpt2, batch, 1) for side in ("left", "right")}
    left, right = (
        al.target_logits(
            gpt2,
            prompts(gpt2, ASKED, padding_side=side, **sizes),
            hooks=hooks[side],
            progress=False,
        )
        for side in hooks
    )
    whole = al.run(gpt2, [batch], [al.Accuracy()], hooks=hooks["left"], **QUIET)["accuracy"]
    assert is_shared(whole)
    close(left, right)


@pytest.mark.slow("many passes")
def test_vectors_of_other_models_and_positions_are_refused(gpt2: Any, llama: Any) -> None:
    tested = prompts(gpt2, ASKED)
    record = al.task_vectors(gpt2, prompts(gpt2, READ), tested, **QUIET)
    with pytest.raises(
        HookError, match=r"= \(3, 32\); got torch.float64 of the shape \(3, 1, 24\)"
    ):
        record.hooks(llama, prompts(llama, READ)[0], 0)
    with pytest.raises(AnchorlensError, match="at 1 positions in each prompt, but anchors gives 6"):
        record.hooks(gpt2, tested[0], 0, al.edges.anchors)
    with pytest.raises(HookError, match="layers must be numbers from 0 to 2"):
        record.hooks(gpt2, tested[0], 3)
    at_words = al.task_vectors(
        gpt2, prompts(gpt2, READ), tested, into=tested, positions=al.edges.anchors, **QUIET
    )
    after = tested[0].after(int(tested[0].label_ends.min()) + 1)
    with pytest.raises(HookError, match=f"positions before {after.first_query}, from which on"):
        at_words.hooks(gpt2, after, 0, al.edges.anchors)


@pytest.mark.slow("many passes")
def test_the_figure_and_the_intervals(gpt2: Any) -> None:
    batches, tested = prompts(gpt2, READ), prompts(gpt2, slice(3, 25))
    record = al.task_vectors(gpt2, batches, tested, resamples=20, progress=False)
    fields = ["accuracy", "unchanged", "demonstrations"]
    assert record.intervals.keys() == {*fields, "gain"}
    bands, lines = record.plot().data[:3], record.plot().data[3:]
    assert [line.name for line in lines] == ["with the vector", "zero-shot", "after demonstrations"]
    for name, line, band in zip(fields, lines, bands, strict=True):
        assert list(line.y) == getattr(record, name).reshape(-1).expand(3).tolist()
        ends = record.intervals[name].reshape(2, -1).expand(2, 3)
        assert list(band.y)[:3] == ends[0].tolist() and list(band.y)[5:2:-1] == ends[1].tolist()
    tensors: Any = record.tensors()
    assert len(al.records.TaskVectorsRecord(**tensors).plot().data) == 3


def test_bad_input_is_refused_before_any_pass(gpt2: Any) -> None:
    batches, tested = prompts(gpt2, READ), prompts(gpt2, ASKED)
    others = prompts(gpt2, slice(4, 16), MIXED)
    symbols = prompts(gpt2, ASKED, al.relabeling.symbols([" A", " B", " C", " D", " E", " F"]))
    texts = al.build_prompts(gpt2.tokenizer, TASK, al.sample_demonstrations(EXAMPLES), ["Who?"])
    in_turn: dict[str, Any] = {
        "positions": lambda batch: batch.attention_mask & (batch.index > 0)[:, None]
    }
    anchors: dict[str, Any] = {"positions": al.edges.anchors}
    for source, asked, options, message in (
        ([], tested, {}, "no batches to run"),
        (batches, texts, {}, "task_vectors needs the true label of each query"),
        (batches, tested, anchors, "at 6 positions in each prompt, but anchors gives 0 in"),
        (batches, tested, in_turn, "at as many positions in each prompt, but <lambda> gives"),
        (batches, tested, {"into": others}, "into must have the queries, classes and label words"),
        (batches, tested, {"into": symbols}, "into must have the queries, classes and label words"),
        (batches, tested, {"positions": lambda batch: 3}, "'positions' of states must give"),
    ):
        with pytest.raises(AnchorlensError, match=message), does_not_run(gpt2):
            al.task_vectors(gpt2, source, asked, **options, **QUIET)
    with pytest.warns(UserWarning, match="2 queries are in both lists"):
        al.task_vectors(gpt2, batches, prompts(gpt2, READ), **QUIET)
