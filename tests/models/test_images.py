"""Seven classes of models of images equal plain transformers; tokens without image are refused."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

import anchorlens as al
from anchorlens.contexts.prefix import drawn_tokens
from anchorlens.errors import ModelError, PromptError
from anchorlens.models import media_tokens as tokens_of_media
from anchorlens.models.media_tokens import media_tokens, without_media_tokens
from anchorlens.models.twin import twin_of
from anchorlens.passes.shortcuts import why_not_late
from anchorlens.prompts.batch import check_prompts
from anchorlens.runs import way
from anchorlens.runs.study import Study
from tests.models.test_matrix import save
from tests.references.comparison import precise
from tests.support.asked import ask
from tests.support.image_models import (
    MODELS,
    NEED_TORCHVISION,
    image_model,
    picture,
    place_in,
    written,
)
from tests.support.measures import difference, does_not_run
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
EXACT = 1e-10


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    model: Any
    plain: Any
    processor: Any
    text: al.PromptBatch
    batch: al.PromptBatch
    images: list[list[Any]]


@pytest.fixture(scope="module", params=MODELS)
def case(request: Any) -> Any:
    return case_of(request.param)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Norms and softmax are in float64, too, so that numbers are equal but for its rounding."""
    with precise(torch.float64):
        yield


@pytest.fixture(scope="module")
def llava() -> Case:
    return case_of("LLaVA")


def case_of(name: str, dtype: torch.dtype = torch.float64) -> Case:
    from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter

    weights, processor = image_model(name)
    weights = weights.to(dtype)
    plain = copy.deepcopy(weights)
    with pytest.MonkeyPatch.context() as patch, precise(dtype):
        # Their models need no torchvision, only their processors of videos do.
        patch.setattr(ArchitectureAdapter, "_check_required_libraries", lambda self: None)
        model = al.load_model(weights, tokenizer=processor.tokenizer)
    [text], images = written(processor)
    [batch] = al.with_images([text], processor, images)
    return Case(name, model, plain, processor, text, batch, images)


def plain_numbers(case: Case, row: int) -> tuple[Tensor, Tensor]:
    tokens = case.text.tokens[row][case.text.attention_mask[row]].tolist()
    made = case.processor(
        text=[case.processor.tokenizer.decode(tokens)],
        images=[case.images[int(case.batch.index[row])]],
        add_special_tokens=False,
        return_tensors="pt",
    )
    if "pixel_values" in made:
        made["pixel_values"] = made["pixel_values"].to(case.plain.dtype)
    output = case.plain(**made, output_attentions=True, use_cache=False)
    logits, gold = output.logits[:, -1], case.batch.gold[row : row + 1]  # type: ignore[index]
    loss = cross_entropy(logits[:, case.batch.label_token_ids], gold)
    slopes = torch.autograd.grad(loss, output.attentions)
    pairs = zip(output.attentions, slopes, strict=True)
    return logits[0].detach(), torch.stack([(a * d)[0].sum(0).abs().detach() for a, d in pairs])


