"""Hard prompts: projection, search, inserted tokens, and their text, also in other models."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers.normalizers import Lowercase
from torch import Tensor

import anchorlens as al
from anchorlens.contexts import hard_prompt_search, hard_prompts
from anchorlens.contexts.embedded import embeddings_of
from anchorlens.contexts.hard_prompt_search import NearestTokens, SearchedTokens
from anchorlens.contexts.protocol import bos_of, queries_after
from anchorlens.contexts.training import query_digests
from anchorlens.errors import AnchorlensError, ModelError, NotFiniteError
from anchorlens.passes.forward import run_pass
from anchorlens.prompts.batch import check_batch
from anchorlens.prompts.token_texts import plain_tokens
from tests.support.asked import ask
from tests.support.measures import difference, does_not_run
from tests.support.plain_prompts import rows
from tests.support.printed_code import printed
from tests.support.tiny_models import LONG_LABELS, questions, tiny_gpt2, tiny_llama
from tests.support.trained_contexts import halves, train_hard_prompt

SGD = partial(torch.optim.SGD, lr=30.0)


def searched(model: Any, **options: Any) -> al.contexts.HardPrompt:
    training, held_out = halves(model)
    call = {"held_out": held_out, "length": 3, "steps": 6, "check_every": 2} | options
    return train_hard_prompt(model, training, **call)


def best_of_all(points: Tensor, table: Tensor, allowed: Any = True) -> Tensor:
    cosines = torch.cosine_similarity(points.double()[:, None], table.double(), dim=-1)
    return cosines.masked_fill(~torch.as_tensor(allowed), -2).argmax(1)


def test_the_projection_equals_a_full_cosine(gemma3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a large vocabulary, which is neither copied nor normalised."""
    monkeypatch.setattr(hard_prompt_search, "_TOKENS_AT_ONCE", 700)
    count = len(gemma3.W_E)
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(count, generator=generator) < 0.5
    nearest = NearestTokens.of(gemma3, allowed)
    assert nearest.table.data_ptr() == gemma3.W_E.data_ptr()
    points = torch.randn(50, 32, generator=generator)
    ids = nearest.ids(points)
    assert torch.equal(ids, best_of_all(points, gemma3.W_E.detach(), allowed))
    assert torch.equal(nearest.ids(7 * gemma3.W_E.detach()[ids]), ids)
    # The nearest by dot product are others, because longer rows win.
    assert not torch.equal((points @ gemma3.W_E.T).masked_fill(~allowed, -99).argmax(1), ids)


def test_of_equal_embeddings_the_lowest_is_nearest_and_of_almost_equal_ones_the_nearest() -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(101, 37, generator=generator)
    for twin in (100, 64, 33, 20):
        table[twin] = table[8]
    allowed = torch.ones(101, dtype=torch.bool)
    allowed[[8, 20]] = False
    points = table[8] + 0.05 * torch.randn(40, 37, generator=generator)
    assert NearestTokens(table, table.norm(dim=1), allowed).ids(points).unique().tolist() == [33]
    row = torch.randn(37, generator=generator)
    table = row + 2e-7 * torch.randn(60, 37, generator=generator)
    points = row + 0.5 * torch.randn(40, 37, generator=generator)
    expected = best_of_all(points, table)
    nearest = NearestTokens(table, table.norm(dim=1), torch.ones(60, dtype=torch.bool))
    assert len(expected.unique()) > 5
    for length in (1.0, 1e5, 1e-5):
        assert torch.equal(nearest.ids(length * points), expected)


def test_norms_of_low_precision_are_exact_and_rows_of_zeros_are_never_found() -> None:
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(300, 5, generator=generator).bfloat16()
    table[7] = 0
    nearest = NearestTokens.of(SimpleNamespace(W_E=table), torch.ones(300, dtype=torch.bool))
    points = torch.randn(50, 5, generator=generator)
    assert torch.equal(nearest.ids(points), best_of_all(points, table, torch.arange(300) != 7))


