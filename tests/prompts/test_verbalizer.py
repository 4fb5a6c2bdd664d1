"""Scores of label words: several for a class, and two that are equal."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.prompts.batch import check_batch
from tests.support.tiny_models import questions, tiny_gpt2

TEMPLATE = al.TASKS["sst2"].template
WORDS = [[" Negative", " Sad", " Angry"], [" Positive", " Happy"]]
DEMOS = [al.Example("dull", 0), al.Example("fun", 1)]
IDS = [[4, 1, 7], [2], [0, 5]]
BY_HAND: dict[Any, Any] = {torch.mean: np.mean, torch.sum: np.sum, torch.amax: np.max}
BY_HAND[torch.logsumexp] = logsumexp


def test_the_first_word_stands_in_the_demonstrations(tokenizer: Any) -> None:
    first = al.Task(TEMPLATE, [" Negative", " Positive"])
    (one,) = al.build_prompts(tokenizer, first, DEMOS, ["x", "y z"])
    for words in (WORDS, [WORDS[0][::-1], WORDS[1]]):
        task = al.Task(TEMPLATE, words)
        (batch,) = al.build_prompts(tokenizer, task, DEMOS, ["x", "y z"])
        assert batch.labels == task.first_words == (words[0][0], words[1][0])
        before = len(tokenizer("Sentiment:")["input_ids"])
        ids = [[tokenizer(f"Sentiment:{word}")["input_ids"] for word in row] for row in words]
        expected = tuple(tuple(tokens[before] for tokens in row) for row in ids)
        assert batch.verbalizer == al.prompts.Verbalizer(expected)
        assert batch.label_token_ids.tolist() == [row[0] for row in expected]
        assert torch.equal(one.tokens, batch.tokens) == (words is WORDS)


def test_one_word_in_a_list_is_the_word() -> None:
    listed = al.Task(TEMPLATE, [[" a"], (" b",)])
    alone = al.Task(TEMPLATE, [" a", " b"])
    assert (listed, hash(listed), repr(listed)) == (alone, hash(alone), repr(alone))
    assert listed.words == ((" a",), (" b",))
    assert "score" not in repr(alone)
    several = al.Task(TEMPLATE, [[" a", " c"], " b"], score=torch.amax)
    assert several.labels == ((" a", " c"), " b")
    assert repr(several).endswith("score=amax)")
    assert replace(several, separator=" ").words == several.words


@pytest.mark.parametrize("score", BY_HAND, ids=lambda score: score.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_equal_those_by_hand(score: Any, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(1)).mul(4).to(dtype)
    log_probs = log_softmax(logits.double().numpy(), axis=-1)
    expected = [[BY_HAND[score](row[ids]) for ids in IDS] for row in log_probs]
    scores = al.prompts.Verbalizer(IDS, score).scores(logits)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(scores.double(), expected, atol=tolerance)
    given = logits[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(al.prompts.Verbalizer(IDS, score).scores, given)


def test_single_words_score_by_their_logits_or_by_a_function(byte_level: Any) -> None:
    (batch,) = al.build_prompts(byte_level, al.TASKS["sst2"], DEMOS, ["x"])
    assert batch.verbalizer == al.prompts.Verbalizer(batch.label_token_ids[:, None].tolist())
    logits = torch.randn(1, len(byte_level))
    assert torch.equal(batch.label_scores(logits), logits[:, batch.label_token_ids])

    def halved(log_probs: torch.Tensor, axis: int) -> torch.Tensor:
        return log_probs.sum(axis) / 2

    task = al.Task(TEMPLATE, [" Negative", " Positive"], score=halved)
    (batch,) = al.build_prompts(byte_level, task, DEMOS, ["x"])
    expected = logits.log_softmax(-1)[:, batch.label_token_ids] / 2
    torch.testing.assert_close(batch.label_scores(logits), expected)
    assert "halved" in repr(batch.verbalizer) and "halved" in repr(task)
    assert " at 0x" not in repr(batch.verbalizer)


def test_batches_from_positions_take_several_words() -> None:
    words = al.prompts.Verbalizer([[1, 3], [2]])
    arguments: dict[str, Any] = {"label_positions": [[1, 3]], "label_classes": [[0, 1]]}
    tokens = torch.tensor([[5, 1, 6, 2, 7, 8]])
    batch = al.PromptBatch.from_positions(tokens, label_token_ids=words, **arguments)
    check_batch(batch)
    ours = batch.prompt(0).label_scores(torch.arange(9.0)[None])[0]
    log_probs = log_softmax(np.arange(9.0))
    np.testing.assert_allclose(ours, [log_probs[[1, 3]].mean(), log_probs[2]], rtol=1e-6)
    assert batch.label_token_ids.tolist() == [1, 2]
    with pytest.raises(PromptError, match=r"is an al\.prompts\.Verbalizer; got None"):
        check_batch(replace(batch, verbalizer=None))


QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
EQUAL = "of 4 prompts have two labels with equal scores"


@pytest.fixture(scope="module")
def tied(byte_level: Any) -> tuple[Any, list[al.PromptBatch]]:
    """A model that gives the first and the third label equal scores, and prompts."""
    weights = tiny_gpt2(len(byte_level), tie_word_embeddings=False)
    weights.lm_head.weight = torch.nn.Parameter(weights.lm_head.weight.clone())
    model = al.load_model(weights, tokenizer=byte_level)
    batches = questions(model, 4, batch_size=3)
    tokens = batches[0].label_token_ids
    with torch.no_grad():
        rows = model.unembed.original_component.weight
        rows[tokens] = rows[tokens[0]] * torch.linspace(1, 0.1, len(tokens))[:, None]
        rows[tokens[2]] = rows[tokens[0]]
    return model, batches


@pytest.mark.filterwarnings("ignore:in . of . sets of demonstrations")
@pytest.mark.parametrize("kind", ["run", "caches", "loyalty", "study"])
def test_ties_are_counted_and_said(kind: str, tied: Any, gpt2: Any) -> None:
    model, batches = tied
    logits = al.target_logits(model, batches, progress=False)
    tokens = batches[0].label_token_ids
    first, second = logits[:, tokens].topk(2).values.T
    count = int((first == second).sum())
    assert count > 0
    asked = [al.Accuracy(), al.AttentionAUCROC(), al.SegmentAttention()]
    context = al.ContextComparison({"nothing": al.contexts.NoContext()}, repeats=0)
    passes = (model.run_with_cache(batch.tokens) for batch in batches)
    found: dict[str, Any] = {
        "run": lambda: al.run(model, batches, asked, **QUIET),
        "caches": lambda: al.caches.from_caches(asked, batches, passes, model=model, resamples=0),
        "loyalty": lambda: {"accuracy": al.metrics.loyalty(logits, logits, tokens)},
        "study": lambda: al.run(model, batches, [context], **QUIET),
    }
    with pytest.warns(UserWarning, match=f"^{count} {EQUAL}, the highest") as told:
        records = found[kind]()
    assert len([each for each in told if EQUAL in str(each.message)]) == 1
    for name, record in records.items():
        expected = None if name == "segment_attention" else f"{count} of 4 prompts"
        assert record.info.get("ties") == expected
    assert "ties" not in al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], **QUIET)["accuracy"].info
