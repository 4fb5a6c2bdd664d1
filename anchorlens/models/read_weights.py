"""Read a model's weights, settings and tokenizer; verify that none is missing; choose a device.

transformers stores any setting of a config.json and reads some: the others would decide nothing.
"""

import copy
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from ..system.files import kind_of, paths_in
from ..system.package import installed_version
from ..system.processes import process_device
from ..system.warn import warn_user
from .gguf_settings import gguf_config, parsed_once, refuse_part, refuse_unread, set_tokenizer
from .kinds import configs_of, modules_of
from .quiet_libraries import quiet_libraries, warnings_of_transformers

_IN_A_LAYER = re.compile(r"(^|\.)\d+\.")
# Masks and positions that older versions of transformers stored, and newer versions compute.
_COMPUTED = re.compile(r"\.(attn|attention)\.(bias|masked_bias|causal_mask)$|\.inv_freq$")

# What programs note for training, texts, lengths and speed: it decides no number of a pass.
_UNUSED = re.compile(
    r"^_|^(auto_map|prefix|is_llama_config|ignore_index|n_ctx|seq_length|ep_size)$|^(max|summary)_"
    r"|task|version|unsloth|quantization|initial|drop|loss|_tp$|cache|token(izer|_i)|checkpointing"
    r"|dtype|js_config|fusion|fused|flash|parallel|torchscript|label"
)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
# Code of a folder or of the hub is never run. Without this option transformers asks.
_OPTIONS: dict[str, Any] = {"trust_remote_code": False}
_NO_HUB = ". If no hub can be reached, give a local folder or a .gguf file (source=)"


def read_model_files(name: str) -> tuple[Any, Any]:
    """Configuration and tokenizer of a hub name, a folder or a .gguf file, without the weights."""
    with warnings_of_transformers(), _reading_model(name), parsed_once(name):
        source, options = _source(name)
        return _config_of(name, source, options), _tokenizer_of(name, source, options)


def read_weights(
    name: str, tokenizer: Any, place: Any, dtype: torch.dtype | None, revision: str | None = None
) -> tuple[Any, Any]:
    """Weights at a place of ``device_or_map``, and tokenizer, of a name, folder or .gguf file."""
    import transformers

    is_gguf, at = name.endswith(".gguf"), name if revision is None else f"{name}@{revision}"
    with warnings_of_transformers(), _reading_model(at), parsed_once(name):
        if revision is not None:
            refuse_revision(name)
        source, options = _source(name)
        options |= {} if revision is None else {"revision": revision}
        config = _config_of(name, source, options)
        # The fused kernels never form the pattern that the hooks need. It is set here because
        # transformers first verifies the value of the folder, which this machine may not have.
        config._attn_implementation = "eager"
        tokenizer = tokenizer or _tokenizer_of(name, source, options)
        of_images = (
            type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        )
        kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        result: Any = kinds[of_images].from_pretrained(
            source,
            config=config,
            dtype=dtype or (torch.float32 if is_gguf else "auto"),
            ignore_mismatched_sizes=True,  # the report names them
            output_loading_info=True,
            **options,
        )
        weights, report = result
        if is_gguf:
            refuse_unread(name, weights)
        stored = {} if is_gguf else config.get_config_dict(source, **options)[0]
    _refuse_other_weights(name, weights, report)
    check_settings(name, weights, stored)
    return placed(weights, best_device() if place is None else place, dtype), tokenizer


def read_processor(name: str) -> Any:
    from transformers import AutoProcessor

    cure = "; give a model stored with its processor; torchvision needs the build of your torch"
    with _reading(name, f"the processor of images of {name!r} cannot be read", cure):
        source, options = _source(name)
        return AutoProcessor.from_pretrained(source, **options)


