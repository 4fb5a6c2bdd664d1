"""Tiny, seeded models and tokenizers, which every test can make without a download."""

from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformer_lens.model_bridge import TransformerBridge
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import anchorlens as al
from tests.support.hooked_transformers import hooked_transformer, with_its_bos

# Label words of several tokens.
LONG_LABELS = al.Task("In: {text}\nOut:{label}", labels=(" Table", " Window"))

OF_THE_PAPER = [al.TASKS[name] for name in ("sst2", "trec", "agnews", "emo")]
TEXTS = [
    *(example.text for name in ("sentiment", "questions") for example in al.load_examples(name)),
    *(task.template for task in OF_THE_PAPER),
] + [f"Answer{word}" for task in OF_THE_PAPER for word in task.labels for _ in range(20)]


def byte_level_tokenizer(size: int = 3000) -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's: byte-level BPE whose offsets trim spaces, without a BOS.

    With more tokens prompts are shorter, and what runs many of them is quicker.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def sentencepiece_like_tokenizer(size: int = 3000) -> PreTrainedTokenizerFast:
    """A tokenizer like those of Gemma and Llama: spaces are symbols, with bytes and a BOS."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", core.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    )


def randomize(model: torch.nn.Module, seed: int = 0, scale: float = 0.25) -> torch.nn.Module:
    """Draw every parameter again, because the zeros and ones of a new model hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_scale = parameter.ndim == 1 or "norm" in name
            is_norm_scale = is_scale and not name.endswith("bias")
            parameter.copy_(noise * scale + (1.0 if is_norm_scale else 0.0))
    return model.eval()


def with_dropout(model: Any, share: float) -> Any:
    """The model with dropout wherever it or its configuration has one, as in training."""
    for part in (model.config, *model.modules()):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, share)
        if isinstance(part, torch.nn.Dropout):
            part.p = share
    return model


def tiny_gpt2(vocab_size: int, **changes: Any) -> GPT2LMHeadModel:
    """A model with learned positions and value biases."""
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 24, "n_positions": 512} | changes
    options = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) | sizes
    config = GPT2Config(vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **options)
    # With this seed it answers several words to different questions.
    return randomize(GPT2LMHeadModel(config), seed=76)


def tiny_llama(vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    """A model with rotary positions and two query heads for each key head."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        **{"num_hidden_layers": 3} | changes,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return randomize(LlamaForCausalLM(config))


def tiny_gemma3(vocab_size: int) -> Gemma3ForCausalLM:
    """A model with query and key norms, sliding and full layers, and one key head."""
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=512,
    )
    return randomize(Gemma3ForCausalLM(config))


def boot(weights: Any, tokenizer: Any) -> Any:
    """A bridge as users make it, not prepared."""
    weights.config.architectures = [type(weights).__name__]
    with torch.random.fork_rng(devices=[]):  # new layers draw weights that are not used
        return TransformerBridge.boot_transformers(
            "tiny", hf_model=weights, tokenizer=with_its_bos(tokenizer)
        )


def raw_model(kind: str, weights: Any, tokenizer: Any, fold: bool = False) -> Any:
    """An unprepared model of a kind (--kind). Folding the value biases processes a bridge."""
    if kind == "hooked-transformer":
        return hooked_transformer(weights, tokenizer, fold_value_biases=fold)
    bridge = boot(weights, tokenizer)
    if kind == "processed" or fold:
        bridge.enable_compatibility_mode(disable_warnings=True, fold_value_biases=fold)
    return bridge


def hooked_model(kind: str, weights: Any, tokenizer: Any) -> Any:
    """A prepared model of a kind; a bridge as al.load_model gives it."""
    if kind == "bridge":
        return al.load_model(weights, tokenizer=tokenizer)
    return al.prepare_model(raw_model(kind, weights, tokenizer))


def questions(model: Any, count: int = 12, seed: int = 1, **options: Any) -> list[al.PromptBatch]:
    """Prompts of the bundled questions with one demonstration of each class."""
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=seed)
    queries = [example for example in examples if example not in demos][:count]
    return al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries, **options)
