"""Rotary embeddings that depend on the length of a text: which lengths rotate alike.

1. longrope (Phi-3 with long contexts): above a number of tokens, all positions are rotated with
   other frequencies. So no text on the other side of the switch can continue a cached token, and
   prompts of both sides cannot share a batch.
2. dynamic NTK: from the length of the configuration on, the frequencies follow the longest text
   that the model ran, also in earlier passes. There no number belongs to a text alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import PromptError
from .kinds import LAST_TEXT_ROTATES, LONGER_ROTATES, config_of

_SHORTER_PROMPTS = "shorter prompts (build_prompts(..., max_length=..., drop_too_long=True))"


def rotates_by_length(model: Any) -> bool:
    return any(True for _ in _kinds(model))


def rotate_alike(model: Any, length: int, other: int) -> bool:
    return _switch_between(model, length, other) is None


def refuse_another_rotation(model: Any, cached: int, longest: int) -> None:
    """Raise an error if texts up to this length cannot continue tokens ``cached`` in another."""
    _refuse_dynamic(model, longest)
    if (switch := _switch_between(model, cached, longest)) is not None:
        raise PromptError(
            f"keys that were cached in a text of {cached} tokens cannot be used in a text of "
            f"{longest}: in texts of more than {switch} tokens this model rotates all positions "
            "differently (longrope); use texts on one side, or whole prompts (al.run)"
        )


def refuse_rotations_in_a_batch(model: Any, shortest: int, width: int) -> None:
    """Raise an error for prompts that would be rotated in another way than alone."""
    if (switch := _switch_between(model, shortest, width)) is not None:
        raise PromptError(
            f"prompts of {shortest} and {width} tokens are in one batch, but if one is longer than "
            f"{switch} tokens, this model rotates the positions of all differently (longrope); use "
            f"batches of one prompt (batch_size=1), or {_SHORTER_PROMPTS}"
        )
    _refuse_dynamic(model, width)


def _refuse_dynamic(model: Any, length: int) -> None:
    limits = [limit for kind, limit in _kinds(model) if LAST_TEXT_ROTATES in kind]
    if limits and length >= min(limits):
        raise PromptError(
            f"a text has {length} tokens, but from {min(limits)} tokens on this model (dynamic "
            "NTK) rotates positions by the longest text that it ran before, so that numbers "
            f"would depend on earlier passes; use {_SHORTER_PROMPTS}"
        )


def _switch_between(model: Any, length: int, other: int) -> int | None:
    """The length between these above which all positions are rotated differently, if any."""
    switches = sorted({limit for kind, limit in _kinds(model) if LAST_TEXT_ROTATES not in kind})
    return next((each for each in switches if (length > each) != (other > each)), None)


def _kinds(model: Any) -> Iterator[tuple[str, int]]:
    """The rotations of a model that depend on the length: each with its kind and its limit."""
    of_model = config_of(model)
    if of_model is None:
        return
    config = of_model.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    # One for all layers, or one for each type of layer; rope_scaling in older code.
    settings = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    given = [each for each in settings if isinstance(each, Mapping)]
    inner = [each for one in given for each in one.values() if isinstance(each, Mapping)]
    for rope in given + inner:
        kind = str(rope.get("rope_type", rope.get("type", "")))
        if LAST_TEXT_ROTATES in kind and longest is not None:
            yield kind, longest
        elif "long_factor" in rope:  # longrope, also by its older name su
            own = getattr(config, "original_max_position_embeddings", longest)
            yield kind, rope.get("original_max_position_embeddings", own)


def follows_the_prompts(held: Mapping[str, Any], name: str) -> bool:
    """Whether each pass sets what a module holds under this name anew, by its prompts' length."""
    # From ``original_inv_freq`` and the configuration.
    if not name.endswith(("inv_freq", "max_seq_len_cached")) or name.endswith("original_inv_freq"):
        return False
    kind = str(held.get("rope_type", ""))
    return LONGER_ROTATES in kind or LAST_TEXT_ROTATES in kind
