"""How likely answers are with some segments only, against plain transformers with masks."""

from dataclasses import replace
from decimal import Decimal, localcontext
from functools import partial
from math import log, prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import anchorlens as al
from anchorlens.errors import AnchorlensError, MetricError
from anchorlens.experiments.ablation import (
    Ablation,
    Answers,
    _outcome,
    are_likeliest,
    info_of_answers,
    log_odds_of,
    subsets_of,
)
from anchorlens.passes import shared_prefix
from anchorlens.passes.forward import logits_at
from anchorlens.runs import way
from anchorlens.runs.study import Study
from tests.support.measures import does_not_run
from tests.support.tiny_models import questions, tiny_gpt2

NAMES = ("museum", "shop", "question", "answer")
TEXTS = [
    ("It opens at ten.", " It sells cheese.", " When?"),
    ("Nobody is there today.", " It is new.", " What does it sell, and why?"),
]


def study_of(model: Any, batches: list[al.PromptBatch]) -> Study:
    return Study(model, batches, {"experiment": "test"}, resamples=0, progress=False)


def outcomes(
    model: Any, batches: list[al.PromptBatch], count: int = 6, whole: bool = False, **options: Any
) -> tuple[list[Answers], list[Tensor], list[Any]]:
    """The answers of each batch, random subsets, and the outcome of each."""
    with study_of(model, batches) as study:
        given: dict[str, Any] = {"segments": None, "answer": None, "remove": al.removal.edges}
        given |= options
        passes = study.passes([al.SegmentAttribution(**given)], share_prefix=not whole)
        ablation = Ablation.of(study.batches, **given)
        answers = [Answers.of(ablation, passes, batch) for batch in study.batches]
        draw = partial(al.subsets.random, count)
        number = len(ablation.segments.names_of(study.batches[0]))
        kept = [subsets_of(draw, batch, number, 0) for batch in study.batches]
        return answers, kept, [a.of_subsets(k) for a, k in zip(answers, kept, strict=True)]


def written(tokenizer: Any, model: Any, side: Any = "right") -> al.PromptBatch:
    """Prompts of documents with the answer that the model writes, three tokens."""
    pieces = [list(zip(NAMES, (*texts, " x"), strict=True)) for texts in TEXTS]
    [batch] = al.build_segments(tokenizer, pieces)
    tokens, segments = [], []
    for row in range(2):
        inside = batch.attention_mask[row] & (batch.segments[row] < 3)
        ids = batch.tokens[row, inside].tolist()
        for _ in range(3):
            prompt = al.PromptBatch.from_segments(torch.tensor([ids]), [[0] * len(ids)], ["a"])
            [logits] = logits_at(model, prompt, al.edges.target(prompt))
            ids.append(int(logits[0].argmax()))
        tokens.append(ids)
        segments.append(batch.segments[row, inside].tolist() + [3] * 3)
    width = max(map(len, tokens))

    def padded(rows: list[list[int]], value: int) -> Tensor:
        left = side == "left"
        pads = [[value] * (width - len(row)) for row in rows]
        return torch.tensor([p + r if left else r + p for p, r in zip(pads, rows, strict=True)])

    mask = padded([[1] * len(row) for row in tokens], 0)
    return al.PromptBatch.from_segments(
        padded(tokens, 0), padded(segments, -1), NAMES, attention_mask=mask
    )


def misquoted(batch: al.PromptBatch, rows: list[int]) -> al.PromptBatch:
    """The same, with another last token of some prompts."""
    tokens = batch.tokens.clone()
    for row in rows:
        last = batch.attention_mask[row].nonzero()[-1]
        tokens[row, last] = (tokens[row, last] + 1) % 700
    return replace(batch, tokens=tokens)