def read_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of a name or folder; a copy of a tokenizer, or None."""
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, str | Path):
        name = str(tokenizer)
        cure = ". Give its name, its folder, a .gguf file or AutoTokenizer.from_pretrained(...)"
        failed = f"tokenizer={name!r} cannot be read as a tokenizer"
        with _reading(name, failed, cure), warnings_of_transformers(), parsed_once(name):
            source, options = _source(name) if name.endswith(".gguf") else (name, dict(_OPTIONS))
            return _tokenizer_of(name, source, options)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        inner = getattr(tokenizer, "tokenizer", None)
        cure = "its .tokenizer" if inner is not None else "AutoTokenizer.from_pretrained(...)"
        raise ModelError(
            "tokenizer must be a tokenizer of transformers, or the name or folder of one; got a "
            f"{type(tokenizer).__name__}: pass {cure}"
        )
    return copy.deepcopy(tokenizer)


def _config_of(name: str, source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if not name.endswith(".gguf"):
        return AutoConfig.from_pretrained(source, **options)
    with quiet_libraries():  # each setting of the file is read or refused, whatever a class expects
        return gguf_config(name)


def _tokenizer_of(name: str, source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # made of a configuration alone
        raise ModelError(
            f"{source} has a model and no tokenizer (such as tokenizer.json); give the name or "
            "folder of one: tokenizer=..."
        )
    if name.endswith(".gguf"):
        set_tokenizer(tokenizer, name)
    return tokenizer


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """What transformers reads, a hub name or a folder, and the options of every reading."""
    path, options = Path(name), dict(_OPTIONS)
    if name.endswith(".gguf"):
        refuse_no_file(name)
        return str(path.parent), options | {"gguf_file": path.name}
    if name and kind_of(path, ModelError) == "folder":
        _refuse_folder_without_model(path)
    elif not _HUB_NAME.fullmatch(name):
        raise ModelError(f"there is no folder {name!r}, and the hub has no such names")
    return name, options


def refuse_no_file(name: str) -> None:
    if kind_of(name, ModelError) != "file":
        raise ModelError(f"there is no file {name}")


def refuse_revision(model: Any) -> None:
    """Raise an error for what is no name on the hub: it has no revisions."""
    is_name = isinstance(model, str) and not model.endswith(".gguf")
    if not is_name or kind_of(model, ModelError):
        what = model if isinstance(model, str | Path) else f"a {type(model).__name__}"
        raise ModelError(f"only a name on the hub has revisions, and {what} is none")


def _refuse_folder_without_model(folder: Path) -> None:
    has_adapter = bool(kind_of(folder / "adapter_config.json", ModelError))
    if kind_of(folder / "config.json", ModelError):
        if has_adapter:
            raise ModelError(
                f"{folder} has a model and an adapter of peft (adapter_config.json): merge it into "
                "the model (merge_and_unload) and save that, or take its files out of the folder"
            )
        return
    if gguf := paths_in(folder, "*.gguf", ModelError):
        gguf = [file for file in gguf if not _PART.search(file.name)] or gguf
        if part := _PART.search(gguf[0].name):
            refuse_part(str(gguf[0]), int(part[1]))
        cure = f"give the file {gguf[0]}"
    elif has_adapter:
        cure = "it holds an adapter of peft: merge it into its model (merge_and_unload), save that"
    else:
        cure = "give the folder of a saved transformers model, a .gguf file or a name on the hub"
    raise ModelError(f"{folder} has no config.json; {cure}")


@contextmanager
def _reading(name: str, failed: str, cure: str) -> Iterator[None]:
    """Raises a ModelError in place of the many types of errors that transformers raises."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            failed += f": {name!r} has code of its own, which is never run here"
            cure = (
                "; give a model that transformers knows, or, if you trust this code, read the "
                "model with AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True) and "
                "pass it to al.load_model with its tokenizer"
            )
            raise ModelError(failed + cure) from error
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(f"{failed}: {reason}{cure}") from error


def _reading_model(name: str) -> AbstractContextManager[None]:
    cure = "" if kind_of(name, ModelError) else _NO_HUB
    return _reading(name, f"{name!r} cannot be loaded as a causal language model", cure)