@pytest.mark.parametrize("value", [0.0, 1e30, float("inf"), float("nan")])
def test_an_embedding_without_a_direction_is_an_error(gpt2: Any, value: float) -> None:
    nearest = NearestTokens.of(gpt2, torch.ones(len(gpt2.W_E), dtype=torch.bool))
    with pytest.raises(NotFiniteError, match="none is nearest"):
        nearest.ids(torch.full((2, 24), value))


def test_only_plain_tokens_among_those_of_the_user_are_found(gpt2: Any) -> None:
    allowed = torch.zeros(len(gpt2.W_E), dtype=torch.bool)
    allowed[[0, 300, 301, 17]] = True
    plain = plain_tokens(gpt2.tokenizer, len(gpt2.W_E))
    assert not plain[0] and plain[[17, 300, 301]].all()
    method = hard_prompts.Descent(partial(torch.optim.SGD, lr=1e6))
    prompt = searched(gpt2, start=[300], method=method, allowed=allowed, check_every=1, steps=2)
    assert {*prompt.ids.tolist()} <= {17, 300, 301}
    _, [held_out] = halves(gpt2)
    given = hard_prompts.of_tokens(gpt2, prompt.ids.tolist(), held_out=[held_out])
    assert torch.equal(given.logits(gpt2, held_out), prompt.logits(gpt2, held_out))
    assert float(given.training.best_accuracy) == float(prompt.training.best_accuracy)


def test_plain_tokens_are_encoded_as_they_were(sentencepiece_like: Any, byte_level: Any) -> None:
    size = len(sentencepiece_like)
    plain = plain_tokens(sentencepiece_like, size + 100)
    names = sentencepiece_like.convert_ids_to_tokens(range(size))
    assert not plain[:259].any(), "special tokens, and bytes"
    assert not plain[size:].any(), "tokens that the tokenizer does not know"
    assert plain[names.index("▁the")] and plain.sum() > 500
    byte_plain = plain_tokens(byte_level, len(byte_level))
    for token in range(len(byte_level)):
        text = byte_level.decode([token], clean_up_tokenization_spaces=False)
        survives = byte_level(text)["input_ids"] == [token] and token != byte_level.eos_token_id
        assert bool(byte_plain[token]) == survives
    assert not byte_plain[byte_level.convert_tokens_to_ids("Ã")], "a part of a character"
    # Unused tokens are not plain.
    tokenizer, size = deepcopy(byte_level), len(byte_level)
    assert plain_tokens(tokenizer, size + 3)[size:].tolist() == [False] * 3
    tokenizer.add_tokens(["<unused7>", "abcabc"])
    assert not plain_tokens(tokenizer, size + 3)[size:].any(), "they were added"
    before = plain_tokens(byte_level, size)
    byte_level.backend_tokenizer.enable_padding(length=4)
    try:
        assert torch.equal(plain_tokens(deepcopy(byte_level), size), before)
    finally:
        byte_level.backend_tokenizer.no_padding()


def trainable_of(model: Any, batch: al.PromptBatch, method: Any, **changes: Any) -> SearchedTokens:
    fields: dict[str, Any] = {
        "model": model,
        "bos": bos_of(batch),
        "embeddings": model.W_E[[300, 17]].detach().clone().requires_grad_(),
        "unit": 1.0,
        "nearest": NearestTokens.of(model, torch.ones(len(model.W_E), dtype=torch.bool)),
        "method": method,
        "steps": 4,
        "seed": 0,
        "example": batch.prompt(0),
    }
    return SearchedTokens(**(fields | changes))


