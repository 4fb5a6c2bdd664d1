"""Read a model's weights, all of them, onto a device that can compute."""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from ..system.processes import own_device

_IN_A_LAYER = re.compile(r"(^|\.)\d+\.")
# Masks and positions that older versions of transformers stored, and newer ones compute.
_COMPUTED = re.compile(r"\.(attn|attention)\.(bias|masked_bias|causal_mask)$|\.inv_freq$")


def read_weights(name: str, tokenizer: Any, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Weights and tokenizer of a hub name, a folder or a .gguf file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_gguf = name.endswith(".gguf")
    if is_gguf and not Path(name).is_file():
        raise ModelError(f"there is no file {name}")
    place, options = name, {}
    if is_gguf:
        place, options = str(Path(name).parent), {"gguf_file": Path(name).name}
        dtype = dtype or torch.float32
    try:
        # Eager attention: the fused kernels never form the pattern that the hooks need.
        read: Any = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=dtype or "auto",
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # so that they are reported by name
            output_loading_info=True,
            **options,
        )
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # each reader of transformers raises its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{name!r} cannot be loaded as a causal language model: {reason} "
            "Where no hub can be reached, give a local folder or a .gguf file (--model)"
        ) from error
    weights, report = read
    _refuse_other_weights(name, weights, report)
    return weights, tokenizer


def best_device() -> str | torch.device:
    """The process's own where accelerate made its state, else the first that there is."""
    if (own := own_device()) is not None:
        return own
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def refuse_device(device: str | torch.device) -> None:
    """Refuse a device that cannot compute, before weights are read for it."""
    try:
        on_device = torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise _no_device(device, str(error)) from error
    if on_device.is_meta:
        raise _no_device(device, "its tensors have shapes and no numbers")


def moved(weights: Any, device: str | torch.device, dtype: torch.dtype | None) -> Any:
    """The model on a device, in a type where one is given."""
    try:
        # Quantised weights refuse any mention of a type.
        return weights.to(device) if dtype is None else weights.to(device=device, dtype=dtype)
    except (RuntimeError, AssertionError, ValueError) as error:
        where = str(device) if dtype is None else f"{device} as {dtype}"
        raise _no_device(where, str(error)) from error


def _refuse_other_weights(name: str, weights: Any, report: dict[str, Any]) -> None:
    """Refuse weights that are not all of the configured model, which would be drawn at random.

    Args:
        name: What the user asked for.
        weights: The model that was read.
        report: Of transformers, without tied tensors and buffers that are computed.
    """
    problems = []
    if missing := report["missing_keys"]:
        problems.append(f"{_listed(missing)} missing")
    if shapes := report["mismatched_keys"]:
        named = [f"{key} ({tuple(stored)}, not {tuple(due)})" for key, stored, due in shapes]
        problems.append(f"{_listed(named)} of another shape")
    if problems:
        raise ModelError(
            f"the weights of {name!r} are not those of its configuration ({type(weights).__name__})"
            f": {'; '.join(problems)}. Such tensors would be random numbers; put the weights and "
            "the config.json of one model into the folder"
        )
    unused = [key for key in report["unexpected_keys"] if _IN_A_LAYER.search(key)]
    if unused := [key for key in unused if not _COMPUTED.search(key)]:
        warnings.warn(
            f"the configuration of {name!r} ({type(weights).__name__}) has no use for all of its "
            f"weights: {_listed(unused)} left out, so that this may be another model than the one "
            "that was stored",
            stacklevel=4,
        )


def _listed(names: Iterable[str]) -> str:
    """The first three of some tensors, in order, and how many they are."""
    ordered = sorted(names)
    few = ", ".join(ordered[:3]) + (" and others" if len(ordered) > 3 else "")
    return f"1 tensor ({few}) is" if len(ordered) == 1 else f"{len(ordered)} tensors ({few}) are"


def _no_device(device: str | torch.device, reason: str) -> ModelError:
    return ModelError(
        f"the model cannot be put on the device {str(device)!r}: {reason.partition(chr(10))[0]}; "
        "name a device that this machine has (cuda, mps, cpu), and leave the type (--dtype, in "
        "Python dtype) of quantised weights as it is"
    )
