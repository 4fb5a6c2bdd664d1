"""What must be equal for stored numbers to be those of a run: the model, the prompts, the rest."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..prompts.batch import PromptBatch
from ..system.checksum import digest_of

PACKAGES = ("anchorlens", "transformer-lens", "transformers", "tokenizers", "torch", "scipy")

# Where an object without a repr of its own lies in memory says nothing about what it is.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Of a configuration, where it comes from and goes to; the rest decides the numbers.
_ELSEWHERE = ("_name_or_path", "transformers_version", "device", "dtype", "torch_dtype", "seed")


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    return {package: version(package) for package in PACKAGES}


def fingerprint(
    model: Any, batches: Sequence[PromptBatch], settings: Mapping[str, str]
) -> dict[str, str]:
    """What must be equal for stored rows to be those of this run.

    Hooks are functions and cannot be told apart by what they say, so that a resumed run also
    computes the first batch that is stored (see ``collect``).
    """
    prompts = hashlib.sha256()
    for batch in batches:
        for name, value in vars(batch).items():
            if isinstance(value, Tensor):
                prompts.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                prompts.update(value.cpu().numpy().tobytes())
            else:
                prompts.update(f"{name} {value!r}".encode())
    parameters = list(model.parameters())
    return {
        **identity(model),
        "attention": _attention(model),
        "dtype": ", ".join(sorted({str(weights.dtype) for weights in parameters})),
        "device": ", ".join(sorted({weights.device.type for weights in parameters})),
        "precision": _precision({weights.device.type for weights in parameters}),
        "prompts": prompts.hexdigest(),
        **{name: _ADDRESS.sub("", value) for name, value in settings.items()},
        **versions(),
    }


def identity(model: Any) -> dict[str, str]:
    """What tells one model from another: name, configuration, every weight and every buffer."""
    # None in a HookedTransformer and other models that TransformerLens makes itself.
    original = getattr(getattr(model, "original_model", None), "config", None)
    config = vars(model.cfg) if original is None else original.to_dict()
    deciding = {name: value for name, value in config.items() if name not in _ELSEWHERE}
    return {
        "model": str(model.cfg.model_name),
        "configuration": hashlib.sha256(
            _ADDRESS.sub("", json.dumps(deciding, sort_keys=True, default=str)).encode()
        ).hexdigest(),
        "weights": digest_of(_contents(model)),
    }


def tokenizer_identity(tokenizer: Any) -> str:
    """A digest of all by which a tokenizer turns a text into a prompt."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call leaves its own options there, and every call sets them anew.
    rules = {name: backend[name] for name in backend if name not in ("truncation", "padding")}
    options = {
        name: str(getattr(tokenizer, name, None))
        for name in ("special_tokens_map", "model_max_length", "pad_token_id", "padding_side")
    }
    everything = json.dumps([type(tokenizer).__name__, options, rules], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()


def _contents(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight and buffer, each once, of the hooked model and of the one inside it.

    A bridge does not register all modules of the transformers model that it holds.
    """
    counted: set[int] = set()
    original = getattr(model, "original_model", None)
    for root in (model,) if original is None else (model, original):
        for path, module in root.named_modules():
            held = chain(
                module.named_parameters(path, recurse=False),
                module.named_buffers(path, recurse=False),
            )
            for name, tensor in held:
                if id(tensor) in counted or _follows_the_prompts(module, name):
                    continue
                counted.add(id(tensor))
                yield name, tensor
                yield from _beside(name, tensor)


def _follows_the_prompts(module: Any, name: str) -> bool:
    """Whether each pass writes the buffer anew, after the length of its prompts.

    So that it says what ran last, and not what the model is. What it is made from is in another
    buffer (``original_inv_freq``) and in the configuration.
    """
    kinds = str(getattr(module, "rope_type", ""))
    changing = "longrope" in kinds or "dynamic" in kinds
    return changing and name.endswith("inv_freq") and not name.endswith("original_inv_freq")


def _beside(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Scales that bitsandbytes holds as attributes of a quantised weight."""
    state = getattr(tensor, "quant_state", None)
    scales = {} if state is None else state.as_dict(packed=True)
    for key, value in {**scales, "SCB": getattr(tensor, "SCB", None)}.items():
        if isinstance(value, Tensor):
            yield f"{name}.{key}", value


def _attention(model: Any) -> str:
    """The implementation of attention: eager, sdpa, ...; of a HookedTransformer its own."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    return str(getattr(config, "_attn_implementation", None))


def _precision(devices: set[str]) -> str:
    """Settings of the process that change how a model computes."""
    automatic = [
        f"autocast {torch.get_autocast_dtype(device)}"
        for device in sorted(devices)
        if device != "meta" and torch.is_autocast_enabled(device)
    ]
    return ", ".join([f"matmul {torch.get_float32_matmul_precision()}", *automatic])
