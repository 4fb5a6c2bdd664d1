"""Prompts with tokens that stand for an image are refused; caches of passes with the image work."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import anchorlens as al
from anchorlens.contexts.prefix import drawn_tokens
from anchorlens.errors import PromptError
from anchorlens.models.media_tokens import media_tokens, without_media_tokens
from anchorlens.runs.study import Study
from tests.support.asked import ask
from tests.support.image_models import image_model
from tests.support.measures import does_not_run
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
N_PATCHES = 4


@pytest.fixture(scope="module")
def llava() -> Any:
    weights, processor = image_model("LLaVA")
    return al.load_model(weights, tokenizer=processor.tokenizer)


def with_image(model: Any) -> al.PromptBatch:
    """A prompt whose first segment is an image."""
    text = model.tokenizer("what is a cat ? answer :").input_ids
    (image,) = media_tokens(model)
    tokens = [*text[:1], *[image] * N_PATCHES, *text[1:]]
    segments = [0] + [1] * N_PATCHES + [2] * (len(text) - 3) + [3, 3]
    names = ["bos", "image", "text", "answer"]
    return al.PromptBatch.from_segments(
        torch.tensor([tokens]), [segments], names, begins_with_bos=True
    )


def with_demonstrations(model: Any) -> al.PromptBatch:
    """A prompt with an image in its demonstrations."""
    batch = questions(model, 1)[0]
    tokens = batch.tokens.clone()
    tokens[:, 5] = next(iter(media_tokens(model)))
    return replace(batch, tokens=tokens)


ANSWER = al.losses.span_cross_entropy("answer")
CALLS: dict[str, Callable[[Any, al.PromptBatch], Any]] = {
    "run": lambda m, b: al.run(m, [b], [al.SegmentAttention(apart=1)], **QUIET),
    "flows": lambda m, b: al.run(m, [b], [al.SegmentFlows()], loss=ANSWER, **QUIET),
    "target_logits": lambda m, b: al.target_logits(m, [b], progress=False),
    "saliency": lambda m, b: al.saliency(m, b, loss=ANSWER),
    "step_flows": lambda m, b: al.step_flows(m, b, "answer"),
    "integrated_flows": lambda m, b: ask(m, [b], al.IntegratedFlows(steps=1), **QUIET),
    "Study": lambda m, b: Study(m, [b], {}, **QUIET).entered().__enter__(),
    "plot_prompt": lambda m, b: al.plot_prompt(m, with_demonstrations(m)),
    "compress": lambda m, b: al.compress(m, with_demonstrations(m)),
    "a prefix": lambda m, b: al.PrefixEffect().plot_pattern(m, with_demonstrations(m), 0, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_tokens_of_an_image_are_refused_before_any_pass(name: str, llava: Any) -> None:
    batch = with_image(llava)
    message = r"holds the token \d+, the image_token_\w+ of .* give its caches to al.caches"
    with pytest.raises(PromptError, match=message), does_not_run(llava):
        CALLS[name](llava, batch)


def test_caches_of_a_pass_with_the_image_are_right(llava: Any) -> None:
    batch, metrics = with_image(llava), [al.SegmentAttention(apart=1)]
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    names = al.caches.names_filter(metrics, llava, batch)
    with torch.no_grad():
        own = llava.run_with_cache(batch.tokens, names_filter=names, pixel_values=pixels)
        plain = llava.original_model(batch.tokens, pixel_values=pixels).logits
    torch.testing.assert_close(own[0], plain)
    for model in (None, llava):
        results = al.caches.from_caches(metrics, [batch], [own], model=model, resamples=0)
        pattern = own[1]["blocks.1.attn.hook_pattern"][0]
        read = pattern[:, batch.segments[0] == 2][:, :, batch.segments[0] == 1].mean((1, 2))
        ours = results["segment_attention"].attention[1, :, 2, 1]
        torch.testing.assert_close(ours, read.double())
    batch = with_demonstrations(llava)
    with pytest.raises(PromptError, match="holds the token"):  # it makes passes of its own
        ask(llava, [batch], al.PrefixEffect(), **QUIET)


def test_prompts_of_text_run_and_drawn_tokens_are_of_text(llava: Any) -> None:
    batches = questions(llava, 2)
    assert al.target_logits(llava, batches, progress=False).isfinite().all()
    (image,) = media_tokens(llava)
    tokens = torch.tensor([[image, 5], [image - 1, image + 1]])
    moved = without_media_tokens(llava, tokens)
    assert moved.tolist() == [[image - 1, 5], [image - 1, image + 1]]
    assert image not in drawn_tokens(llava, 20_000, seed=0)


def made(name: str, **options: Any) -> Any:
    config = getattr(transformers, name)(**options)
    return SimpleNamespace(original_model=SimpleNamespace(config=config))


def test_settings_of_images_sounds_and_videos_are_found_in_any_configuration() -> None:
    """Also inside others; a token that begins, ends or pads texts stands for no image."""
    for name, settings in {
        "Gemma3Config": {"boi_token_index", "eoi_token_index"},
        "Qwen2VLConfig": {"video_token_id", "vision_start_token_id"},
    }.items():
        assert settings <= {*media_tokens(made(name)).values()}
    audio = made("Qwen2AudioConfig", audio_token_index=7)
    assert media_tokens(audio)[7].startswith("audio_token")
    nested = made("LlamaConfig")
    nested.original_model.config.thinker_config = audio.original_model.config
    assert 7 in media_tokens(nested)
    nested.original_model.config.eos_token_id = [2, 7]
    assert 7 not in media_tokens(nested)
    for name in ("LlamaConfig", "GPT2Config", "Gemma3TextConfig"):
        assert not media_tokens(made(name))
