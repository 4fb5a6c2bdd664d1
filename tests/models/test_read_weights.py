"""Weights that do not match their configuration raise an error or give a warning."""

import copy
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2ForSequenceClassification, LlamaForSequenceClassification
from transformers.utils import logging as of_transformers

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models.quiet_libraries import quiet_libraries
from anchorlens.models.read_weights import read_model_files
from tests.references.architectures import BY_NAME
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import questions, randomize, tiny_gpt2, tiny_llama

pytestmark = [pytest.mark.every_kind, pytest.mark.filterwarnings("error")]
VOCABULARY = 3000


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("a model ran before its weights were checked")

    monkeypatch.setattr("anchorlens.models.load.logits_of", run)


def save(weights: Any, tokenizer: Any, folder: Path, **options: Any) -> Path:
    weights.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder: Path, **options: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def load(folder: Path, tokenizer: Any) -> Any:
    return al.load_model(folder, tokenizer=tokenizer, device="cpu")


def of_another_architecture(folder: Path) -> None:
    config = tiny_llama(VOCABULARY).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda old: [old.pop(name) for name in names])


def of_a_classifier(folder: Path) -> None:
    """Its weights have no unembedding; transformers would draw a random one."""
    config = tiny_llama(VOCABULARY).config
    config.pad_token_id = 0
    randomize(LlamaForSequenceClassification(config)).save_pretrained(folder)  # type: ignore[operator]


LOST = "transformer.h.1.attn.c_proj.weight", "transformer.ln_f.bias"
OTHER_WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "of another architecture": (
        of_another_architecture,
        r"not those of its configuration \(LlamaForCausalLM\): \d+ tensors \(lm_head\.weight, "
        r".*and others\) are missing.*config\.json",
    ),
    "without two": (without(*LOST), rf"2 tensors \({', '.join(LOST)}\) are missing"),
    "of fewer layers": (
        partial(change_config, n_layer=5),
        r"24 tensors \(transformer\.h\.3\.attn.* are missing",
    ),
    "of another shape": (
        partial(change_config, n_positions=256),
        r"1 tensor \(transformer\.wpe\.weight \(\(512, 24\), not \(256, 24\)\)\) is of another",
    ),
    "of a classifier": (of_a_classifier, r"1 tensor \(lm_head\.weight\) is missing"),
}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_weights_that_are_not_those_of_the_configuration_are_refused(
    name: str, tmp_path: Path, byte_level: Any
) -> None:
    change, message = OTHER_WEIGHTS[name]
    change(save(tiny_gpt2(VOCABULARY), byte_level, tmp_path))
    with pytest.raises(ModelError, match=message):
        load(tmp_path, byte_level)


def test_tensors_that_are_left_out_give_a_warning(tmp_path: Path, byte_level: Any) -> None:
    few, more = (tmp_path / name for name in ("few", "more"))
    change_config(save(tiny_gpt2(VOCABULARY), byte_level, few), n_layer=2)
    message = r"no use for .* \d+ tensors \(transformer\.h\.2\.attn.* are left out.* another model"
    with pytest.warns(UserWarning, match=message):
        assert load(few, byte_level).cfg.n_layers == 2
    # A tensor of a module that the model has.
    save(tiny_llama(VOCABULARY), byte_level, more)
    change_tensors(more, lambda tensors: tensors.update({"model.norm.bias": torch.ones(4)}))
    with pytest.warns(UserWarning, match=r"1 tensor \(model\.norm\.bias\) is left out"):
        load(more, byte_level)


