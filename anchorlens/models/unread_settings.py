"""Settings of a config.json that decide nothing, because transformers stores any and reads some."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from ..errors import ModelError
from ..system.package import installed_version
from ..system.warn import warn_user
from .kinds import configs_of, modules_of

# What programs note for training, texts, lengths and speed: it decides no number of a pass.
_HARMLESS = re.compile(
    r"^_|^(auto_map|prefix|is_llama_config|ignore_index|n_ctx|seq_length|ep_size)$|^(max|summary)_"
    r"|task|version|unsloth|quantization|initial|drop|loss|_tp$|cache|token(izer|_i)|checkpointing"
    r"|dtype|js_config|fusion|fused|flash|parallel|torchscript|label"
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
        elif key in words or _HARMLESS.search(key) or key in ("architectures", "model_type"):
            continue
        elif value is not None and (meant := get_close_matches(key, known, 1, 0.9)):
            yield f"{at}{key}", value, meant[0]
        elif value and (key in vars(config) or key.startswith("rope_")):
            yield f"{at}{key}", value, ""
