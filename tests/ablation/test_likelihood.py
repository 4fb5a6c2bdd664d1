"""Segments are removed, and how likely answers are then, against plain transformers with masks."""

from dataclasses import fields, replace
from decimal import Decimal, localcontext
from functools import partial
from math import log, prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

import anchorlens as al
from anchorlens.ablation.likelihood import (
    Ablation,
    Answers,
    _outcome,
    are_likeliest,
    log_odds_of,
    subsets_of,
)
from anchorlens.errors import PromptError
from anchorlens.runs.study import Study
from tests.support.asked import scored
from tests.support.measures import logits_of
from tests.support.tiny_models import questions, tiny_gpt2

NAMES = ("museum", "shop", "question", "answer")
TEXTS = [
    ("It opens at ten.", " It sells cheese.", " When?"),
    ("Nobody is there today.", " It is new.", " What does it sell, and why?"),
]


def study_of(model: Any, batches: list[al.PromptBatch]) -> Study:
    return Study(model, batches, {"experiment": "test"}, resamples=0, progress=False)


def outcomes(
    model: Any, batches: list[al.PromptBatch], count: int = 6, **options: Any
) -> tuple[list[Answers], list[Tensor], list[Any]]:
    with study_of(model, batches).entered() as study:
        given: dict[str, Any] = {"segments": None, "answer": None, "remove": al.removal.edges}
        given |= options
        passes = study.passes([scored(**given)])
        ablation = Ablation.of(study.batches, **given)
        answers = [Answers.of(ablation, passes, batch) for batch in study.batches]
        draw = partial(al.subsets.random, count)
        number = len(ablation.segments.names)
        kept = [subsets_of(draw, batch, number, 0) for batch in study.batches]
        return answers, kept, [a.of_subsets(k) for a, k in zip(answers, kept, strict=True)]


def written(
    model: Any, side: Any = "right", texts: Any = TEXTS, names: Any = NAMES
) -> al.PromptBatch:
    """Prompts of documents with the answer that the model writes, three tokens."""
    pieces = [list(zip(names[:-1], of_prompt, strict=True)) for of_prompt in texts]
    options: dict[str, Any] = {"max_new_tokens": 3, "stop_at_eos": False}
    alone = [al.trace_generation(model, each, **options).batch for each in pieces]

    def padded(rows: list[Tensor], value: int) -> Tensor:
        return pad_sequence(rows, True, padding_value=value, padding_side=side)

    tokens = padded([each.tokens[0] for each in alone], 0)
    segments = padded([each.segments[0] for each in alone], -1)
    return al.PromptBatch.from_segments(tokens, segments, names, attention_mask=segments >= 0)


def misquoted(batch: al.PromptBatch, rows: list[int]) -> al.PromptBatch:
    """The same, with another last token of some prompts."""
    tokens = batch.tokens.clone()
    for row in rows:
        last = batch.attention_mask[row].nonzero()[-1]
        tokens[row, last] = (tokens[row, last] + 1) % 700
    return replace(batch, tokens=tokens)


def plain_outcome(
    weights: Any, tokens: Tensor, removed: Tensor, predicting: list[int], answer: list[int]
) -> tuple[float, float]:
    """log p / (1 - p) and log p of the whole answer of a prompt without padding."""
    count = len(tokens)
    allowed = torch.ones(count, count, dtype=torch.bool).tril()
    allowed[~removed] &= ~removed | torch.eye(count, dtype=torch.bool)[~removed]
    mask = torch.zeros(count, count, dtype=torch.double)
    mask.masked_fill_(~allowed, torch.finfo(torch.double).min)
    with torch.no_grad():
        out = weights(tokens[None], attention_mask=mask[None, None], use_cache=False)
    chances = out.logits[0].softmax(-1)
    p = prod(float(chances[t, token]) for t, token in zip(predicting, answer, strict=True))
    return log(p / (1 - p)), log(p)


