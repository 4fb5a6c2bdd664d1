"""Every result reads labels by their scores: one word as ever, several words as by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.metrics import roc_auc_score

import anchorlens as al
from anchorlens.passes.forward import run_pass
from anchorlens.runs.identity import fingerprint
from tests.support.asked import ask, by_site

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}
TEMPLATE = al.TASKS["sst2"].template
ONE = [" Negative", " Positive"]
SEVERAL = [[" Negative", " Sad", " Angry"], [" Positive", " Fine"]]
METRICS: list[al.Metric] = [
    al.SaliencyFlows(),
    al.AttentionAUCROC(),
    al.AnchorDistances(directions=3),
    al.Accuracy(),
]
EXAMPLES = al.load_examples("sentiment")
DEMOS, QUERIES = EXAMPLES[:4], EXAMPLES[4:20]
GOLD = np.array([query.label for query in QUERIES])

pytestmark = pytest.mark.filterwarnings("ignore:in 1 of 1 sets:UserWarning")


def prompts(model: Any, labels: Any, **options: Any) -> list[al.PromptBatch]:
    task = al.Task(TEMPLATE, labels, **options)
    return al.build_prompts(model.tokenizer, task, DEMOS, QUERIES, batch_size=6)


def scores_by_hand(model: Any, batches: list[al.PromptBatch], hooks: Any = None) -> np.ndarray:
    """The largest log probability of each class's words, in the order of the queries."""
    words = [
        [model.tokenizer(f":{word}", add_special_tokens=False)["input_ids"][1] for word in row]
        for row in SEVERAL
    ]
    scores = np.empty((len(QUERIES), 2))
    for batch in batches:
        logits = run_pass(model, batch, hooks=[] if hooks is None else hooks(batch))
        log_probs = log_softmax(logits.double().numpy(), axis=-1)
        scores[batch.index] = [[row[ids].max() for ids in words] for row in log_probs]
    return scores


@pytest.mark.slow("many passes")
def test_results_of_several_words_equal_those_by_hand(gpt2: Any) -> None:
    batches = prompts(gpt2, SEVERAL, score=torch.amax)
    hooks = lambda batch: al.isolate_labels(gpt2, batch, range(2))  # noqa: E731
    scores = scores_by_hand(gpt2, batches)
    predicted = scores.argmax(1)
    logits = al.target_logits(gpt2, batches, progress=False)
    one_word = logits[:, batches[0].label_token_ids].argmax(1).numpy()
    assert (predicted != one_word).any()  # so that the words beside the first count

    results: Any = al.run(gpt2, batches, METRICS, **QUIET)
    assert results["accuracy"].info["verbalizer"] == repr(batches[0].verbalizer)
    assert np.array_equal(results["accuracy"].correct, predicted == GOLD)
    for record in (results["accuracy"], results["anchor_distances"]):
        answers = [(predicted == k).sum() for k in range(scores.shape[1])]
        assert record.info["answers_per_class"] == answers
    distances = results["anchor_distances"]
    expected = roc_auc_score(GOLD == 0, scores[:, 0] - scores[:, 1])
    assert float(distances.pair_auc[0, 1]) == pytest.approx(expected)
    assert float(distances.accuracy) == (predicted == GOLD).mean()

    changed = scores_by_hand(gpt2, batches, hooks).argmax(1)
    loyalty: Any = al.run(gpt2, batches, [al.Loyalty()], hooks=hooks, **QUIET)["loyalty"]
    assert np.array_equal(loyalty.label_kept, predicted == changed)
    logits_of_hooks = al.target_logits(gpt2, batches, hooks=hooks, progress=False)
    words = batches[0].verbalizer
    assert words is not None
    of_logits = al.metrics.loyalty(logits, logits_of_hooks, words).label_loyalty
    assert float(of_logits) == (predicted == changed).mean()
    isolation = al.EdgeSweep.isolation({"first 2": al.Site(range(2))}, draws=1)
    isolated = by_site(ask(gpt2, batches, isolation, **QUIET))["first 2"]
    assert np.array_equal(isolated.label_kept, predicted == changed)


def test_the_attention_predicts_the_prediction_of_all_words(gpt2: Any) -> None:
    batches = prompts(gpt2, SEVERAL, score=torch.amax)
    predicted = scores_by_hand(gpt2, batches).argmax(1)
    assert 0 < predicted.sum() < len(predicted)
    attention = np.empty(len(QUERIES))
    for batch in batches:
        _, cache = gpt2.run_with_cache(
            batch.tokens, attention_mask=batch.attention_mask.long(), return_type="logits"
        )
        pattern = cache["blocks.1.attn.hook_pattern"].sum(1)
        for n, target in enumerate(batch.target_positions.tolist()):
            at = batch.label_positions[n][batch.label_classes[n] == 1]
            attention[batch.index[n]] = float(pattern[n, target, at].sum())
    record: Any = al.run(gpt2, batches, [al.AttentionAUCROC()], **QUIET)["attention_aucroc"]
    assert float(record.aucroc[1]) == pytest.approx(roc_auc_score(predicted, attention))


def test_the_loss_is_that_of_the_scores(gpt2: Any) -> None:
    batches = prompts(gpt2, SEVERAL, score=torch.amax)
    scores = log_softmax(scores_by_hand(gpt2, batches), axis=1)
    expected = -scores[np.arange(len(scores)), GOLD]
    for batch in batches:
        losses = al.losses.label_cross_entropy(run_pass(gpt2, batch), batch)
        np.testing.assert_allclose(losses, expected[batch.index], atol=1e-5)

    def by_hand(logits: Any, batch: Any) -> Any:
        words = [[int(t) for t in row] for row in batch.verbalizer.token_ids]
        of_words = logits.softmax(-1)
        best = torch.stack([of_words[:, row].amax(-1) for row in words], 1)
        return -(best / best.sum(1, keepdim=True)).log().gather(1, batch.gold[:, None])[:, 0]

    ours = al.saliency(gpt2, batches[0])
    theirs = al.saliency(gpt2, batches[0], loss=by_hand)
    plain = al.saliency(gpt2, prompts(gpt2, ONE)[0])
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(ours.max())
    assert float((ours - plain).abs().max()) > 1e-2 * float(ours.max())


@pytest.mark.slow("many passes")
def test_re_weighting_and_compression_use_the_scores(gpt2: Any) -> None:
    batches = prompts(gpt2, SEVERAL, score=torch.amax)
    scores = scores_by_hand(gpt2, batches)
    beta = al.contexts.train_reweighting(
        gpt2, batches, al.contexts.Training(steps=1, progress=False)
    )
    losses = -log_softmax(scores, axis=1)[np.arange(len(GOLD)), GOLD]
    expected = np.mean([losses[batch.index].mean() for batch in batches])
    assert float(beta.vanilla_loss) == pytest.approx(expected, abs=1e-5)
    contexts: dict[str, Any] = {"anchors": al.compress}
    record = ask(gpt2, batches, al.ContextComparison(contexts, draws=1), **QUIET)
    assert float(record.whole_accuracy) == (scores.argmax(1) == GOLD).mean()


def test_stored_rows_of_other_words_or_scores_are_not_those_of_this_run(gpt2: Any) -> None:
    labels: list[Any] = [ONE, [[word] for word in ONE], SEVERAL, [SEVERAL[0], SEVERAL[1][:1]]]
    batches = [prompts(gpt2, words) for words in labels]
    batches.append(prompts(gpt2, SEVERAL, score=torch.amax))
    one, same, *others = (fingerprint(gpt2, each, {}).facts["prompts"] for each in batches)
    assert one == same and len({one, *others}) == 4