def best_device() -> str | torch.device:
    """The device that accelerate gave this process, or else cuda, mps or cpu if available."""
    if (device := process_device()) is not None:
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def refuse_device(device: int | str | torch.device) -> None:
    try:
        on_device = torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise _no_device(device, str(error)) from error
    if on_device.is_meta:
        raise _no_device(device, "its tensors have shapes and no numbers")


Map = Mapping[str, int | str | torch.device]  # the device of each module
# Words for maps that accelerate makes, as in transformers.
_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_NOT_IN_MEMORY = (
    "so that each pass would read them again. Use more or larger devices, or a smaller dtype; or "
    "load the model with AutoModelForCausalLM.from_pretrained(..., device_map=..., "
    "offload_folder=...) and pass it to al.load_model with its tokenizer"
)


def device_or_map(
    device: str | torch.device | None, device_map: str | int | torch.device | Map | None
) -> str | torch.device | Map | None:
    """The device or the map that is asked for; an error, before weights are read, for others."""
    if device_map is None:
        if device is not None:
            refuse_device(device)
        return device
    if device is not None:
        raise ModelError(
            f"device_map spreads the layers, so leave device out; got device={str(device)!r}"
        )
    if isinstance(device_map, str) and device_map in _DEVICE_MAPS:
        return device_map
    named = [*device_map.values()] if isinstance(device_map, Mapping) else [device_map]
    if "disk" in named:
        raise ModelError(f"device_map={device_map!r} leaves weights on the disk, {_NOT_IN_MEMORY}")
    for each in named:
        try:
            refuse_device(each)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"device_map={device_map!r} cannot be used: {error}. Give "
                f"{', '.join(_DEVICE_MAPS)}, a device, or a dictionary with the device of each "
                "module, such as {'': 'cpu'}"
            ) from error
    return device_map if isinstance(device_map, Mapping) else torch.device(device_map)


def placed(weights: Any, place: str | torch.device | Map | None, dtype: torch.dtype | None) -> Any:
    """The model at a place of ``device_or_map`` and in a type, where they are given."""
    is_map = isinstance(place, Mapping) or place in _DEVICE_MAPS
    try:
        # Quantised weights raise an error if any type is given.
        device = weights.device if is_map or place is None else place
        weights = weights.to(device) if dtype is None else weights.to(device=device, dtype=dtype)
    except (RuntimeError, AssertionError, ValueError) as error:
        where = str(device) if dtype is None else f"{device} as {dtype}"
        raise _no_device(where, str(error)) from error
    return _spread(weights, place) if is_map else weights


def _spread(weights: Any, device_map: Any) -> Any:
    from accelerate import dispatch_model, infer_auto_device_map  # a second to import
    from accelerate.utils import get_balanced_memory

    try:
        weights.tie_weights()
        if isinstance(device_map, str):
            whole: Any = {"no_split_module_classes": weights._no_split_modules}
            is_even, low = device_map != "sequential", device_map == "balanced_low_0"
            memory = get_balanced_memory(weights, low_zero=low, **whole) if is_even else None
            places = infer_auto_device_map(weights, memory, **whole)
        else:
            places = dict(device_map)
        result = dispatch_model(weights, places)
    except (RuntimeError, AssertionError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"device_map={device_map!r} cannot be used: {str(error).partition(chr(10))[0]}; give "
            "'auto', or a dictionary with the device of each module, such as {'': 'cpu'}"
        ) from error
    if outside := [name for name, each in result.named_parameters() if each.is_meta]:
        raise ModelError(
            f"device_map={device_map!r} leaves {outside[0]!r} and others in no memory of these "
            f"devices, {_NOT_IN_MEMORY}"
        )
    return result


