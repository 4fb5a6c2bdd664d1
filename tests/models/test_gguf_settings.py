"""Each setting of a .gguf file is read, or refused by its name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models.read_weights import read_tokenizer, read_weights
from tests.references.architectures import BY_NAME
from tests.support.gguf_files import write_gguf

pytestmark = pytest.mark.filterwarnings("error")
VOCABULARY = 3000
SHORT, LONG = [1.0, 1.3, 2.5, 8.0], [2.0, 3.0, 5.0, 9.0]


def rope(**options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | options}


# Heads of Gemma have 256 numbers: no key holds by which number its scores are divided.
GEMMA: dict[str, Any] = {"head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": None}
GEMMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
PART = {"stablelm": 0.25, "nemotron": 0.5}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma 2", GEMMA),
    "gemma3": ("Gemma 3", GEMMA | {"num_hidden_layers": 7}),
    "phi3": ("Phi-3", {}),
    "starcoder2": ("StarCoder2", {"sliding_window": None}),
    "stablelm": ("StableLM", rope(partial_rotary_factor=PART["stablelm"])),
    "nemotron": ("Nemotron", rope(partial_rotary_factor=PART["nemotron"])),
    "gpt2": ("GPT-2", {}),
    "bloom": ("Bloom", {}),
    "falcon": ("Falcon", {}),
    "qwen2moe": ("Qwen2-MoE", {}),
    "qwen3moe": ("Qwen3-MoE", {"norm_topk_prob": True}),
}
ALL = KINDS | {"granite": ("Llama", {})}
Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {name: (name, {}, {}, {}) for name in KINDS}


def case(name: str, of: str, model: Mapping[str, Any] = {}, /, **keys: Any) -> None:
    tensors = {key: keys.pop(key) for key in [*keys] if key.endswith(".weight")}
    CASES[f"{of}: {name}"] = (of, dict(model), keys, tensors)


SCALING = "rope.scaling."
YARN = {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 32}
IN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
for of in ("llama", "qwen2", "qwen3", "gemma2", "starcoder2", "stablelm", "nemotron", "falcon"):
    part = {"partial_rotary_factor": PART[of]} if of in PART else {}
    case("base", of, rope(**part, rope_theta=5e5))
    case("linear", of, rope(**part, rope_type="linear", factor=4.0), **{f"{SCALING}factor": 4.0})
    case("yarn", of, rope(**part, **IN_YARN), **YARN)
case("no scaling", "llama", **{f"{SCALING}type": "none", f"{SCALING}factor": 4.0})
BETAS = {"beta_fast": 16.0, "beta_slow": 2.0}
IN_FILE = {f"{SCALING}yarn_{key}": BETAS[key] for key in BETAS}
case("betas", "qwen3", rope(**IN_YARN, **BETAS), **YARN, **IN_FILE)
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
OF_LLAMA3: Any = BY_NAME["Llama"].build(9, **rope(**LLAMA3)).model
FREQUENCIES = 10000.0 ** (-torch.arange(0, 8, 2) / 8) / OF_LLAMA3.rotary_emb.inv_freq
case("llama3", "llama", rope(**LLAMA3), **{"rope_freqs.weight": FREQUENCIES})
BOTH = ("rope_factors_short.weight", "rope_factors_long.weight")
for limit in (32, 100):
    LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    case(
        f"longrope {limit}",
        "phi3",
        rope(**LONGROPE, attention_factor=1.5) | {"original_max_position_embeddings": limit},
        **{f"{SCALING}original_context_length": limit, f"{SCALING}attn_factor": 1.5},
        **{"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
    )
case("half is rotated", "phi3", rope(partial_rotary_factor=0.5))
case(
    "all is rotated", "stablelm", rope(partial_rotary_factor=1.0), **{"rope.dimension_count": None}
)
case("window", "phi3", {"sliding_window": 12})
case("window", "starcoder2", {"sliding_window": 12}, **{"attention.sliding_window": 12})
case("no biases", "starcoder2", {"use_bias": False})
case("biases", "llama", {"attention_bias": True, "mlp_bias": True})
case("biases", "qwen3", {"attention_bias": True})
case("wide heads", "llama", {"head_dim": 16})
case("tied", "llama", {"tie_word_embeddings": True})
case("tied", "qwen2", {"tie_word_embeddings": True})
case("own head", "bloom", {"tie_word_embeddings": False})
LOCAL = {"rope_type": "default", "rope_theta": 2e4}
FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
case(
    "linear",
    "gemma3",
    {"rope_parameters": {"full_attention": FULL, "sliding_attention": LOCAL}},
    **{f"{SCALING}type": "linear", f"{SCALING}factor": 8.0, "rope.freq_base_swa": 2e4},
)
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
for of in ("gemma2", "gemma3"):
    case("caps", of, CAPS)
    case("no caps", of, dict.fromkeys(CAPS), **dict.fromkeys(CAPS, 0.0))
USUAL = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
case("caps in no key", "gemma2", USUAL, **dict.fromkeys(CAPS))
SLIDE, WHOLE = "sliding_attention", "full_attention"
PATTERN = "attention.sliding_window_pattern"
case("layers", "gemma2", {"layer_types": [WHOLE, SLIDE, WHOLE]}, **{PATTERN: [False, True, False]})
case("period", "gemma3", {"layer_types": [SLIDE, WHOLE] * 3 + [SLIDE]}, **{PATTERN: 2})
case("27B", "gemma2", {"num_hidden_layers": 46, "head_dim": 8, "query_pre_attn_scalar": 16})
PARALLEL = {"use_parallel_residual": True}
case("parallel, biases", "stablelm", PARALLEL | {"use_qkv_bias": True}, **PARALLEL)
for of, field in (
    *(("llama", "rms_norm_eps"), ("falcon", "layer_norm_epsilon"), ("nemotron", "norm_eps")),
    *(("stablelm", "layer_norm_eps"), ("starcoder2", "norm_epsilon")),
    ("gpt2", "layer_norm_epsilon"),
):
    case("epsilon", of, {field: 0.05})
case("width", "gpt2", {"n_inner": 48}, feed_forward_length=48)
case(
    "keys that change nothing",
    "llama",
    **{"expert_count": 0, "attention.sliding_window": 128, "rope.scaling.yarn_ext_factor": 0.0},
    **{f"{SCALING}finetuned": False, "quantize.imatrix.file": "a"},
    **{"attention.value_length": 8, "general.name": "mistral", "tensor_data_layout": "Meta AI"},
)


def build(of: str, **changes: Any) -> Any:
    name, options = ALL[of]
    return BY_NAME[name].build(VOCABULARY, **options | changes)


@pytest.mark.slow_cases("whole models", ": base", ": epsilon", ": linear", ": yarn", "27B")
@pytest.mark.parametrize("name", CASES)
def test_a_setting_gives_the_logits_of_the_model_that_was_written(
    name: str, tmp_path: Path, byte_level: Any
) -> None:
    of, changes, keys, tensors = CASES[name]
    weights = build(of, **changes)
    path = write_gguf(tmp_path / "a.gguf", weights, byte_level, of, keys, tensors)
    read, _ = read_weights(str(path), byte_level, "cpu", None)
    tokens = torch.randint(VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = weights(tokens).logits
        difference = (read(tokens).logits - logits).abs().max() / logits.abs().max()
    assert difference <= 1e-6


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("llama", {key: value}, rf"a\.gguf says {key} = {value}, which is not read, .* give the tr")
        for key, value in {
            "rope.dimension_count": 4,
            "rope.freq_base_swa": 5.0,
            "rope.scale_linear": 4.0,
            "rope.scaling.type": "dynamic",
            "rope.scaling.attn_factor": 2.0,
            "rope.scaling.yarn_attn_factor": 2.0,
            "rope.scaling.yarn_log_multiplier": 2.0,
            "attention.sliding_window": 12,
            "attention.scale": 0.5,
            "attention.value_length": 16,
            "attention.causal": False,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 3.0,
            "embedding_scale": 2.0,
            "residual_scale": 2.0,
            "logit_scale": 2.0,
            "expert_count": 4,
            "new.key": 0,
            "other.key": 0,
        }.items()
    ),
    ("llama", {"attention.head_count_kv": [2, 1, 2]}, r"head_count_kv = \[2, 1, 2\]"),
    ("llama", {"attention.head_count": [4, 4, 2]}, "needs one number for .*attention.head_count"),
    ("qwen3", {"attention.layer_norm_rms_epsilon": None}, "needs one number .*rms_epsilon: give"),
    ("gemma3", {"attention.sliding_window": None}, "needs one number .*sliding_window: give"),
    ("phi3", YARN, "rope.scaling.factor = 4.0, .*, rope.scaling.type = yarn"),
    ("phi3", {"rope.scaling.factor": 4.0}, "says rope.scaling.factor = 4.0, which"),
    ("qwen2", YARN | {"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor = 2.0"),
    ("qwen2", YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
    ("gpt2", {"rope.freq_base": 5.0}, "says rope.freq_base = 5.0"),
    ("falcon", {"attention.head_count_kv": 4}, "says attention.head_count_kv = 4"),
    ("llama", {"general.type": "adapter"}, r"\(a .gguf adapter of the architecture llama\) is not"),
    ("gemma2", {"attention.key_length": 8}, r"key_length \(and no scale of the scores\) = 8"),
    ("llama", {"split.count": 3}, "one part of a model that is split into 3 files: join them"),
    ("llama", {"rope_freqs.weight": [1.0, 2.0]}, r"says rope_freqs.weight = \[1.0, 2.0\], which"),
    ("qwen2", {"rope_freqs.weight": SHORT}, r"says rope_freqs.weight = \[1.0, 1.29"),
    ("phi3", {"rope_factors_short.weight": SHORT}, "says rope_factors_short.weight"),
    ("phi3", {key: SHORT for key in BOTH}, "says rope_factors_long.weight"),  # no attn_factor
    ("granite", {}, r"\(a .gguf model of the architecture granite\) is not read: .*llama"),
    ("llama", {"blk.0.attn_q_norm.weight": [1.0] * 8}, "says the tensor blk.0.attn_q_norm.weight"),
    ("llama", {"blk.7.attn_norm.weight": [1.0] * 8}, "says the tensor blk.7.attn_norm.weight"),
    ("qwen2", {"blk.0.attn_output.bias": [1.0] * 32}, "says the tensor blk.0.attn_output.bias"),
    ("llama", {"blk.0.attn_q.bias": [1.0] * 32}, r"\d+ tensors \(model.*bias .*are missing"),
]


@pytest.mark.parametrize(("of", "keys", "message"), REFUSED, ids=str)
def test_a_setting_that_is_not_read_is_refused_by_its_name(
    of: str, keys: dict[str, Any], message: str, tmp_path: Path, byte_level: Any
) -> None:
    tensors = {key: keys[key] for key in keys if key.endswith((".weight", ".bias"))}
    rest = {key: keys[key] for key in keys if key not in tensors}
    path = write_gguf(tmp_path / "a.gguf", build(of), byte_level, of, rest, tensors)
    with pytest.raises(ModelError, match=message):
        read_weights(str(path), byte_level, "cpu", None)


# What a text begins with, what an entry that no merges reach becomes, and "12" after a blank.
BOS, ALONE = ["<|endoftext|>"], ["Ġ", "1", "2"]
TOKENS: list[tuple[dict[str, Any], list[str], bool]] = [
    *(({"pre": pre}, BOS, True) for pre in ("llama-bpe", "llama3", "tekken", "pixtral", "falcon3")),
    ({"pre": "llama-bpe", "add_bos_token": False}, [], True),
    ({"pre": "gpt-2"}, [], False),
    ({"pre": "gpt-2", "add_bos_token": True}, BOS, False),
    ({"pre": "qwen2"}, [], False),
    ({"pre": "smollm"}, [], False),
    ({"pre": "command-r", "add_space_prefix": False}, [], False),
]


def write_tokenizer(path: Path, tokenizer: Any, keys: dict[str, Any], more: list[str]) -> Path:
    vocabulary = {"tokens": [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), *more]}
    in_file = {f"tokenizer.ggml.{key}": value for key, value in (vocabulary | keys).items()}
    return write_gguf(path, build("llama"), tokenizer, "llama", in_file)


@pytest.mark.parametrize(("keys", "start", "is_whole"), TOKENS, ids=str)
def test_texts_become_the_tokens_of_llama_cpp(
    keys: dict[str, Any], start: list[str], is_whole: bool, tmp_path: Path, byte_level: Any
) -> None:
    path = write_tokenizer(tmp_path / "a.gguf", byte_level, keys, ["Ġzqjxv"])
    tokenizer = read_tokenizer(path)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("Review: 12")["input_ids"])
    assert tokens[: len(start)] == start and (tokens[0] == BOS[0]) == bool(start)
    assert (tokenizer.tokenize(" zqjxv") == ["Ġzqjxv"]) == is_whole
    if keys["pre"] in ("smollm", "command-r"):
        assert tokens[-3:] == ALONE


@pytest.mark.parametrize("prefix", [True, False, None])
def test_sentencepiece_has_a_blank_before_a_text_unless_the_file_says_otherwise(
    prefix: bool | None, tmp_path: Path, byte_level: Any
) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"]
    keys: dict[str, Any] = {"model": "llama", "pre": "default", "tokens": tokens}
    keys |= {"scores": [-float(i) for i in range(8)]}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "merges": None, "add_space_prefix": prefix}
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "a.gguf", byte_level, keys, []))
    assert tokenizer.tokenize("ab") == (["ab"] if prefix is False else ["▁ab"])
    assert tokenizer("ab")["input_ids"][0] == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre = 'deepseek-llm'\. Give .*\(tokenizer="),
        ({"pre": "llama-bpe", "bos_token_id": None}, "no tokenizer.ggml.bos_token_id. Give"),
        ({"add_sep_token": True}, "not read, so .*: tokenizer.ggml.add_sep_token. Give the tok"),
        ({"normalizer.lowercase": True}, "tokenizer.ggml.normalizer.lowercase"),
    ],
)
def test_settings_of_a_tokenizer_that_are_not_read_are_refused(
    keys: dict[str, Any], message: str, tmp_path: Path, byte_level: Any
) -> None:
    path = write_tokenizer(tmp_path / "a.gguf", byte_level, keys, [])
    with pytest.raises(ModelError, match=message):
        read_weights(str(path), None, "cpu", None)
    read_weights(str(path), byte_level, "cpu", None)  # as the error says


def test_a_file_that_does_not_say_how_to_cut_texts_gives_a_warning(
    tmp_path: Path, byte_level: Any
) -> None:
    path = write_tokenizer(tmp_path / "a.gguf", byte_level, {"pre": None}, [])
    with pytest.warns(UserWarning, match=r"cuts texts .* as in GPT-2.* give a tokenizer"):
        tokenizer = read_tokenizer(path)
    assert tokenizer("Review: a")["input_ids"] == byte_level("Review: a")["input_ids"]


def test_a_part_of_a_split_file_says_how_to_join_the_parts(tmp_path: Path, byte_level: Any) -> None:
    for part in (1, 2):
        name = f"a-0000{part}-of-00002.gguf"
        write_gguf(tmp_path / name, build("qwen2"), byte_level, keys={"split.count": 2})
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(ModelError, match=r"part of .* split into 2 files: join .*--merge"):
            al.load_model(source)
