"""Functions that select positions of the demonstrations for a compressed context.

A selection is a function from the demonstrations, as a batch of one prompt, to the positions that a
compressed context stores. Your own functions with the same signature work as those here.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import PromptError
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.segment_names import FORMAT, LABEL, OTHER, TEXT
from ..system.arguments import checked

Selection = Callable[[PromptBatch], Bool[Tensor, " position"]]


@checked
def everything(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """All positions: the whole demonstrations as a cached prefix."""
    return demonstrations.attention_mask[0]


@checked
def anchors_and_format(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """BOS, instructions, and every template, separator and label token (Hidden_anchor).

    Examples:
        >>> context = al.compress(model, batch, select=al.contexts.selection.anchors_and_format)
    """
    return _in_segments(demonstrations, OTHER, LABEL, FORMAT)


@checked
def label_words(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """BOS, instructions and the label words.

    Examples:
        >>> context = al.compress(model, batch, select=al.contexts.selection.label_words)
        >>> context.selected.sum() >= len(demos)
        tensor(True)
    """
    return _in_segments(demonstrations, OTHER, LABEL)


@checked
def random_and_format(seed: int) -> Selection:
    """The control of ``anchors_and_format`` (Hidden_random).

    It selects, in place of each label word, as many random text tokens of the same demonstration
    as the word has tokens. The draw depends on ``seed`` and the demonstrations alone.

    Args:
        seed: Number of the draw.

    Returns:
        A function for the argument ``select`` of ``compress``. It raises a PromptError if a
        demonstration has fewer text tokens than its label word has tokens.

    Examples:
        >>> selections = [al.contexts.selection.random_and_format(seed) for seed in range(3)]
        >>> contexts = [al.compress(model, batch, select=select) for select in selections]
    """

    def select(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
        selected = _in_segments(demonstrations, OTHER, FORMAT)
        set_id = int(demonstrations.demonstrations_id[0])
        generator = torch.Generator().manual_seed((seed * 1_000_003 + set_id) % 2**63)
        texts = (demonstrations.segments[0] == TEXT).nonzero().flatten().cpu()
        begin = 0
        for first, last in zip(
            demonstrations.label_positions[0].tolist(),
            demonstrations.label_ends[0].tolist(),
            strict=True,
        ):
            candidates = texts[(texts >= begin) & (texts < first)]
            count, begin = last - first + 1, last + 1
            if len(candidates) < count:
                raise PromptError(
                    f"the demonstration before position {first} has {len(candidates)} text tokens, "
                    f"but its label word has {count}, which random text tokens replace; use longer "
                    "demonstrations"
                )
            drawn = candidates[
                torch.randperm(len(candidates), generator=generator, device="cpu")[:count]
            ]
            selected[drawn.to(selected.device)] = True
        return selected

    return select


def _in_segments(demonstrations: PromptBatch, *segments: int) -> Bool[Tensor, " position"]:
    if not edges.segment(demonstrations, "text").any():
        raise PromptError(
            "it is not known which tokens of these prompts are texts and which are format; build "
            "them with build_prompts, or pass your own select: (demonstrations) to Bool['position']"
        )
    return torch.isin(
        demonstrations.segments[0], torch.tensor(segments, device="cpu").to(demonstrations.segments)
    )