@pytest.mark.quick_cases("many passes", "written")
@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["label words", "written"])
def test_log_odds_are_those_of_plain_transformers(
    side: Any, kind: str, exact_gpt2: Any, byte_level: Any, kind_of_model: str
) -> None:
    model = exact_gpt2
    if kind == "written":
        answer, batches = "answer", [written(model, side)]
    else:
        answer, batches = None, questions(model, 3, batch_size=2, padding_side=side)
    answers, kept, got = outcomes(model, batches, count=4, answer=answer)
    weights: Any = tiny_gpt2(len(byte_level)).double()
    weights.set_attn_implementation("eager")
    tolerance = 1e-9 if kind_of_model == "bridge" else 1e-6
    for of_batch, subsets, outcome in zip(answers, kept, got, strict=True):
        batch = of_batch.batch
        assert of_batch.is_given.all() and (of_batch.ablation.answer is None) == (answer is None)
        inside = [
            batch.segments == k if answer else al.edges.demonstration(batch, k)
            for k in range(subsets.shape[2])
        ]
        for row in range(len(batch)):
            real = batch.attention_mask[row]
            if answer:
                places = (batch.segments[row, real] == 3).nonzero()[:, 0].tolist()
                words = batch.tokens[row, real][places].tolist()
                predicting = [place - 1 for place in places]
            else:
                predicting = [int(real.sum()) - 1]
                words = list(of_batch.tokens[row])
            for number, subset in enumerate(subsets[row]):
                removed = torch.zeros_like(real)
                for k in range(len(inside)):
                    removed |= inside[k][row] & ~subset[k]
                removed = removed[real]
                removed[predicting[0]] = False
                expected = plain_outcome(
                    weights, batch.tokens[row, real], removed, predicting, words
                )
                ours = float(outcome.log_odds[row, number]), float(outcome.log_prob[row, number])
                assert ours == pytest.approx(expected, rel=0, abs=tolerance)


def test_log_odds_are_exact_where_a_probability_is_near_0_or_1() -> None:
    """In words of three: the others have the logits 0 and 0."""
    for chance in (1 - 1e-12, 1e-30, 0.25):
        odds = log(chance / (1 - chance)) if chance != 1 - 1e-12 else log(1e12 - 1)
        row = torch.tensor([[0.0, odds + log(2), 0.0]], dtype=torch.double)
        [got] = log_odds_of(row, [1]).tolist()
        assert got == pytest.approx(odds, rel=1e-14)
    rows = torch.tensor([[5.0, 0.0], [-1.0, 2.0]]).repeat(10, 1)  # in several pieces
    assert log_odds_of(rows, [0, 1] * 10).tolist() == [5.0, 3.0] * 10


def of_all_digits(odds: list[float]) -> float:
    """log p - log(1 - p) of the whole answer, with 1,000 digits."""
    with localcontext(prec=1000):
        p = prod((1 / (1 + (-Decimal(each)).exp()) for each in odds), start=Decimal(1))
        return float(p.ln() - (1 - p).ln())


def of_context_cite(odds: Tensor) -> Tensor:
    """aggregate_logit_probs of its utils.py, for tables [subset, token]."""
    log_probs = logsigmoid(odds).sum(dim=1)
    return log_probs - torch.log1p(-torch.exp(log_probs))


@pytest.mark.slow("many passes")
def test_the_odds_are_those_of_the_whole_answer_to_the_last_digit() -> None:
    """Also where the published functions are infinite, and in any order of the tokens."""

    def ours(table: list[list[float]]) -> Tensor:
        rows = [torch.tensor([[o, 0.0] for o in odds], dtype=torch.double) for odds in table]
        given = torch.ones(len(rows), dtype=torch.bool)
        return _outcome(rows, [[0] * len(odds) for odds in table], given).log_odds

    fours = [log(0.99 / (1 - 0.99))] * 4
    extreme = [fours, [40.0, 41.0, 39.0], [800.0, 800.0], [-200.0, -300.0, 2.0]]
    expected = [3.1936869, 38.592394, 799.30685, -500.12693]
    assert ours(extreme).tolist() == pytest.approx(expected, rel=1e-7)
    assert of_context_cite(torch.tensor([[800.0, 800.0]]).double()).isinf()
    random = 8 * torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).double()
    table = [*extreme, *random.tolist()]
    exact = [of_all_digits(odds) for odds in table]
    assert ours(table).tolist() == pytest.approx(exact, rel=1e-15, abs=0)
    assert ours([odds[::-1] for odds in table]).tolist() == pytest.approx(exact, rel=1e-15, abs=0)
    torch.testing.assert_close(ours(random.tolist()), of_context_cite(random), rtol=1e-13, atol=0)
    alone = [[odds] for odds in random.flatten().tolist()]
    assert torch.equal(ours(alone), random.flatten())


