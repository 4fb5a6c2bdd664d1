"""The loss of label words of several tokens, against whole texts in plain transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import anchorlens as al
from anchorlens.passes.forward import run_pass
from tests.models.test_matrix import hooked as hooked_architecture
from tests.references import plain
from tests.references.comparison import batch_of, weights_of
from tests.support.measures import difference
from tests.support.tiny_models import LONG_LABELS, tiny_gpt2, tiny_llama

MAKE = {"gpt2": tiny_gpt2, "llama": tiny_llama}
# Where attention depends on distances counted in columns, on a window, or on a sink.
ARCHITECTURES = ["MPT", "Bloom", "Gemma 3", "GPT-OSS"]
DEMONSTRATIONS = [al.Example("Put the cup on it.", 0), al.Example("Open it, it is hot.", 1)]
QUERIES = [al.Example("Lay it.", 0), al.Example("A bird flew in.", 1), al.Example("We eat.", 0)]


def long_labels(model: Any, side: Any = "right", queries: Any = QUERIES) -> al.PromptBatch:
    [batch] = al.build_prompts(
        model.tokenizer, LONG_LABELS, DEMONSTRATIONS, queries, padding_side=side
    )
    assert (batch.label_ends > batch.label_positions).all()
    return batch


def one_class_at_a_time(model: Any, prompt: plain.Prompt, words: Any, gold: int) -> torch.Tensor:
    """``| sum_h A dL/dA |`` of a prompt, [layer, query, key], from a whole text for each class."""
    length, scores, attentions = prompt.tokens.shape[1], [], []
    for word in words:
        text = torch.cat([prompt.tokens, torch.tensor([word[:-1]], dtype=torch.long)], dim=1)
        out = plain.forward(model, replace(prompt, tokens=text), output_attentions=True)
        for attention in out.attentions:
            attention.retain_grad()
        attentions.append(out.attentions)
        log_probs = out.logits[0, length - 1 :].log_softmax(-1)
        scores.append(sum(log_probs[k, token] for k, token in enumerate(word)))
    cross_entropy(torch.stack(scores), torch.tensor(gold)).backward()
    model.zero_grad()
    products = [
        sum((a * a.grad)[0, :, :length, :length] for a in layer)
        for layer in zip(*attentions, strict=True)
    ]
    return torch.stack([product.sum(0).abs() for product in products]).detach()


def assert_as_whole_texts(
    ours: torch.Tensor, batch: al.PromptBatch, reference: Any, words: Any, tolerance: float
) -> None:
    for row, prompt in enumerate(plain.prompts_of(batch)):
        inside = batch.attention_mask[row]
        expected = one_class_at_a_time(reference, prompt, words, int(prompt.gold))
        assert difference(ours[row][:, inside][:, :, inside], expected) <= tolerance


@pytest.mark.quick_cases("whole models", "right")
@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MAKE)
def test_saliency_is_that_of_whole_texts_of_each_class(
    name: str, side: str, request: pytest.FixtureRequest, kind_of_model: str
) -> None:
    model = request.getfixturevalue(name)
    batch = long_labels(model, side)
    ours = al.saliency(model, batch, loss=al.losses.word_cross_entropy())
    reference = MAKE[name](model.W_E.shape[0])
    reference.set_attn_implementation("eager")
    words = [
        batch.tokens[0, first : last + 1].tolist()
        for first, last in zip(batch.label_positions[0], batch.label_ends[0], strict=True)
    ]
    tolerance = 1e-4 if kind_of_model != "bridge" else 1e-5
    assert_as_whole_texts(ours, batch, reference, words, tolerance)


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_words_after_padded_prompts_equal_whole_texts(name: str) -> None:
    model, batch = hooked_architecture(name, torch.float32, "bridge"), batch_of("right")
    first = batch.label_token_ids.tolist()
    words = [(first[0], 9, 11), (first[1], 40), (first[2],), (first[3], 8, 30)]
    ours = al.saliency(model, batch, loss=al.losses.word_cross_entropy(words))
    assert_as_whole_texts(ours, batch, weights_of(name, torch.float32), words, 1e-5)


def test_words_follow_the_target_and_not_the_tokens_after_it(gpt2: Any) -> None:
    batch = long_labels(gpt2).prompt(0)
    length = batch.tokens.shape[1]
    longer = replace(
        batch,
        tokens=torch.cat([batch.tokens, torch.tensor([[7, 8]])], dim=1),
        attention_mask=torch.ones(1, length + 2, dtype=torch.bool),
        segments=torch.cat([batch.segments, batch.segments[:, -3:-1]], dim=1),
    )
    expected = al.saliency(gpt2, batch, loss=al.losses.word_cross_entropy())
    ours = al.saliency(gpt2, longer, loss=al.losses.word_cross_entropy())
    assert difference(ours[..., :length, :length], expected) <= 1e-5
    assert not ours[:, :, length:].any()


def test_scores_can_be_divided_by_the_number_of_tokens() -> None:
    loss = al.losses.word_cross_entropy([[1, 2, 3], [4]], per_token=True)
    batch = al.PromptBatch.from_positions(
        torch.tensor([[1, 4, 5]]),
        label_positions=[[0, 1]],
        label_classes=[[0, 1]],
        label_token_ids=[1, 4],
        gold=[1],
    )
    assert loss.continuations(batch).tolist() == [[1, 2, 3], [4, -1, -1]]
    log_probs = torch.tensor([[[-1.0, -2.0, -3.0], [-2.5, 0.0, 0.0]]])
    expected = -torch.tensor([-2.0, -2.5]).log_softmax(0)[1]
    assert torch.allclose(loss(log_probs, batch), expected[None])
    whole = replace(loss, per_token=False)
    assert torch.allclose(whole(log_probs, batch), -torch.tensor([-6, -2.5]).log_softmax(0)[1:])


def test_hooks_act_in_the_prompt_alone(gpt2: Any) -> None:
    """The hooks of a prompt do not fit the rows of its continuations."""
    batch, seen = long_labels(gpt2), []

    def note(pattern: torch.Tensor, hook: Any) -> None:
        seen.append(tuple(pattern.shape[2:]))

    loss = al.losses.word_cross_entropy()
    hooks = al.isolate_labels(gpt2, batch, range(2))
    point = "blocks.0.attn.hook_pattern"
    run_pass(gpt2, batch, hooks=hooks, observers=[(point, note)], loss=loss)
    length = batch.tokens.shape[1]
    assert seen == [(length, length)]


def test_models_without_a_cache_are_refused() -> None:
    model = hooked_architecture("Toy", torch.float32, "bridge")
    batch = batch_of("right")
    words = [[token, 3] for token in batch.label_token_ids.tolist()]
    message = r"takes no key-value cache.* al\.losses\.label_cross_entropy"
    with pytest.raises(al.errors.ModelError, match=message):
        al.saliency(model, batch, loss=al.losses.word_cross_entropy(words))
