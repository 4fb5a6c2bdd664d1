"""Loading a model, and verifying that its hooks act."""

import subprocess
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models import load
from anchorlens.models.facts import facts_of
from anchorlens.passes.forward import run_pass
from tests.models.test_verify_hooks import SIZES, TEXTS, made
from tests.support.image_models import image_model
from tests.support.tiny_models import boot, questions, randomize, tiny_gpt2
from tests.support.unchanged import changed, state_of

pytestmark = pytest.mark.every_kind

TEXT = "Review: what a film\nSentiment: Positive"


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out)


@pytest.mark.slow("whole models")
def test_a_model_loads_from_a_local_folder(tmp_path: Path, byte_level: Any) -> None:
    weights = tiny_gpt2(len(byte_level))
    weights.save_pretrained(tmp_path)
    byte_level.save_pretrained(tmp_path)
    for folder in (tmp_path, str(tmp_path)):
        model = al.load_model(folder, device="cpu")
    facts_of(model)
    tokens = torch.tensor([byte_level(TEXT)["input_ids"]])
    assert model.tokenizer(TEXT)["input_ids"] == tokens[0].tolist()
    torch.testing.assert_close(logits_of(model, tokens), logits_of(weights, tokens))
    assert next(model.parameters()).dtype == torch.float32
    double = al.load_model(tmp_path, device="cpu", dtype=torch.float64)
    assert {parameter.dtype for parameter in double.parameters()} == {torch.float64}
    half = al.load_model(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16
    batch = questions(half, 2)[0]
    assert run_pass(half, batch).dtype == torch.float32
    assert al.saliency(half, batch).isfinite().all()


def test_the_error_names_the_model_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    broken, empty = tmp_path / "broken", tmp_path / "empty"
    broken.mkdir()
    empty.mkdir()
    (broken / "it.gguf").write_bytes(b"GGUF and nothing more")
    for source, message in {
        "nobody/none": "'nobody/none' cannot be loaded.*give a local folder or a .gguf file",
        empty: r"has no config\.json; give the folder of a saved",
        "/no/such/folder": "there is no folder '/no/such/folder'",
        tmp_path / "missing.gguf": r"there is no file .*missing\.gguf",
        broken / "it.gguf": "cannot be loaded",
        broken: r"no config\.json; give the file .*it\.gguf",
    }.items():
        with pytest.raises(ModelError, match=message):
            al.load_model(source)


@pytest.mark.slow("whole models")
def test_a_revision_is_read_and_named(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a cache as the hub's client writes it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--nobody--tiny"
    (cached / "refs").mkdir(parents=True)
    tokens = torch.tensor([byte_level(TEXT)["input_ids"]])
    expected: dict[str, torch.Tensor] = {}
    for number, revision in enumerate(("main", "step1000")):
        weights: Any = randomize(tiny_gpt2(len(byte_level)), number)
        commit = str(number) * 40
        expected[revision] = logits_of(weights, tokens)
        (cached / "refs" / revision).write_text(commit)
        weights.save_pretrained(cached / "snapshots" / commit)
        byte_level.save_pretrained(cached / "snapshots" / commit)
    assert not torch.allclose(expected["main"], expected["step1000"])
    names = {None: "nobody/tiny", "step1000": "nobody/tiny@step1000"}
    for given, name in names.items():
        model = al.load_model("nobody/tiny", revision=given)
        torch.testing.assert_close(logits_of(model, tokens), expected[given or "main"])
        assert model.cfg.model_name == name
    with pytest.raises(ModelError, match="'nobody/tiny@step2' cannot be loaded"):
        al.load_model("nobody/tiny", revision="step2")
    for source in (cached, tiny_gpt2(len(byte_level))):
        with pytest.raises(ModelError, match=r"only a name on the hub has revisions, and .* none"):
            al.load_model(source, tokenizer=byte_level, revision="main")


def as_peft(weights: Any) -> Any:
    import peft

    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(weights, config)


# What torch.compile imports, and what peft asks of transformers.
@pytest.mark.slow_cases("whole models", "compile")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*checkpointing")
@pytest.mark.parametrize(
    ("wrapped", "got", "cure"),
    [
        (as_peft, "PeftModelForCausalLM", r"pass model\.merge_and_unload\(\)"),
        (torch.compile, "OptimizedModule", r"pass model\._orig_mod"),
        (torch.nn.DataParallel, "DataParallel", r"pass model\.module"),
        (lambda weights: weights.state_dict(), "OrderedDict", "use AutoModelForCausalLM"),
        (lambda weights: None, "NoneType", "use AutoModelForCausalLM"),
    ],
)
def test_a_wrapped_model_is_refused_in_one_line(
    byte_level: Any, wrapped: Any, got: str, cure: str
) -> None:
    """The error does not print the module, which may be thousands of lines."""
    source = wrapped(tiny_gpt2(len(byte_level)))
    with pytest.raises(ModelError, match=f"expected a name, .*; got a {got}: {cure}") as error:
        al.load_model(source, tokenizer=byte_level)
    assert len(str(error.value)) < 250


@pytest.mark.draws
def test_objects_that_are_not_hooked_models_are_refused(gpt2: Any) -> None:
    with pytest.raises(ModelError, match=r"hooked model already: pass it to al\.prepare_model"):
        al.load_model(gpt2)
    with pytest.raises(ModelError, match=r"without a tokenizer; pass tokenizer=\.\.\."):
        al.load_model(tiny_gpt2(700))
    for value in (tiny_gpt2(700), torch.nn.Linear(2, 2), "gpt2", None):
        message = f"expected a TransformerBridge or HookedTransformer; got {type(value).__name__}"
        with pytest.raises(ModelError, match=message + r".*al\.load_model makes one"):
            al.prepare_model(value)  # type: ignore[type-var]


@pytest.mark.slow("whole models")
def test_prepare_model_verifies_a_model_and_does_not_change_it(
    byte_level: Any, raw: Any, gpt2: Any
) -> None:
    model = raw(tiny_gpt2(len(byte_level)), byte_level)
    batch = questions(model, 2)[0]
    with pytest.raises(ModelError, match=r"not been verified; call al\.prepare_model"):
        al.isolate_labels(model, batch, 0)
    with pytest.raises(ModelError, match=r"not been verified"):
        al.reweight_anchors(model, batch, torch.zeros(3, 2, 6))
    model(torch.tensor([[1, 2, 3]]))  # a bridge adds its own hooks in its first pass
    before = state_of(model)
    assert al.prepare_model(model) is model
    changes = changed(before, state_of(model))
    # The forward of attention that a bridge leaves to transformers is wrapped.
    names = {name.split(": ")[-1] for name in changes} - {"forward"}
    assert names == {"the facts that are known of it"}
    assert al.isolate_labels(model, batch, 0)
    torch.testing.assert_close(al.saliency(model, batch), al.saliency(gpt2, batch))
    # al.run verifies the hooks at first use.
    other = raw(tiny_gpt2(len(byte_level)), byte_level)
    al.run(other, [batch], [al.SaliencyFlows()], resamples=0, progress=False)
    facts_of(other)


@pytest.mark.quick_cases("whole models", "False", "byte_level")
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like"])
@pytest.mark.parametrize("twice", [False, True])
def test_a_model_adds_bos_where_its_tokenizer_does(
    kind: str, twice: bool, hooked: Any, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    settings, ids = dict(tokenizer.init_kwargs), tokenizer(TEXT)["input_ids"]
    model = hooked(tiny_gpt2(len(tokenizer)), tokenizer)
    if twice:
        model = al.load_model(tiny_gpt2(len(tokenizer)), tokenizer=model.tokenizer)
    assert model.tokenizer(TEXT)["input_ids"] == ids
    assert (ids[0] == tokenizer.bos_token_id) == (kind == "sentencepiece_like")
    assert tokenizer.init_kwargs == settings and tokenizer(TEXT)["input_ids"] == ids
    assert questions(model, 1)[0].begins_with_bos == (kind == "sentencepiece_like")


def test_quantised_weights_cannot_be_cast(byte_level: Any) -> None:
    """The weights are marked as quantised, and transformers refuses to cast them, even to None."""
    weights: Any = tiny_gpt2(len(byte_level))
    weights.is_quantized, weights.quantization_method = True, "gptq"
    al.load_model(weights, tokenizer=byte_level, device="cpu")
    with pytest.raises(
        ModelError, match=r"cannot be put .* leave the type \(dtype=\) of quantised"
    ):
        al.load_model(weights, tokenizer=byte_level, dtype=torch.bfloat16)


@pytest.mark.slow("whole models")
def test_loading_a_model_of_images_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerLens installs torchvision where it is missing; the text part does not need it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commands: list[Any] = []
    for name in ("check_call", "run", "Popen"):
        monkeypatch.setattr(subprocess, name, lambda *command, **_: commands.append(command))
    weights, processor = image_model("Gemma 3")
    model = al.load_model(weights, tokenizer=processor.tokenizer)
    assert al.saliency(model, questions(model, 1)[0]).isfinite().all()
    assert not commands


def test_a_device_that_cannot_compute_is_refused_before_weights_are_read(
    tmp_path: Path, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "read_weights", None)
    with pytest.raises(ModelError, match=r"device 'meta': its tensors have shapes and no numbers"):
        al.load_model(tmp_path, device="meta")
    for device in ("no-such-device", torch.device("cuda", 63)):
        with pytest.raises(ModelError, match=r"the device .*; this machine has .*cpu"):
            al.load_model(tmp_path, device=device)
    weights: Any = tiny_gpt2(len(byte_level))
    with pytest.raises(ModelError, match=r"shapes and no numbers.*so that all stay in memory"):
        al.load_model(weights.to("meta"), tokenizer=byte_level)


@pytest.mark.parametrize("through", ["load", "prepare"])
def test_models_that_are_too_small_are_refused(byte_level: Any, through: str) -> None:
    def prepared(**sizes: Any) -> Any:
        weights = tiny_gpt2(len(byte_level), **sizes)
        if through == "load":
            return al.load_model(weights, tokenizer=byte_level)
        return al.prepare_model(boot(weights, byte_level))

    with pytest.raises(ModelError, match="has no layers"):
        prepared(n_layer=0)
    with pytest.raises(ModelError, match=r"context of .* is 2 tokens, and the check .* takes 3"):
        prepared(n_positions=2)
    assert prepared(n_positions=3, n_layer=1).cfg.n_ctx == 3


@pytest.mark.parametrize("ending", ["LMHeadModel", "ForMaskedLM"])
@pytest.mark.parametrize("through", ["load", "prepare"])
def test_bidirectional_models_are_refused(byte_level: Any, ending: str, through: str) -> None:
    sizes = SIZES | TEXTS | {"intermediate_size": 48, "pad_token_id": 0}
    weights: Any = randomize(made("Bert", ending, **sizes))
    with pytest.raises(ModelError, match="bidirectional: its tokens attend to later ones"):
        if through == "load":
            al.load_model(weights, tokenizer=byte_level)
        else:
            model: Any = boot(weights, byte_level)
            model.add_hook("blocks.0.hook_out", lambda resid, hook: pytest.fail("it was called"))
            al.prepare_model(model)


def test_a_bridge_with_other_logits_than_transformers_is_refused(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_lens.model_bridge import sources

    build = sources.build_bridge_from_module

    def spoiled(weights: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            weights.transformer.h[0].attn.c_attn.bias.mul_(1.1)
        return build(weights, *args, **options)

    monkeypatch.setattr(sources, "build_bridge_from_module", spoiled)
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ModelError, match=r"makes another model of .* differ by 0\.\d+ of the"):
            al.load_model(tiny_gpt2(len(byte_level)).type(dtype), tokenizer=byte_level)