def test_a_token_as_likely_as_the_likeliest_is_given() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 2.0, -1.0]], dtype=torch.bfloat16)
    assert [are_likeliest(logits, pair, 0.01) for pair in ([1, 1], [2, 1], [0, 1], [1, 0])] == [
        *(True, True, False, False)
    ]
    off = torch.tensor([[-8.0, -8.0 - 1e-6, -8.0 - 1e-3]])
    assert [are_likeliest(off, [token], 1e-5) for token in range(3)] == [True, True, False]


def test_the_likeliest_word_of_the_predicted_class_is_the_answer(gpt2: Any) -> None:
    [batch] = questions(gpt2, 3)
    words = al.prompts.Verbalizer(
        [[k, k + 50] for k in batch.label_token_ids.tolist()], torch.logsumexp
    )
    [answers], _, _ = outcomes(gpt2, [replace(batch, verbalizer=words)])
    log_probs = al.target_logits(gpt2, [batch], progress=False).log_softmax(-1)
    for row, of_prompt in enumerate(log_probs):
        best = max(words.token_ids, key=lambda ids: float(of_prompt[list(ids)].logsumexp(0)))
        assert list(answers.tokens[row]) == [max(best, key=lambda word: float(of_prompt[word]))]


def test_a_removal_of_ones_own_can_use_plain_hooks(gpt2: Any) -> None:
    """A token whose input is 0 is not the same as one that nobody reads."""

    def silence(model: Any, batch: al.PromptBatch, removed: Tensor) -> Any:
        def set_to_0(resid: Tensor, hook: Any) -> Tensor:
            return resid.masked_fill(removed[:, batch.first_query :, None], 0.0)

        return batch, [("blocks.0.hook_resid_pre", set_to_0)]

    batches = questions(gpt2, 4, batch_size=2)
    [first, _], [subsets, _], [outcome, _] = outcomes(gpt2, batches, remove=silence)
    batch, kept = first.batch, subsets[:, 0]
    removed = first.ablation.removed(batch, kept)
    rows = logits_of(gpt2, batch, silence(gpt2, batch, removed)[1])
    expected = log_odds_of(rows, [word for [word] in first.tokens])
    torch.testing.assert_close(outcome.log_odds[:, 0], expected, rtol=0, atol=1e-4)


