"""Compressed contexts: selected tokens, their positions, bad input, and what loyalty measures."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.contexts import compressed, placement, selection
from anchorlens.errors import ModelError, StoreError
from anchorlens.passes.forward import run_pass
from anchorlens.prompts.segment_names import FORMAT, LABEL, OTHER, TEXT
from tests.support.measures import centred, difference, logits_of, same
from tests.support.plain_prompts import rows
from tests.support.tiny_models import questions


def shared(batch: al.PromptBatch) -> al.PromptBatch:
    prompt = batch.prompt(0)
    return prompt.before(int(prompt.query_start[0]))


def masking(model: Any, right: al.PromptBatch, selected: Tensor) -> Any:
    """Hooks without the edges from the query to tokens that are not selected."""
    cut = torch.zeros(1, right.tokens.shape[1], right.tokens.shape[1], dtype=torch.bool)
    cut[:, len(selected) :, (~selected).nonzero().flatten()] = True
    return al.block_edges(model, right, al.edges.every(right) & cut)


def masked(model: Any, batch: al.PromptBatch, selected: Tensor) -> Tensor:
    right = batch.padded_right()
    return run_pass(model, right, hooks=masking(model, right, selected))


def test_selections_have_the_segments_that_they_name(llama: Any) -> None:
    demos = shared(questions(llama, 3)[0])
    assert demos.segments[0].unique().tolist() == [OTHER, TEXT, LABEL, FORMAT]
    for select, segments in (
        (selection.everything, [OTHER, TEXT, LABEL, FORMAT]),
        (selection.anchors_and_format, [OTHER, LABEL, FORMAT]),
        (selection.label_words, [OTHER, LABEL]),
    ):
        selected = select(demos)
        assert demos.segments[0][selected].unique().tolist() == segments
        assert not torch.isin(demos.segments[0][~selected], torch.tensor(segments)).any()
    # The demonstrations end with the newline before the query.
    assert llama.tokenizer.decode(demos.tokens[0, -1:]) == "\n"
    assert selection.anchors_and_format(demos)[-1]


def test_random_selections_have_as_many_tokens_as_label_words(gpt2: Any) -> None:
    demos = shared(questions(gpt2, 3)[0])
    ends = [-1, *demos.label_ends[0].tolist()]
    words = [*zip(demos.label_positions[0].tolist(), ends[1:], ends[:-1], strict=True)]
    draws = [selection.random_and_format(seed)(demos) for seed in range(8)]
    for selected in draws:
        assert selected.sum() == selection.anchors_and_format(demos).sum()
        assert not selected[demos.segments[0] == LABEL].any()
        assert selected[demos.segments[0] == FORMAT].all()
        texts = (selected & (demos.segments[0] == TEXT)).nonzero().flatten()
        for first, last, before in words:
            assert ((texts > before) & (texts < first)).sum() == last - first + 1
    assert len({tuple(selected.tolist()) for selected in draws}) > 4
    assert torch.equal(draws[3], selection.random_and_format(3)(demos))


def test_placements_give_the_positions_of_keys_and_query() -> None:
    selected = torch.tensor([True, False, True, True, False])
    for place, keys, query in (
        (placement.as_in_prompt, [0, 2, 3], 5),
        (placement.restarted, [0, 2, 3], 0),
        (placement.rebased, [0, 1, 2], 3),
    ):
        positions = place(selected)
        assert (positions[0].tolist(), positions[1]) == (keys, query)


def second(demonstrations: al.PromptBatch) -> Tensor:
    """One token, between which and the query are many; of the last token there are none."""
    return demonstrations.positions == 1


def last(demonstrations: al.PromptBatch) -> Tensor:
    return demonstrations.positions == demonstrations.tokens.shape[1] - 1


SELECTIONS = [selection.anchors_and_format, selection.label_words, selection.random_and_format(1)]


@pytest.mark.slow("trained contexts")
@pytest.mark.every_kind
@pytest.mark.parametrize("select", [*SELECTIONS, second, last])
def test_a_compressed_context_equals_masking(model: Any, select: Any) -> None:
    batches = questions(model, 7, batch_size=3, padding_side="left")
    context = al.compress(model, batches[1], select=select)
    for batch in batches:
        expected = masked(model, batch, context.selected)
        assert difference(context.logits(model, batch), expected) < 1e-5
        assert difference(run_pass(model, batch), expected) > 1e-3
        given, cut = batch.padded_right(), context.query_pass(model, batch).batch
        both = context.selected[given.label_positions] & context.selected[given.label_ends]
        stored = both.all(0) | (not context.is_cut)
        for name in ("label_positions", "label_ends"):
            expected = given.tokens.gather(1, getattr(given, name)[:, stored])
            assert torch.equal(cut.tokens.gather(1, getattr(cut, name)), expected)
    is_bridge = hasattr(model, "original_model")
    assert context.is_cut == is_bridge
    share = int(context.selected.sum()) / len(context.selected)
    whole = al.compress(model, batches[0], select=selection.everything)
    assert context.size == pytest.approx(whole.size * (share if is_bridge else 1))


def pieces(batch: al.PromptBatch) -> list[range]:
    ends = [int(end) + 2 for end in batch.label_ends[0]]  # after its line break
    return [range(*each) for each in pairwise([0, int(batch.begins_with_bos), *ends])]


@pytest.mark.every_kind
def test_one_demonstration_alone_is_what_it_was(llama: Any) -> None:
    tokens = questions(llama, 3)[0].padded_right().tokens
    batch = al.PromptBatch.from_positions(
        tokens,
        label_positions=[[20]] * 3,
        label_classes=[[0]] * 3,
        label_token_ids=[int(tokens[0, 20]), 5],
        begins_with_bos=True,
    )
    everything = selection.everything
    contexts = [al.compress(llama, batch, everything, separately=a) for a in (False, True)]
    assert same(*contexts)
    assert torch.equal(*(context.logits(llama, batch) for context in contexts))
    # Which tokens are format is not known, and nobody has to know it where the number is given.
    most_read = al.compress(llama, batch, selection.by_score("most read", 12))
    assert int(most_read.selected.sum()) == 12 and most_read.selected[0]


@pytest.mark.slow("trained contexts")
def test_separate_demonstrations_can_be_moved(llama: Any) -> None:
    """All but the first, in one piece with the query, which so keep all distances."""
    batch = questions(llama, 3)[0]
    first = pieces(batch.padded_right())[1].stop

    def later(demonstrations: al.PromptBatch) -> Tensor:
        return demonstrations.positions >= first

    make = partial(al.compress, llama, batch, later, positions=placement.rebased)
    moved, joint = (make(separately=alone) for alone in (True, False))
    still = al.compress(llama, batch, later, separately=True)
    logits = moved.logits(llama, batch)
    assert moved.is_cut and difference(logits, still.logits(llama, batch)) < 1e-5
    assert difference(logits, joint.logits(llama, batch)) > 1e-3


@pytest.mark.changes_model
def test_separate_demonstrations_have_the_hooks_of_the_user(gpt2: Any) -> None:
    batch = questions(gpt2, 3)[0].prompts(0, 2)

    def halved(value: Tensor, hook: Any) -> Tensor:
        return value / 2

    clean = al.compress(gpt2, batch, separately=True)
    gpt2.add_hook("blocks.0.attn.hook_v", halved)
    context, joint = (al.compress(gpt2, batch, separately=alone) for alone in (True, False))
    first = pieces(batch.padded_right())[1].stop
    for ours, theirs in zip(context.prefix.values, joint.prefix.values, strict=True):
        count = int(context.selected[:first].sum())  # the first demonstration sees no other
        assert difference(ours[:, :, :count], theirs[:, :, :count]) < 1e-5
    assert difference(context.prefix.values[-1], joint.prefix.values[-1]) > 1e-3
    assert difference(context.prefix.values[-1], clean.prefix.values[-1]) > 1e-3


@pytest.mark.slow("trained contexts")
def test_what_is_stored_tells_separate_demonstrations_apart(gpt2: Any, tmp_path: Any) -> None:
    [batch] = questions(gpt2, 3)
    for separately, text in ((False, ""), (True, ", each demonstration alone")):
        context = al.compress(gpt2, batch, separately=separately)
        assert context.info["separately"] is separately
        assert f"placement as_in_prompt{text}; " in repr(context)
    damaged = replace(context, info={**context.info, "separately": 1})
    with pytest.raises(StoreError, match="does not say whether demonstrations were run separately"):
        al.contexts.StoredContext.load(damaged.save(tmp_path / "context.safetensors"))


@pytest.mark.every_kind
def test_restarted_positions_equal_a_computation_by_hand(gpt2: Any) -> None:
    """The query has the position embeddings of the first tokens; keys do not change."""
    if not hasattr(gpt2, "original_model"):
        with pytest.raises(ModelError, match="positions cannot be restarted"):
            al.compress(gpt2, questions(gpt2, 2)[0], positions=placement.restarted)
        return
    batch = questions(gpt2, 4)[0].padded_right()
    context = al.compress(gpt2, batch, positions=placement.restarted)
    start, length = len(context.selected), batch.tokens.shape[1]

    def move(embeddings: Tensor, hook: Any) -> Tensor:
        moved = embeddings.expand(len(batch), -1, -1).clone()
        moved[:, start:] = embeddings[:1, : length - start]  # embeddings of the first positions
        return moved

    hooks = [*masking(gpt2, batch, context.selected), ("hook_pos_embed", move)]
    assert difference(centred(context.logits(gpt2, batch)), logits_of(gpt2, batch, hooks)) < 1e-5


@pytest.mark.slow("trained contexts")
@pytest.mark.every_kind
def test_contexts_of_one_run_are_those_of_each_selection_alone(llama: Any) -> None:
    """All demonstrations stand at 0, 1, ... already; what is selected of them must be moved."""
    batch = questions(llama, 3)[0]
    selections = [selection.everything, selection.label_words]
    for positions in (placement.as_in_prompt, placement.rebased):
        if positions is placement.rebased and not hasattr(llama, "original_model"):
            continue  # its keys cannot be moved
        for order in (selections, selections[::-1]):
            made = compressed.compressed_contexts(llama, batch, order, positions=positions)
            for context, select in zip(made, order, strict=True):
                alone = al.compress(llama, batch, select, positions=positions)
                assert same(context, alone)
                assert torch.equal(context.logits(llama, batch), alone.logits(llama, batch))


@pytest.mark.parametrize("order", [1, -1])
def test_one_selection_that_cannot_be_moved_is_refused_beside_others(gpt2: Any, order: int) -> None:
    """All demonstrations stand at 0, 1, ... also where positions cannot be chosen."""
    selections = [selection.everything, selection.label_words][::order]
    [batch] = questions(gpt2, 3)
    with pytest.raises(ModelError, match="positions cannot be rebased"):
        compressed.compressed_contexts(gpt2, batch, selections, positions=placement.rebased)


def test_text_anchor_prompts_have_label_words_and_format_only(byte_level: Any) -> None:
    examples, task = al.load_examples("questions"), al.TASKS["trec"]
    demos = al.sample_demonstrations(examples, seed=1)
    given = byte_level, task, demos, examples[:3]
    text = "".join(f"Question:\nAnswer Type:{task.labels[demo.label or 0]}\n" for demo in demos)
    pairs = rows(al.prompts.text_anchor_prompts(*given)), rows(al.build_prompts(*given))
    for ours, theirs in zip(*pairs, strict=True):
        assert byte_level.decode(ours.tokens[: ours.query_start]) == text
        assert ours.tokens[ours.query_start :] == theirs.tokens[theirs.query_start :]
