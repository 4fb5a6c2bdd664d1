"""A fingerprint of a run: its model, prompts, settings and versions, by which rows are stored."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError
from ..prompts.batch import PromptBatch
from ..system.checksum import digest_of

PACKAGES = ("anchorlens", "transformer-lens", "transformers", "tokenizers", "torch", "scipy")
_version_of = cache(version)  # it reads files of the installed package

# The address in an object's default repr tells nothing about the object.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Fields of a configuration that do not decide the numbers, or have their own entry.
_ELSEWHERE = ("_name_or_path", "transformers_version", "device", "dtype", "torch_dtype", "seed")


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    return {package: _version_of(package) for package in PACKAGES}


def fingerprint(
    model: Any, batches: Sequence[PromptBatch], settings: Mapping[str, str]
) -> dict[str, str]:
    """What must be equal if stored rows belong to this run.

    Functions, for example hooks, cannot be compared, so that a resumed run also computes the first
    stored batch again (see ``Study.collect``).
    """
    prompts = hashlib.sha256()
    for batch in batches:
        for name, value in vars(batch).items():
            if name == "verbalizer" and value is None:
                continue  # so that folders of earlier versions, without this field, go on
            if isinstance(value, Tensor):
                prompts.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                prompts.update(value.cpu().numpy().tobytes())
            else:
                prompts.update(f"{name} {value!r}".encode())
    parameters = list(model.parameters())
    devices = {weights.device.type for weights in parameters}
    facts = {
        **identity(model),
        "attention": _attention(model),
        "dtype": ", ".join(sorted({str(weights.dtype) for weights in parameters})),
        "device": ", ".join(sorted(devices)),
        "precision": _precision(devices),
        "prompts": prompts.hexdigest(),
        **versions(),
    }
    if both := facts.keys() & settings.keys():
        raise StoreError(
            f"settings cannot be named {', '.join(sorted(both))}: the model and the prompts are "
            "stored under these names; rename them"
        )
    return facts | {name: _ADDRESS.sub("", value) for name, value in settings.items()}


def identity(model: Any) -> dict[str, str]:
    """What identifies a model: its name, configuration, weights and buffers."""
    # A HookedTransformer has no model of transformers inside.
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
    """A digest of everything that decides how a tokenizer turns a text into tokens."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call stores its options there, and every call sets them again.
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
            tensors = chain(
                module.named_parameters(path, recurse=False),
                # With duplicates: after a long text the rotations of dynamic NTK are one tensor
                # under two names, of which the first is left out below.
                module.named_buffers(path, recurse=False, remove_duplicate=False),
            )
            for name, tensor in tensors:
                if id(tensor) in counted or _follows_the_prompts(module, name):
                    continue
                counted.add(id(tensor))
                yield name, tensor
                yield from _beside(name, tensor)


def _follows_the_prompts(module: Any, name: str) -> bool:
    """Whether each pass computes the buffer again from the length of its prompts.

    Such a buffer depends on the last pass. The values from which it is computed are in another
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
    """The implementation of attention (eager, sdpa, ...); "None" for a HookedTransformer."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    return str(getattr(config, "_attn_implementation", None))


def _precision(devices: set[str]) -> str:
    """Settings of the process that change the precision of computations."""
    automatic = [
        f"autocast {torch.get_autocast_dtype(device)}"
        for device in sorted(devices)
        if device != "meta" and torch.is_autocast_enabled(device)
    ]
    return ", ".join([f"matmul {torch.get_float32_matmul_precision()}", *automatic])