@pytest.mark.slow("whole models")
def test_complete_weights_load_without_a_warning(tmp_path: Path, byte_level: Any) -> None:
    """Weights may be tied, in shards, with masks of older versions, or with another task's head."""
    plain = save(tiny_gpt2(VOCABULARY), byte_level, tmp_path / "plain")
    assert "lm_head.weight" not in load_file(plain / "model.safetensors")
    sharded = save(tiny_gpt2(VOCABULARY), byte_level, tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    untied = save(tiny_llama(VOCABULARY), byte_level, tmp_path / "untied")
    masks = save(tiny_gpt2(VOCABULARY), byte_level, tmp_path / "masks")
    old = {"attn.bias": torch.ones(1, 1, 4, 4), "attn.masked_bias": torch.tensor(-1e4)}
    change_tensors(
        masks, lambda tensors: tensors.update({f"transformer.h.0.{key}": old[key] for key in old})
    )
    config = tiny_gpt2(VOCABULARY).config
    config.pad_token_id = 0
    classifier = randomize(GPT2ForSequenceClassification(config))
    other_head = save(classifier, byte_level, tmp_path / "classifier")
    for folder in (plain, sharded, untied, masks, other_head):
        load(folder, byte_level)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": LINEAR | {"beta": 3}}, "Unrecognized .*beta"),
        ({"rope_parameters": LINEAR | {"factor": 0.5}}, r"factor field must be .* 0\.5"),
        ({"eos_token_id": 10**6}, "eos_token_id must be .* 1000000"),
    ],
)
def test_what_transformers_warns_of_is_a_warning_at_every_load(
    change: dict[str, Any], message: str, tmp_path: Path, byte_level: Any
) -> None:
    """TransformerLens, once imported, hides it."""
    folder = save(tiny_llama(VOCABULARY), byte_level, tmp_path)
    change_config(folder, **change)
    of_transformers.warning_once.cache_clear()
    logger = logging.getLogger("transformers")
    before = logger.level, logger.handlers
    with pytest.warns(UserWarning, match=f"^transformers: .*{message}") as told:
        load(folder, byte_level)
    assert len(told) == 1
    of_transformers.warning_once.cache_clear()
    with quiet_libraries(), pytest.warns(UserWarning, match=message):  # as in a command
        read_model_files(str(folder))
    assert (logger.level, logger.handlers) == before


ITS_CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()

class Config(GPT2Config):
    model_type = "own"

