"""A fingerprint of a run: its model, prompts, settings and versions, by which rows are stored."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import StoreError
from ..models.kinds import config_of
from ..models.model_identity import ADDRESS, identity
from ..models.model_state import user_hooks
from ..prompts.batch import PromptBatch
from ..system.package import installed_version
from ..system.processes import is_main
from ..system.texts import name_of
from ..system.warn import warn_user
from .identity import identity_of

PACKAGES = ("anchorlens", "transformer-lens", "transformers", "tokenizers", "torch", "scipy")
_LONGEST = 2000  # characters of a setting in words
_version_of = cache(installed_version)  # it reads files of the installed package


class Fingerprint(NamedTuple):
    """What must be equal if stored numbers belong to a run."""

    facts: dict[str, str]
    unknown: tuple[str, ...]  # what the facts do not cover, so that all is computed again


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    return {package: _version_of(package) for package in PACKAGES}


def fingerprint(
    model: Any, batches: Sequence[PromptBatch], settings: Mapping[str, Any]
) -> Fingerprint:
    """The fingerprint of a run."""
    parameters = list(model.parameters())
    devices = {weights.device.type for weights in parameters}
    known, on_model = {id(model): "the model"}, user_hooks(model)
    hooks = identity_of(on_model, known)
    facts = {
        **identity(model),
        "hooks on the model": hooks.digest if on_model else "none",
        # Its implementation (eager, sdpa, ...); "None" for a HookedTransformer.
        "attention": str(getattr(config_of(model), "_attn_implementation", None)),
        "dtype": ", ".join(sorted({str(weights.dtype) for weights in parameters})),
        "device": ", ".join(sorted(devices)),
        "precision": _precision(devices),
        "prompts": identity_of([batch.__getstate__() for batch in batches], known).digest,
        # The code of a function is that of a version of Python.
        "python": ".".join(platform.python_version_tuple()[:2]),
        **versions(),
    }
    if both := facts.keys() & settings.keys():
        raise StoreError(
            f"settings cannot be named {', '.join(sorted(both))}: the model and the prompts are "
            "stored under these names; rename them"
        )
    unknown = [f"hooks on the model: {what}" for what in hooks.unknown]
    for name, value in settings.items():
        of_setting = identity_of(value, known)
        digest = "" if _is_told(value) else f" ({of_setting.digest[:16]})"
        facts[name] = f"{in_words(value)}{digest}"
        unknown += [f"{name}: {what}" for what in of_setting.unknown]
    return Fingerprint(facts, tuple(unknown))


def warn_of_unknown(folder: str | Path, unknown: Sequence[str]) -> None:
    """Warn, in the main process, that what is stored is computed again, and why."""
    if unknown and is_main():
        warn_user(
            f"what {folder} holds is computed again at each call, because something that decides "
            f"the numbers cannot be compared: {'; '.join(unknown[:3])}. Give what was read as a "
            "value, such as a tensor"
        )


def in_words(value: Any) -> str:
    """A short text of a setting, by which a person recognises it."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, Sequence):
        text = ", ".join(map(in_words, value))
    elif isinstance(value, partial):
        options = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
        text = f"{name_of(value.func)}({', '.join(options)})"
    elif isinstance(value, torch.Tensor):
        text = f"{value.dtype} of the shape {tuple(value.shape)}"
    elif is_dataclass(value) and not all(
        field.compare and not isinstance(getattr(value, field.name, None), torch.Tensor)
        for field in fields(value)
    ):
        # Its repr would tell counters, which do not decide, or numbers on a device.
        told = [field.name for field in fields(value) if field.compare and field.repr]
        options = [f"{name}={in_words(getattr(value, name))}" for name in told]
        text = f"{type(value).__qualname__}({', '.join(options)})"
    else:
        text = str(getattr(value, "__name__", repr(value)))
    return ADDRESS.sub("", text)[:_LONGEST]


def _is_told(value: Any) -> bool:
    """Whether the words of a setting tell all of it."""
    if isinstance(value, list | tuple):
        return len(value) < 20 and all(map(_is_told, value))
    return isinstance(value, str | int | float | None) and len(str(value)) < _LONGEST / 20


def _precision(devices: set[str]) -> str:
    """Settings of the process that change the precision of computations."""
    automatic = [
        f"autocast {torch.get_autocast_dtype(device)}"
        for device in sorted(devices)
        if device != "meta" and torch.is_autocast_enabled(device)
    ]
    return ", ".join([f"matmul {torch.get_float32_matmul_precision()}", *automatic])
