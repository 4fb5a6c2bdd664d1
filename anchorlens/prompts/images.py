"""Prompts with images: a placeholder becomes the tokens that the processor writes for the image.

The processor writes all images of a prompt in one call, between tokens that tell them apart: how
many tokens an image has can depend on the others. All positions move with these tokens, and what
the processor gives beside tokens are the ``inputs`` of the prompt.
"""

from base64 import b64encode
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PromptError
from ..system.arguments import checked
from ..system.files import bytes_of
from .batch import PromptBatch, bytes_digest, check_prompts, demonstrations_ids, digest
from .prompt_html import Picture
from .segment_names import IMAGE, PADDING, SEGMENTS, of_task

# What a processor gives for each token, which follows from the tokens that are run.
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_SIDE = 96  # pixels of an image that a page draws, at most
_CURE = "install Pillow: pip install 'anchorlens[images]'"
# Named, because an image comes from a stranger, and for others Pillow starts a program (EPS).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Twice what processors keep (4096 x 4096), in 128 MiB; a file of some KB can have 100 times more.
_PIXELS = 2**25
_KEPT = 2**25  # pixels of images that are held for other prompts, before one more is read


@checked
def with_images(
    batches: Sequence[PromptBatch], processor: Any, images: Sequence[Sequence[Any]]
) -> list[PromptBatch]:
    """The same prompts with images, whose tokens are the segment ``image``.

    Write the processor's placeholder (``processor.image_token``, in Gemma 3
    ``processor.boi_token``) where each image belongs: in the template of a task, so that each
    demonstration and the query has one, or with ``build_segments`` in a piece without a name. In a
    segment of your own its tokens belong to that segment.

    All passes, edges, hooks and metrics take these prompts, which run whole: no tokens are shared,
    and what goes on from a key-value cache (contexts, losses of several tokens) is refused.

    Args:
        batches: Prompts of texts, built with ``processor.tokenizer``.
        processor: The processor of the model (``transformers.AutoProcessor.from_pretrained``).
        images: For each prompt, by its ``index``, the images in the order of their placeholders:
            those of the demonstrations, then that of the query. An image is one of Pillow or a file
            (PNG, JPEG, WEBP, GIF, BMP or TIFF), with at most 33,554,432 pixels.

    Returns:
        The batches with the tokens of the images, with ``inputs`` and ``pictures``. Prompts whose
        demonstrations have other images are other sets of demonstrations.

    Raises:
        PromptError: A prompt has other placeholders than images, an image cannot be read, Pillow is
            missing, ``processor`` is none of images, or a placeholder would merge with the text.

    Examples:
        >>> asked = al.Task("<image> {text} ->{label}", labels=[" Human", " Location"])
        >>> pair = [al.Example("Who?", 0), al.Example("Where?", 1)]
        >>> texts = al.build_prompts(processor.tokenizer, asked, pair, ["Who is it?"])
        >>> [shown] = al.with_images(texts, processor, [[picture, picture, picture]])
        >>> shown.segment_names[-1], int(al.edges.segment(shown, "image").sum())
        ('image', 12)
    """
    writer, reader = _Writer.of(processor), _Reader()
    return [_expanded(batch, writer, reader, images) for batch in batches]


def place_of(processor: Any) -> str:
    """The text that stands for an image in a prompt."""
    place = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    if not isinstance(place, str) or not hasattr(processor, "tokenizer"):
        raise PromptError(
            "a processor of images has a tokenizer and an image_token, as that of "
            f"transformers.AutoProcessor; got a {type(processor).__name__}"
        )
    return place