def plain_log_odds(
    weights: Any, tokens: Tensor, removed: Tensor, predicting: list[int], answer: list[int]
) -> float:
    """log p / (1 - p) of the whole answer of a prompt without padding, with a mask of four axes."""
    count = len(tokens)
    allowed = torch.ones(count, count, dtype=torch.bool).tril()
    allowed[~removed] &= ~removed | torch.eye(count, dtype=torch.bool)[~removed]
    mask = torch.zeros(count, count, dtype=torch.double)
    mask.masked_fill_(~allowed, torch.finfo(torch.double).min)
    with torch.no_grad():
        out = weights(tokens[None], attention_mask=mask[None, None], use_cache=False)
    chances = out.logits[0].softmax(-1)
    p = prod(float(chances[t, token]) for t, token in zip(predicting, answer, strict=True))
    return log(p / (1 - p))


@pytest.mark.quick_cases("many passes", "written")
@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["label words", "written"])
def test_log_odds_are_those_of_plain_transformers(
    side: Any, kind: str, exact_gpt2: Any, byte_level: Any, kind_of_model: str
) -> None:
    model = exact_gpt2
    if kind == "written":
        answer, batches = "answer", [written(byte_level, model, side)]
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
                expected = plain_log_odds(
                    weights, batch.tokens[row, real], removed, predicting, words
                )
                assert float(outcome.log_odds[row, number]) == pytest.approx(
                    expected, rel=0, abs=tolerance
                )


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.every_kind
def test_all_segments_are_the_clean_run_bit_for_bit(model: Any) -> None:
    batches = questions(model, 4, batch_size=2)
    logits = al.target_logits(model, batches, progress=False)
    parts = ["text", "label", "format"]
    answers, kept, got = outcomes(model, batches, count=8, segments=parts)  # all subsets of three
    clean = torch.cat([of_batch.clean.log_odds for of_batch in answers])
    predicted = logits[:, batches[0].label_token_ids].argmax(1)
    words = batches[0].label_token_ids[predicted].tolist()
    order = torch.cat([batch.index for batch in batches])
    expected = torch.cat(
        [log_odds_of(row[None], [w]) for row, w in zip(logits, words, strict=True)]
    )
    assert torch.equal(clean, expected[order])
    for of_batch, subsets, outcome in zip(answers, kept, got, strict=True):
        whole = subsets.all(-1)
        assert (whole.sum(1) == 1).all()
        assert torch.equal(outcome.log_odds[whole], of_batch.clean.log_odds)
        assert torch.equal(outcome.log_prob[whole], of_batch.clean.log_prob)
        assert (outcome.log_odds[:, :5] != of_batch.clean.log_odds[:, None]).any()


