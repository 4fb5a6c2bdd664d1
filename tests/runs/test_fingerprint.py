"""The fingerprint holds everything that decides a number, and nothing else."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from anchorlens.runs.by_value import tokenizer_identity
from anchorlens.runs.identity import fingerprint, identity
from anchorlens.system import checksum
from anchorlens.system.checksum import digest_of, row_sums
from tests.support.tiny_models import tiny_llama


def digest(tensor: Tensor) -> str:
    return digest_of(iter([("weight", tensor)]))


# Where a weight is changed, and what stands there afterwards.
CHANGES: dict[str, tuple[Any, Any]] = {
    "a negated row": (7, lambda weights: -weights[7]),
    "swapped rows": ([3, 40], lambda weights: weights[[40, 3]]),
    "swapped columns": ((slice(None), [1, 2]), lambda weights: weights[:, [2, 1]]),
    "one element": ((-1, -1), lambda weights: weights[-1, -1] + 1e-6),
    "one sign": ((0, 0), lambda weights: -weights[0, 0]),
    "all negated": (..., lambda weights: -weights),
}


@pytest.mark.every_kind
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shape", [(64, 4096), (128, 768), (50, 8)])
def test_every_change_of_a_weight_changes_the_digest(change: str, shape: tuple[int, int]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    changed, (place, value) = weights.clone(), CHANGES[change]
    changed[place] = value(weights)
    assert not torch.equal(weights, changed)
    assert digest(weights) != digest(changed)
    assert digest(weights) == digest(weights.T.contiguous().T)  # another memory layout


def test_each_bit_changes_the_digest() -> None:
    weights = torch.randn(9)
    digests = {digest(weights)}
    for byte in range(4 * 9):
        for bit in range(8):
            changed = weights.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            digests.add(digest(changed))
    assert len(digests) == 1 + 9 * 32


@pytest.mark.parametrize("rows", [0, 1, 17, 1024, 1025, 3000])
def test_the_function_for_gpus_gives_the_sums_of_a_cpu(rows: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (rows, checksum.ROW_WIDTH), dtype=torch.int32)
    expected = [
        sum(int(word) * int(weight) for word, weight in zip(row, checksum._WEIGHTS, strict=True))
        for row in words[:: max(1, rows // 2)].tolist()
    ]
    if rows:
        on_cpu, on_device = checksum._sums_on_cpu(words.numpy()), checksum._sums_on_device(words)
        assert np.array_equal(on_cpu, on_device)
        sums = [int(value) for value in on_cpu[:: max(1, rows // 2)]]
        assert [value % 2**64 for value in sums] == [value % 2**64 for value in expected]
    else:
        assert len(row_sums(words)) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_real_gpu_gives_the_sums_of_a_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        weights = torch.randn(3001, 777).to(dtype)
        assert digest(weights) == digest(weights.cuda())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 4),
        torch.arange(7, dtype=torch.uint8),  # an odd number of bytes
        torch.arange(9, dtype=torch.uint8)[1:],  # words would begin at an odd byte
        torch.randn(5, dtype=torch.bfloat16)[1:],
        torch.randn(8).to(torch.float8_e4m3fn),
        torch.randn(4, 6).T[::2],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.randn(3)),
        torch.ones(3).expand(4, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype}, {tuple(tensor.shape)}, {tensor.device}",
)
def test_any_kind_of_tensor_has_a_digest(tensor: Tensor) -> None:
    assert digest(tensor) == digest(tensor.detach().clone())
    assert digest(tensor) != digest(torch.zeros(1, dtype=tensor.dtype))


class Quantised(torch.Tensor):
    """A tensor that holds two tensors, like those of torchao."""

    stored: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, inner: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: Tensor, scale: Tensor) -> None:
        self.stored, self.scale = inner, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored", "scale"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func is torch.ops.aten.detach.default
        return Quantised(args[0].stored, args[0].scale)


def test_the_digest_of_a_tensor_covers_the_tensors_inside_it() -> None:
    inner, scale = torch.arange(6, dtype=torch.int8), torch.ones(1)
    assert digest(Quantised(inner, scale)) == digest(Quantised(inner.clone(), scale.clone()))
    assert digest(Quantised(inner, scale)) != digest(Quantised(inner, scale * 2))
    assert digest(Quantised(inner, scale)) != digest(Quantised(inner + 1, scale))


def test_the_scales_of_a_quantised_weight_count() -> None:
    def model(scale: float) -> Any:
        layer = torch.nn.Linear(2, 2, bias=False)
        layer.weight = torch.nn.Parameter(torch.ones(4, 1, dtype=torch.uint8), requires_grad=False)
        state = {"absmax": torch.tensor([scale])}
        layer.weight.quant_state = SimpleNamespace(as_dict=lambda packed: state)  # type: ignore[attr-defined]
        layer.cfg = SimpleNamespace(model_name="quantised")  # type: ignore[assignment]
        return layer

    assert identity(model(1.0)) == identity(model(1.0))
    assert identity(model(1.0))["weights"] != identity(model(2.0))["weights"]


def contents_of(model: Any) -> dict[str, Tensor]:
    """The buffers and parameters that are not empty; masks of a HookedTransformer are empty."""
    inside = getattr(model, "original_model", model)
    tensors = (*inside.named_buffers(), *inside.named_parameters())
    return {name: value for name, value in tensors if value.numel()}


@pytest.mark.every_kind
def test_a_changed_buffer_changes_the_fingerprint(llama: Any) -> None:
    before = identity(llama)
    assert identity(llama) == before
    name, buffer = next(
        (name, value)
        for name, value in contents_of(llama).items()
        if not isinstance(value, torch.nn.Parameter) and value.is_floating_point()
    )
    original = buffer.clone()
    buffer.view(-1)[-1] = 0.5
    assert identity(llama)["weights"] != before["weights"], name
    buffer.copy_(original)
    assert identity(llama) == before


@pytest.mark.slow("many passes")
@pytest.mark.changes_model
@pytest.mark.every_kind
def test_every_weight_and_buffer_counts(gpt2: Any) -> None:
    before = identity(gpt2)["weights"]
    tensors = contents_of(gpt2)
    assert len(tensors) > 10
    for tensor in tensors.values():
        last = (-1,) * tensor.dim()
        with torch.no_grad():
            original = tensor[last].clone()
            tensor[last] = original == 0  # this changes masks and -inf too
            assert identity(gpt2)["weights"] != before
            tensor[last] = original
    assert identity(gpt2)["weights"] == before


def test_two_exchanged_weights_change_the_fingerprint() -> None:
    """Both have the same shape, so that only their names differ."""
    layer = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    layer.cfg = SimpleNamespace(model_name="two")  # type: ignore[assignment]
    before = identity(layer)["weights"]
    other = torch.nn.ModuleDict({"b": layer["a"], "a": layer["b"]})
    other.cfg = layer.cfg
    assert identity(other)["weights"] != before


def test_rotary_frequencies_that_depend_on_prompts_do_not_count(
    hooked: Any, byte_level: Any
) -> None:
    """A long prompt changes the frequencies of a dynamic rotary embedding, but not the model."""
    weights: Any = tiny_llama(900)
    config = weights.config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config.max_position_embeddings = 16
    long: Any = type(weights)(config)
    model = SimpleNamespace(cfg=SimpleNamespace(model_name="x"), original_model=long)
    model.named_modules = long.named_modules
    before = identity(model)
    frequencies = long.model.rotary_emb.inv_freq.clone()
    long(torch.arange(40)[None])
    assert not torch.equal(long.model.rotary_emb.inv_freq, frequencies)
    assert identity(model) == before
    long.model.rotary_emb.original_inv_freq += 1
    assert "original_inv_freq" in dict(long.model.rotary_emb.named_buffers())
    assert identity(model) != before


def test_settings_of_the_process_are_in_the_fingerprint(gpt2: Any) -> None:
    before = fingerprint(gpt2, (), {}).facts
    assert fingerprint(gpt2, (), {}).facts == before
    with torch.autocast("cpu", torch.bfloat16):
        inside = fingerprint(gpt2, (), {}).facts
    assert {name for name in before if before[name] != inside[name]} == {"precision"}
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        inside = fingerprint(gpt2, (), {}).facts
    finally:
        torch.set_float32_matmul_precision(precision)
    assert {name for name in before if before[name] != inside[name]} == {"precision"}
    assert {"tokenizers", "scipy", "torch", "transformers"} <= before.keys()


def without_a_merge(tokenizer: Any) -> Any:
    """A tokenizer of the same vocabulary that splits some words differently."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["model"]["merges"] = rules["model"]["merges"][:-40]
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(rules))
    special = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_merges_and_settings_change_the_identity_of_a_tokenizer(byte_level: Any) -> None:
    before = tokenizer_identity(byte_level)
    byte_level("some text", truncation=True, max_length=3)
    assert tokenizer_identity(byte_level) == before
    assert tokenizer_identity(without_a_merge(byte_level)) != before
    for name, value in (("model_max_length", 77), ("pad_token", "!"), ("bos_token", "!")):
        other = PreTrainedTokenizerFast(
            tokenizer_object=type(byte_level.backend_tokenizer).from_str(
                byte_level.backend_tokenizer.to_str()
            ),
            bos_token=byte_level.bos_token,
            eos_token=byte_level.eos_token,
        )
        setattr(other, name, value)
        assert tokenizer_identity(other) != before, name
