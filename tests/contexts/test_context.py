"""Contexts: queries after them, their files, adapters of peft, and models that were changed."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

import anchorlens as al
from anchorlens.contexts import StoredContext, context_from_peft, context_to_peft, placement
from anchorlens.contexts.hard_prompts import of_tokens
from anchorlens.contexts.protocol import bos_of, check_queries, queries_after
from anchorlens.errors import ModelError, PromptError, StoreError
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest
from tests.support.measures import centred, difference, does_not_run, same
from tests.support.peft_oracle import peft_logits, saved_by_peft
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama
from tests.support.trained_contexts import split, train_prefix, train_soft_prompt, trained

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

PLAIN: dict[str, Any] = {"gpt2": tiny_gpt2, "llama": tiny_llama, "gemma3": tiny_gemma3}
LIMIT = 1e-5


@pytest.fixture(params=["gpt2", "llama", "gemma3"])
def pair(request: pytest.FixtureRequest, hooked: Any) -> tuple[Any, Any]:
    model = request.getfixturevalue(request.param)
    return model, plain(request.param, model)


def plain(name: str, model: Any) -> Any:
    return PLAIN[name](len(model.tokenizer))


def of_everything(model: Any, batch: al.PromptBatch) -> al.contexts.CompressedContext:
    return al.compress(model, batch, select=al.contexts.selection.everything)


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.quick_cases("trained contexts", "llama")
@pytest.mark.every_kind
def test_peft_gives_the_logits_of_a_context(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """Grouped keys, and a prefix of demonstrations, which is longer than a window of 24."""
    model, weights = pair
    (batch,) = questions(model, 3)
    whole = of_everything(model, batch)
    assert len(whole.tokens) > 24
    for context in (trained(model), whole):
        if not hasattr(model, "original_model"):
            with pytest.raises(ModelError, match="is a HookedTransformer, whose keys and values"):
                context_to_peft(context, model, tmp_path / "none")
            continue
        expected = context.logits(model, batch)
        folder = context_to_peft(context, model, tmp_path / type(context).__name__)
        assert difference(centred(peft_logits(weights, folder, batch)), centred(expected)) < LIMIT
        with_bos = peft_logits(weights, folder, batch, bos_of(batch).tolist())
        changes = difference(centred(with_bos), centred(expected)) > 1e-3
        assert changes == bool(len(bos_of(batch)))


@pytest.mark.slow("trained contexts")
def test_the_base_model_is_named_for_peft(model_folder: Path, tmp_path: Path) -> None:
    model = al.load_model(str(model_folder))
    context = of_everything(model, questions(model, 2)[0])
    folder = context_to_peft(context, model, tmp_path / "new" / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folder)
    assert config["num_virtual_tokens"] == len(context.tokens)


@pytest.mark.slow_cases("trained contexts", "gemma3")
@pytest.mark.every_kind
def test_a_prefix_of_peft_answers_as_in_peft(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """peft runs the BOS and the query after 30 virtual tokens, more than a window of 24."""
    model, weights = pair
    (batch,) = questions(model, 3, padding_side="left")
    (right,) = questions(model, 3, padding_side="right")
    bos = bos_of(batch).tolist()
    folder = saved_by_peft(weights, tmp_path / "adapter", 30)
    if not hasattr(model, "original_model"):
        with pytest.raises(ModelError, match="is a HookedTransformer"):
            context_from_peft(folder, model, batch)
        return
    context = context_from_peft(folder, model, batch)
    expected = peft_logits(weights, folder, right, bos)
    assert difference(centred(context.logits(model, batch)), centred(expected)) < LIMIT
    assert context.tokens.tolist() == [0] * 30 + bos and context.info["bos"] == bos
    for after in ([], [17, 300]):
        other = context_from_peft(folder, model, batch, tokens_after=after)
        expected = peft_logits(weights, folder, right, after)
        assert difference(centred(other.logits(model, batch)), centred(expected)) < LIMIT
        assert len(other.tokens) == 30 + len(after)


def test_the_file_of_a_projected_prefix_holds_keys_and_values(llama: Any, tmp_path: Path) -> None:
    weights, (batch,) = plain("llama", llama), questions(llama, 3)
    options = {"prefix_projection": True, "encoder_hidden_size": 12}
    folder = saved_by_peft(weights, tmp_path / "adapter", 4, **options)
    expected = peft_logits(weights, folder, batch, bos_of(batch).tolist())
    context = context_from_peft(folder, llama, batch)
    assert difference(context.logits(llama, batch), expected) < LIMIT


@pytest.mark.slow("trained contexts")
def test_a_prefix_has_the_models_type(hooked: Any, sentencepiece_like: Any, tmp_path: Path) -> None:
    weights: Any = tiny_llama(len(sentencepiece_like)).to(torch.bfloat16)
    model = hooked(tiny_llama(len(sentencepiece_like)).to(torch.bfloat16), sentencepiece_like)
    (batch,) = questions(model, 2)
    folder = saved_by_peft(tiny_llama(len(sentencepiece_like)), tmp_path / "adapter", 3)
    context = context_from_peft(folder, model, batch)
    assert {tensor.dtype for tensor in context.prefix.keys} == {torch.bfloat16}
    expected = peft_logits(weights, folder, batch, bos_of(batch).tolist()).float()
    assert difference(context.logits(model, batch), expected) < 0.03


@pytest.mark.quick_cases("trained contexts", "gpt2")
def test_a_context_comes_back_bit_for_bit(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model, weights = pair
    (batch,) = questions(model, 3)
    foreign = saved_by_peft(weights, tmp_path / "peft", 3)
    for context in (trained(model), context_from_peft(foreign, model, batch)):
        folder = context_to_peft(context, model, tmp_path / "ours")
        back = context_from_peft(folder, model)
        assert type(back) is al.contexts.PrefixContext and back.training is None
        assert same(back, replace(context, training=None)) and back.info == context.info
        assert torch.equal(back.logits(model, batch), context.logits(model, batch))
        assert same(context_from_peft(folder, model, batch), back)
        assert same(al.contexts.PrefixContext.load(back.save(tmp_path / "context")), back)


@pytest.mark.slow("trained contexts")
def test_a_folder_that_peft_saved_again_holds_the_bos(llama: Any, tmp_path: Path) -> None:
    (batch,) = questions(llama, 2)
    for context in (trained(llama), al.compress(llama, batch, positions=placement.rebased)):
        folder = context_to_peft(context, llama, tmp_path / "adapter")
        assert torch.equal(context_from_peft(folder, llama).tokens, context.cached_tokens)
        weights = folder / "adapter_model.safetensors"
        save_file(load_file(weights), weights, metadata={"format": "pt"})
        again = context_from_peft(folder, llama, batch, tokens_after=[])
        assert difference(again.logits(llama, batch), context.logits(llama, batch)) < LIMIT


def test_no_virtual_token_is_taken_for_a_bos(llama: Any, tmp_path: Path) -> None:
    """The BOS of some tokenizers has the number 0."""
    (batch,) = questions(llama, 2)
    first = replace(batch, tokens=batch.tokens.masked_fill(batch.tokens == 1, 0))
    folder = saved_by_peft(plain("llama", llama), tmp_path / "adapter", 2)
    context = context_from_peft(folder, llama, first)
    assert context.tokens.tolist() == [1, 1, 0] and context.info["bos"] == [0]


@pytest.mark.slow("trained contexts")
def test_contexts_that_peft_cannot_hold_are_refused(gpt2: Any, llama: Any, tmp_path: Path) -> None:
    (batch,) = questions(llama, 2)
    context, folder = trained(llama, steps=0), tmp_path / "adapter"
    keys = context.prefix.keys
    gap, restarted = (
        al.compress(llama, batch, positions=positions)
        for positions in (placement.as_in_prompt, placement.restarted)
    )
    wider = replace(context.prefix, keys=(*keys[:-1], torch.cat([keys[-1]] * 2, dim=3)))
    fewer = replace(context.prefix, keys=keys[:-1], values=context.prefix.values[:-1])
    bad: list[tuple[type[Exception], str, Any]] = [
        (PromptError, r"positions=al\.contexts\.placement\.rebased, or select=", gap),
        (PromptError, "an adapter of peft must have its keys at the positions", restarted),
        (ModelError, "this context was made with", trained(gpt2, steps=0)),
        (ModelError, r"with \(heads, d_head\) \(2, 8\), \(2, 16\)", replace(context, prefix=wider)),
        (ModelError, "3 layers caches them in 2", replace(context, prefix=fewer)),
    ]
    for kind, message, refused in bad:
        with pytest.raises(kind, match=message):
            context_to_peft(refused, llama, folder)
    assert not folder.exists()
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        context_to_peft(context, llama, path)


@pytest.mark.every_kind
def test_folded_value_biases_are_refused(raw: Any, byte_level: Any, tmp_path: Path) -> None:
    """The cached values then lack their bias."""
    weights = tiny_gpt2(len(byte_level))
    model = al.prepare_model(raw(tiny_gpt2(len(byte_level)), byte_level, fold=True))
    (batch,) = questions(model, 2)
    context = of_everything(model, batch)
    folder = saved_by_peft(weights, tmp_path / "peft", 2)
    message = "value biases of this model are folded|is a HookedTransformer"
    with pytest.raises(ModelError, match=message):
        context_to_peft(context, model, tmp_path / "ours")
    with pytest.raises(ModelError, match=message):
        context_from_peft(folder, model, batch)


def test_without_peft_an_error_says_how_to_install_it(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = trained(gpt2, steps=0)
    folder = context_to_peft(context, gpt2, tmp_path / "adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(StoreError, match=r'pip install "anchorlens\[peft\]"'):
        context_to_peft(context, gpt2, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert same(context_from_peft(folder, gpt2), replace(context, training=None))


def test_what_does_not_fit_is_refused_when_reading(gpt2: Any, llama: Any, tmp_path: Path) -> None:
    (batch,) = questions(llama, 2)
    theirs, long, more_heads = (
        saved_by_peft(plain("llama", llama), tmp_path / name, count)
        for name, count in (("peft", 3), ("long", 510), ("heads", 3))
    )
    changed(more_heads / "adapter_config.json", num_attention_heads=4)  # of as many entries
    of_gpt2 = saved_by_peft(tiny_gpt2(700), tmp_path / "of gpt2", 3)
    ours = context_to_peft(trained(llama, steps=0), llama, tmp_path / "ours")
    other = context_to_peft(trained(gpt2, steps=0), gpt2, tmp_path / "gpt2")
    no_bos = replace(batch, begins_with_bos=False)
    bad: list[tuple[type[Exception], str, Path, dict[str, Any]]] = [
        (PromptError, "pass a batch of the prompts", theirs, {}),
        (PromptError, "tokens_after must hold", theirs, {"batch": batch, "tokens_after": [-1]}),
        (PromptError, "are left after 511 positions", long, {"batch": batch}),
        (PromptError, "leave tokens_after out", ours, {"tokens_after": []}),
        (PromptError, "begin with the BOS 1, but these", ours, {"batch": no_bos}),
        (ModelError, "this context was made with", other, {}),
    ]
    for kind, message, folder, options in bad:
        with pytest.raises(kind, match=message), does_not_run(llama):
            context_from_peft(folder, llama, **options)
    for folder, shape in ((of_gpt2, r"\(3, 2, 12\)"), (more_heads, r"\(3, 4, 4\)")):
        with pytest.raises(ModelError, match=rf"{shape}, but .* has \(3, 2, 8\)"):
            context_from_peft(folder, llama, batch)


OTHERS = [LoraConfig("CAUSAL_LM"), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)]


@pytest.mark.parametrize("config", OTHERS)
def test_adapters_of_another_kind_are_refused(llama: Any, tmp_path: Path, config: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        get_peft_model(plain("llama", llama), config).save_pretrained(str(tmp_path))
    with pytest.raises(StoreError, match=f"of the kind {config.peft_type.value} for CAUSAL_LM"):
        context_from_peft(tmp_path, llama, questions(llama, 2)[0])


def test_damaged_files_are_refused(llama: Any, tmp_path: Path) -> None:
    (batch,) = questions(llama, 2)
    theirs = saved_by_peft(plain("llama", llama), tmp_path / "peft", 3)
    ours = context_to_peft(trained(llama, steps=0), llama, tmp_path / "ours")
    with pytest.raises(StoreError, match=r"has no adapter_config\.json; give the local folder"):
        context_from_peft(tmp_path / "no folder", llama, batch)
    with pytest.raises(StoreError, match=r"holds no record and no context.*context_from_peft"):
        al.contexts.StoredContext.load(ours / "adapter_model.safetensors")
    for folder in (theirs, ours):
        config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        good = {path: path.read_bytes() for path in (config, weights)}
        settings = json.loads(good[config])
        of_settings = [
            ({"num_layers": None}, "should hold one tensor"),
            ({"num_virtual_tokens": 9}, "should hold one tensor"),
            ({"token_dim": 8}, "should hold one tensor"),
            ({"task_type": "SEQ_CLS"}, "PREFIX_TUNING for SEQ_CLS"),
        ]
        for path, data, message in (
            (config, b"{", "is no json, or is damaged"),
            (config, b"[" * 100_000, "is no json, or is damaged"),
            (config, b"[1]", "holds no settings"),
            *((config, json.dumps(settings | new).encode(), told) for new, told in of_settings),
            (weights, good[weights][:100], "is no safetensors file, or is damaged"),
        ):
            path.write_bytes(data)
            with pytest.raises(StoreError, match=message):
                context_from_peft(folder, llama, batch)
            path.write_bytes(good[path])
        weights.unlink()
        with pytest.raises(StoreError, match=r"adapter_model\.bin, load and save it in peft"):
            context_from_peft(folder, llama, batch)


def test_changes_of_our_files_are_found(llama: Any, tmp_path: Path) -> None:
    folder = context_to_peft(trained(llama, steps=0), llama, tmp_path / "ours")
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    good, data = config.read_text(), bytearray(weights.read_bytes())
    changed(config, num_attention_heads=4)
    with pytest.raises(StoreError, match="use the two files that one call"):
        context_from_peft(folder, llama)
    config.write_text(good)
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged: its bytes are not those"):
        context_from_peft(folder, llama)
    save_file({"prompt_embeddings": torch.zeros(4, 96), "score.weight": torch.zeros(2, 2)}, weights)
    with pytest.raises(StoreError, match=r"score\.weight"):
        context_from_peft(folder, llama)


def test_settings_of_an_adapter_that_are_not_read_are_named(llama: Any, tmp_path: Path) -> None:
    folder = context_to_peft(of_everything(llama, questions(llama, 2)[0]), llama, tmp_path)
    changed(folder / "adapter_config.json", prefix_scale=2.0, newer=None)
    with pytest.warns(UserWarning, match=r"not read: \{'prefix_scale': 2\.0\}\. If they decide"):
        context_from_peft(folder, llama)


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
    with pytest.raises(StoreError, match=r"a Named, not a SoftPrompt; al"):
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