@pytest.mark.slow("many passes")
@pytest.mark.parametrize("remove", [al.removal.edges, al.removal.text])
def test_shared_tokens_run_once_for_each_subset(
    remove: Any, exact_gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runs = exact_gpt2, list[int]()
    run_prefix = shared_prefix.run_prefix

    def counted(*args: Any, **options: Any) -> Any:
        runs.append(1)
        return run_prefix(*args, **options)

    outcomes(model, questions(model, 6, batch_size=2), remove=remove)  # facts are found
    monkeypatch.setattr(shared_prefix, "run_prefix", counted)
    _, subsets, _ = outcomes(model, questions(model, 6, batch_size=2), remove=remove)
    # One for the clean run and one for each subset, for the three batches.
    different = len(subsets[0][0].unique(dim=0)) - int(subsets[0][0].all(-1).any())
    expected = {al.removal.edges: 1 + different, al.removal.text: 1}
    assert len(runs) == expected[remove] and different > 4


@pytest.mark.slow("many passes")
def test_text_without_a_demonstration_is_the_prompt_without_it(
    exact_gpt2: Any, byte_level: Any
) -> None:
    """As it was built in the first place."""
    model = exact_gpt2
    task = al.Task("Review: {text}\nSentiment:{label}", (" Negative", " Positive"))
    demos = [al.Example(f"text {k} is here", k % 2) for k in range(4)]
    queries = [al.Example("short", 0), al.Example("and a longer one", 1)]
    batches = al.build_prompts(byte_level, task, demos, queries)
    with study_of(model, batches) as study:
        passes = study.passes([al.SegmentAttribution(remove=al.removal.text)])
        ablation = Ablation.of(study.batches, None, None, al.removal.text)
        answers = Answers.of(ablation, passes, study.batches[0])
        for number in range(4):
            kept = (torch.arange(4) != number).expand(2, 4)
            rest = demos[:number] + demos[number + 1 :]
            [built] = al.build_prompts(byte_level, task, rest, queries)
            logits = al.target_logits(model, [built], progress=False)
            pairs = zip(logits, answers.tokens, strict=True)
            expected = torch.cat([log_odds_of(row[None], words) for row, words in pairs])
            torch.testing.assert_close(answers.of_kept(kept).log_odds, expected)


@pytest.mark.slow("many passes")
def test_text_without_a_part_of_the_query_is_the_rest_of_the_tokens(exact_gpt2: Any) -> None:
    """Queries begin alike, with tokens that run once for all until they are removed."""
    model = exact_gpt2
    parts = {"start": lambda b: b.from_query & (b.positions < b.query_start[:, None] + 1)}
    parts["rest"] = lambda batch: al.edges.query(batch) & ~parts["start"](batch)
    parts["text"] = partial(al.edges.segment, name="text")
    batches = questions(model, 3)
    [answers], [kept], [outcome] = outcomes(
        model, batches, count=8, segments=parts, remove=al.removal.text
    )
    for row in range(3):
        for number in range(8):
            removed = answers.ablation.removed(answers.batch, kept[:, number])[row]
            ids = answers.batch.tokens[row, answers.batch.attention_mask[row] & ~removed]
            alone = al.PromptBatch.from_segments(ids[None], [[0] * len(ids)], ["all"])
            logits = al.target_logits(model, [alone], progress=False)
            expected = float(log_odds_of(logits, answers.tokens[row]))
            assert float(outcome.log_odds[row, number]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.quick_cases("many passes", "text")
@pytest.mark.parametrize("remove", [al.removal.edges, al.removal.text])
def test_long_prompts_run_with_a_fused_attention(
    remove: Any, gpt2: Any, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[list[al.PromptBatch], Any]] = [
        ([written(byte_level, gpt2, "left")], "answer"),
        (questions(gpt2, 2), None),
    ]
    for batches, answer in cases:
        _, _, whole = outcomes(gpt2, batches, answer=answer, remove=remove)
        with monkeypatch.context() as patch:
            patch.setattr(way, "LARGE", 0)
            answers, _, fused = outcomes(gpt2, batches, answer=answer, remove=remove)
        assert answers[0].passes.way.attention.startswith("fused: ")
        for ours, theirs in zip(fused, whole, strict=True):
            torch.testing.assert_close(ours.log_odds, theirs.log_odds, rtol=0, atol=1e-4)


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
    random = 8 * torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).double()
    table = [*extreme, *random.tolist()]
    exact = [of_all_digits(odds) for odds in table]
    assert ours(table).tolist() == pytest.approx(exact, rel=1e-15, abs=0)
    assert ours([odds[::-1] for odds in table]).tolist() == pytest.approx(exact, rel=1e-15, abs=0)
    torch.testing.assert_close(ours(random.tolist()), of_context_cite(random), rtol=1e-13, atol=0)
    alone = [[odds] for odds in random.flatten().tolist()]
    assert torch.equal(ours(alone), random.flatten())


def test_the_log_probability_is_a_sum_over_tokens(gpt2: Any, byte_level: Any) -> None:
    batch = written(byte_level, gpt2)
    [answers], _, _ = outcomes(gpt2, [batch], answer="answer")
    predicting = al.losses.span_cross_entropy("answer").positions(batch)
    rows = logits_at(gpt2, batch, predicting)
    for row, logits in enumerate(rows):
        chances = logits.double().softmax(-1)[range(3), answers.tokens[row]]
        assert float(answers.clean.log_prob[row]) == pytest.approx(float(chances.log().sum()))
        odds = (chances.prod() / (1 - chances.prod())).log()
        assert float(answers.clean.log_odds[row]) == pytest.approx(float(odds))


def test_another_answer_than_the_models_counts_for_nothing(gpt2: Any, byte_level: Any) -> None:
    wrong = misquoted(written(byte_level, gpt2), [1])
    [answers], _, [outcome] = outcomes(gpt2, [wrong], answer="answer")
    assert answers.is_given.tolist() == [True, False]
    assert outcome.log_odds.isnan().tolist() == [[False] * 6, [True] * 6]
    with pytest.warns(UserWarning, match="does not give the answer 'answer' of 1 of 2 prompts"):
        info = info_of_answers(answers.ablation, answers.is_given)
    assert "1 of 2" in info["left_out"]
    with pytest.raises(MetricError, match=r"of 2 of 2 prompts.*some token of it is not the likeli"):
        info_of_answers(answers.ablation, torch.zeros(2, dtype=torch.bool))
    with study_of(gpt2, [misquoted(wrong, [0])]) as study:  # no subset runs
        passes = study.passes([al.SegmentAttribution(answer="answer")])
        ablation = Ablation.of(study.batches, None, "answer", al.removal.edges)
        answers = Answers.of(ablation, passes, study.batches[0])
        with does_not_run(gpt2):
            outcome = answers.of_subsets(torch.zeros(2, 2, 3, dtype=torch.bool))
    assert outcome.log_odds.shape == (2, 2) and outcome.log_odds.isnan().all()


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


def test_bad_prompts_are_an_error_before_any_pass(gpt2: Any, byte_level: Any) -> None:
    batch, [shorter], others = written(byte_level, gpt2), questions(gpt2, 1), questions(gpt2, 1)
    shorter, _ = al.removal.text(gpt2, shorter, al.edges.demonstration(shorter, 0))

    def changed(model: Any, given: al.PromptBatch, removed: Tensor) -> Any:
        return replace(given, tokens=given.tokens + 1), []

    cases: list[tuple[list[al.PromptBatch], dict[str, Any], str]] = [
        ([batch], {}, "no label words, so that the answer must be a segment.*answer='answer'"),
        ([batch], {"answer": "shop"}, "segment 'question' of prompt 0 goes on after the answer"),
        ([batch], {"answer": "answer", "remove": changed}, "keep the prompts and the tokens of"),
        ([*others, shorter], {}, "every prompt must have equally many demonstrations"),
        ([], {}, "there are no batches to run"),
    ]
    for batches, options, message in cases:
        with pytest.raises(AnchorlensError, match=message), does_not_run(gpt2):
            outcomes(gpt2, batches, **options)


def test_a_removal_of_ones_own_can_use_plain_hooks(gpt2: Any) -> None:
    """A token whose input is 0 is not the same as one that nobody reads."""

    def silence(model: Any, batch: al.PromptBatch, removed: Tensor) -> Any:
        def set_to_0(resid: Tensor, hook: Any) -> Tensor:
            return resid.masked_fill(removed[:, batch.query_rows, None], 0.0)

        return batch, [("blocks.0.hook_resid_pre", set_to_0)]

    batches = questions(gpt2, 4, batch_size=2)
    [first, _], [subsets, _], [outcome, _] = outcomes(gpt2, batches, remove=silence)
    batch, kept = first.batch, subsets[:, 0]
    removed = first.ablation.removed(batch, kept)
    logits = gpt2.run_with_hooks(
        batch.tokens,
        attention_mask=batch.attention_mask.long(),
        fwd_hooks=silence(gpt2, batch, removed)[1],
    )
    rows = logits[range(2), batch.target_positions]
    pairs = zip(rows, first.tokens, strict=True)
    expected = torch.cat([log_odds_of(row[None], words) for row, words in pairs])
    torch.testing.assert_close(outcome.log_odds[:, 0], expected.detach(), rtol=0, atol=1e-4)
