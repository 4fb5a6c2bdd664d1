"""Models and tokenizers that every test can make for itself: tiny, seeded, nothing downloaded."""

import json
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked_transformers import hooked_transformer, with_its_bos
from safetensors.torch import load_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor
from torch.nn import Module
from torch.overrides import _get_current_function_mode_stack
from transformer_lens.model_bridge import TransformerBridge
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from unchanged import ModelState, global_state, models_made_without_global_draws

import anchorlens as al
from anchorlens.models.hooked import pattern_name

GOLDEN = Path(__file__).parent / "golden"

# Label words of several tokens.
LONG_LABELS = al.Task("In: {text}\nOut:{label}", labels=(" Table", " Window"))

TEXTS = [
    *(
        f"{example.text}"
        for name in ("sentiment", "questions")
        for example in al.load_examples(name)
    ),
    *(task.template for task in al.TASKS.values()),
] + [f"Answer{word}" for task in al.TASKS.values() for word in task.labels for _ in range(20)]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Like GPT-2's: byte-level BPE whose offsets trim spaces, and no BOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def sentencepiece_like_tokenizer() -> PreTrainedTokenizerFast:
    """Like Gemma's and Llama's: spaces are symbols, bytes as a fallback, and a BOS."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<pad>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", core.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    )


def randomize(model: torch.nn.Module, seed: int = 0, scale: float = 0.25) -> torch.nn.Module:
    """Every parameter drawn anew: the zeros and ones of a fresh model hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_scale = parameter.ndim == 1 or "norm" in name
            is_norm_scale = is_scale and not name.endswith("bias")
            parameter.copy_(noise * scale + (1.0 if is_norm_scale else 0.0))
    return model.eval()


def tiny_gpt2(vocab_size: int, **changes: Any) -> GPT2LMHeadModel:
    """Learned positions, value biases."""
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 24, "n_positions": 512} | changes
    config = GPT2Config(
        vocab_size=vocab_size,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        **sizes,
    )
    return randomize(GPT2LMHeadModel(config))  # type: ignore[return-value]


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    """Rotary positions, two query heads a key head."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return randomize(LlamaForCausalLM(config))  # type: ignore[return-value]


def tiny_gemma3(vocab_size: int) -> Gemma3ForCausalLM:
    """Query and key norms, sliding and full layers, one key head."""
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=512,
    )
    return randomize(Gemma3ForCausalLM(config))  # type: ignore[return-value]


SHARED: dict[Any, Any] = {}
MATRIX = ("test_matrix", "test_cache_matrix")
LINE = ".".join(version("transformer-lens").split(".")[:2])
KINDS = ("bridge", "processed", "hooked-transformer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kind",
        choices=KINDS,
        action="append",
        help="what the tests hook: a bridge as al.load_model gives it (the default), one in "
        "compatibility mode, or a HookedTransformer (transformer-lens 3.9); several if repeated. "
        "Value biases are never folded",
    )
    parser.addoption(
        "--matrix-results",
        metavar="FILE",
        help="add what test_matrix.py measures to FILE, one JSON object a line",
    )


class RaisedLog(logging.Handler):
    """Makes an error of a fallback that the package did not expect, and logs with its traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            raise AssertionError(record.getMessage()) from record.exc_info[1]


def pytest_configure() -> None:
    """One thread: on models this small several wait for each other, up to eight times as long."""
    torch.set_num_threads(1)
    logging.getLogger("anchorlens").addHandler(RaisedLog())