def image_of(source: Any) -> Any:
    """An image of Pillow, of a path or as it is; a PromptError if it cannot be read."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise PromptError(f"images need Pillow, which is not installed; {_CURE}") from error
    is_path = isinstance(source, str | Path)
    if not is_path and not isinstance(source, Image.Image):
        raise PromptError(
            f"an image is one of Pillow, or the path of a file; got a {type(source).__name__}"
        )
    data = bytes_of(source, PromptError) if is_path else b""
    try:
        with (
            Image.open(BytesIO(data), formats=_FORMATS) if is_path else nullcontext(source) as image
        ):
            if image.width * image.height > _PIXELS:  # of the header: nothing was decoded yet
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            return image.convert("RGB")
    except Exception as error:  # Pillow has several for files that hold no image
        is_other = isinstance(error, UnidentifiedImageError)
        raise PromptError(
            f"the image {source} cannot be read: "
            f"{f'its bytes begin with {data[:12]!r}' if is_other else error}; give one of "
            f"{', '.join(_FORMATS)} with at most {_PIXELS:,} pixels, twice what processors keep"
        ) from error


class _Shown(NamedTuple):
    source: Any  # held, so that no other object gets its id
    image: Any
    digest: int
    small: str


class _Reader(dict[Any, _Shown]):
    """The images that were read last, because those of demonstrations are in many prompts."""

    def read(self, source: Any) -> _Shown:
        key = source if isinstance(source, str | Path) else id(source)
        if key not in self:
            if sum(each.image.width * each.image.height for each in self.values()) > _KEPT:
                self.clear()
            image = image_of(source)
            pixels = bytes_digest(repr(image.size).encode() + image.tobytes())
            self[key] = _Shown(source, image, pixels, _small(image))
        return self[key]


class _Writer(NamedTuple):
    """How a processor writes images."""

    processor: Any
    place: str
    place_id: int
    between: tuple[str, int]  # a token that stands between images, and in none

    @classmethod
    def of(cls, processor: Any) -> "_Writer":
        place, tokenizer = place_of(processor), processor.tokenizer
        written = tokenizer(place, add_special_tokens=False)["input_ids"]
        if len(written) != 1:
            raise PromptError(
                f"the tokenizer reads {place!r}, which stands for an image, as {len(written)} "
                "tokens; take the tokenizer of the processor, which has it as a special token"
            )
        of_texts = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token)
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        others = [each for each in special if each[0] in of_texts and each[1] != written[0]]
        if not others:
            raise PromptError("the tokenizer of the processor has no special token of texts")
        return cls(processor, place, written[0], others[0])

    def write(self, images: Sequence[Any]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """The tokens of each image, and what the forward takes for all of them."""
        if not images:
            return [], {}
        name, number = self.between
        text = name.join([self.place] * len(images))
        made = self.processor(
            text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt"
        )
        runs: list[list[int]] = [[]]
        for token in made["input_ids"][0].tolist():
            if token == number:
                runs.append([])
            else:
                runs[-1].append(token)
        if len(runs) != len(images):
            raise PromptError(f"the processor writes {len(runs)} images of {len(images)}")
        return runs, {name: value for name, value in made.items() if name not in _OF_TOKENS}


class _Prompt(NamedTuple):
    """A prompt whose placeholders became the tokens of images."""

    tokens: list[int]
    segments: list[int]
    counts: list[int]  # of the tokens that each token became
    inputs: dict[str, Tensor]
    pictures: tuple[Picture, ...]
    of_set: list[int]  # a digest of the images of its demonstrations


def _expanded(
    given: PromptBatch, writer: _Writer, reader: _Reader, images: Sequence[Sequence[Any]]
) -> PromptBatch:
    places = (given.tokens == writer.place_id) & given.attention_mask
    if not places.any() and not any(map(len, images)):
        return given
    names = given.segment_names
    unnamed = bool((given.segments[places] == PADDING).any())
    if IMAGE not in names and (names == SEGMENTS or unnamed):
        names = (*names, IMAGE)
    prompts = [_prompt(given, row, names, writer, reader, images) for row in range(len(given))]
    width = max(len(prompt.tokens) for prompt in prompts)
    counts = torch.zeros_like(given.tokens)
    of_tokens = [count for prompt in prompts for count in prompt.counts]
    counts[given.attention_mask] = torch.tensor(of_tokens, device="cpu")
    after = counts.cumsum(1)  # the tokens up to each column, with it

    def moved(positions: Tensor, to: Tensor) -> Tensor:
        return to.gather(1, positions.view(len(given), -1)).view_as(positions)

    changed = replace(
        given,
        tokens=_table([each.tokens for each in prompts], width, 0),
        attention_mask=_table([[1] * len(each.tokens) for each in prompts], width, 0).bool(),
        segments=_table([each.segments for each in prompts], width, PADDING),
        segment_names=names,
        label_positions=moved(given.label_positions, after - counts),
        label_ends=moved(given.label_ends, after - 1),
        target_positions=moved(given.target_positions, after - 1),
        query_start=moved(given.query_start, after - counts),
        inputs=tuple(each.inputs for each in prompts),
        pictures=tuple(each.pictures for each in prompts),
    )
    check_prompts(changed)
    ids = zip(demonstrations_ids(changed).tolist(), prompts, strict=True)
    own = [digest([number, *each.of_set]) if each.of_set else number for number, each in ids]
    return replace(changed, demonstrations_id=torch.tensor(own, device="cpu"))


def _prompt(
    batch: PromptBatch,
    row: int,
    names: Sequence[str],
    writer: _Writer,
    reader: _Reader,
    images: Sequence[Sequence[Any]],
) -> _Prompt:
    inside, number = batch.attention_mask[row], int(batch.index[row])
    before: list[int] = batch.tokens[row, inside].tolist()
    segments_before: list[int] = batch.segments[row, inside].tolist()
    places = [k for k, token in enumerate(before) if token == writer.place_id]
    if number >= len(images) or len(places) != len(images[number]):
        given = len(images[number]) if number < len(images) else "no list of"
        raise PromptError(
            f"prompt {number} has {len(places)} placeholders of images ({writer.place!r}), but "
            f"{given} images; give those of its whole prompt, also of the demonstrations"
        )
    shown = [reader.read(image) for image in images[number]]
    runs, inputs = writer.write([each.image for each in shown])
    run_of = dict(zip(places, runs, strict=True))
    tokens, segments, counts, pictures = list[int](), list[int](), list[int](), list[Picture]()
    for k, token in enumerate(before):
        run, segment = run_of.get(k, [token]), segments_before[k]
        if k in run_of:
            pictures.append(Picture(len(tokens), len(run), shown[len(pictures)].small))
            is_own = segment != PADDING and not of_task(names)
            segment = segment if is_own else names.index(IMAGE)
        tokens += run
        segments += [segment] * len(run)
        counts.append(len(run))
    tokenizer = writer.processor.tokenizer
    if _encodes_back(tokenizer, before) and not _encodes_back(tokenizer, tokens):
        raise PromptError(
            f"in prompt {number} the tokenizer joins the text beside an image with the tokens of "
            f"the image; write a space before {writer.place!r}, or another text around it"
        )
    last = len(before)
    if batch.has_label_words:
        last = int(batch.label_ends[row].max() - batch.starts[row])
    of_set = [each.digest for place, each in zip(places, shown, strict=True) if place <= last]
    return _Prompt(tokens, segments, counts, inputs, tuple(pictures), of_set)


def _encodes_back(tokenizer: Any, tokens: Sequence[int]) -> bool:
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    again: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return again == list(tokens)


def _table(rows: Sequence[Sequence[int]], width: int, padding: int) -> Tensor:
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], device="cpu")


def _small(image: Any) -> str:
    """A small copy of an image, as the address that a page loads it from without a file."""
    copy, written = image.copy(), BytesIO()
    copy.thumbnail((_SIDE, _SIDE))
    copy.save(written, "PNG")
    return f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"