@pytest.mark.every_kind
def test_the_tokens_nearest_to_p_are_run_and_give_the_logits_of_plain_tokens(model: Any) -> None:
    batch = questions(model, 4, padding_side="left")[0]
    bos = bos_of(batch)
    tokens = torch.cat([bos, torch.tensor([300, 17, 301])])
    point = embeddings_of(model, batch, tokens)[len(bos) :]
    nearby = (3 * point + 0.01).requires_grad_()
    method = replace(hard_prompts.AUTOPROMPT, optimizer=SGD)
    trainable = trainable_of(model, batch, method, embeddings=nearby)
    assert torch.equal(trainable.tokens, tokens)
    queries = queries_after(batch, tokens)
    # With a hook that does nothing, so that all of them run on the hooked model.
    expected = run_pass(model, queries, hooks=[("hook_embed", lambda embedded, hook: None)])
    assert difference(trainable.query_pass(model, batch).logits(model), expected) < 1e-5
    loss = trainable.backward(model, batch, al.losses.label_cross_entropy)
    assert loss == float(al.losses.label_cross_entropy(expected, queries).mean())
    trainable.after_step(0)
    assert torch.equal(nearby.detach(), point), "projected into the space of the embeddings"


@pytest.mark.slow("trained contexts")
@pytest.mark.parametrize("keep", [True, False])
def test_a_search_is_the_algorithm_by_hand_on_plain_transformers(llama: Any, keep: bool) -> None:
    """Steps of SGD on P with the clipped gradient at P', and a projection after each if asked."""
    ((batch,), _), start = halves(llama), [300, 301, 302]
    lr, clip, fluency = 8.0, 0.5, 0.2
    method = hard_prompts.Descent(partial(torch.optim.SGD, lr=lr), keep, fluency=fluency)
    losses = searched(llama, method=method, start=start, clip=clip, steps=7).training.losses
    gold: Any = batch.gold
    weights: Any = tiny_llama(len(llama.tokenizer))
    weights.requires_grad_(False)
    table = weights.model.embed_tokens.weight
    allowed = plain_tokens(llama.tokenizer, len(table))

    def nearest(values: Tensor) -> Tensor:
        cosines = torch.cosine_similarity(values[:, None], table, dim=-1)
        return cosines.masked_fill(~allowed, -2).argmax(1)

    def mean_loss(prompt: Tensor) -> Tensor:
        begin = torch.cat([table[batch.tokens[0, :1]], prompt])
        tasks = []
        for row in range(len(batch)):
            start, stop = int(batch.query_start[row]), int(batch.target_positions[row]) + 1
            whole = torch.cat([begin, table[batch.tokens[row, start:stop]]])[None]
            labels = weights(inputs_embeds=whole).logits[0, -1, batch.label_token_ids]
            tasks.append(-labels.log_softmax(0)[gold[row]])
        next_logits = weights(inputs_embeds=begin[None]).logits[0, :-1]
        of_text = torch.nn.functional.cross_entropy(next_logits, nearest(prompt.detach()))
        return (1 - fluency) * torch.stack(tasks).mean() + fluency * of_text

    point, expected, seen = table[start].clone(), list[float](), set[tuple[int, ...]]()
    for _ in range(7):
        leaf = table[nearest(point)].clone().requires_grad_()
        seen.add(tuple(nearest(point).tolist()))
        loss = mean_loss(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        expected.append(float(loss.detach()))
        point = point - lr * gradient * min(1, clip / gradient.norm())
        point = point if keep else table[nearest(point)].clone()
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)
    assert len(seen) > 1, "the search moves"


def test_noise_follows_each_step_becomes_smaller_and_depends_on_the_seed(gpt2: Any) -> None:
    given = Mock(return_value=0.0)
    searched(gpt2, method=hard_prompts.Descent(SGD, noise=given), start=[300], steps=3)
    assert [call.args for call in given.call_args_list] == [(0, 3), (1, 3), (2, 3)]
    batch = questions(gpt2, 2)[0]
    noise = hard_prompts.Langevin(rate=0.5)
    assert [noise(step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.1, 0.01])
    fluent: Any = hard_prompts.FLUENT_PROMPT
    assert fluent.noise.rate == fluent.optimizer.rate and not fluent.keep_continuous
    assert hard_prompts.PEZ.keep_continuous and not hard_prompts.PEZ_AS_PUBLISHED.keep_continuous
    other = hard_prompts.Langevin(rate=8.0, first=0.25, last=0.01)
    assert [other(step, 2) for step in (0, 1, 2)] == pytest.approx([2.0, 0.8**0.5, 0.4])
    method = hard_prompts.Descent(SGD, noise=noise)

    def moved(step: int, seed: int, unit: float = 1.0) -> Tensor:
        trainable = trainable_of(gpt2, batch, method, seed=seed, unit=unit)
        before = trainable.embeddings.detach().clone()
        trainable.after_step(step)
        return trainable.embeddings.detach() - before

    assert torch.equal(moved(0, 1), moved(0, 1))
    assert not torch.equal(moved(0, 1), moved(0, 2))
    assert torch.sign(moved(0, 1)).ne(torch.sign(moved(1, 1))).any()
    assert moved(0, 1).std() == pytest.approx(1.0, rel=0.3)
    assert moved(4, 1).std() == pytest.approx(0.01, rel=0.3)
    torch.testing.assert_close(moved(0, 1, unit=5.0), 5 * moved(0, 1))