def kinds_of(config: pytest.Config) -> list[str]:
    return config.getoption("kind") or ["bridge"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What differs by kind of model is tested on each kind that was asked for."""
    kinds = kinds_of(metafunc.config)
    differs = metafunc.definition.get_closest_marker("every_kind") is not None
    if differs and "raw" in metafunc.fixturenames and kinds != ["bridge"]:
        metafunc.parametrize("kind_of_model", kinds, indirect=True, scope="session")


def kind_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("kind_of_model") if callspec else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what would be repeated, and say which tests stay in one process."""
    selected: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    for item in items:
        (selected if is_selected(config, item) else rest).append(item)
    config.hook.pytest_deselected(items=rest)
    for item in selected:
        if kind_of(item) not in (None, "bridge"):
            item.add_marker("without_jaxtyping")  # a bridge shows the shapes
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {kind_of(item) or ''}"))
    # Groups of few and short tests go last, so that all processes end at the same time.
    items[:] = sorted(selected, key=lambda item: item.path.stem in MATRIX)


def is_selected(config: pytest.Config, item: pytest.Item) -> bool:
    """A test runs on a bridge of the newest line; one marked ``every_kind`` on the others too."""
    if item.get_closest_marker("published_table") and not config.getoption("--matrix-results"):
        return False
    if kind_of(item) is None and "bridge" not in kinds_of(config):
        return False
    return LINE.startswith("4.") or item.get_closest_marker("every_kind") is not None


def boot(weights: Any, tokenizer: Any) -> Any:
    """A bridge as anyone makes one: not prepared."""
    weights.config.architectures = [type(weights).__name__]
    with torch.random.fork_rng(devices=[]):  # making layers draws what is overwritten at once
        return TransformerBridge.boot_transformers(
            "tiny", hf_model=weights, tokenizer=with_its_bos(tokenizer)
        )


@pytest.fixture(scope="session")
def kind_of_model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "bridge")


@pytest.fixture(scope="session")
def raw(kind_of_model: str) -> Callable[..., Any]:
    """(weights, tokenizer, fold=False) to a model of the kind that the tests run on, unprepared.

    To fold the value biases, a bridge has to be processed.
    """
    kind = kind_of_model

    def make(weights: Any, tokenizer: Any, fold: bool = False) -> Any:
        if kind == "hooked-transformer":
            return hooked_transformer(weights, tokenizer, fold_value_biases=fold)
        bridge = boot(weights, tokenizer)
        if kind == "processed" or fold:
            bridge.enable_compatibility_mode(disable_warnings=True, fold_value_biases=fold)
        return bridge

    return make


@pytest.fixture(scope="session")
def hooked(raw: Callable[..., Any], kind_of_model: str) -> Callable[..., Any]:
    """(weights, tokenizer) to a prepared model of that kind; a bridge as al.load_model gives it."""
    if kind_of_model == "bridge":
        return lambda weights, tokenizer: al.load_model(weights, tokenizer=tokenizer)
    return lambda weights, tokenizer: al.prepare_model(raw(weights, tokenizer))


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece_like() -> PreTrainedTokenizerFast:
    return sentencepiece_like_tokenizer()


def shared(request: pytest.FixtureRequest, make: Callable[[int], Any], tokenizer: Any) -> Any:
    """A model that all tests of this process share, or one that this test may change."""
    hooked = request.getfixturevalue("hooked")
    if request.node.get_closest_marker("changes_model") is not None:
        return hooked(make(len(tokenizer)), tokenizer)
    key = (make, request.getfixturevalue("kind_of_model"))
    if key not in SHARED:
        SHARED[key] = hooked(make(len(tokenizer)), tokenizer)
    return SHARED[key]


@pytest.fixture
def gpt2(request: Any, byte_level: PreTrainedTokenizerFast, hooked: Callable[..., Any]) -> Any:
    return shared(request, tiny_gpt2, byte_level)


@pytest.fixture
def llama(request: Any, sentencepiece_like: PreTrainedTokenizerFast, hooked: Any) -> Any:
    return shared(request, tiny_llama, sentencepiece_like)


