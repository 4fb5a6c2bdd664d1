"""Tokens that stand for an image, a sound or a video, which the passes of this package do not have.

A multimodal model replaces their embeddings by those of the image. Without it, every number would
be that of another input.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import PromptError
from ..prompts.batch import PromptBatch, all_on_cpu
from .hooked import HookedModel
from .kinds import config_of

# Names of settings in the configurations of transformers: image_token_id, image_token_index,
# vision_start_token_id, boi_token_id (begin of image), eoa_token_index (end of audio), ...
_KINDS = "image|images|img|video|audio|vision|visual|frame|speech|media|[be]o[iav]"
_SETTING = re.compile(rf"(^|_)({_KINDS})(_.*)?_(token|tokens|pad)_(id|ids|index|indices)$")
_OF_TEXTS = ("bos_token_id", "eos_token_id", "pad_token_id")


def media_tokens(model: Any) -> dict[int, str]:
    """The name of the setting of each token that stands for an image, a sound or a video."""
    settings = [
        (name, token)
        for config in _configs(config_of(model))
        for name, value in vars(config).items()
        for token in _ids(value)
    ]
    of_texts = {token for name, token in settings if name in _OF_TEXTS}
    return {
        token: name for name, token in settings if _SETTING.search(name) and token not in of_texts
    }


def refuse_media_tokens(model: HookedModel, *batches: PromptBatch) -> None:
    """Raise an error for prompts that hold such a token among those that are run."""
    if not (names := media_tokens(model)):
        return
    tokens = torch.tensor(sorted(names), device="cpu")
    for batch in all_on_cpu(batches):
        rows = batch.query_rows
        found = torch.isin(batch.tokens[:, rows], tokens) & batch.attention_mask[:, rows]
        if found.any():
            prompt, column = found.nonzero()[0].tolist()
            token = int(batch.tokens[:, rows][prompt, column])
            raise PromptError(
                f"prompt {prompt} holds the token {token}, the {names[token]} of the model's "
                "configuration, which stands for an image, a sound or a video. The passes of "
                "anchorlens have tokens alone, so that every number would be that of another "
                "input: give prompts of text, or run the model yourself (with pixel_values=... and "
                "the like) and give its caches to al.caches.from_caches"
            )


def without_media_tokens(model: HookedModel, tokens: Int[Tensor, "*_"]) -> Int[Tensor, "*_"]:
    """The tokens, with the last token of a text before it in place of each for an image."""
    texts = {token: token for token in media_tokens(model)}
    for token in texts:
        while texts[token] in texts and texts[token] > 0:
            texts[token] -= 1
    moved = [texts.get(token, token) for token in tokens.flatten().tolist()]
    return torch.tensor(moved, device=tokens.device).view_as(tokens)


def _configs(config: Any) -> Iterator[Any]:
    """A configuration of transformers, and those inside it."""
    if config is None:
        return
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _configs(value)


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if type(each) is int and each >= 0]