def test_a_relative_rate_makes_the_same_steps_at_any_size_of_embeddings() -> None:
    """Their size is the root mean square at the start, not that of later steps."""
    start = torch.tensor([[3.0, -4.0, 0.0, 5.0]])  # mean of the squares: 12.5
    gradients = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))

    def path(scale: float, optimizer: Any) -> Tensor:
        values = (scale * start).requires_grad_()
        made = optimizer([values])
        points = []
        for gradient in gradients:
            values.grad = gradient
            made.step()
            points.append(values.detach() / scale)
        return torch.stack(points)

    relative = hard_prompts.RelativeAdafactor(0.3)
    torch.testing.assert_close(path(100.0, relative), path(1.0, relative))
    absolute = hard_prompts.Adafactor(lr=0.3 * 12.5**0.5)
    torch.testing.assert_close(path(1.0, relative), path(1.0, absolute))


def test_without_a_step_the_start_is_returned(gpt2: Any) -> None:
    words = hard_prompts.class_words(halves(gpt2)[0])
    labels = [word.replace(" ", "Ġ") for word in al.TASKS["trec"].first_words]
    assert gpt2.tokenizer.convert_ids_to_tokens(words) == labels
    assert searched(gpt2, steps=0, length=8).ids.tolist() == [*words, *words][:8]
    assert searched(gpt2, steps=0, start=[300, 301]).ids.tolist() == [300, 301, 300]


@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_the_text_is_that_of_the_tokens_after_the_bos_and_is_encoded_again(model: Any) -> None:
    (_, held_out), tokenizer = halves(model), model.tokenizer
    joined = tokenizer(" the", add_special_tokens=False)["input_ids"]
    whole = hard_prompts.of_tokens(model, joined, held_out=held_out)
    assert whole.text == " the" and whole.encodes_back and len(joined) == 1
    assert whole.encoded.tolist() == whole.tokens.tolist() == [*whole.info["bos"], *joined]
    marker = "Ġ" if not whole.info["bos"] else "▁"
    pieces = tokenizer.convert_tokens_to_ids([marker, "t", "h", "e"])
    prompt = hard_prompts.of_tokens(model, pieces, held_out=held_out)
    assert prompt.text == " the" and torch.equal(prompt.encoded, whole.tokens)
    assert not prompt.encodes_back and "to other tokens" in prompt._repr_html_()
    assert float(prompt.encoded_accuracy) == float(whole.training.best_accuracy)


def test_the_accuracy_of_the_text_is_that_on_held_out_queries(gpt2: Any) -> None:
    tokenizer = gpt2.tokenizer
    pieces = tokenizer.convert_tokens_to_ids(["Ġ", "t", "h", "e"])
    joined = tokenizer(" the", add_special_tokens=False)["input_ids"]
    (training,), (held_out,) = halves(gpt2)
    context = hard_prompts.of_tokens(gpt2, joined, held_out=[held_out])
    scores = [each.label_scores(context.logits(gpt2, each)) for each in (training, held_out)]
    wrong = replace(training, gold=(scores[0].argmax(1) + 1) % 6)
    right = replace(held_out, gold=scores[1].argmax(1))
    prompt = train_hard_prompt(gpt2, [wrong], held_out=[right], start=pieces, length=4, steps=0)
    assert prompt.encoded.tolist() == joined and float(prompt.encoded_accuracy) == 1


