"""Settings that nothing reads are named; configurations that were published are not refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import anchorlens as al
from anchorlens.models.read_weights import check_settings
from tests.support.tiny_models import tiny_llama

LLAMA3: dict[str, Any] = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "rope_type": "llama3",
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "_name_or_path": "a/b",
    "auto_map": {"AutoConfig": "own.Config"},
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 32}  # of newer classes
OLDER = ("gpt2", "gptj", "gpt_neox", "bloom", "opt", "llava")
GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 100,
}
# What published files have beside sizes.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": (
        "gpt2",
        GPT2
        | {"n_ctx": 64, "summary_type": "cls_index"}
        | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    ),
    "GPT-J": ("gptj", GPT2 | {"rotary_dim": 4, "rotary": True, "tokenizer_class": "GPT2Tokenizer"}),
    "Pythia": ("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
    "BLOOM": (
        "bloom",
        {"n_inner": None, "bias_dropout_fusion": True, "masked_softmax_fusion": True}
        | {"offset_alibi": 100, "pretraining_tp": 1, "skip_bias_add_qkv": False}
        | {"seq_length": 2048},
    ),
    "OPT": (
        "opt",
        {"prefix": "</s>", "ffn_dim": 32, "word_embed_proj_dim": 32, "activation_dropout": 0.0},
    ),
    "Llama 2": ("llama", {"max_sequence_length": 2048, "rope_scaling": None}),
    "Llama 3.2": (
        "llama",
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}}
        | {"rope_theta": 500000.0, "unsloth_fixed": True},
    ),
    "SmolLM": (
        "llama",
        {"is_llama_config": True, "rope_interleaved": False}
        | {"transformers.js_config": {"dtype": "q4"}},
    ),
    "Qwen 2.5": ("qwen2", {"max_window_layers": 21, "sliding_window": 32768, "use_mrope": False}),
    "Gemma 2": (
        "gemma2",
        {"attn_logit_softcapping": 50.0, "cache_implementation": "hybrid"}
        | {"sliding_window": 4096, "sliding_window_size": 4096},
    ),
    "Gemma 3": (
        "gemma3_text",
        {"_sliding_window_pattern": 6, "layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_local_base_freq": 10000.0, "rope_theta": 1000000.0},
    ),
    "Phi-4-mini": (
        "phi3",
        {"full_attn_mod": 1, "lm_head_bias": False, "partial_rotary_factor": 0.75},
    ),
    "Granite": ("granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.02}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "LLaVA": (
        "llava",
        {"ignore_index": -100, "image_token_index": 99}
        | {"text_config": {"model_type": "llama", "alibi": True, **SIZES}}
        | {"vision_config": {"model_type": "clip_vision_model", "projection_dim": 16}},
    ),
    # Files of no published model: settings of another class.
    "caps in a Llama": ("llama", {"attn_logit_softcapping": 50.0}),
    "windows in a Llama": ("llama", {"sliding_window": 16}),
    "rotations in GPT-2": ("gpt2", GPT2 | {"rope_scaling": LINEAR}),
    "both in GPT-2": ("gpt2", GPT2 | {"rope_scaling": LINEAR, "rope_theta": 1e4}),
}
# What transformers 5 does not read.
UNREAD = {
    "GPT-J": {"rotary"},
    "BLOOM": {"offset_alibi"},
    "Gemma 2": {"sliding_window_size"},
    "Phi-4-mini": {"full_attn_mod"},
    "DeepSeek-V3": {"moe_layer_freq", "scoring_func", "topk_method"},
    "LLaVA": {"text_config.alibi"},
    "caps in a Llama": {"attn_logit_softcapping"},
    "windows in a Llama": {"sliding_window"},
    "rotations in GPT-2": {"rope_scaling"},
    "both in GPT-2": {"rope_scaling", "rope_theta"},
}
MISSPELT = [
    ("num_key_value_head", 1, "num_key_value_heads"),
    ("rope_scalling", LINEAR, "rope_scaling"),
    ("rms_norm_ep", 1e-3, "rms_norm_eps"),
    ("tie_word_embedding", False, "tie_word_embeddings"),
    ("head_dims", 8, "head_dim"),
]


def check(folder: Path, kind: str, more: dict[str, Any]) -> None:
    grouped = {} if kind in OLDER else GROUPED
    stored = {"model_type": kind, "architectures": ["Model"], **SIZES, **grouped, **more}
    (folder / "config.json").write_text(json.dumps(stored))
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if kind == "llava" else AutoModelForCausalLM
    with torch.device("meta"):
        weights = auto.from_config(config)
    check_settings("it", weights, stored)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", FILES)
def test_settings_that_nothing_reads_are_named(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (kind, more), unread = FILES[name], UNREAD.get(name, set())
    if unread:
        with pytest.warns(UserWarning, match="does not read: ") as recorded:
            check(tmp_path, kind, more)
        text = str(recorded[-1].message).partition("does not read: ")[2]
        assert {each.partition("=")[0] for each in text.partition(". If")[0].split(", ")} >= unread
        assert text.count("=") == len(unread)
    else:
        check(tmp_path, kind, more)
        assert not [each for each in recwarn if "does not read" in str(each.message)]


@pytest.mark.parametrize(("key", "value", "meant"), MISSPELT)
def test_misspelt_settings_are_refused(key: str, value: Any, meant: str, tmp_path: Path) -> None:
    with pytest.raises(al.errors.ModelError, match=rf"misspelt: {key} \(for {meant}\)\. Correct"):
        without = {name: each for name, each in (SIZES | GROUPED).items() if name != meant}
        stored = {"model_type": "llama", **without, key: value}
        weights = AutoModelForCausalLM.from_config(AutoConfig.for_model(**stored))
        check_settings("it", weights, stored)


def test_a_folder_is_asked_when_it_is_loaded(tmp_path: Path, byte_level: Any) -> None:
    tiny_llama(len(byte_level)).save_pretrained(tmp_path)
    byte_level.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"attention_multiplier": 0.1}))
    with pytest.warns(UserWarning, match=r"does not read: attention_multiplier=0\.1\. If they"):
        al.load_model(tmp_path, device="cpu")
    path.write_text(json.dumps(stored | {"attention_biass": True}))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(al.errors.ModelError, match="a model and an adapter of peft"):
        al.load_model(tmp_path, device="cpu")