def _refuse_other_weights(name: str, weights: Any, report: dict[str, Any]) -> None:
    """Raise an error if weights are missing or of another shape: they would be random numbers."""
    problems = []
    if missing := report["missing_keys"]:
        problems.append(f"{_some(missing)} missing")
    if shapes := report["mismatched_keys"]:
        described = [f"{key} ({tuple(got)}, not {tuple(want)})" for key, got, want in shapes]
        problems.append(f"{_some(described)} of another shape")
    if problems:
        raise ModelError(
            f"the weights of {name!r} are not those of its configuration ({type(weights).__name__})"
            f": {'; '.join(problems)}. Such tensors would be random numbers; put the weights and "
            "the config.json of one model into the folder"
        )
    # Tensors of layers, and of modules that the model has; others are heads of other tasks.
    modules = {name for name, _ in weights.named_modules()}
    modules |= {name.removeprefix(f"{weights.base_model_prefix}.") for name in modules}
    unused = [key for key in report["unexpected_keys"] if not _COMPUTED.search(key)]
    unused = [k for k in unused if _IN_A_LAYER.search(k) or k.rpartition(".")[0] in modules]
    if unused:
        warn_user(
            f"the configuration of {name!r} ({type(weights).__name__}) has no use for all of its "
            f"weights: {_some(unused)} left out; another model than this may have been stored"
        )


def check_settings(name: str, weights: Any, stored: Mapping[str, Any]) -> None:
    """Warn of the settings of a config.json that nothing reads; an error for a misspelt one.

    A setting is read if the files of transformers in which the classes of the configuration and of
    the model stand have its name.
    """
    kinds = {type(each) for each in (*configs_of(weights.config), *modules_of(weights))}
    files = {base.__module__ for kind in kinds for base in kind.__mro__}
    files = {each for each in files if each.startswith("transformers.models.")}
    sources = [inspect.getsource(sys.modules[each]) for each in files]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    unread = [*_unread(weights.config, stored, words)]
    if wrong := [f"{key} (for {meant})" for key, _, meant in unread if meant]:
        raise ModelError(
            f"the configuration of {name!r} has settings that {type(weights).__name__} does not "
            f"know, and that seem to be misspelt: {', '.join(wrong)}. Correct its config.json"
        )
    if unread:
        listed = ", ".join(f"{key}={str(value)[:60]}" for key, value, _ in unread)
        warn_user(
            f"the configuration of {name!r} has settings that {type(weights).__name__} of "
            f"transformers {installed_version('transformers')} does not read: {listed}. If they "
            "decide numbers, this is another model than the one that was stored"
        )


def _unread(
    config: Any, stored: Mapping[str, Any], words: set[str], at: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Name and value of each setting that is not read, and the name that is meant if it is near."""
    known = [key for key in vars(config) if key in words and key not in stored]
    if "rope_parameters" in words:  # transformers itself turns these into it
        known += [key for key in ("rope_scaling", "rope_theta") if key not in stored]
        words = words | {"rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor"}
    for key, value in stored.items():
        inner = getattr(config, key, None)
        if isinstance(value, Mapping) and hasattr(inner, "get_config_dict"):
            yield from _unread(inner, value, words, f"{at}{key}.")
        elif key in words or _UNUSED.search(key) or key in ("architectures", "model_type"):
            continue
        elif value is not None and (meant := get_close_matches(key, known, 1, 0.9)):
            yield f"{at}{key}", value, meant[0]
        elif value and (key in vars(config) or key.startswith("rope_")):
            yield f"{at}{key}", value, ""


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    first = ", ".join(ordered[:3]) + (" and others" if len(ordered) > 3 else "")
    return (
        f"1 tensor ({first}) is" if len(ordered) == 1 else f"{len(ordered)} tensors ({first}) are"
    )


def _no_device(device: int | str | torch.device, reason: str) -> ModelError:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    devices = ", ".join([*(name for name in there if there[name]), "cpu"])
    return ModelError(
        f"the model cannot be put on the device {str(device)!r}: {reason.partition(chr(10))[0]}; "
        f"this machine has {devices}; leave the type (dtype=) of quantised weights as it is"
    )
