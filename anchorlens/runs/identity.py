"""The fingerprint of a run: what decides its numbers, by content, and what of it cannot be seen.

It holds the model, the prompts, the settings, what acts on all of torch, and the versions of
packages; it is stored with contributions. Where code cannot be compared, a person can name it
(``named``).
"""

import functools
import hashlib
import json
import platform
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..errors import ArgumentError, StoreError
from ..models.kinds import config_of, is_bridge, original_of
from ..models.model_state import user_hooks
from ..models.rotary import follows_the_prompts
from ..printable import printable
from ..prompts.batch import PromptBatch
from ..system.arguments import checked
from ..system.checksum import digest_of
from ..system.package import installed_version
from ..system.processes import is_main
from ..system.texts import name_of
from ..system.warn import warn_user
from .by_value import ADDRESS, Known, identity_of
from .installed import bases_of, changed, home_of

PACKAGES = ("anchorlens", "transformer-lens", "transformers", "tokenizers", "torch", "scipy")
_LONGEST = 2000  # characters of a setting in words
_TOLD = 3  # at most, of what is unknown
_DIGEST = re.compile(r" \(([0-9a-f]{16})\)$")  # of a setting, after its words
# Fields of a configuration that do not decide the numbers, or have their own entry.
_ELSEWHERE = ("_name_or_path", "transformers_version", "device", "dtype", "torch_dtype", "seed")

_installed = functools.cache(installed_version)  # it reads files of the installed package


class Fingerprint(NamedTuple):
    """What must be equal if stored numbers belong to a run."""

    facts: dict[str, str]
    unknown: dict[str, tuple[str, ...]]  # of each name what its fact does not cover


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    return {package: _installed(package) for package in PACKAGES}


def fingerprint(
    model: Any,
    batches: Sequence[PromptBatch],
    settings: Mapping[str, Any],
    known: Known | None = None,
) -> Fingerprint:
    """The fingerprint of a run; ``known`` are its model and what is known beside it."""
    known = known or Known(model)
    parameters = list(model.parameters())
    devices = {weights.device.type for weights in parameters}
    facts = {
        **identity(model),
        # Its implementation (eager, sdpa, ...); "None" for a HookedTransformer.
        "attention": str(getattr(config_of(model), "_attn_implementation", None)),
        "dtype": ", ".join(sorted({str(weights.dtype) for weights in parameters})),
        "device": ", ".join(sorted(devices)),
        "precision": _precision(devices),
        # The code of a function is that of a version of Python.
        "python": ".".join(platform.python_version_tuple()[:2]),
        **versions(),
    }
    changes = changed()
    own = {
        "hooks on the model": [*user_hooks(model), *_acting_hooks(known)],
        "changes of torch and anchorlens": changes,
        "prompts": [*batches],
    }
    words = {name: "some" if value else "none" for name, value in own.items()} | {**settings}
    if changes:
        words["changes of torch and anchorlens"] = [*changes]
    if both := (facts.keys() | own.keys()) & settings.keys():
        raise StoreError(
            f"settings cannot be named {', '.join(sorted(both))}, as the run has these names"
        )
    unknown = {}
    for name, value in {**own, **settings}.items():
        found = identity_of(value, known)
        facts[name] = f"{as_words(words[name])} ({found.digest[:16]})"  # 1 and "1" have equal words
        if found.unknown:
            unknown[name] = found.unknown
    return Fingerprint(facts, unknown)


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


def _acting_hooks(known: Known) -> list[tuple[str, Any]]:
    """What acts on the model or on all of torch without being given: nothing, as a rule."""
    tables = {**vars(modules_of_torch), **vars(optimizers_of_torch)}
    hooks = {n: x for n, x in tables.items() if n.startswith("_global_") and isinstance(x, dict)}
    acting: list[tuple[str, Any]] = [
        (name, [*hooks[name].values()]) for name in hooks if hooks[name]
    ]
    # The default device is one, which is told with the precision.
    modes = _get_current_function_mode_stack()
    acting += [("mode", each) for each in modes if not isinstance(each, DeviceContext)]
    acting += [*changed(bases_of(known.kinds)).items()]
    acting += [
        (f"{path}.{name}", value)
        for path, module in known.modules.items()
        for name, value in vars(module).items()
        if isinstance(value, FunctionType | MethodType)
        and not home_of(getattr(value, "__func__", value))
    ]
    return acting


