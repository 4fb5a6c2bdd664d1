"""Contexts: queries after them, their files, and models that were changed or hide positions."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

import anchorlens as al
from anchorlens.contexts import StoredContext, placement
from anchorlens.contexts.hard_prompts import of_tokens
from anchorlens.contexts.protocol import bos_of, check_queries, queries_after
from anchorlens.errors import ModelError, PromptError, StoreError
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest
from tests.support.measures import centred, difference, same
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama
from tests.support.trained_contexts import split, train_prefix, train_soft_prompt, trained


@pytest.mark.slow("trained contexts")
@pytest.mark.every_kind
def test_learned_positions_are_seen_in_logits_of_a_large_mean(hooked: Any, byte_level: Any) -> None:
    """GPT-2 has such logits. The effect of positions is small compared with the largest logit."""
    weights: Any = tiny_gpt2(len(byte_level))
    with torch.no_grad():
        weights.transformer.wte.weight += 1
        weights.transformer.ln_f.bias += 100
    model = hooked(weights, byte_level)
    with pytest.raises(ModelError, match="positions cannot be rebased"):
        al.compress(model, questions(model, 3)[0], positions=placement.rebased)


@pytest.mark.slow("trained contexts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rotary_positions_can_be_rebased_in_low_precision(
    hooked: Any, byte_level: Any, sentencepiece_like: Any, dtype: torch.dtype
) -> None:
    model = hooked(tiny_llama(len(sentencepiece_like)).to(dtype), sentencepiece_like)
    assert al.compress(model, questions(model, 3)[0], positions=placement.rebased).is_cut
    learned = hooked(tiny_gpt2(len(byte_level)).to(dtype), byte_level)
    with pytest.raises(ModelError, match="positions cannot be rebased"):
        al.compress(learned, questions(learned, 3)[0], positions=placement.rebased)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_alibi_is_seen_in_low_precision(hooked: Any, byte_level: Any, dtype: torch.dtype) -> None:
    """With small weights a wrong distance changes the logits by less than rounding may."""
    config = BloomConfig(vocab_size=len(byte_level), hidden_size=24, n_layer=2, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights: Any = BloomForCausalLM(config).to(dtype)
    model = hooked(weights, byte_level)
    assert not al.compress(model, questions(model, 3)[0]).is_cut


@pytest.mark.parametrize("head", [0, 1])
def test_a_context_is_refused_with_an_ablated_head(hooked: Any, byte_level: Any, head: int) -> None:
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    batch = questions(model, 3)[0]
    context = al.compress(model, batch)
    context.logits(model, batch)
    with pytest.raises(ModelError, match="dtype 'float32', got 'float64'"):
        context.logits(model.double(), batch)
    model.float()
    names = (".1._original_component.attn.o._original_component.weight", ".1.attn.W_O")
    output = next(p for name, p in model.named_parameters() if name.endswith(names))
    with torch.no_grad():
        output.view(2, 12, 24)[head] = 0
    with pytest.raises(ModelError, match="made with weights"):
        context.logits(model, batch)


@pytest.mark.slow("trained contexts")
def test_a_changed_sliding_window_changes_the_logits(hooked: Any, sentencepiece_like: Any) -> None:
    model = hooked(tiny_gemma3(len(sentencepiece_like)), sentencepiece_like)
    if not hasattr(model, "original_model"):
        pytest.skip("its windows are made once")
    batch = questions(model, 3)[0]
    before = al.compress(model, batch).logits(model, batch)
    model.original_model.config.sliding_window = 60
    context = al.compress(model, batch)
    assert context.is_cut
    assert difference(context.logits(model, batch), before) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_queries_stand_after_the_tokens(llama: Any, side: str) -> None:
    batch = questions(llama, 4, padding_side=side)[0]
    queries = queries_after(batch, torch.tensor([7, 8]))
    for row in range(4):
        inside = batch.attention_mask[row].clone()
        inside[: int(batch.query_start[row])] = False
        expected = [7, 8, *batch.tokens[row][inside].tolist()]
        assert queries.tokens[row][queries.attention_mask[row]].tolist() == expected
        assert int(queries.target_positions[row]) == len(expected) - 1
        segments = queries.segments[row][queries.attention_mask[row]].tolist()
        assert segments[2:] == batch.segments[row][inside].tolist()
    assert queries.query_start.tolist() == [2] * 4 and queries.label_positions.shape == (4, 0)
    assert len({int(count) for count in queries.attention_mask.sum(1)}) > 1


@pytest.mark.every_kind
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_no_context_gives_the_logits_of_a_query_alone(model: Any) -> None:
    batches = questions(model, 5, batch_size=3, padding_side="left")
    for batch in batches:
        logits = centred(al.contexts.NoContext().logits(model, batch))
        for row in range(len(batch)):
            query = batch.tokens[row, int(batch.query_start[row]) :]
            tokens = torch.cat([bos_of(batch), query])[None]
            with torch.no_grad():
                alone = model(tokens, attention_mask=torch.ones_like(tokens))[:, -1]
            assert difference(logits[row : row + 1], centred(alone)) < 1e-5
    assert al.contexts.NoContext().size == 0
    assert len(bos_of(batches[0])) == int(batches[0].begins_with_bos)


def test_a_query_without_room_after_a_context_is_refused(gpt2: Any) -> None:
    batches = questions(gpt2, 3)
    length = int((batches[0].target_positions - batches[0].query_start).max()) + 1
    room = gpt2.cfg.n_ctx - length
    check_queries(gpt2, batches, room)
    message = f"a query has {length} tokens, but {length - 1} of the model's context of 512"
    with pytest.raises(PromptError, match=message):
        check_queries(gpt2, batches, room + 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Named(al.contexts.PrefixContext):
    text: str
    embeddings: Tensor


class Renamed(Named): ...


MADE: list[tuple[type[Any], Any]] = [
    (al.contexts.PrefixContext, train_prefix),
    (al.contexts.SoftPrompt, train_soft_prompt),
    (
        al.contexts.HardPrompt,
        lambda model, batches, held_out, **_: of_tokens(model, [300, 17], held_out=held_out),
    ),
    (al.contexts.CompressedContext, lambda model, batches, **_: al.compress(model, batches[0])),
]


@pytest.mark.quick_cases("trained contexts", "CompressedContext")
@pytest.mark.parametrize(("kind", "make"), MADE, ids=[kind.__name__ for kind, _ in MADE])
def test_a_loaded_context_is_the_saved_one(
    gpt2: Any, llama: Any, gemma3: Any, tmp_path: Path, kind: Any, make: Any
) -> None:
    path = tmp_path / "context.safetensors"
    for model in (gpt2, llama, gemma3):
        batches, held_out = split(model)
        context = make(model, batches, held_out=held_out, length=2, steps=2)
        for read in (kind.load, StoredContext.load):
            loaded = read(context.save(path))
            assert type(loaded) is kind and same(loaded, context)
            shown = [(each.info, each.size, repr(each)) for each in (loaded, context)]
            assert shown[0] == shown[1]
            batch = batches[0]
            assert torch.equal(loaded.logits(model, batch), context.logits(model, batch))
        for name in ("text", "query_position"):
            assert vars(loaded).get(name) == vars(context).get(name)


def test_a_class_of_ones_own_is_saved_with_its_fields(gpt2: Any, tmp_path: Path) -> None:
    base = trained(gpt2, steps=0)
    own = Named(**vars(base) | {"training": None}, text="a b", embeddings=torch.eye(2))
    path = own.save(tmp_path / "own.safetensors")
    loaded = StoredContext.load(path)
    assert isinstance(loaded, Named) and loaded.text == "a b" and loaded.training is None
    assert torch.equal(loaded.embeddings, torch.eye(2))
    assert "accuracy on held-out queries not known" in repr(loaded)
    renamed = Renamed(**vars(own)).save(tmp_path / "renamed.safetensors")
    assert type(StoredContext.load(renamed)) is Renamed
    assert type(al.contexts.PrefixContext.load(path)) is Named
    with pytest.raises(StoreError, match=r"a Named, not a SoftPrompt; use Named\.load"):
        al.contexts.SoftPrompt.load(path)
    texts: Any = ["a", "b"]
    wrong = replace(own, text=texts)
    with pytest.raises(StoreError, match=r"is not written: .*: text must be a tensor, record"):
        wrong.save(path)


def test_wrong_contents_are_refused(gpt2: Any, tmp_path: Path) -> None:
    path = trained(gpt2, steps=0).save(tmp_path / "context")
    header, tensors = read_with_digest(path)
    for missing in ({"training.losses"}, {name for name in tensors if "key." in name}):
        rest = {name: value for name, value in tensors.items() if name not in missing}
        path.write_bytes(to_bytes_with_digest(header, rest))
        with pytest.raises(StoreError, match="not hold what a PrefixContext of this version"):
            StoredContext.load(path)
