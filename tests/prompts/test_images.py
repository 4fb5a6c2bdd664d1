"""Prompts with images are those of the processor, and their positions are those of the texts."""

import os
import pickle
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFile

import anchorlens as al
from anchorlens.errors import DataError, PromptError
from anchorlens.prompts.images import image_of
from tests.support.image_models import image_model, picture, place_in, written

Built = tuple[Any, al.PromptBatch, al.PromptBatch, list[list[Any]]]


@pytest.fixture(scope="module", params=["LLaVA", "LLaVA-NeXT", "Gemma 3", "Idefics 3"])
def built(request: Any) -> Built:
    return of_processor(request.param)


@pytest.fixture(scope="module")
def llava() -> Built:
    return of_processor("LLaVA")


def of_processor(name: str) -> Built:
    _, processor = image_model(name)
    [text], images = written(processor)
    [batch] = al.with_images([text], processor, images)
    return processor, text, batch, images


def test_tokens_and_inputs_are_those_of_the_processor(built: Built) -> None:
    """Also of images of several sizes, whose tiles are padded."""
    processor, text, batch, images = built
    rows = [text.tokens[k][text.attention_mask[k]].tolist() for k in range(len(text))]
    processor.tokenizer.padding_side = "right"
    made = processor(
        text=processor.tokenizer.batch_decode(rows),
        images=[images[k] for k in text.index.tolist()],
        add_special_tokens=False,
        return_tensors="pt",
        padding=True,
    )
    assert batch.tokens[batch.attention_mask].equal(made["input_ids"][made["attention_mask"] == 1])
    inputs = batch.forward_inputs
    assert {*inputs} == {*made} - {"input_ids", "attention_mask", "token_type_ids"}
    assert all(inputs[name].equal(made[name]) for name in inputs)


def test_positions_move_with_the_tokens(built: Built) -> None:
    processor, text, batch, _ = built
    for name in ("label_positions", "label_ends", "target_positions", "query_start"):
        before, after = (getattr(each, name).view(len(each), -1) for each in (text, batch))
        assert batch.tokens.gather(1, after).equal(text.tokens.gather(1, before))
    assert batch.segment_names == (*text.segment_names, "image")
    place = processor.tokenizer.convert_tokens_to_ids(place_in(processor))
    stays = text.attention_mask & (text.tokens != place)
    is_image = al.edges.segment(batch, "image")
    others = batch.attention_mask & ~is_image
    assert batch.tokens[others].equal(text.tokens[stays])
    assert batch.segments[others].equal(text.segments[stays])
    drawn = torch.zeros_like(is_image)
    for row, pictures in enumerate(batch.pictures):
        assert len(pictures) == 3
        for first, length, _ in pictures:
            drawn[row, first : first + length] = True
    assert drawn.equal(is_image)


def test_images_of_demonstrations_are_a_part_of_their_set(llava: Built) -> None:
    processor, text, batch, images = llava
    assert len(batch.demonstrations_id.unique()) == 1
    other = [[picture(50), *of[1:]] for of in images]
    [changed] = al.with_images([text], processor, other)
    assert not {*changed.demonstrations_id.tolist()} & {*batch.demonstrations_id.tolist()}
    [mixed] = al.with_images([text], processor, [other[0], *images[1:]])
    assert len(mixed.demonstrations_id.unique()) == 2


def test_inputs_go_with_their_prompts(llava: Built) -> None:
    batch = llava[2]
    last = batch.prompt(2)
    assert last.inputs == batch.inputs[2:] and last.pictures == batch.pictures[2:]
    assert last.forward_inputs["pixel_values"].equal(batch.inputs[2]["pixel_values"])
    for same in (pickle.loads(pickle.dumps(batch)), batch.padded_left()):
        assert same.forward_inputs["pixel_values"].equal(batch.forward_inputs["pixel_values"])
    assert "inputs pixel_values" in repr(batch)
    shown = batch.show(llava[0].tokenizer)
    assert repr(shown).count("[image, 4 tokens]") == 3
    assert shown._repr_html_().count('<img src="data:image/png;base64,') == 3


def test_segments_of_texts_have_an_image_of_their_own(llava: Built) -> None:
    processor, place = llava[0], place_in(llava[0])
    pieces = [(None, place), ("question", " Who is it?"), (None, place), ("answer", " He")]
    texts = al.build_segments(processor.tokenizer, [pieces, [("question", "Who?")]])
    [batch] = al.with_images(texts, processor, [[picture(0), picture(1)], []])
    assert batch.segment_names == ("question", "answer", "image")
    assert al.edges.segment(batch, "image").sum(1).tolist() == [0, 8]
    assert [len(each) for each in batch.inputs] == [0, 1]
    inside = texts[0].segments.clamp(min=0).masked_fill(~texts[0].attention_mask, -1)
    named = replace(texts[0], segments=inside)  # so that each image is in a segment
    [kept] = al.with_images([named], processor, [[picture(0), picture(1)], []])
    assert kept.segment_names == ("question", "answer")
    texts = al.build_segments(processor.tokenizer, ["Who is it?"])
    assert al.with_images(texts, processor, [[]])[0] is texts[0]


