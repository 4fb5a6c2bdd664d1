"""Edge sets against loops over positions, which follow the definitions, and random edges."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens import head_detector

import anchorlens as al
from anchorlens.errors import AnchorlensError, HookError, PromptError
from anchorlens.prompts import edges
from anchorlens.prompts.segment_names import SEGMENTS
from tests.support.tiny_models import questions

# A rule tells for (batch, row, query, key), with the key before the query, if it is an edge.
Rule = Callable[[al.PromptBatch, int, int, int], bool]


@pytest.fixture(params=["left", "right"])
def batch(request: pytest.FixtureRequest, sentencepiece_like: Any) -> al.PromptBatch:
    """Prompts of three lengths, with label words of one and of several tokens, after a BOS."""
    words, template = [" Positive", " utterly wrong"], "Review: {text}\nSentiment:{label}"
    task = al.Task(template, words, instructions="Do:\n")
    demos = [al.Example(text, k % 2) for k, text in enumerate(["fine", "bad, bad", "", "no"])]
    given = task, demos, ["so so", "a much longer text", ""]
    (prompts,) = al.build_prompts(sentencepiece_like, *given, padding_side=request.param)
    assert len(set(prompts.attention_mask.sum(1).tolist())) == 3
    assert (prompts.label_ends > prompts.label_positions).any()
    return prompts


def edges_by_loop(batch: al.PromptBatch, rule: Rule) -> Tensor:
    size, length = batch.tokens.shape
    result = torch.zeros(size, length, length, dtype=torch.bool)
    for row in range(size):
        for i in range(length):
            for j in range(i):
                if batch.attention_mask[row, i] and batch.attention_mask[row, j]:
                    result[row, i, j] = rule(batch, row, i, j)
    return result


def is_anchor(batch: al.PromptBatch, row: int, position: int) -> bool:
    return position in batch.label_positions[row].tolist()


def is_target(batch: al.PromptBatch, row: int, position: int) -> bool:
    return position == int(batch.target_positions[row])


RULES: dict[str, Rule] = {
    "wp": lambda b, row, i, j: is_anchor(b, row, i),
    "pq": lambda b, row, i, j: is_target(b, row, i) and is_anchor(b, row, j),
    "ww": lambda b, row, i, j: not RULES["wp"](b, row, i, j) and not RULES["pq"](b, row, i, j),
    "tq": lambda b, row, i, j: is_target(b, row, i) and not is_anchor(b, row, j),
    "from_first": lambda b, row, i, j: j == b.attention_mask[row].tolist().index(True),
    "every": lambda b, row, i, j: True,
}


@pytest.mark.parametrize("name", RULES)
def test_edges_equal_their_definition(batch: al.PromptBatch, name: str) -> None:
    result = getattr(edges, name)(batch)
    assert result.dtype == torch.bool
    assert torch.equal(result, edges_by_loop(batch, RULES[name]))
    assert result.any((1, 2)).all()


@pytest.mark.parametrize("kind", ["previous_token", "same_token", "induction"])
def test_edges_of_equal_tokens_are_as_in_transformer_lens(batch: al.PromptBatch, kind: str) -> None:
    """In many prompts, of which padding has equal tokens, as in each prompt alone."""
    detector = {"same_token": "duplicate_token"}.get(kind, kind)
    pattern = getattr(head_detector, f"get_{detector}_head_detection_pattern")
    batch = replace(batch, tokens=batch.tokens % 5)
    found = getattr(edges, kind)(batch)
    for row, inside in enumerate(batch.attention_mask):
        # Theirs has induction from a token to itself, which no set of edges has.
        expected = pattern(batch.tokens[row : row + 1, inside]).tril(-1).bool()
        assert torch.equal(getattr(edges, kind)(batch.prompt(row))[0], expected)
        assert torch.equal(found[row][inside][:, inside], expected)
        assert int(found.counts()[row]) == int(expected.sum()) > 9
    assert torch.equal(found.rows(slice(3, 9)), found.table()[:, 3:9])


def test_pairs_count_from_the_first_token_of_each_prompt(batch: al.PromptBatch) -> None:
    expected = torch.zeros_like(edges.every(batch).table())
    for row, start in enumerate(batch.starts.tolist()):
        expected[row, start + 9, start + 4] = expected[row, start + 3, start] = True
    found = edges.pairs(batch, [(9, 4), (3, 0)])
    assert torch.equal(found, expected)
    assert torch.equal(found.rows(slice(5, 12)), expected[:, 5:12])
    table: Any = torch.tensor([[[9, 4]], [[3, 0]], [[3, 0]]])
    own = edges.pairs(batch, table)
    for row, (query, key) in enumerate([(9, 4), (3, 0), (3, 0)]):
        assert (own[row].nonzero() - batch.starts[row]).tolist() == [[query, key]]
    assert edges.pairs(batch, [[], [(3, 0)], []]).counts().tolist() == [0, 1, 0]
    length = int(batch.attention_mask[0].sum())
    cases: list[tuple[Any, str]] = [
        ([(4, 9)], r"the key is the earlier one; got \(4, 9\) for prompt 0 of the batch"),
        ([(4, 4)], r"got \(4, 4\)"),
        ([[(1, 0)], [(4, -1)], []], r"got \(4, -1\) for prompt 1"),
        ([(length, 4)], rf"got \({length}, 4\) for prompt 0 .* has {length} tokens"),
        ([], "pairs are .* for all 3 prompts"),
        ([[(4, 1)], [(4, 1)]], "such a list for each of them"),
        ([[], [], []], "pairs are "),
        ((4, 1), "pairs of pairs must be a list of pairs of"),
        ([(4, 1, 0)], "pairs of pairs must be a list of pairs of"),
    ]
    for given, message in cases:
        with pytest.raises(AnchorlensError, match=message):
            edges.pairs(batch, given)


def test_every_token_belongs_to_exactly_one_segment(batch: al.PromptBatch) -> None:
    members = torch.stack([edges.segment(batch, name) for name in SEGMENTS])
    assert torch.equal(members.sum(0), batch.attention_mask.long())
    assert torch.equal(members[SEGMENTS.index("target")], edges.target(batch))
    for number, member in enumerate(members):
        for row, segments in enumerate(batch.segments.tolist()):
            positions = [k for k, segment in enumerate(segments) if segment == number]
            assert member[row].nonzero().flatten().tolist() == positions


def test_positions_by_number_lie_in_their_prompts(batch: al.PromptBatch) -> None:
    assert torch.equal(edges.at(batch, batch.label_positions), edges.anchors(batch))
    fractions, flags, one = torch.tensor([[1.0]]), torch.tensor([[True]]), torch.tensor(1)
    for wrong in (fractions, flags, one, torch.zeros(3, 0, dtype=torch.long)):
        with pytest.raises(PromptError, match=r"must be whole numbers, a list .*; got"):
            edges.at(batch, wrong)
    first = batch.starts[:, None]
    assert torch.equal(edges.at(batch, first.tolist()), edges.at(batch, first))  # type: ignore[arg-type]
    shortest = int(batch.attention_mask.sum(1).argmin())
    padded = int((~batch.attention_mask[shortest]).nonzero()[0])
    for position, fault in ((-1, "outside"), (999, "outside"), (padded, "under padding")):
        positions = batch.label_positions.clone()
        positions[shortest, 0] = position
        with pytest.raises(PromptError, match=f"of prompt {shortest} has a position {fault}"):
            edges.at(batch, positions)


@pytest.mark.parametrize("are_numbers", [True, False])
def test_edges_of_readers_and_of_what_is_read(batch: al.PromptBatch, are_numbers: bool) -> None:
    last = int(batch.target_positions.min())
    positions: Any = [last - 3, last - 1] if are_numbers else edges.anchors
    chosen = edges.at(batch, positions) if are_numbers else positions(batch)
    read = edges_by_loop(batch, lambda b, row, i, j: bool(chosen[row, j]))
    readers = edges_by_loop(batch, lambda b, row, i, j: bool(chosen[row, i]))
    assert torch.equal(edges.read_by(positions)(batch).table(), read)  # type: ignore[attr-defined]
    assert torch.equal(edges.reading(positions)(batch).table(), readers)  # type: ignore[attr-defined]


def test_tokens_after_the_target_have_no_edges() -> None:
    """Later tokens cannot influence the target. Their edges would only lower the mean S_ww."""
    rows = torch.tensor([[9, 5, 8, 6, 7, 4, 4]])
    whole, shortened = (
        al.PromptBatch.from_positions(
            tokens,
            label_positions=[[1, 3]],
            label_classes=[[0, 1]],
            label_token_ids=[5, 6],
            target_positions=[4],
        )
        for tokens in (rows, rows[:, :5])
    )
    of_tokens = (edges.previous_token, edges.same_token, edges.induction)
    for flow in (edges.every, edges.wp, edges.pq, edges.ww, edges.tq, *of_tokens):
        assert torch.equal(flow(whole)[:, :5, :5], flow(shortened))
        assert not flow(whole)[:, 5:].any() and not flow(whole)[:, :, 5:].any()


def test_demonstrations_are_all_between_instructions_and_query(batch: al.PromptBatch) -> None:
    """Each is a text, its label word and the separator: here the line break after it."""
    named = edges.each_demonstration(batch)
    assert list(named) == [f"demonstration {k}" for k in range(1, 5)]
    parts = [positions_of(batch) for positions_of in named.values()]
    covered = torch.stack(parts).sum(0)
    names = ("text", "label", "format")
    inside = torch.stack([edges.segment(batch, name) for name in names]).any(0)
    assert torch.equal(covered, inside.long())
    for number, part in enumerate(parts):
        assert torch.equal(part, edges.demonstration(batch, number))
        for row in range(len(batch)):
            places = part[row].nonzero()[:, 0]
            assert places.diff().eq(1).all()
            assert int(batch.label_ends[row, number]) == int(places[-1]) - 1
    assert int(parts[3][0].nonzero()[-1]) + 1 == int(batch.query_start[0])


def test_demonstrations_of_bare_positions_end_with_their_label_words() -> None:
    bare = al.PromptBatch.from_positions(
        torch.tensor([[0, 0, 9, 5, 5, 8, 6, 7], [9, 5, 8, 8, 6, 7, 4, 4]]),
        label_positions=[[3, 4, 6], [1, 2, 4]],
        label_classes=[[0, 0, 1]] * 2,
        label_token_ids=[5, 6],
        attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8]),
    )
    expected = [[[2, 3], [4], [5, 6]], [[0, 1], [2], [3, 4]]]
    for begins_with_bos in (False, True):
        given = replace(bare, begins_with_bos=begins_with_bos)
        for number in range(3):
            part = edges.demonstration(given, number)
            for row in range(2):
                places = expected[row][number]
                places = places[1:] if begins_with_bos and number == 0 else places
                assert part[row].nonzero()[:, 0].tolist() == places
    for number in (-1, 3):
        with pytest.raises(PromptError, match=f"have the demonstrations 0 to 2; got {number}"):
            edges.demonstration(bare, number)
    segments = al.PromptBatch.from_segments(torch.tensor([[1, 2]]), [[0, 0]], ["a"])
    for function in (edges.each_demonstration, lambda batch: edges.demonstration(batch, 0)):
        with pytest.raises(PromptError, match="no label words"):
            function(segments)


Draw = Callable[[al.PromptBatch, Tensor, int], Tensor]
DRAWS = {"random_keys": edges.random_keys, "random_edges": edges.random_edges}


def forerunners_read(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.forerunners(batch))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_other_edges_are_drawn_as_many_as_there_are(model: Any, draw: Draw) -> None:
    batch = questions(model, 5, padding_side="left")[0]
    chosen = forerunners_read(batch)
    assert int(chosen.sum(2).max()) == batch.label_positions.shape[1]
    draws = [draw(batch, chosen, seed) for seed in range(10)]
    for drawn in draws:
        assert torch.equal(drawn.sum((1, 2)), chosen.sum((1, 2)))
        if draw is edges.random_keys:
            assert torch.equal(drawn.sum(2), chosen.sum(2))
        assert not (drawn & (chosen | edges.from_first(batch) | ~edges.every(batch))).any()
    assert all(not torch.equal(draws[0], other) for other in draws[1:])
    assert torch.equal(draw(batch, chosen, 3), draws[3])


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_depends_on_the_seed_and_the_prompt_alone(gpt2: Any, draw: Draw) -> None:
    for side in ("left", "right"):
        [batch] = questions(gpt2, 7, padding_side=side)
        drawn = draw(batch, forerunners_read(batch), 5)
        for row, mask in enumerate(batch.attention_mask):
            alone = batch.prompt(row)
            expected = draw(alone, forerunners_read(alone), 5)[0]
            assert torch.equal(drawn[row][mask][:, mask], expected)


def test_other_demonstrations_have_other_draws(gpt2: Any) -> None:
    """Of prompts that are equal but for their set, so that nothing else can change a draw."""
    batch = questions(gpt2, 1)[0]
    other = replace(batch, demonstrations_id=batch.demonstrations_id + 1)
    draws: dict[str, Callable[[al.PromptBatch, int], Tensor]] = {
        "random_positions": edges.random_positions,
        "random_keys": lambda each, seed: edges.random_keys(each, edges.pq, seed),
        "random_edges": lambda each, seed: edges.random_edges(each, edges.pq, seed),
        "random_and_format": lambda each, seed: al.contexts.selection.random_and_format(seed)(each),
    }
    for name, draw in draws.items():
        drawn, again, of_other = (
            torch.stack([torch.as_tensor(draw(each, seed)) for seed in range(4)])
            for each in (batch, batch, other)
        )
        assert torch.equal(drawn, again), name
        # A draw of one number is not that of the next number after other demonstrations either.
        assert len({tuple(each.flatten().tolist()) for each in (*drawn, *of_other)}) == 8, name


@pytest.mark.slow("many passes")
def test_every_free_key_is_drawn_equally_often(gpt2: Any) -> None:
    """Each key's count over draws is binomial; six standard deviations are allowed."""
    batch = questions(gpt2, 1)[0]
    chosen, count = edges.pq(batch), 400
    target = int(batch.target_positions[0])
    drawn = torch.stack([edges.random_keys(batch, chosen, seed)[0] for seed in range(count)])
    free = (edges.every(batch) & ~chosen & ~edges.from_first(batch))[0, target]
    chance = float(chosen[0, target].sum() / free.sum())
    limit = 6 * (count * chance * (1 - chance)) ** 0.5
    assert ((drawn.sum(0)[target][free] - count * chance).abs() < limit).all()


