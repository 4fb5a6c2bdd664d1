"""About how long all analyses of a task take: the operations of their passes over a speed."""

from collections.abc import Sequence
from typing import NamedTuple

from ..models.hooked import HookedModel
from ..passes.short_pass import timed_pass
from ..prompts.batch import PromptBatch
from ..runs.trial import shared_lengths

# About how many times longer an operation of attention takes than one with weights, on a CPU. No
# GPU was tried.
_SLOWER = 4
_WITH_GRADIENT = 3  # forward passes; a fourth where blocks run twice
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class ModelSize(NamedTuple):
    """What the operations of a pass depend on, apart from its tokens.

    Attributes:
        weights: Numbers in the blocks, with each of which every token is multiplied.
        width: Numbers of a query of all heads.
        windows: By layer, how many keys a query sees at most; None for all before it.
    """

    weights: int
    width: int
    windows: Sequence[int | None]


class PromptSet(NamedTuple):
    """Prompts with the same demonstrations.

    Attributes:
        shared: How many leading tokens they share, which run once.
        lengths: The tokens of each prompt.
    """

    shared: int
    lengths: Sequence[int]


def size_of(model: HookedModel) -> ModelSize:
    """The size of a model."""
    blocks = list(model.blocks.parameters())  # type: ignore[attr-defined]
    config = getattr(getattr(model, "original_model", None), "config", None)
    kinds = getattr(config, "layer_types", None) or [""] * model.cfg.n_layers
    window = getattr(config, "sliding_window", None)
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return ModelSize(
        sum(weights.numel() for weights in blocks), model.cfg.n_heads * model.cfg.d_head, windows
    )


def prompt_sets(batches: Sequence[PromptBatch]) -> list[PromptSet]:
    """The prompts of all batches, by their demonstrations."""
    shared = shared_lengths(batches, None)
    lengths: dict[int, list[int]] = {}
    for batch in batches:
        counts = batch.attention_mask.sum(1).tolist()
        for name, count in zip(batch.demonstrations_id.tolist(), counts, strict=True):
            lengths.setdefault(name, []).append(count)
    return [PromptSet(shared.get(name, 0), counts) for name, counts in lengths.items()]


def operations(size: ModelSize, tokens: int, before: int = 0) -> float:
    """The operations of a forward pass over tokens that come after others.

    An operation of attention counts as the operations with weights that take the same time.

    Examples:
        >>> from anchorlens.cli.duration import ModelSize, operations
        >>> operations(ModelSize(1000, 0, [None]), 7)
        14000.0
    """
    seen = before + tokens / 2
    keys = sum(seen if window is None else min(window, seen) for window in size.windows)
    return float(2 * size.weights * tokens + _SLOWER * 4 * size.width * tokens * keys)


def operations_of_analysis(
    size: ModelSize,
    sets: Sequence[PromptSet],
    sweeps: int,
    *,
    gradient_checkpointing: bool = False,
    processes: int = 1,
) -> float:
    """The operations of a process: a pass with a gradient for each prompt, and all others.

    Args:
        size: The size of the model.
        sets: All prompts.
        sweeps: How many passes without a gradient run over each prompt.
        gradient_checkpointing: Whether blocks run twice for the gradient.
        processes: Among how many the prompts are divided. The shared tokens of a set run in each
            process that has prompts of it.
    """
    times = _WITH_GRADIENT + gradient_checkpointing
    of_prompts = sum(
        times * operations(size, length) + sweeps * operations(size, length - shared, before=shared)
        for shared, lengths in sets
        for length in lengths
    )
    of_shared = sweeps * sum(operations(size, shared) for shared, _ in sets)
    return of_prompts / processes + of_shared / min(processes, len(sets))


def seconds_of_analysis(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    sites: int,
    draws: int,
    *,
    gradient_checkpointing: bool = False,
    processes: int = 1,
) -> float:
    """About how long ``analyse`` takes, by the speed of a short pass.

    Args:
        model: A prepared model.
        batches: All prompts.
        sites: Where label words are isolated.
        draws: Random controls at each site.
        gradient_checkpointing: Whether blocks run twice for the gradient.
        processes: Among how many the prompts are divided.
    """
    size, timed = size_of(model), timed_pass(model, batches[0])
    speed = operations(size, timed.tokens) / timed.seconds
    # Metrics without a gradient observe one pass, and isolation is compared with another.
    sweeps = 2 + sites * (1 + draws)
    counted = operations_of_analysis(
        size,
        prompt_sets(batches),
        sweeps,
        gradient_checkpointing=gradient_checkpointing,
        processes=processes,
    )
    return counted / speed


def in_words(seconds: float) -> str:
    """A duration in the unit that a person would choose; empty for less than a minute.

    Examples:
        >>> from anchorlens.cli.duration import in_words
        >>> in_words(2500.0)
        'about 40 minutes'
        >>> in_words(80.0)
        'about 1 minute'
        >>> in_words(20.0)
        ''
    """
    if seconds < _MINUTE:
        return ""
    if seconds < 1.5 * _HOUR:
        minutes = round(seconds / _MINUTE)
        return _counted(minutes if minutes < 10 else 5 * round(minutes / 5), "minute")
    if seconds < 2 * _DAY:
        return _counted(round(seconds / _HOUR), "hour")
    return _counted(round(seconds / _DAY), "day")


def _counted(number: int, unit: str) -> str:
    return f"about {number} {unit}{'' if number == 1 else 's'}"