def test_wrong_images_are_refused(llava: Built, tmp_path: Path) -> None:
    processor, text, _, images = llava
    (tmp_path / "text.png").write_text("no image")
    several = {"image_token": "<image> <image>", "tokenizer": processor.tokenizer}
    two_of_three = [images[0], images[1][:2], images[2]]
    for given, of_prompts, message in [
        (processor, two_of_three, "prompt 1 has 3 placeholders of images .*, but 2 images"),
        (processor, images[:2], "prompt 2 has 3 placeholders of images .*, but no list of images"),
        (processor.tokenizer, images, "a processor of images has a tokenizer"),
        (processor, [[1, 2, 3]] * 3, "is one of Pillow, or the path of a file; got a int"),
        (processor, [[tmp_path / "text.png"] * 3] * 3, "text.png cannot be read"),
        (type("Own", (), several)(), images, "as 3 tokens; take the tokenizer of the processor"),
    ]:
        with pytest.raises(PromptError, match=message):
            al.with_images([text], given, of_prompts)


def test_text_that_joins_the_tokens_of_an_image_is_refused() -> None:
    """As the line breaks around an image of Gemma 3 do in some tokenizers."""
    _, processor = image_model("Gemma 3")
    core = processor.tokenizer
    core.add_tokens(["a\n"])
    texts = al.build_segments(core, [[("question", "Is it a"), (None, place_in(processor))]])
    with pytest.raises(PromptError, match="write a space before '<boi>'"):
        al.with_images(texts, processor, [[picture(0)]])


def header(width: int, height: int) -> bytes:
    """A PNG of zeros in one bit each, packed."""
    sizes = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    ends = [
        struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each))
        for each in (sizes, b"IDAT" + zlib.compress(bytes((width + 7) // 8 + 1) * height), b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(ends)


OTHERS = r"give one of PNG, JPEG, WEBP, GIF, BMP, TIFF with at most 33,554,432 pixels"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "b'%!PS-Adobe-3'"),
        (b"P6 1 1 255 abc", "b'P6 1 1 255 a'"),
        (b"", "b''"),
        (header(5793, 5793), "it has 5793 x 5793 pixels"),
        (header(2**25 + 1, 1), "it has 33554433 x 1 pixels"),
        (header(10_000, 10_000), "pixels"),
        (header(40_000, 40_000), "pixels"),
    ],
)
def test_files_of_strangers_are_refused_before_they_are_read(
    data: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(data)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program is started"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it is unpacked"))
    with pytest.raises(PromptError, match=f"cat.png cannot be read: .*{reason}.*; {OTHERS}"):
        image_of(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_of_pictures_are_read(kind: str, tmp_path: Path) -> None:
    picture(0).quantize(4).convert("RGB").save(tmp_path / "a.png", kind)
    assert image_of(str(tmp_path / "a.png")).size == picture(0).size
    with Image.open(tmp_path / "a.png") as opened:
        assert image_of(opened).mode == "RGB"


def test_large_images_of_pillow_are_refused_and_devices_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=rf"it has 1 x 33554433 pixels; {OTHERS}"):
        image_of(Image.new("1", (1, 2**25 + 1)))
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", "/dev/zero"):
        with pytest.raises(PromptError, match="cannot be read: it is a pipe or a device"):
            image_of(path)


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PromptError, match=r"pip install 'anchorlens\[images\]'"):
        image_of("a.png")


def test_examples_have_the_paths_of_a_column(llava: Built, tmp_path: Path) -> None:
    picture(0).save(tmp_path / "a.png")
    rows = [{"text": "x", "label": k, "photo": "a.png"} for k in (0, 1)]
    file = tmp_path / "rows.csv"
    file.write_text("text,label,photo\nx,0,a.png\n")
    [example] = al.load_examples(file, image="photo")
    assert example == al.Example("x", 0, str(tmp_path / "a.png"))
    with pytest.raises(DataError, match=r"got 'a\.png', which is no file in"):
        al.load_examples(rows, image="photo")
    with pytest.raises(DataError, match="but not 'picture'; name the one of the paths"):
        al.load_examples(file, image="picture")
    with pytest.raises(DataError, match="which only a file or rows have"):
        al.load_examples("questions", image="photo")
    others = [replace(example, image=f"{k}.png") for k in range(3)]
    assert len(al.sample_queries(others, 2, exclude=others[:1])) == 2
    task = al.Task("{text}{label}", labels=(" a", " b"))
    labelled = [replace(each, label=k % 2) for k, each in enumerate(others * 2)]
    with pytest.raises(PromptError, match=r"give them and the images to al\.with_images"):
        al.sample_prompts(llava[0].tokenizer, task, labelled, queries=1)