TASK = al.Task(
    "Review: {text}\nSentiment:{label}", (" Negative", " Positive"), instructions="Say it.\n"
)
LONG = al.Task("In: {text}\nOut:{label}", labels=(" Table", " Window"), separator=" ;\n")
DEMOS = [al.Example(f"text {k} is here", k % 2) for k in range(4)]
QUERIES = [al.Example("short", 0), al.Example("and a longer one", 1)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("task", [TASK, LONG], ids=["instructions", "long separator"])
def test_a_prompt_without_a_demonstration_is_as_it_would_be_built(
    side: Any, task: al.Task, gpt2: Any, tokenizer: Any
) -> None:
    """Every field of the batch, after a BOS or without one."""
    [batch] = al.build_prompts(tokenizer, task, DEMOS, QUERIES, padding_side=side)
    for number in range(4):
        rest = DEMOS[:number] + DEMOS[number + 1 :]
        [expected] = al.build_prompts(tokenizer, task, rest, QUERIES)
        changed, hooks = al.removal.text(gpt2, batch, al.edges.demonstration(batch, number))
        assert not hooks and changed.begins_with_bos == (tokenizer.pad_token is not None)
        for field in fields(changed):
            ours, theirs = getattr(changed, field.name), getattr(expected, field.name)
            is_tensor = isinstance(ours, torch.Tensor)
            assert torch.equal(ours, theirs) if is_tensor else ours == theirs, field.name


def test_scattered_tokens_are_deleted_as_from_a_list(gpt2: Any) -> None:
    [batch] = questions(gpt2, 3, padding_side="left")
    drawn = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    # All label words, and others also under padding.
    removed = (drawn | al.edges.anchors(batch)) & ~al.edges.target(batch)
    before = batch.tokens.clone()
    changed, _ = al.removal.text(gpt2, batch, removed)
    assert torch.equal(batch.tokens, before) and not changed.has_label_words
    assert changed.label_positions.shape == (3, 0) and changed.labels == ()
    for row in range(3):
        stays = [
            position
            for position in range(batch.tokens.shape[1])
            if batch.attention_mask[row, position] and not removed[row, position]
        ]
        inside = changed.attention_mask[row]
        for name in ("tokens", "segments"):
            assert getattr(changed, name)[row, inside].tolist() == [
                int(getattr(batch, name)[row, position]) for position in stays
            ]
        assert int(changed.target_positions[row]) == stays.index(int(batch.target_positions[row]))
        from_query = [position for position in stays if position >= batch.query_start[row]]
        assert int(changed.query_start[row]) == stays.index(from_query[0])
        assert inside.tolist() == [k < len(stays) for k in range(len(inside))]


def test_a_label_word_of_which_a_token_is_removed_is_none(byte_level: Any, gpt2: Any) -> None:
    [batch] = al.build_prompts(byte_level, LONG, DEMOS, QUERIES)
    last = al.edges.at(batch, batch.label_ends[:, 1:2])
    changed, _ = al.removal.text(gpt2, batch, last)
    kept = [0, 2, 3]
    moved = batch.label_positions[:, kept] - torch.tensor([0, 1, 1])
    assert torch.equal(changed.label_positions, moved) and changed.has_label_words
    assert torch.equal(changed.label_classes, batch.label_classes[:, kept])
    # Of the two prompts one loses a label word: there is no table of label words.
    changed, _ = al.removal.text(gpt2, batch, last & torch.tensor([[True], [False]]))
    assert not changed.has_label_words and changed.attention_mask.sum(1).diff() != 0


def test_without_its_bos_a_prompt_begins_with_none(gemma3: Any) -> None:
    [batch] = questions(gemma3, 2)
    changed, _ = al.removal.text(gemma3, batch, al.edges.bos(batch))
    assert batch.begins_with_bos and not changed.begins_with_bos
    assert torch.equal(changed.tokens[:, 0], batch.tokens[:, 1])


@pytest.mark.parametrize("remove", [al.removal.edges, al.removal.text])
def test_removing_nothing_gives_the_batch_itself(remove: Any, gpt2: Any) -> None:
    [batch] = questions(gpt2, 2)
    changed, hooks = remove(gpt2, batch, ~batch.attention_mask)
    assert changed is batch and not hooks


@pytest.mark.parametrize("remove", [al.removal.edges, al.removal.text])
def test_other_positions_than_those_of_the_batch_are_an_error(remove: Any, gpt2: Any) -> None:
    [batch] = questions(gpt2, 2)
    for wrong in (batch.attention_mask[:, 1:], batch.tokens):
        with pytest.raises(PromptError, match=r"removed must be .* True and False .*got torch"):
            remove(gpt2, batch, wrong)
    with pytest.raises(PromptError, match="the target position is removed"):
        al.removal.text(gpt2, batch, al.edges.query(batch))
    segments = replace(batch, verbalizer=None, labels=())
    assert not al.removal.text(gpt2, segments, al.edges.bos(batch))[1]