@pytest.mark.slow("trained contexts")
def test_random_prompts_are_plain_and_seeded(gpt2: Any) -> None:
    _, held_out = halves(gpt2)
    call: dict[str, Any] = {"held_out": held_out, "length": 4, "draws": 2}
    drawn = (hard_prompts.random(gpt2, seed=seed, **call) for seed in (1, 1, 2))
    ids, again, others = ([prompt.ids.tolist() for prompt in prompts] for prompts in drawn)
    assert len(ids) == 2 and ids[0] != ids[1] and ids == again != others
    assert plain_tokens(gpt2.tokenizer, len(gpt2.tokenizer))[torch.tensor(ids)].all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_inserted_tokens_give_the_prompts_of_a_text_before_them(model: Any, side: Any) -> None:
    batch = questions(model, 3, padding_side=side)[0]
    words = "What is it?\n"
    ids = model.tokenizer(words, add_special_tokens=False)["input_ids"]
    longer = hard_prompts.of_tokens(model, ids, held_out=[batch]).insert(batch)
    check_batch(longer)
    examples, begun = al.load_examples("questions"), replace(al.TASKS["trec"], instructions=words)
    demos = al.sample_demonstrations(examples, seed=1)
    given = begun, demos, [example for example in examples if example not in demos][:3]
    [expected] = al.build_prompts(model.tokenizer, *given, padding_side=side)
    names = ["tokens", "label_positions", "target_positions", "attention_mask", "query_start"]
    # So that a run takes no shared tokens of the shorter prompts for those of the longer ones.
    names.append("demonstrations_id")
    for name in names:
        assert torch.equal(getattr(longer, name), getattr(expected, name)), name
    assert torch.equal(longer.segments[:, -5:], expected.segments[:, -5:])


@pytest.mark.changes_model
def test_embeddings_that_are_no_multiple_of_the_table_are_refused(gpt2: Any) -> None:
    gpt2.embed.original_component.register_forward_hook(
        lambda module, arguments, output: torch.nn.functional.layer_norm(output + 1, [24])
    )
    with pytest.raises(ModelError, match="is no multiple of the rows of W_E"):
        searched(gpt2, start=[300])


def right(model: Any, batches: list[al.PromptBatch], before: list[int]) -> torch.Tensor:
    """1 for each query that the plain model answers right after these tokens, one at a time."""
    words, answers = batches[0].label_token_ids, list[bool]()
    for row in rows(batches):
        bos = row.tokens[: int(batches[0].begins_with_bos)]
        tokens = torch.tensor([[*bos, *before, *row.tokens[row.query_start : row.target + 1]]])
        with torch.no_grad():
            logits = model.original_model(input_ids=tokens).logits[0, -1]
        answers.append(int(logits[words].argmax()) == row.gold)
    return torch.tensor(answers).double()


@pytest.mark.slow("trained contexts")
@pytest.mark.filterwarnings("ignore:.*intervals of")
def test_a_text_answers_in_each_model_as_in_plain_passes(gpt2: Any, gemma3: Any) -> None:
    in_model = printed("own_context.md", "in_model")
    prompt = hard_prompts.of_tokens(gpt2, [300, 411, 352, 17], held_out=questions(gpt2, 14))
    seen = set()
    for model in (gpt2, gemma3):
        batches = questions(model, 14, batch_size=7)
        record = in_model(prompt, model, batches, draws=3)
        ids = model.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        read = hard_prompts.of_text(model, prompt.text, held_out=batches)
        assert read.ids.tolist() == ids and read.text == prompt.text and read.encodes_back
        drawn = hard_prompts.random(model, held_out=batches, length=len(ids), draws=3)
        random = torch.stack([right(model, batches, each.ids.tolist()) for each in drawn])
        text, empty = (right(model, batches, before) for before in (ids, list[int]()))
        for name, value in {
            "accuracy": torch.stack([empty.mean(), text.mean()]),
            "random_accuracy": random.mean(1),
            "gain_over_first": torch.stack([torch.tensor(0.0), (text - empty).mean()]),
            "gain_over_random": torch.stack([empty.mean(), text.mean()]) - random.mean(),
        }.items():
            torch.testing.assert_close(getattr(record, name).double(), value.double())
        assert read.training.best_accuracy == record.accuracy[1].float()
        seen |= {float(text.mean()), float(empty.mean()), *random.mean(1).tolist()}
        for name in ("gain_over_first", "gain_over_random"):
            low, high = record.intervals[name][:, 1]
            assert low < getattr(record, name)[1] < high
    assert len(seen) > 3, "the models do not answer alike"