def differences(
    stored: Mapping[str, str], now: Mapping[str, str], believe: Collection[str] = ()
) -> dict[str, bool]:
    """The names of facts that differ, and whether each is believed; patches of a version are."""
    return {
        name: name in believe
        or (name in PACKAGES and _up_to_patch(stored, name) == _up_to_patch(now, name) != [])
        for name in sorted({*stored, *now})
        if _deciding(stored.get(name)) != _deciding(now.get(name))
    }


def _up_to_patch(facts: Mapping[str, str], package: str) -> list[str]:
    return re.findall(r"\d+", facts.get(package, "").partition("+")[0])[:2]


def _deciding(fact: str | None) -> str | None:
    digest = _DIGEST.search(fact or "")
    return digest[1] if digest else fact


def told_apart(stored: str | None, now: str | None) -> str:
    """Two facts in words: with their digests only where the words are equal."""
    short = [fact and _DIGEST.sub("", fact) for fact in (stored, now)]
    stored, now = (stored, now) if short[0] == short[1] else short
    return f"stored {stored!r}, now {now!r}"


def warn_of_unknown(folder: str | Path, unknown: Mapping[str, Sequence[str]]) -> None:
    """Warn, in the main process, that what is stored is computed again, and why."""
    told = [f"{name}: {each}" for name in unknown for each in unknown[name]]
    if told and is_main():
        warn_user(
            f"what {folder} holds is computed again at each call, because something that decides "
            f"the numbers cannot be compared: {'; '.join(told[:_TOLD])}. Give what it reads as "
            'a number or a tensor; or name the function, al.named("my score, 1", function), with '
            "another name when it changes"
        )


def as_words(value: Any) -> str:
    """A short text of a setting, by which a person recognises it."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, Sequence):
        text = ", ".join(map(as_words, value))
    elif isinstance(value, functools.partial):
        options = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
        text = f"{name_of(value.func)}({', '.join(options)})"
    elif isinstance(value, Tensor):
        text = f"{value.dtype} of the shape {tuple(value.shape)}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{as_words(key)}: {as_words(of)}" for key, of in value.items())
        text = f"{{{text}}}"
    elif is_dataclass(value) and not isinstance(value, type):
        # Its repr may shorten them, and tell counters, which do not decide, or numbers on a device.
        told = [field.name for field in fields(value) if field.compare and field.repr]
        options = [f"{n}={as_words(getattr(value, n))}" for n in told if hasattr(value, n)]
        text = f"{type(value).__qualname__}({', '.join(options)})"
    else:
        text = str(getattr(value, "__name__", repr(value)))
    return ADDRESS.sub("", text)[:_LONGEST]


def _precision(devices: set[str]) -> str:
    computing = sorted(devices - {"meta"})
    enabled = [device for device in computing if torch.is_autocast_enabled(device)]
    automatic = [f"autocast {torch.get_autocast_dtype(device)}" for device in enabled]
    made = f"new tensors {torch.get_default_dtype()} on {torch.get_default_device()}"
    return ", ".join([f"matmul {torch.get_float32_matmul_precision()}", made, *automatic])


@dataclass(frozen=True)
class NamedFunction:
    """A function that is the same wherever it has the same name."""

    name: str
    function: Callable[..., Any] = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.function)  # its signature is that of this

    def __repr__(self) -> str:
        return printable(f"named({self.name!r})")

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@checked
def named(name: str, function: Callable[..., Any]) -> NamedFunction:
    """The function under a name by which its stored results are believed.

    Runs with a ``folder`` compare a function by its code and what that names, or, where this cannot
    be seen (NumPy, a file, another library), compute again. A named one is compared by its name.

    Pitfalls:
        Give another name with each change of the function, or of what it reads: numbers of the old
        one are not told from those of the new one.

    Args:
        name: A text of your own, such as "my score, 3".
        function: Hooks, a loss, a score, an optimizer, a function of the batch, a part of a paper.

    Raises:
        ArgumentError: The name is empty, or what is named cannot be called.

    Examples:
        >>> import numpy as np
        >>> def halved(logits, batch):
        ...     return al.losses.label_cross_entropy(logits, batch) * float(np.sqrt(0.25))
        >>> al.named("halved, 1", halved)
        named('halved, 1')
    """
    if not name.strip():
        raise ArgumentError(f'name of named must be a text, such as "my score, 1"; got {name!r}')
    return NamedFunction(name, function)
