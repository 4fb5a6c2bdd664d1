"""What identifies a model and a tokenizer: the contents that decide their numbers and tokens."""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from ..system.checksum import digest_of
from .kinds import config_of, is_bridge, original_of
from .rotary import follows_the_prompts

# The address in an object's default repr tells nothing about the object.
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Attributes of a tokenizer that tell where its files are, or have their own entry.
_OF_FILES = re.compile(
    r"_path$|_files?$|local|_hash$|dir$|^(files_loaded|_tokenizer|init_kwargs|deprecation_warnings)$"
)
# Fields of a configuration that do not decide the numbers, or have their own entry.
_ELSEWHERE = ("_name_or_path", "transformers_version", "device", "dtype", "torch_dtype", "seed")


def identity(model: Any) -> dict[str, str]:
    """What identifies a model: its name, configuration, weights and buffers."""
    config = vars(model.cfg) if config_of(model) is None else config_of(model).to_dict()
    deciding = {name: value for name, value in config.items() if name not in _ELSEWHERE}
    text = ADDRESS.sub("", json.dumps(deciding, sort_keys=True, default=str))
    return {
        "model": str(model.cfg.model_name),
        "configuration": hashlib.sha256(text.encode()).hexdigest(),
        "weights": digest_of(_tensors_of(model)),
    }


def tokenizer_identity(tokenizer: Any) -> str:
    """A digest of everything that a tokenizer holds, apart from where its files are."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call stores its options there, and every call sets them again.
    rules = {name: backend[name] for name in backend if name not in ("truncation", "padding")}
    both = (vars(tokenizer), tokenizer.init_kwargs)
    options = [{name: own[name] for name in own if not _OF_FILES.search(name)} for own in both]
    everything = [type(tokenizer).__name__, options, rules]
    text = ADDRESS.sub("", json.dumps(everything, sort_keys=True, default=repr))
    return hashlib.sha256(text.encode()).hexdigest()


def _tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight and buffer, each once, also those that a bridge does not register."""
    counted: set[int] = set()
    for root in (model, original_of(model)) if is_bridge(model) else (model,):
        for path, module in root.named_modules():
            tensors = chain(
                module.named_parameters(path, recurse=False),
                # With duplicates: after a long text the rotations of dynamic NTK are one tensor
                # under two names, of which the first is left out below.
                module.named_buffers(path, recurse=False, remove_duplicate=False),
            )
            for name, tensor in tensors:
                if id(tensor) in counted or follows_the_prompts(vars(module), name):
                    continue
                counted.add(id(tensor))
                yield name, tensor
                # Scales that bitsandbytes holds as attributes of a quantised weight.
                state = getattr(tensor, "quant_state", None)
                scales = {} if state is None else state.as_dict(packed=True)
                for key, value in {**scales, "SCB": getattr(tensor, "SCB", None)}.items():
                    if isinstance(value, Tensor):
                        yield f"{name}.{key}", value
