"""What a .gguf file says besides its weights: each setting is read, or refused by its name.

The keys are llama.cpp's, and mean what it computes. transformers reads the sizes, skips all other
keys and each tensor that it does not know, and silently takes the settings of its own class.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from threading import RLock
from typing import Any

import numpy as np

from ..errors import ModelError
from ..system.put_back import replaced, safe_context
from ..system.warn import warn_user

_CURE = "give the transformers model that it was made of (its name on the hub, or its folder)"
_NOT_READ = (
    "{} says {}, which is not read, so that all numbers would be those of another model: " + _CURE
)
# The architectures that are read.
_READ = (
    *("bloom", "falcon", "gemma2", "gemma3", "gpt2", "llama", "nemotron", "phi3", "qwen2"),
    *("qwen2moe", "qwen3", "qwen3moe", "stablelm", "starcoder2"),
)
_GEMMA = {"gemma2": (2, 46), "gemma3": (6, 62)}  # each such layer is full; the layers of 27B

# Keys after the architecture, and the names of their field, of which a class has one or none.
_NEEDED = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon layer_norm_eps norm_epsilon norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_FIELDS = _NEEDED | {  # these may be absent
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "feed_forward_length": "intermediate_size n_inner ffn_hidden_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_WINDOW = "attention.sliding_window"
_SCALING = (  # keys of rope.scaling
    *("type", "factor", "original_context_length", "attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor"),
)
# Fields that say whether there are such tensors.
_BIASES = {
    "attention_bias bias qkv_bias use_bias use_qkv_bias": r"\.attn_(q|k|v|qkv|output)\.bias",
    "mlp_bias": r"\.ffn_(up|gate|down)\.bias",
}
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_NO_NUMBERS = re.compile(
    r"(GGUF|general|mradermacher|quantize|split|tokenizer)\..*"
    # llama.cpp looks for the norm that a parallel residual stream does not have.
    r"|\w+\.(rope\.scaling\.finetuned|tensor_data_layout)|stablelm\.use_parallel_residual"
)
# tokenizer.ggml.pre: words as in GPT-2; so, with each digit alone; and those that llama.cpp begins
# with BOS, and of which a word that is an entry of the vocabulary stays whole.
_AS_GPT2 = re.compile(
    r"gpt-2|phi-2|jina(-v2)?-(es|de)|gigachat|a\.x-4\.0|mellum|modern-bert|mpt|olmo|jais|trillion"
    r"|granite-docling|exaone4"
)
_DIGITS_ALONE = re.compile(r"starcoder|refact|command-r|smollm|codeshell|exaone|minerva-7b|mellum2")
_BOS_AND_WHOLE = re.compile(
    r"llama3|llama-v3|llama-bpe|falcon3|falcon-h1|pixtral|midm-2\.0|lfm2|jina-v5-nano|tekken"
)
_READ_OF_TOKENIZER = re.compile(
    r"tokenizer\.(ggml\.(model|pre|tokens|token_type|scores|merges|add_(bos|eos)_token|\w+_token_id"
    r"|add_space_prefix)|chat_template(s|\..+)?|huggingface\.json)"
)
_lock = RLock()  # the class that is replaced belongs to the process, so that a second thread waits


@safe_context
def parsed_once(name: str) -> Iterator[None]:
    """Inside, all readers of a .gguf file are one, and all tables of its names for tensors.

    transformers makes several readers, and a table for each module: most of the time.
    """
    if not name.endswith(".gguf"):
        yield
        return
    import gguf

    with _lock:

        class Reader(gguf.GGUFReader):
            # Slices of a plain array take half as long as those of a memmap.
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        reader = vars(gguf), "GGUFReader", functools.cache(Reader)
        table = vars(gguf), "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)
        with replaced(reader, table):
            yield


def refuse_part(file: str, count: int) -> None:
    if count > 1:
        raise ModelError(
            f"{file} is one part of a model that is split into {count} files: join them (the tool "
            "of llama.cpp: llama-gguf-split --merge FIRST-PART WHOLE.gguf) and give the whole file"
        )


def gguf_config(file: str) -> Any:
    """The configuration of transformers that says what a .gguf file says."""
    from transformers import CONFIG_MAPPING

    reader, value = _opened(file)
    refuse_part(file, value("split.count", 1))
    name, of = value("general.architecture"), value("general.type", "model")
    if name not in _READ or of != "model":
        raise ModelError(
            f"{file} (a .gguf {of} of the architecture {name}) is not read: al.load_model reads "
            f"models of {', '.join(_READ)} from such files. Instead {_CURE}"
        )
    kind = CONFIG_MAPPING["gemma3_text" if name == "gemma3" else name.replace("moe", "_moe")]
    known = {*kind().to_dict(), *kind.attribute_map}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    # What is read is taken out of these, so that what stays is refused.
    left = {key: value(key) for key in reader.fields if not _NO_NUMBERS.fullmatch(key)}
    left = {key.removeprefix(f"{name}."): each for key, each in left.items()}
    left |= {key: tensors[key].tolist() for key in _FACTORS if key in tensors}
    needed = {key for key, fields in _NEEDED.items() if known.intersection(fields.split())}
    needed |= {"context_length", *([_WINDOW] if name == "gemma3" else [])}
    if lacking := [key for key in sorted(needed) if not isinstance(left.get(key), int | float)]:
        raise ModelError(f"{file} needs one number for each of {', '.join(lacking)}: {_CURE}")
    context = left["context_length"]
    options = _sizes(name, left, known, len(tensors.get("token_embd.weight", ())))
    size = options.get("head_dim", options["hidden_size"] // options["num_attention_heads"])
    if left.get("attention.value_length") == size:
        del left["attention.value_length"]
    if name in _GEMMA:
        _set_gemma(name, left, options, size)
    window = left.get(_WINDOW, 0)
    if name in ("phi3", "starcoder2") or (name in _GEMMA and window):
        options["sliding_window"] = window or None
    if "sliding_window" in options or (name not in _GEMMA and window in (0, context)):
        left.pop(_WINDOW, None)
    if "rope_parameters" in known:
        _set_rotations(name, left, options, size, context)
    for fields, tensor in _BIASES.items():
        there = any(re.search(tensor, each) for each in tensors)
        options |= dict.fromkeys(known.intersection(fields.split()), there)
    options["tie_word_embeddings"] = "output.weight" not in tensors
    if name == "stablelm":
        options["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    if name == "qwen3moe":
        options["norm_topk_prob"] = True
    if left:
        said = ", ".join(f"{key} = {left[key]!s:.40}" for key in sorted(left))
        raise ModelError(_NOT_READ.format(file, said))
    for token in ("bos", "eos", "padding"):
        options[f"{token[:3]}_token_id"] = value(f"tokenizer.ggml.{token}_token_id")
    return kind(**{kind.attribute_map.get(key, key): each for key, each in options.items()})


def _sizes(name: str, left: dict[str, Any], known: set[str], rows: int) -> dict[str, Any]:
    heads, hidden = left["attention.head_count"], left["embedding_length"]
    # As in llama.cpp. A class without the field computes with the same.
    default: dict[str, Any] = dict.fromkeys(_FIELDS, 0) | {
        "context_length": left["context_length"],
        "vocab_size": rows,
        "feed_forward_length": 4 * hidden,
        "attention.head_count_kv": 1 if name == "falcon" else heads,
        "attention.key_length": hidden // heads,
    }
    if name == "gemma2":
        default |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    options = {}
    for key, fields in _FIELDS.items():
        value = left.get(key, default[key])
        field = next((each for each in fields.split() if each in known), None)
        if isinstance(value, list) or (field is None and value != default[key]):
            continue
        if field is not None:
            options[field] = (value or None) if key.endswith("softcapping") else value
        left.pop(key, None)
    return options


def _set_gemma(name: str, left: dict[str, Any], options: dict[str, Any], size: int) -> None:
    """Set the layers with a window, and the number whose square root divides the scores."""
    (period, largest), layers = _GEMMA[name], options["num_hidden_layers"]
    pattern = left.pop("attention.sliding_window_pattern", period)
    if not isinstance(pattern, list):
        pattern = [not pattern or layer % pattern < pattern - 1 for layer in range(layers)]
    options["layer_types"] = [f"{'sliding' if each else 'full'}_attention" for each in pattern]
    if layers == largest:
        size = options["hidden_size"] // options["num_attention_heads"]
    elif size != 256:  # no key has it, and llama.cpp takes another one than transformers
        left["attention.key_length (and no scale of the scores)"] = size
    options["query_pre_attn_scalar"] = size


def _set_rotations(
    name: str, left: dict[str, Any], options: dict[str, Any], size: int, context: int
) -> None:
    rope = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base", 10000.0)}
    rotated = left.get("rope.dimension_count", size)
    if name in ("nemotron", "phi3", "stablelm"):
        # The class rounds size * factor down.
        rope["partial_rotary_factor"] = math.nextafter(rotated / size, 1)
    if rotated == size or "partial_rotary_factor" in rope:
        left.pop("rope.dimension_count", None)
    scaling = {key: left.pop(f"rope.scaling.{key}", None) for key in _SCALING}
    kind, factor, original, attention, fast, slow, mix = scaling.values()
    kind, factor = kind or "linear", factor or 1.0
    scales = kind == "yarn" or (kind == "linear" and factor != 1)
    is_read = kind in ("linear", "none", "yarn") and attention in (None, 1)
    is_read &= not (scales and name == "phi3")
    lists = [key for key in _FACTORS if key in left]
    if lists in ([*_FACTORS[:1]], [*_FACTORS[1:]]) and kind in ("linear", "none", "longrope"):
        # Of all kinds in transformers, only this one has a factor for each frequency.
        short, long = left[lists[0]], left[lists[-1]]
        is_read = not scales and 2 * len(short) == 2 * len(long) == rotated
        if len(lists) == 1:
            original, attention = context, attention or 1.0
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["attention_factor"] = attention
        if name in ("llama", "phi3") and is_read and original and attention:
            for key in lists:
                del left[key]
    elif scales:
        rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope |= {"beta_fast": fast, "beta_slow": slow}
    if rope["rope_type"] in ("longrope", "yarn"):
        rope["original_max_position_embeddings"] = original or context
    if name == "phi3":
        options["original_max_position_embeddings"] = original or context
    if not is_read or mix not in (None, int(kind == "yarn")):
        left |= {f"rope.scaling.{key}": scaling[key] for key in scaling if scaling[key] is not None}
    options["rope_parameters"] = rope
    if name == "gemma3":
        local = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base_swa", 10000.0)}
        options["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}


def refuse_unread(file: str, weights: Any) -> None:
    from transformers import modeling_gguf_pytorch_utils as of_gguf

    reader, value = _opened(file)
    kind = of_gguf.TENSOR_PROCESSORS.get(value("general.architecture"), of_gguf.TensorProcessor)
    read = {*of_gguf.get_gguf_hf_weights_map(weights, kind()), *_FACTORS}
    stored = [tensor.name for tensor in reader.tensors]
    # Experts are one parameter, whose name has no ending.
    if unread := [name for name in stored if not {name, name.removesuffix(".weight")} & read]:
        count = f"{len(unread)} tensors, " if len(unread) > 1 else "the tensor "
        raise ModelError(_NOT_READ.format(file, count + ", ".join(unread[:3])))


def set_tokenizer(tokenizer: Any, file: str) -> None:
    from tokenizers import pre_tokenizers

    reader, value = _opened(file)
    backend = tokenizer.backend_tokenizer
    unread = [key for key in reader.fields if not _READ_OF_TOKENIZER.fullmatch(key)]
    refused = [key for key in unread if key.startswith("tokenizer.") and value(key)]
    pre, kind = value("tokenizer.ggml.pre", "default"), value("tokenizer.ggml.model")
    if kind != "gpt2":  # texts are not cut into words
        cut, blank = backend.pre_tokenizer, value("tokenizer.ggml.add_space_prefix", True)
        if isinstance(cut, pre_tokenizers.Metaspace):
            cut.prepend_scheme = "first" if blank else "never"
        elif kind == "llama" and blank != ("Prepend" in str(backend.normalizer)):
            refused.append(f"tokenizer.ggml.add_space_prefix = {blank}")
    elif pre == "default":
        warn_user(
            f"{file} does not say how its tokenizer cuts texts into words (tokenizer.ggml.pre), so "
            "that they are cut as in GPT-2. If that is wrong, give a tokenizer (tokenizer=...)"
        )
    elif _DIGITS_ALONE.fullmatch(pre):
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif not _AS_GPT2.fullmatch(pre) and "Split" not in str(backend.pre_tokenizer):
        refused.append(f"tokenizer.ggml.pre = {pre!r}")
    begins = bool(_BOS_AND_WHOLE.fullmatch(pre)) and value("tokenizer.ggml.add_bos_token", True)
    if begins and tokenizer.bos_token is None:
        refused.append("no tokenizer.ggml.bos_token_id")
    if refused:
        raise ModelError(
            f"{file} has settings of its tokenizer that are not read, so that it would give other "
            f"tokens: {', '.join(refused)}. Give the tokenizer of the model (tokenizer=...)"
        )
    if _BOS_AND_WHOLE.fullmatch(pre):
        backend.model.ignore_merges, tokenizer.add_bos_token = True, begins


def _opened(file: str) -> tuple[Any, Callable[..., Any]]:
    """The reader of a .gguf file (``parsed_once`` makes it one), and the value of a key."""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = reader.fields
    return reader, lambda key, default=None: fields[key].contents() if key in fields else default