def differences_of(case: Case, expected: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    logits, saliency = logits_of(case, case.batch), al.saliency(case.model, case.batch)
    return {
        "logits": max(difference(ours, row[0]) for ours, row in zip(logits, expected, strict=True)),
        "saliency": max(
            difference(ours[:, : maps.shape[1], : maps.shape[1]], maps)
            for ours, (_, maps) in zip(saliency, expected, strict=True)
        ),
    }


def logits_of(case: Case, batch: al.PromptBatch, hooks: Any = None) -> Tensor:
    """The logits of each prompt in the order of the batch."""
    logits = al.target_logits(case.model, [batch], hooks=hooks, progress=False)
    return logits[batch.index.argsort().argsort()]


def to_images(case: Case) -> Callable[[al.PromptBatch], Any]:
    def hooks(batch: al.PromptBatch) -> Any:
        images = al.edges.segment(batch, "image")
        edges = al.edges.between(batch.attention_mask & ~images, images)
        return al.block_edges(case.model, batch, edges)

    return hooks


@pytest.mark.quick_cases("whole models", "NeXT", "OneVision")
@pytest.mark.usefixtures("in_float64")
def test_logits_and_saliency_are_those_of_plain_transformers(case: Case) -> None:
    expected = [plain_numbers(case, row) for row in range(3)]
    results = al.run(case.model, [case.batch], [al.SaliencyFlows()], **QUIET)
    info = results["saliency_flows"].info
    assert "prompts have images" in info["shared_prefix"]
    if case.name == "Gemma 3":  # whose tokens of an image see one another both ways
        assert info["passes"].startswith("with hooks: prompts have images")
    else:
        assert info["passes"] == "native"
    for way_of_passes in (nullcontext(), twin_of(case.model).kept_out()):
        with way_of_passes:
            assert max(differences_of(case, expected).values()) < EXACT
    modules = case.model.original_model.modules()
    assert all(vars(each).get("rope_deltas") is None for each in modules)  # of Qwen


@pytest.mark.published_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_the_published_table(name: str, dtype: torch.dtype, request: Any) -> None:
    with precise(dtype):
        case = case_of(name, dtype)
        numbers = differences_of(case, [plain_numbers(case, row) for row in range(3)])
    of_row: dict[str, Any] = {"differences": numbers, "native": True}
    of_row["architecture"] = "Gemma 3 (images)" if name == "Gemma 3" else name
    of_row["special"] = f"images{SPECIAL.get(name, '')}"
    save(request.config.getoption("--matrix-results"), name, dtype, "bridge", "right", **of_row)


SPECIAL = {
    "LLaVA-NeXT": " in tiles",
    "LLaVA-OneVision": " in tiles",
    "Idefics 3": " in tiles",
    "Gemma 3": ", whose tokens see one another",
    "Qwen2.5-VL": ", whose positions are in rows and columns",
    "Qwen3-VL": ", as Qwen2.5-VL, also in later layers",
}


@pytest.mark.quick_cases("whole models", "LLaVA-OneVision", "Qwen3-VL")
def test_without_edges_to_images_logits_do_not_depend_on_pixels(case: Case) -> None:
    others = [[picture(90 + k, *image.size) for k, image in enumerate(of)] for of in case.images]
    [batch] = al.with_images([case.text], case.processor, others)
    assert (logits_of(case, batch) - logits_of(case, case.batch)).abs().max() > 0.1
    cut = [logits_of(case, each, to_images(case)) for each in (batch, case.batch)]
    assert cut[0].equal(cut[1])


@pytest.mark.quick_cases("whole models", "LLaVA-OneVision", "Qwen3-VL")
@pytest.mark.usefixtures("in_float64")
def test_prompts_are_independent_of_one_another_and_of_padding(case: Case) -> None:
    expected = logits_of(case, case.batch)
    alone = torch.cat([logits_of(case, case.batch.prompt(row)) for row in range(3)])
    assert difference(alone, expected) < EXACT
    assert logits_of(case, case.batch.padded_left()).equal(expected)
    permuted = [case.batch.prompts(2, 3), case.batch.prompts(0, 2)]
    logits = al.target_logits(case.model, permuted, progress=False)
    assert difference(logits, expected[case.batch.index.argsort()]) < EXACT


@pytest.mark.slow("whole models")
def test_late_starts_sweeps_steps_and_checkpoints_hold(llava: Case) -> None:
    model, batch = llava.model, llava.batch
    assert not why_not_late(model, 2)

    def edges(each: al.PromptBatch) -> Any:
        images = al.edges.segment(each, "image")
        return al.edges.between(each.attention_mask & ~images, images)

    sweep = ask(model, [batch], al.EdgeSweep(edges, {"deep": al.Site(2)}), **QUIET)
    cut = logits_of(llava, batch, lambda each: al.block_edges(model, each, edges(each), al.Site(2)))
    clean = logits_of(llava, batch).log_softmax(-1)
    kl = (clean.exp() * (clean - cut.log_softmax(-1))).sum(-1).mean()
    assert float(sweep.kl[0]) == pytest.approx(float(kl), rel=1e-4)
    whole, again = (
        al.run(model, [batch], [al.SaliencyFlows()], gradient_checkpointing=on, **QUIET)
        for on in (False, True)
    )
    assert difference(again["saliency_flows"].flows, whole["saliency_flows"].flows) < 1e-6


@pytest.mark.usefixtures("in_float64")
def test_long_prompts_have_whole_patterns(llava: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = al.run(llava.model, [llava.batch], [al.SaliencyFlows()], **QUIET)
    monkeypatch.setattr(way, "LARGE", 0)
    results = al.run(llava.model, [llava.batch], [al.SaliencyFlows()], **QUIET)
    assert (
        "whole patterns, because prompts have images" in results["saliency_flows"].info["attention"]
    )
    assert difference(results["saliency_flows"].flows, expected["saliency_flows"].flows) < EXACT


def with_inputs(*inputs: Any) -> Callable[[Any, al.PromptBatch], Any]:
    return lambda m, b: check_prompts(replace(b, inputs=inputs, pictures=()))


def without_image(inputs: Any) -> Callable[[Any, al.PromptBatch], Any]:
    return lambda m, b: al.target_logits(m, [replace(b, inputs=inputs(b))], progress=False)


RUN_WHOLE = "Prompts with images run whole"
WITHOUT = r"prompt 0 holds the token .* came without the image"
JOINED, NONE = "of one type and one number of axes", al.contexts.NoContext()
REFUSED: dict[str, tuple[Callable[[Any, al.PromptBatch], Any], str]] = {
    # What goes on from a cache.
    "compress": (al.compress, RUN_WHOLE),
    "prefix effect": (lambda m, b: al.run(m, [b], [al.PrefixEffect()], **QUIET), RUN_WHOLE),
    "context": (lambda m, b: ask(m, [b], al.ContextComparison({"no": NONE}), **QUIET), RUN_WHOLE),
    "hard prompt": (
        lambda m, b: al.contexts.hard_prompts.of_tokens(m, [300], held_out=[b]),
        RUN_WHOLE,
    ),
    "words": (lambda m, b: al.saliency(m, b, loss=al.losses.word_cross_entropy()), RUN_WHOLE),
    "removed text": (
        lambda m, b: al.removal.text(m, b, al.edges.demonstration(b, 0)),
        r"cut the edges from it with al\.removal\.edges",
    ),
    "one without its image": (without_image(lambda b: ({}, *b.inputs[1:])), WITHOUT),
    "all without images": (without_image(lambda b: ()), WITHOUT),
    "one prompt": (with_inputs({}), "one for each of 3 prompts, or none; got 1"),
    "words as inputs": (
        with_inputs("pixels", "pixels", "pixels"),
        "are what the model's forward takes for each prompt",
    ),
    "inputs of two shapes": (
        with_inputs({"x": torch.ones(1, 2)}, {"x": torch.ones(1)}, {}),
        JOINED,
    ),
    "lists": (with_inputs({"x": [1.0]}, {}, {}), JOINED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_images_do_not_allow_is_refused(name: str, llava: Case) -> None:
    call, message = REFUSED[name]
    with pytest.raises(al.AnchorlensError, match=message), does_not_run(llava.model):
        call(llava.model, llava.batch)


def test_line_3_of_transformer_lens_takes_no_images(
    llava: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_of_media, "installed_version", lambda name: "3.9.0")
    with pytest.raises(PromptError, match="images need transformer-lens 4"):
        al.target_logits(llava.model, [llava.batch], progress=False)


# Quick are those with nothing between the images: the others have a blank in their id.
@pytest.mark.slow_cases("whole models", " ", "LLaVA")
@pytest.mark.parametrize("between", ["", " ", " and "])
@pytest.mark.usefixtures("in_float64")
def test_images_side_by_side_are_refused_where_they_are_read_as_one(
    case: Case, between: str
) -> None:
    """Elsewhere, and with any text between, they are those of plain transformers."""
    place = place_in(case.processor)
    words = al.build_segments(
        case.processor.tokenizer, [[(None, f"See {place}{between}{place}"), ("question", " it ->")]]
    )
    [batch] = al.with_images(words, case.processor, [[picture(0), picture(1)]])
    if case.name in NEED_TORCHVISION and not between:
        with (
            pytest.raises(PromptError, match=r"prompt 0 has 2 images, but 1 groups .*side by side"),
            does_not_run(case.model),
        ):
            al.target_logits(case.model, [batch], progress=False)
        return
    text = case.processor.tokenizer.decode(words[0].tokens[0])
    made = case.processor(
        text=[text],
        images=[[picture(0), picture(1)]],
        add_special_tokens=False,
        return_tensors="pt",
    )
    assert batch.tokens.equal(made["input_ids"])
    expected = case.plain(**made, use_cache=False).logits[:, -1].detach()
    assert difference(al.target_logits(case.model, [batch], progress=False), expected) < EXACT


def test_models_of_texts_take_no_images(gpt2: Any, llava: Case) -> None:
    with pytest.raises(PromptError, match="takes none; load a model of images"):
        al.target_logits(
            gpt2, [replace(llava.batch, tokens=llava.batch.tokens.clamp(max=99))], progress=False
        )


@pytest.mark.parametrize("name", NEED_TORCHVISION)
def test_models_that_need_torchvision_say_which(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    weights, processor = image_model(name)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *o: None if n == "torchvision" else found(n, *o)
    )
    with pytest.raises(ModelError, match=r"torchvision.* of the same build as your torch"):
        al.load_model(weights, tokenizer=processor.tokenizer)


@pytest.mark.slow("whole models")
def test_a_folder_of_a_model_of_images_is_loaded(llava: Case, tmp_path: Any) -> None:
    llava.plain.save_pretrained(tmp_path)
    llava.processor.save_pretrained(tmp_path)
    model = al.load_model(tmp_path, device="cpu")
    logits = al.target_logits(model, [llava.batch], progress=False)
    expected = al.target_logits(llava.model, [llava.batch], progress=False)
    assert difference(logits, expected) < 1e-6


def with_image(model: Any) -> al.PromptBatch:
    text = model.tokenizer("what is a cat ? answer :").input_ids
    (image,) = media_tokens(model)
    tokens = [*text[:1], *[image] * 4, *text[1:]]
    segments = [0] + [1] * 4 + [2] * (len(text) - 3) + [3, 3]
    names = ["bos", "image", "text", "answer"]
    return al.PromptBatch.from_segments(
        torch.tensor([tokens]), [segments], names, begins_with_bos=True
    )


def with_demonstrations(model: Any) -> al.PromptBatch:
    batch = questions(model, 1)[0]
    tokens = batch.tokens.clone()
    tokens[:, 5] = next(iter(media_tokens(model)))
    return replace(batch, tokens=tokens)


ANSWER = al.losses.span_cross_entropy("answer")
WITHOUT_PIXELS: dict[str, Any] = {
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


@pytest.mark.parametrize("name", WITHOUT_PIXELS)
def test_tokens_of_an_image_are_refused_before_any_pass(name: str, llava: Case) -> None:
    batch = with_image(llava.model)
    message = r"holds the token \d+, the image_token_\w+ of .* give its caches to al.caches"
    with pytest.raises(PromptError, match=message), does_not_run(llava.model):
        WITHOUT_PIXELS[name](llava.model, batch)


def test_caches_of_a_pass_with_the_image_are_right(llava: Case) -> None:
    batch, metrics = with_image(llava.model), [al.SegmentAttention(apart=1)]
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    names = al.caches.names_filter(metrics, llava.model, batch)
    with torch.no_grad():
        own = llava.model.run_with_cache(batch.tokens, names_filter=names, pixel_values=pixels)
        plain = llava.model.original_model(batch.tokens, pixel_values=pixels).logits
    torch.testing.assert_close(own[0], plain)
    for model in (None, llava.model):
        results = al.caches.from_caches(metrics, [batch], [own], model=model, resamples=0)
        pattern = own[1]["blocks.1.attn.hook_pattern"][0]
        read = pattern[:, batch.segments[0] == 2][:, :, batch.segments[0] == 1].mean((1, 2))
        ours = results["segment_attention"].attention[1, :, 2, 1]
        torch.testing.assert_close(ours, read.double())
    batch = with_demonstrations(llava.model)
    with pytest.raises(PromptError, match="holds the token"):  # it makes passes of its own
        ask(llava.model, [batch], al.PrefixEffect(), **QUIET)


def test_prompts_of_text_run_and_drawn_tokens_are_of_text(llava: Case) -> None:
    batches = questions(llava.model, 2)
    assert al.target_logits(llava.model, batches, progress=False).isfinite().all()
    (image,) = media_tokens(llava.model)
    tokens = torch.tensor([[image, 5], [image - 1, image + 1]])
    moved = without_media_tokens(llava.model, tokens)
    assert moved.tolist() == [[image - 1, 5], [image - 1, image + 1]]
    assert image not in drawn_tokens(llava.model, 20_000, seed=0)


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