def test_all_free_keys_are_drawn_and_one_more_is_an_error(gpt2: Any) -> None:
    batch = questions(gpt2, 1)[0]
    row = edges.every(batch) & edges.between(edges.target(batch), batch.attention_mask)
    free = int(row.sum()) - 1  # without the first token
    half = row & (row.cumsum(2) <= free // 2 + 1) & ~edges.from_first(batch)
    assert int(edges.random_keys(batch, half, 0).sum()) == int(half.sum())
    with pytest.raises(HookError, match=r"prompt 0 has 1 other edges .* for \d+ .*=al.edges.rando"):
        edges.random_keys(batch, row & (row.cumsum(2) <= free), 0)
    assert int(edges.random_edges(batch, row, 0).sum()) == int(row.sum())


def test_forerunners_stand_before_the_label_words(gpt2: Any) -> None:
    batch = questions(gpt2, 4, padding_side="left")[0]
    expected = torch.zeros_like(batch.attention_mask).scatter(1, batch.label_positions - 1, True)
    assert torch.equal(edges.forerunners(batch), expected)
    at_the_start = replace(batch, label_positions=batch.label_positions.clone())
    at_the_start.label_positions[:, 0] = batch.attention_mask.long().argmax(1)
    found = edges.forerunners(at_the_start)
    assert int(found.sum()) == int(expected.sum()) - 4
    assert not (found & ~batch.attention_mask).any()
