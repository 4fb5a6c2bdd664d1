"""Contexts at the positions 0, 1, ...: logits by hand, files, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

import anchorlens as al
from anchorlens.contexts.protocol import bos_of, queries_after
from anchorlens.contexts.stored import key_values_at_start
from anchorlens.errors import StoreError
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.passes.forward import run_pass, run_prefix
from anchorlens.system.digest_file import to_bytes_with_digest
from tests.support.measures import centred, difference
from tests.support.tiny_models import questions, randomize
from tests.support.trained_contexts import same, split, train_prefix, train_soft_prompt, trained


@dataclass(frozen=True, eq=False, kw_only=True)
class Named(al.contexts.PrefixContext):
    """A context with fields of its own."""

    text: str
    embeddings: Tensor


class Renamed(Named):
    """A class two levels below ours."""


def of_tokens(model: Any, batch: al.PromptBatch, tokens: Tensor) -> al.contexts.PrefixContext:
    """The context of tokens after the BOS, whose keys and values the model computes."""
    bos = bos_of(batch)
    ids = torch.cat([bos, tokens])
    queries = queries_after(batch, ids)
    with frozen_in_eval_mode(model):
        prefix = run_prefix(model, queries.prompt(0).before(len(ids)))
    return al.contexts.PrefixContext(
        prefix=key_values_at_start(list(prefix.keys), list(prefix.values)),
        tokens=ids,
        info={"bos": bos.tolist()},
    )


@pytest.fixture(params=["gpt2", "llama", "gemma3", "bloom"])
def model(request: pytest.FixtureRequest, hooked: Any, byte_level: Any) -> Any:
    if request.param != "bloom":
        return request.getfixturevalue(request.param)
    if request.getfixturevalue("kind_of_model") == "hooked-transformer":
        pytest.skip("transformer-lens does not convert such small weights")
    config = BloomConfig(vocab_size=len(byte_level), hidden_size=24, n_layer=2, n_head=2)
    return hooked(randomize(BloomForCausalLM(config)), byte_level)


@pytest.mark.every_kind
def test_a_context_of_tokens_answers_as_the_tokens(model: Any) -> None:
    """Learned and rotary positions, ALiBi, and windows that are shorter than the context."""
    for batch in questions(model, 5, batch_size=3, padding_side="left"):
        tokens = torch.arange(40, 70)
        context = of_tokens(model, batch, tokens)
        queries = queries_after(batch, torch.cat([bos_of(batch), tokens]))
        with frozen_in_eval_mode(model):
            whole = run_pass(model, queries)
            after = context.query_pass(model, batch).logits(model)
        assert difference(centred(after), centred(whole)) < 1e-5


@pytest.mark.slow("trained contexts")
def test_logits_are_those_of_plain_transformers_with_the_same_cache(gpt2: Any, llama: Any) -> None:
    for model in (gpt2, llama):
        context, (batch, *_) = trained(model), questions(model, 3)
        logits = context.logits(model, batch)
        for row in range(3):
            cache = DynamicCache()
            for layer, pair in enumerate(
                zip(context.prefix.keys, context.prefix.values, strict=True)
            ):
                cache.update(*pair, layer)
            start, stop = int(batch.query_start[row]), int(batch.target_positions[row]) + 1
            query = batch.tokens[row : row + 1, start:stop]
            count = len(context.tokens)
            with torch.no_grad():
                plain = model.original_model(
                    query,
                    past_key_values=cache,
                    attention_mask=torch.ones(1, count + query.shape[1], dtype=torch.long),
                    position_ids=torch.arange(count, count + query.shape[1])[None],
                ).logits[:, -1]
            assert difference(logits[row : row + 1], plain) < 1e-5


@pytest.mark.every_kind
def test_logits_depend_on_neither_padding_nor_the_other_prompts(llama: Any) -> None:
    context = trained(llama, steps=1)
    left, right = (questions(llama, 5, padding_side=side)[0] for side in ("left", "right"))
    expected = context.logits(llama, right)
    assert difference(context.logits(llama, left), expected) < 1e-5
    for row in range(5):
        alone = context.logits(llama, right.prompt(row))
        assert difference(alone, expected[row : row + 1]) < 1e-5


def hard_prompt(model: Any, batches: Any, held_out: Any, **options: Any) -> al.contexts.HardPrompt:
    return al.contexts.hard_prompts.of_tokens(model, [300, 17], held_out=held_out)


MADE: list[tuple[type[Any], Any]] = [
    (al.contexts.PrefixContext, train_prefix),
    (al.contexts.SoftPrompt, train_soft_prompt),
    (al.contexts.HardPrompt, hard_prompt),
    (
        al.contexts.CompressedContext,
        lambda model, batches, **options: al.compress(model, batches[0]),
    ),
]


@pytest.mark.slow("trained contexts")
@pytest.mark.parametrize(("kind", "make"), MADE, ids=[kind.__name__ for kind, _ in MADE])
def test_a_loaded_context_is_the_saved_one(
    gpt2: Any, llama: Any, gemma3: Any, tmp_path: Path, kind: Any, make: Any
) -> None:
    path = tmp_path / "context.safetensors"
    for model in (gpt2, llama, gemma3):
        batches, held_out = split(model)
        context = make(model, batches, held_out=held_out, length=2, steps=2)
        for read in (kind.load, al.contexts.load_context):
            loaded = read(context.save(path))
            assert type(loaded) is kind and same(loaded, context)
            shown = [(each.info, each.size, repr(each)) for each in (loaded, context)]
            assert shown[0] == shown[1]
            batch = batches[0]
            assert torch.equal(loaded.logits(model, batch), context.logits(model, batch))
        texts = [
            (vars(each).get("text"), vars(each).get("query_position")) for each in (loaded, context)
        ]
        assert texts[0] == texts[1]


def test_a_class_of_ones_own_is_saved_with_its_fields(gpt2: Any, tmp_path: Path) -> None:
    base = trained(gpt2, steps=0)
    own = Named(**vars(base) | {"training": None}, text="a b", embeddings=torch.eye(2))
    path = own.save(tmp_path / "own.safetensors")
    loaded = al.contexts.load_context(path)
    assert isinstance(loaded, Named) and loaded.text == "a b" and loaded.training is None
    assert torch.equal(loaded.embeddings, torch.eye(2))
    assert "accuracy on held-out queries not known" in repr(loaded)
    renamed = Renamed(**vars(own)).save(tmp_path / "renamed.safetensors")
    assert type(al.contexts.load_context(renamed)) is Renamed
    with pytest.raises(
        StoreError, match=r"holds a Named, not a PrefixContext; use al\.contexts\.load_con"
    ):
        al.contexts.PrefixContext.load(path)
    texts: Any = ["a", "b"]
    wrong = replace(own, text=texts)
    with pytest.raises(StoreError, match="is not written: text must be a tensor, a record"):
        wrong.save(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, tensors: header.pop("info"),
        lambda header, tensors: tensors.pop("tokens"),
        lambda header, tensors: tensors.pop("key.0"),
        lambda header, tensors: tensors.pop("training.losses"),
        lambda header, tensors: [tensors.pop(name) for name in [*tensors] if "key." in name],
    ],
)
def test_wrong_contents_are_refused(gpt2: Any, tmp_path: Path, change: Callable[..., Any]) -> None:
    path = trained(gpt2, steps=0).save(tmp_path / "context")
    data = path.read_bytes()
    outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    header, tensors = json.loads(outer["anchorlens"])["context"], load(data)
    change(header, tensors)
    path.write_bytes(to_bytes_with_digest({"context": header}, tensors))
    with pytest.raises(StoreError, match="not hold what a PrefixContext of this version holds"):
        al.contexts.load_context(path)
