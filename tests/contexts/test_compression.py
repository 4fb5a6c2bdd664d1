"""Compressed contexts: selected tokens, also by scores of kvpress, and positions."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

import anchorlens as al
from anchorlens.contexts import compressed, placement, selection
from anchorlens.contexts.selection import by_score
from anchorlens.errors import AnchorlensError, ModelError, StoreError
from anchorlens.passes.forward import run_pass
from anchorlens.prompts.segment_names import FORMAT, LABEL, OTHER, TEXT
from tests.support.asked import ask
from tests.support.measures import centred, difference, logits_of, same
from tests.support.plain_prompts import rows
from tests.support.tiny_models import questions, tiny_gpt2, tiny_llama


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


QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def scores_of(model: Any, select: selection.ByScore, batch: al.PromptBatch) -> tuple[Any, Tensor]:
    found: list[Any] = []

    def score(cache: Any, seen: Any) -> Any:
        found.append(select.score(cache, seen))
        return found[-1]

    selected = replace(select, score=score).of(model, batch)
    return found[0], selected


def plain_scores(weights: Any, tokens: Tensor) -> dict[str, list[Tensor]]:
    """Each press of kvpress 0.5.5 in every layer: [kv head, position]."""
    weights.set_attn_implementation("eager")  # the others give out no patterns
    with torch.no_grad():
        out = weights(tokens[None], use_cache=True, output_attentions=True)
    scores: dict[str, list[Tensor]] = {}
    for layer, attentions in zip(out.past_key_values.layers, out.attentions, strict=True):
        keys, (_, heads, length, _) = layer.keys, layer.keys.shape
        scores.setdefault("small keys", []).append(-keys.norm(dim=-1)[0])
        scores.setdefault("large values", []).append(layer.values.norm(dim=-1)[0])
        received = attentions.sum(2)
        summed = received.view(1, heads, -1, length).mean(2)[0]
        scores.setdefault("H2O", []).append(summed)
        scores.setdefault("heavy hitters", []).append(summed / torch.arange(length, 0, -1))
        of_window = attentions[..., -8:, :-8].mean(dim=-2)
        pooled = avg_pool1d(of_window, kernel_size=5, padding=2, stride=1)
        scores.setdefault("most read", []).append(pooled.view(1, heads, -1, length - 8).mean(2)[0])
    return scores


@pytest.mark.parametrize("exact_model", ["gpt2", "llama"], indirect=True)
def test_scores_equal_kvpress(exact_model: Any, byte_level: Any, sentencepiece_like: Any) -> None:
    """And one set of positions has the highest means, of as many as label words and format."""
    is_gpt2 = "gpt2" in exact_model.cfg.model_name.lower()
    tokenizer, make = (byte_level, tiny_gpt2) if is_gpt2 else (sentencepiece_like, tiny_llama)
    batch = questions(exact_model, 3, padding_side="left")[0]
    demos = shared(batch)
    length = demos.tokens.shape[1]
    budget = int(selection.anchors_and_format(demos).sum())
    expected = plain_scores(make(len(tokenizer)).double(), demos.tokens[0])
    selects: dict[str, Any] = {name: by_score(name) for name in selection.SCORE_NAMES}
    summed: Any = lambda cache, seen: seen["received"][0]  # noqa: E731
    selects["H2O"] = replace(selects["heavy hitters"], score=summed, last=budget // 2)
    masks = []
    for name, select in selects.items():
        ours, selected = scores_of(exact_model, select, batch)
        theirs = torch.stack([by_head.mean(0) for by_head in expected[name]])
        count = theirs.shape[1]  # without the window
        assert len(ours) == 3
        for layer in range(3):
            # The norms of Llama in transformers compute in float32.
            assert difference(ours[layer, :count], theirs[layer]) < (1e-12 if is_gpt2 else 1e-6)
        kept = {j for j in range(length) if demos.segments[0, j] == OTHER}
        kept |= set(range(length - select.last, length))
        means = theirs.mean(0).tolist()
        rest = sorted((j for j in range(count) if j not in kept), key=lambda j: (-means[j], j))
        best = kept | set(rest[: budget - len(kept)])
        assert selected.nonzero().flatten().tolist() == sorted(best), name
        assert len(best) == budget < length
        masks.append(selected)
    assert len({tuple(mask.tolist()) for mask in masks}) == 5
    # The mean of all heads is not the set of each head.
    by_head = [heads.topk(budget).indices for heads in torch.cat(expected["small keys"])]
    assert len({tuple(sorted(head.tolist())) for head in by_head}) > 1


@pytest.mark.slow_cases("trained contexts", "gemma3")
@pytest.mark.every_kind
def test_as_many_positions_as_asked_for_are_stored(model: Any) -> None:
    [batch] = questions(model, 3)
    demos, make = shared(batch), partial(by_score, "heavy hitters")
    length = demos.tokens.shape[1]
    whole = al.compress(model, batch, make(keep=length))
    everything = al.compress(model, batch, selection.everything)
    assert torch.equal(whole.logits(model, batch), everything.logits(model, batch))
    few = al.compress(model, batch, make(keep=0.5))
    anchors = int(selection.anchors_and_format(demos).sum())
    selects = [*map(by_score, selection.SCORE_NAMES)]
    for select, count in (*((each, anchors) for each in selects), (make(40), 40)):
        assert int(select.of(model, batch).sum()) == count
    assert int(few.selected.sum()) == round(length / 2)
    assert few.info["scored"] == "heavy hitters, one set for all layers and heads"
    assert f"selection {few.info['scored']}" in repr(few)
    assert "scored" not in everything.info and few.selected[demos.segments[0] == OTHER].all()


def test_of_equal_scores_the_lower_positions_are_stored(llama: Any) -> None:
    batch = questions(llama, 3)[0]
    equal = selection.ByScore(lambda cache, seen: cache.keys[0].new_zeros(len(cache)), 30, last=2)
    selected = equal.of(llama, batch)
    length = len(selected)
    assert selected.nonzero().flatten().tolist() == [*range(28), length - 2, length - 1]
    # Scores in float16 are compared as they are, also where they are far apart in size.
    rising = replace(equal, score=lambda cache, seen: torch.arange(length).half(), last=0)
    assert rising.of(llama, batch).nonzero().flatten().tolist() == [0, *range(length - 29, length)]


@pytest.mark.slow("trained contexts")
def test_the_pass_of_a_score_has_the_edges_of_what_is_stored(llama: Any) -> None:
    """Demonstrations that run separately do not read each other, and positions can be moved."""
    batch, found = questions(llama, 3)[0], list[Tensor]()

    def score(cache: Any, seen: Any) -> Tensor:
        found.append(seen["row"][0, :, :, 0])
        return found[-1]

    def last(demonstrations: al.PromptBatch) -> Any:
        return {"row": al.reads.At("pattern", torch.tensor([[demonstrations.tokens.shape[1] - 1]]))}

    select = selection.ByScore(score, 60, reads=last, name="read at the end")
    for separately in (False, True):
        al.compress(llama, batch, select, separately=separately)
    first = slice(1, int(batch.padded_right().label_ends[0, 0]) + 1)
    joint, apart = (rows[..., first].sum(-1) for rows in found)
    assert (joint > 1e-3).all() and (apart == 0).all()
    moved = al.compress(llama, batch, select, positions=placement.rebased)
    assert moved.has_no_gap and len(moved.cached_tokens) == 60


@pytest.mark.changes_model
def test_a_score_is_of_the_model_with_the_hooks_of_its_user(gpt2: Any) -> None:
    [batch] = questions(gpt2, 3)
    clean, _ = scores_of(gpt2, by_score("large values"), batch)
    gpt2.add_hook("blocks.0.attn.hook_v", lambda value, hook: value / 2)
    for dropout in (each for each in gpt2.modules() if isinstance(each, torch.nn.Dropout)):
        dropout.p = 0.5
    gpt2.train()
    changed, _ = scores_of(gpt2, by_score("large values"), batch)
    assert gpt2.training and difference(changed[0], clean[0] / 2) < 1e-6


def test_random_tokens_are_drawn_from_all_that_is_not_always_stored(llama: Any) -> None:
    demos = shared(questions(llama, 3)[0])
    draws = torch.stack([selection.random_tokens(seed)(demos) for seed in range(40)])
    budget = int(selection.anchors_and_format(demos).sum())
    assert (draws.sum(1) == budget).all() and draws[:, 0].all() and draws.any(0).all()
    assert len({tuple(draw.tolist()) for draw in draws}) == 40
    assert torch.equal(draws[3], selection.random_tokens(3)(demos))
    assert draws[:, 1:].double().mean() == pytest.approx((budget - 1) / (demos.tokens.shape[1] - 1))


@pytest.mark.slow("trained contexts")
def test_a_score_may_be_the_control_of_a_comparison(llama: Any) -> None:
    control = replace(by_score("small keys"), keep=60)
    contexts: dict[str, Any] = {"60": partial(al.compress, select=control)}
    drawn = al.ContextComparison(contexts, draws=1, control=lambda seed: control, repeats=0)
    record = ask(llama, questions(llama, 3), drawn, **QUIET)
    assert torch.equal(record.random_kl, record.kl)


def no_cut(cache: Any, seen: Any) -> Tensor:
    return torch.zeros(len(cache))


SLOPE = {"a": al.reads.At("slope", al.edges.anchors)}
RETURNS = {"a": al.reads.Hooks([], [("blocks.0.hook_mlp_out", lambda states, hook: states)])}
REFUSED: list[tuple[Any, Any, str]] = [  # a score, what it reads, and words of the message
    (lambda cache, seen: torch.zeros(3), {}, r"the \d+ positions .* own score gave .* \(3,\)"),
    (lambda cache, seen: no_cut(cache, seen) - torch.inf, {}, "finite numbers"),
    (lambda cache, seen: 3, {}, "own score gave a int"),
    (lambda cache: 0, {}, "score must be a function of keys and values, and what was read"),
    (no_cut, SLOPE, "own score reads a gradient, but demonstrations have no loss"),
    (no_cut, RETURNS, "a hook of metric 'own score' must return None"),
]


@pytest.mark.parametrize(("score", "reads", "message"), REFUSED)
def test_wrong_scores_are_refused(gpt2: Any, score: Any, reads: Any, message: str) -> None:
    [batch] = questions(gpt2, 3)
    with pytest.raises(AnchorlensError, match=message):
        al.compress(gpt2, batch, selection.ByScore(score, reads=lambda demonstrations: reads))