@pytest.mark.slow("trained contexts")
def test_what_a_model_cannot_read_is_an_error_before_any_pass(gpt2: Any, byte_level: Any) -> None:
    held_out = questions(gpt2, 4)
    ids = byte_level("Say What", add_special_tokens=False)["input_ids"]
    prompt = hard_prompts.of_tokens(gpt2, ids, held_out=held_out)
    used = replace(prompt, info={**prompt.info, "queries_in_training": query_digests(held_out)})
    demos = [al.Example("a", 0), al.Example("b", 1)]
    long = al.build_prompts(gpt2.tokenizer, LONG_LABELS, demos, [al.Example("c", 0)])
    of_long = hard_prompts.of_tokens(gpt2, ids, held_out=long)
    lower = deepcopy(byte_level)
    lower.backend_tokenizer.normalizer = Lowercase()
    fits = gpt2.cfg.n_ctx - 60
    many = hard_prompts.of_tokens(gpt2, ids[:1] * fits, held_out=held_out)
    short = al.load_model(tiny_gpt2(len(byte_level), n_positions=fits), tokenizer=byte_level)
    for model, text, batches, tokenizer, message in (
        (gpt2, prompt, held_out, lower, "cannot encode the text 'Say What': its tokens give 'say"),
        (gpt2, "", held_out, None, "cannot encode the text '': .* a text that is empty"),
        (gpt2, used, held_out, None, "4 of these queries trained or chose the hard prompt"),
        (gpt2, prompt, long, None, r"labels \['Abbrev.*these queries have \['Table', 'Window'\]"),
        (gpt2, of_long, long, None, "a label word has several tokens"),
        (short, many, held_out, None, "use shorter queries, or a context with fewer"),
    ):
        with pytest.raises(AnchorlensError, match=message), does_not_run(model):
            hard_prompts.of_text(model, text, held_out=batches, tokenizer=tokenizer)


def test_the_queries_of_a_search_are_refused_after_its_text_too(gpt2: Any) -> None:
    """Also if the text was read with other queries."""
    held_out, others = questions(gpt2, 4, batch_size=2)
    prompt = hard_prompts.of_tokens(gpt2, [300], held_out=[held_out])
    used = replace(prompt, info={**prompt.info, "queries_in_training": query_digests([held_out])})
    text = hard_prompts.of_text(gpt2, used, held_out=[others])
    for asked in (
        al.ContextComparison({"text": text}, repeats=0),
        al.ContextComparison({"nothing": al.contexts.NoContext()}, random=[text], repeats=0),
    ):
        with pytest.raises(AnchorlensError, match="2 of these queries were used"):
            al.run(gpt2, [held_out], [asked], progress=False, resamples=0)


@pytest.mark.slow("trained contexts")
def test_a_random_control_is_a_context_and_joins_those_that_are_drawn(gpt2: Any) -> None:
    batches = questions(gpt2, 4, batch_size=2)
    none, contexts = al.contexts.NoContext(), {"words": al.compress}
    options: list[Any] = [{"draws": 2}, {"random": [none]}, {"draws": 2, "random": [none]}]
    asked = (al.ContextComparison(contexts, repeats=0, **more) for more in options)
    quiet: dict[str, Any] = {"progress": False, "resamples": 0}
    drawn, given, both = (ask(gpt2, batches, each, **quiet).random_kl for each in asked)
    assert torch.equal(both, torch.cat([given, drawn])) and len(both.unique()) == 3
