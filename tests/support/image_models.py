"""Tiny models of images with their processors, by the class of the model; nothing is downloaded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from PIL import Image

import anchorlens as al
from tests.references.architecture_row import COMMON
from tests.support.tiny_models import randomize, sentencepiece_like_tokenizer

SIDE, PATCH = 8, 4  # pixels
SQUARE = {"height": SIDE, "width": SIDE}
TEXT = {**COMMON, "num_key_value_heads": 2, "max_position_embeddings": 1024}
SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
QWEN: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
}
GRID = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]  # sizes that are cut into tiles
_OF_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_IDEFICS = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
_IDEFICS += [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]


def tokenizer(names: dict[str, str], *more: str) -> Any:
    core = sentencepiece_like_tokenizer()
    core.add_special_tokens({"additional_special_tokens": [*names.values(), *more]})
    for name, token in names.items():
        setattr(core, name, token)
        setattr(core, f"{name}_id", core.convert_tokens_to_ids(token))
    return core


def _made(name: str, processor: Any, text: Any, sight: Any, **options: Any) -> tuple[Any, Any]:
    """A model of images of these parts, and its processor."""
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=sight, **options)
    return getattr(hf, f"{name}ForConditionalGeneration")(config), processor


def _clip_with_llama(name: str, of_pixels: Any, **options: Any) -> tuple[Any, Any]:
    words = tokenizer({"image_token": "<image>"})
    pixels = of_pixels(size={"shortest_edge": SIDE}, crop_size=SQUARE, **options)
    processor = getattr(hf, f"{name}Processor")(
        pixels, words, PATCH, "default", num_additional_image_tokens=1
    )
    sight = hf.CLIPVisionConfig(projection_dim=16, **SIGHT)
    options |= {"image_token_id": words.image_token_id, "vision_feature_layer": -2}
    return _made(name, processor, hf.LlamaConfig(vocab_size=len(words), **TEXT), sight, **options)


def _without_videos(kind: Any) -> Any:
    """A processor's part for images, which needs no torchvision."""
    accepted = lambda self, name, argument: type(argument)  # noqa: E731
    return type("Images", (kind,), {"check_argument_for_proper_class": accepted})


def _llava_onevision() -> tuple[Any, Any]:
    words = tokenizer({"image_token": "<image>", "video_token": "<video>"})
    pixels = hf.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=GRID)
    processor = _without_videos(hf.LlavaOnevisionProcessor)(
        pixels, words, num_image_tokens=4, vision_feature_select_strategy="full"
    )
    return _made(
        "LlavaOnevision",
        processor,
        hf.Qwen2Config(vocab_size=len(words), **TEXT),
        hf.SiglipVisionConfig(**SIGHT),
        **{"image_token_id": words.image_token_id, "video_token_id": words.video_token_id},
        **{"vision_feature_layer": -2, "image_grid_pinpoints": GRID},
    )


def _gemma3() -> tuple[Any, Any]:
    words = tokenizer({"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"})
    pixels = hf.Gemma3ImageProcessorPil(size=SQUARE)
    text = hf.Gemma3TextConfig(
        **{"vocab_size": len(words), "head_dim": 8, "query_pre_attn_scalar": 8, **TEXT},
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return _made(
        "Gemma3",
        hf.Gemma3Processor(pixels, words, image_seq_length=4),
        text,
        hf.SiglipVisionConfig(vision_use_head=False, **SIGHT),
        mm_tokens_per_image=4,
        image_token_index=words.image_token_id,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
    )


def _idefics3() -> tuple[Any, Any]:
    words = tokenizer({"image_token": "<image>"}, *_IDEFICS)
    pixels = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    processor = hf.Idefics3Processor(pixels, words, image_seq_len=1)
    options = {"image_token_id": words.image_token_id, "scale_factor": 2, "pad_token_id": 0}
    text = hf.LlamaConfig(vocab_size=len(words), **TEXT)
    return _made("Idefics3", processor, text, SIGHT, **options)


def _qwen(name: str, **sight: Any) -> tuple[Any, Any]:
    words = tokenizer(_OF_QWEN)
    ids = {f"{token}_id": getattr(words, f"{token}_id") for token in _OF_QWEN}
    pixels = hf.Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 128, "longest_edge": 256},
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text_config = getattr(hf, f"{name}Config").sub_configs["text_config"]
    text = text_config(vocab_size=len(words), rope_parameters=rope, head_dim=8, **TEXT)
    processor = _without_videos(getattr(hf, f"{name}Processor"))(pixels, words)
    return _made(name, processor, text.to_dict(), QWEN | sight, **ids)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "LLaVA": partial(_clip_with_llama, "Llava", hf.CLIPImageProcessorPil),
    "LLaVA-NeXT": partial(
        _clip_with_llama, "LlavaNext", hf.LlavaNextImageProcessorPil, image_grid_pinpoints=GRID
    ),
    "LLaVA-OneVision": _llava_onevision,
    "Gemma 3": _gemma3,
    "Idefics 3": _idefics3,
    "Qwen2.5-VL": partial(_qwen, "Qwen2_5_VL", window_size=16, fullatt_block_indexes=[1]),
    "Qwen3-VL": partial(
        _qwen, "Qwen3VL", deepstack_visual_indexes=[0, 1], num_position_embeddings=16
    ),
}
# TransformerLens refuses these without torchvision, which their processors of videos need.
NEED_TORCHVISION = ("Qwen2.5-VL", "Qwen3-VL")


def image_model(name: str) -> tuple[Any, Any]:
    """A model of transformers with random weights, which attends eagerly, and its processor."""
    with torch.random.fork_rng(devices=[]):
        weights, processor = MODELS[name]()
    randomize(weights)
    weights.set_attn_implementation("eager")
    return weights, processor


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """A picture of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def place_in(processor: Any) -> str:
    """What stands for an image in the text of a prompt."""
    return str(getattr(processor, "boi_token", None) or processor.image_token)


def written(processor: Any, **options: Any) -> tuple[list[al.PromptBatch], list[list[Any]]]:
    """Three prompts of two demonstrations with an image each, as texts, and their images."""
    task = al.Task(f"See {place_in(processor)} and {{text}} ->{{label}}", (" Human", " Location"))
    demos = [al.Example("Who was he?", 0), al.Example("Where to?", 1)]
    queries = [
        al.Example("In which town was it?", 1),
        *(al.Example(q, 0) for q in ("When?", "Who?")),
    ]
    texts = al.build_prompts(processor.tokenizer, task, demos, queries, **options)
    shown = [picture(0), picture(1, 2 * SIDE, SIDE)]
    return texts, [[*shown, picture(2 + k, SIDE, (1 + k % 2) * SIDE)] for k in range(3)]
