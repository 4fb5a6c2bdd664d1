"""What a compressed context keeps of the demonstrations, and where it stands.

A *keep* is a function from the demonstrations, as one prompt, to the positions that stay; a
*placement* one from these to where the model takes keys and query to stand. Any function of that
kind will do in place of those here.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import PromptError
from ..prompts import edges
from ..prompts.batch import FORMAT, LABEL, OTHER, TEXT, PromptBatch

Keep = Callable[[PromptBatch], Bool[Tensor, " position"]]
Placement = Callable[[Bool[Tensor, " position"]], tuple[Int[Tensor, " key"], int]]


def everything(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """All positions: the whole prompt behind a cached prefix."""
    return demonstrations.attention_mask[0]


def anchors_and_format(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """BOS, instructions, and every template, separator and label token (Hidden_anchor).

    Examples:
        >>> context = al.compress(model, batch, keep=al.anchors_and_format)
    """
    return _in_groups(demonstrations, OTHER, LABEL, FORMAT)


def label_words(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
    """BOS, instructions and the label words alone.

    Examples:
        >>> al.compress(model, batch, keep=al.label_words).kept.sum() >= len(demos)
        tensor(True)
    """
    return _in_groups(demonstrations, OTHER, LABEL)


def random_and_format(seed: int) -> Keep:
    """The control of :func:`anchors_and_format` (Hidden_random).

    All tokens of each label word are replaced by as many random text tokens of the same
    demonstration. The draw depends on ``seed`` and the demonstrations alone.

    Args:
        seed: Number of the draw.

    Returns:
        A keep, for ``compress``. It raises PromptError where a demonstration has fewer text tokens
        than its label word has tokens.

    Examples:
        >>> contexts = [al.compress(model, batch, keep=al.random_and_format(n)) for n in range(3)]
    """

    def keep(demonstrations: PromptBatch) -> Bool[Tensor, " position"]:
        kept = _in_groups(demonstrations, OTHER, FORMAT)
        name = int(demonstrations.demonstrations_id[0])
        generator = torch.Generator().manual_seed((seed * 1_000_003 + name) % 2**63)
        texts = (demonstrations.groups[0] == TEXT).nonzero().flatten().cpu()
        begin = 0
        for first, last in zip(
            demonstrations.label_positions[0].tolist(),
            demonstrations.label_ends[0].tolist(),
            strict=True,
        ):
            own = texts[(texts >= begin) & (texts < first)]
            count, begin = last - first + 1, last + 1
            if len(own) < count:
                raise PromptError(
                    f"the demonstration before position {first} has {len(own)} text tokens, but "
                    f"its label word has {count}, which random text tokens replace; use longer "
                    "demonstrations"
                )
            drawn = own[torch.randperm(len(own), generator=generator)[:count]]
            kept[drawn.to(kept.device)] = True
        return kept

    return keep


def as_in_prompt(kept: Bool[Tensor, " position"]) -> tuple[Int[Tensor, " key"], int]:
    """Everything stands where it stands in the whole prompt."""
    return kept.nonzero().flatten(), len(kept)


def restarted(kept: Bool[Tensor, " position"]) -> tuple[Int[Tensor, " key"], int]:
    """The query begins at position 0, as in the published code for GPT2-XL."""
    return kept.nonzero().flatten(), 0


def rebased(kept: Bool[Tensor, " position"]) -> tuple[Int[Tensor, " key"], int]:
    """What is kept stands at 0, 1, ... and the query follows it: no gap is left.

    Refused where positions are in the residual stream (learned ones), which cannot be moved.
    """
    count = int(kept.sum())
    return torch.arange(count, device=kept.device), count


def name_of(function: Callable[..., object]) -> str:
    """A keep or placement in the words of its author, for results."""
    return str(getattr(function, "__name__", type(function).__name__))


def _in_groups(demonstrations: PromptBatch, *groups: int) -> Bool[Tensor, " position"]:
    if not edges.group(demonstrations, "text").any():
        raise PromptError(
            "which tokens are texts and which are format is not known of these prompts; build them "
            "with build_prompts, or give a keep of your own: (demonstrations) to Bool['position']"
        )
    return torch.isin(demonstrations.groups[0], torch.tensor(groups).to(demonstrations.groups))