@pytest.fixture
def gemma3(request: Any, sentencepiece_like: PreTrainedTokenizerFast, hooked: Any) -> Any:
    return shared(request, tiny_gemma3, sentencepiece_like)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The models of a test's fixtures are as they were after it, and so is the global state.

    A test that changes them on purpose says so with the marks ``changes_model`` and ``draws``.
    """
    models = {id(m): m for m in getattr(item, "funcargs", {}).values() if isinstance(m, Module)}
    if item.get_closest_marker("changes_model"):
        models = {}
    states = [(model, ModelState.of(model)) for model in models.values()]
    with_python = item.config.getoption("jaxtyping_packages", None) is None
    before = global_state(with_python)
    with models_made_without_global_draws():
        yield
    changes = [change for model, state in states for change in state.changes(model)]
    if changes:
        SHARED.clear()
    if "raw" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("draws"):
        after = global_state(with_python)
        changes += [f"{name} has changed" for name in before if before[name] != after[name]]
    if changes:
        pytest.fail("the test left something changed:\n" + "\n".join(changes[:5]), pytrace=False)


@pytest.fixture(scope="session")
def model_folder(byte_level: PreTrainedTokenizerFast, tmp_path_factory: Any) -> Path:
    """A model as a user has it: weights and tokenizer in a local folder."""
    folder = tmp_path_factory.mktemp("tiny-gpt2")
    tiny_gpt2(len(byte_level), n_layer=6, n_embd=16).save_pretrained(folder)
    byte_level.save_pretrained(folder)
    return folder


def questions(model: Any, count: int = 12, seed: int = 1, **options: Any) -> list[al.PromptBatch]:
    """Prompts of the bundled questions, one demonstration a class."""
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=seed)
    queries = [example for example in examples if example not in demos][:count]
    return al.build_prompts(model.tokenizer, al.TASKS["trec"], demos, queries, **options)


def hooks_on(model: Any) -> list[int]:
    """Hooks of all modules; TransformerLens leaves some of its own on OPT."""
    assert not _get_current_function_mode_stack()
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    ]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference over the largest absolute value of the reference."""
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max())


def centred(logits: Tensor) -> Tensor:
    """Up to the constant in each row that says nothing: a centred unembedding takes it off."""
    return logits - logits.mean(-1, keepdim=True)


def logits_of(model: Any, batch: al.PromptBatch, hooks: list[Any]) -> Tensor:
    with torch.no_grad():
        logits = model.run_with_hooks(
            batch.tokens, attention_mask=batch.attention_mask.long(), fwd_hooks=hooks
        )
    return centred(logits[torch.arange(len(batch)), batch.target_positions])


def patterns_of(model: Any, batch: al.PromptBatch, hooks: list[Any]) -> Tensor:
    seen: list[Tensor] = []
    watch = [(pattern_name(k), lambda a, hook: seen.append(a)) for k in range(model.cfg.n_layers)]
    logits_of(model, batch, [*hooks, *watch])
    return torch.stack(seen, 1)  # [batch, layer, head, query, key]


class GoldenCase:
    """A golden model with its prompts and numbers; see tests/golden/README.md."""

    def __init__(self, name: str) -> None:
        folder = GOLDEN / name
        self.meta = json.loads((folder / "meta.json").read_text())
        self.numbers = load_file(folder / "numbers.safetensors")
        self.weights = load_file(folder / "gpt2.safetensors")

    def transformers_model(self) -> GPT2LMHeadModel:
        model = tiny_gpt2(**self.meta["config"])
        weights = self.weights | {"lm_head.weight": self.weights["transformer.wte.weight"]}
        model.load_state_dict(weights, strict=False)
        return model

    def batch(self, side: str) -> tuple[al.PromptBatch, list[int]]:
        """All five prompts in one padded batch, and where each begins."""
        rows = [self.numbers[f"{n}.input_ids"] for n in range(5)]
        length = max(len(row) for row in rows)
        starts = [length - len(row) if side == "left" else 0 for row in rows]
        tokens = torch.zeros(5, length, dtype=torch.long)
        mask = torch.zeros(5, length, dtype=torch.bool)
        positions, classes = [], []
        for n, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[n, start : start + len(row)] = row
            mask[n, start : start + len(row)] = True
            by_class = self.meta["cases"][n]["label_positions_by_class"]
            order = sorted(range(len(by_class)), key=by_class.__getitem__)
            positions.append([by_class[k] + start for k in order])
            classes.append(order)
        batch = al.PromptBatch.from_positions(
            tokens,
            label_positions=positions,
            label_classes=classes,
            label_token_ids=self.meta["label_token_ids"],
            gold=[case["gold"] for case in self.meta["cases"]],
            attention_mask=mask,
        )
        return batch, starts


@pytest.fixture(scope="session", params=["sentiment", "questions"])
def golden(request: pytest.FixtureRequest) -> GoldenCase:
    return GoldenCase(request.param)
