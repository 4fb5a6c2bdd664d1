"""Tokens that stand for an image, a sound or a video, and what a model takes for those of images.

A multimodal model replaces their embeddings by those of the image. Without it, every number would
be that of another input. What the model takes for it is in ``inputs_of_images`` alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import PromptError
from ..prompts.batch import PromptBatch
from ..system.devices import sent
from ..system.package import installed_version
from .hooked import HookedModel, device_of, dtype_of
from .kinds import config_of, configs_of, takes_argument

_LACKS = (
    "It came without the image, so that every number would be that of another input: build the "
    "prompts with al.with_images (sounds and videos have no such function), or run the model "
    "yourself (with pixel_values=... and the like) and give its caches to al.caches.from_caches"
)
_WHOLE = (
    "Prompts with images run whole: what writes tokens, or goes on from a key-value cache "
    "(contexts, losses of words of several tokens), has no images"
)
# Names of settings in the configurations of transformers: image_token_id, image_token_index,
# vision_start_token_id, boi_token_id (begin of image), eoa_token_index (end of audio), ...
_KINDS = "image|images|img|video|audio|vision|visual|frame|speech|media|[be]o[iav]"
_SETTING = re.compile(rf"(^|_)({_KINDS})(_.*)?_(token|tokens|pad)_(id|ids|index|indices)$")
_OF_IMAGES = re.compile("im(age|g)|vision|visual|[be]oi")
_IMAGE = re.compile("image_token_(id|index)")  # of the tokens that get the image's embeddings
# What the forward of some models takes for each token: 1 where it is of an image.
_TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
_OF_TEXTS = ("bos_token_id", "eos_token_id", "pad_token_id")


def media_tokens(model: Any) -> dict[int, str]:
    """The name of the setting of each token that stands for an image, a sound or a video."""
    settings = [
        (name, token)
        for config in configs_of(config_of(model))
        for name, value in vars(config).items()
        for token in (value if isinstance(value, list | tuple) else [value])
        if type(token) is int and token >= 0
    ]
    of_texts = {token for name, token in settings if name in _OF_TEXTS}
    return {
        token: name for name, token in settings if _SETTING.search(name) and token not in of_texts
    }


def check_media_tokens(model: HookedModel, *batches: PromptBatch) -> None:
    """Raise an error for prompts with such tokens that lack the image, or with images for none."""
    names = media_tokens(model)
    others = {token: name for token, name in names.items() if not _OF_IMAGES.search(name)}
    for batch in batches:
        if batch.inputs and not any(map(_IMAGE.fullmatch, names.values())):
            raise PromptError(
                f"the prompts have images, and {model.cfg.model_name} takes none; load a model of "
                "images, such as LLaVA"
            )
        if batch.inputs and installed_version("transformer-lens").startswith("3."):
            raise PromptError(
                "images need transformer-lens 4: its line 3 computes other numbers from the images "
                "of some models, such as Gemma 3; install a newer version"
            )
        has_images = [bool(each) for each in batch.inputs] or [False] * len(batch.tokens)
        _refuse(batch, [not each for each in has_images], names, _LACKS)
        _refuse(batch, has_images, others, _LACKS)
        before = torch.zeros_like(batch.tokens[:, :1])
        spans = _is_image(names, batch).long().diff(dim=1, prepend=before)
        for row, inputs in enumerate(batch.inputs):
            count = len(inputs.get("image_grid_thw", ()))  # where positions are in rows and columns
            if count > (found := int((spans[row] == 1).sum())):
                raise PromptError(
                    f"prompt {row} has {count} images, but {found} groups of their tokens: the "
                    "model reads images side by side as one. Write a text between them, or the "
                    "processor's marks around each (such as <|vision_start|> and <|vision_end|>)"
                )


def refuse_media_tokens(model: HookedModel, *batches: PromptBatch) -> None:
    """Raise an error for such tokens where tokens are written, or come after a key-value cache."""
    names = media_tokens(model)
    for batch in batches:
        _refuse(batch, [True] * len(batch), names, _WHOLE if batch.inputs else _LACKS)


def inputs_of_images(model: HookedModel, batch: PromptBatch) -> dict[str, Any]:
    """Arguments of the model's forward for the images of whole prompts; none for texts."""
    if not batch.inputs:
        return {}
    dtype = dtype_of(model)
    given = {name: sent(each, device_of(model)) for name, each in batch.forward_inputs.items()}
    inputs = {n: each.to(dtype) if each.is_floating_point() else each for n, each in given.items()}
    return inputs | types_of_tokens(model, _is_image(media_tokens(model), batch))


def _is_image(names: Mapping[int, str], batch: PromptBatch) -> Bool[Tensor, "batch position"]:
    of_images = [token for token, name in names.items() if _IMAGE.fullmatch(name)]
    tokens = torch.tensor(of_images, device="cpu")
    return torch.isin(batch.tokens, tokens) & batch.attention_mask


def types_of_tokens(
    model: HookedModel, is_image: Bool[Tensor, "batch position"]
) -> dict[str, Tensor]:
    """Arguments of the model's forward that say which tokens are of images, if it takes them."""
    return {name: is_image.long() for name in _TYPES_OF_TOKENS if takes_argument(model, name)}


def _refuse(
    batch: PromptBatch, prompts: Sequence[bool], names: Mapping[int, str], why: str
) -> None:
    """Raise an error if some prompts hold one of these tokens among those that are run."""
    if not names:
        return
    tokens, inside = (each[:, batch.first_query :] for each in (batch.tokens, batch.attention_mask))
    found = torch.isin(tokens, torch.tensor(sorted(names), device="cpu"))
    found &= inside & torch.tensor(prompts, device="cpu")[:, None]
    if found.any():
        prompt, column = found.nonzero()[0].tolist()
        token = int(tokens[prompt, column])
        raise PromptError(
            f"prompt {prompt} holds the token {token}, the {names[token]} of the model's "
            f"configuration, which stands for an image, a sound or a video. {why}"
        )


def without_media_tokens(model: HookedModel, tokens: Int[Tensor, "*_"]) -> Int[Tensor, "*_"]:
    """The tokens, with the last token of a text before it in place of each for an image."""
    texts = {token: token for token in media_tokens(model)}
    for token in texts:
        while texts[token] in texts and texts[token] > 0:
            texts[token] -= 1
    moved = [texts.get(token, token) for token in tokens.flatten().tolist()]
    return torch.tensor(moved, device="cpu").view_as(tokens)