class Model(GPT2LMHeadModel):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("of", ["config", "model", "tokenizer"])
@pytest.mark.parametrize("reads", ["load_model", "read_model_files"])
def test_code_in_a_folder_never_runs_and_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, byte_level: Any, of: str, reads: str
) -> None:
    if (of, reads) == ("model", "read_model_files"):
        pytest.skip("it reads no weights")
    asked: list[str] = []

    def yes(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", yes)
    folder = save(tiny_gpt2(VOCABULARY), byte_level, tmp_path / "model")
    (folder / "own.py").write_text(ITS_CODE.format(ran=str(tmp_path / "ran")))
    if of == "tokenizer":
        path = folder / "tokenizer_config.json"
        own: dict[str, Any] = {
            "tokenizer_class": "Own",
            "auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]},
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
        (folder / "tokenizer.json").unlink()
    elif of == "model":
        change_config(folder, model_type="vit", auto_map={"AutoModelForCausalLM": "own.Model"})
    else:
        change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    # Instead of such a tokenizer transformers takes the class of the architecture.
    message = r"has code of its own, which is never run.*AutoModel"
    with pytest.raises(ModelError, match="tokenizer" if of == "tokenizer" else message):
        al.load_model(folder, device="cpu") if reads == "load_model" else read_model_files(
            str(folder)
        )
    assert not asked and not [*tmp_path.rglob("ran")]


@pytest.mark.parametrize("attention", ["flash_attention_2", "someone/kernel", "unknown", 3])
def test_an_attention_in_the_configuration_that_is_not_installed_does_not_matter(
    tmp_path: Path, byte_level: Any, attention: Any
) -> None:
    """The hooks need eager attention, whatever the model was trained with."""
    weights = tiny_gpt2(VOCABULARY)
    folder = save(weights, byte_level, tmp_path)
    change_config(folder, _attn_implementation=attention)
    model = load(folder, byte_level)
    tokens = torch.tensor([byte_level("Review: what a film")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), weights(tokens).logits)


def test_a_gguf_file_gives_the_logits_of_its_weights(tmp_path: Path, byte_level: Any) -> None:
    """It is parsed once, though configuration, tokenizer and weights are read from it."""
    weights = BY_NAME["Qwen2"].build(VOCABULARY)
    path, parse = write_gguf(tmp_path / "tiny.gguf", weights, byte_level), gguf.GGUFReader.__init__
    with patch.object(gguf.GGUFReader, "__init__", autospec=True, side_effect=parse) as parsed:
        model = load(path, None)
    parsed.assert_called_once()
    ids = byte_level("Review: what a film")["input_ids"]
    assert model.tokenizer("Review: what a film")["input_ids"] == ids
    tokens = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), weights(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.quick_cases("whole models", "sequential")
@pytest.mark.parametrize(
    "device_map",
    [
        *({"": "cpu"}, {"": torch.device("cpu")}, "cpu", torch.device("cpu")),
        *("auto", "balanced", "balanced_low_0", "sequential"),
    ],
    ids=str,
)
def test_a_device_map_spreads_a_model(device_map: Any, byte_level: Any) -> None:
    """On devices that a machine has; tests/devices compares all numbers on two of them."""
    if torch.cuda.is_available() and isinstance(device_map, str) and device_map != "cpu":
        pytest.skip("these words choose the GPU")
    weights = tiny_gpt2(len(byte_level))
    model = al.load_model(weights, tokenizer=byte_level, device_map=device_map)
    batches = questions(model, 3)
    plain = al.load_model(weights, tokenizer=byte_level)
    options: dict[str, Any] = {"progress": False}
    spread = al.target_logits(model, batches, **options)
    assert torch.equal(spread, al.target_logits(plain, batches, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu", "device_map": "auto"}, "so leave device out; got device='cpu'"),
        ({"device_map": "spread"}, "'spread' cannot be used: .*; .* Give auto, balanced, .*device"),
        ({"device_map": 70}, "device_map=70 cannot be used: .* cannot be put on the device '70'"),
        ({"device_map": {"": "vulkan:3"}}, "cannot be used: .* cannot be put on .*'vulkan:3'"),
        ({"device_map": "meta"}, "cannot be used: .* have shapes and no numbers"),
        (
            {"device_map": {"transformer": "cpu", "lm_head": "disk"}},
            r"leaves weights on the disk, .* load the model with .*offload_folder=\.\.\.",
        ),
        (
            {"device_map": {"transformer.h.0": "cpu"}},
            "device_map=.*transformer.h.0.* cannot be used: .*; give",
        ),
    ],
)
def test_a_device_map_that_cannot_be_is_refused(
    options: dict[str, Any], words: str, byte_level: Any
) -> None:
    with pytest.raises(ModelError, match=words):
        al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level, **options)


@pytest.mark.slow("whole models")
def test_a_tokenizer_may_be_named_and_other_values_are_refused_first(
    byte_level: Any, tmp_path: Path
) -> None:
    byte_level.save_pretrained(tmp_path / "tokenizer")
    weights = tiny_gpt2(len(byte_level))
    write_gguf(tmp_path / "tiny.gguf", BY_NAME["Qwen2"].build(VOCABULARY), byte_level)
    for named in (tmp_path / "tokenizer", str(tmp_path / "tokenizer"), tmp_path / "tiny.gguf"):
        model = al.load_model(copy.deepcopy(weights), tokenizer=named)
        assert model.tokenizer("Who?")["input_ids"] == byte_level("Who?")["input_ids"]
    (tmp_path / "empty").mkdir()
    weights.save_pretrained(tmp_path / "weights")
    no_tokenizer = r"weights has a model and no tokenizer .* give the name or folder of one"
    wrong: list[tuple[Any, str]] = [
        (str(tmp_path / "weights"), no_tokenizer),
        (tmp_path / "no.gguf", r"there is no file .*no\.gguf"),
        (str(tmp_path / "empty"), r"'.*empty' cannot be read as a tokenizer: .*its folder, a"),
        (byte_level.backend_tokenizer, r"got a Tokenizer: pass AutoTokenizer\.from_pretrained"),
        (SimpleNamespace(tokenizer=byte_level), r"got a SimpleNamespace: pass its \.tokenizer"),
        (5, r"the name or folder of one; got a int"),
    ]
    for source in (weights, str(tmp_path / "no such folder")):  # before any weights are read
        for tokenizer, message in wrong:
            with pytest.raises(ModelError, match=message):
                al.load_model(source, tokenizer=tokenizer)
    with pytest.raises(ModelError, match=no_tokenizer):
        al.load_model(tmp_path / "weights")


def test_a_device_map_is_checked_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anchorlens.models.load.read_weights", lambda *_: pytest.fail("read"))
    for device_map in ("spread", "meta", {"": "disk"}, -2):
        with pytest.raises(ModelError, match="device_map="):
            al.load_model("gpt2", device_map=device_map)
