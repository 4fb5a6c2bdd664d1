"""The kernel in Triton's interpreter, and compiled for a GPU; writes what it finds as JSON.

    python -m tests.passes.kernel_cases FILE KIND

A process of its own, because Triton reads ``TRITON_INTERPRET`` when kernels are made.
"""

import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

import anchorlens as al
from anchorlens.metrics.edge_sums import merged_and_of_heads
from anchorlens.passes import flow_kernel, fused_attention
from anchorlens.passes.fused_attention import RowAttention
from anchorlens.runs import way
from tests.support.tiny_models import (
    byte_level_tokenizer,
    questions,
    sentencepiece_like_tokenizer,
    tiny_gemma3,
    tiny_gpt2,
    tiny_llama,
)

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
LENGTH, TILE = 45, (32, 16, 4, 1)


def error_of(
    *,
    heads: int = 2,
    shared: int = 2,
    width: int = 16,
    of_values: int = 16,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    weight: Any = al.weights.saliency,
) -> float:
    """How far the kernel is from whole tables in float64, of the largest sum."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key = numbers(batch, heads, LENGTH, width) * 2, numbers(batch, shared, LENGTH, width)
    value = numbers(batch, shared, LENGTH, of_values)
    of_output = numbers(batch, heads, LENGTH, of_values)
    classes = torch.randint(-1, 3, (batch, LENGTH), generator=generator)
    sums = flow_kernel.key_class_sums(
        *(query, key, value, of_output, classes, 3), scale=0.25, weight=weight, tile=TILE
    )
    keys, values = (each.double().repeat_interleave(heads // shared, 1) for each in (key, value))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    scores = (query.double() @ keys.mT * 0.25).masked_fill(~seen, -1e300)
    slope = of_output.double() @ values.mT
    weights = merged_and_of_heads(weight, scores.softmax(-1), slope).tril(-1)
    inside = torch.nn.functional.one_hot(classes + 1, 4)[..., 1:].double()
    expected = torch.einsum("bhqk,bkc->bhqc", weights, inside)
    return float((sums.double() - expected).abs().max() / expected.abs().max())


def interpreted() -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {
        "causal": {},
        "two heads of queries for one of keys, two prompts": {"shared": 1, "batch": 2},
        "heads that are no power of two": {"width": 24, "of_values": 40},
        "bfloat16": {"dtype": torch.bfloat16},
        **{f"weight {each.__name__}": {"weight": each} for each in flow_kernel.WEIGHTS},
    }
    return {
        "errors": {name: error_of(**options) for name, options in cases.items()},
        "runs": runs(),
    }


def runs() -> dict[str, Any]:
    """``al.run`` with sums by the kernel against the same run with rows, on three models."""
    found = dict[str, Any]()
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.SegmentFlows()]
    weights = {
        "gpt2": tiny_gpt2(3000, n_layer=2),
        "llama": tiny_llama(3000, num_hidden_layers=2),
        "gemma3": tiny_gemma3(3000),  # has layers with a window
    }
    for name, plain in weights.items():
        tokenizer = byte_level_tokenizer() if name == "gpt2" else sentencepiece_like_tokenizer()
        model = al.load_model(plain, tokenizer=tokenizer)
        batches, used = questions(model, 1), list[int]()

        def counting(*args: Any, used: list[int] = used) -> Any:
            used.append(1)
            return RowAttention.apply(*args)

        with (
            mock.patch.object(way, "LARGE", 0),
            # The interpreter takes as long for a large block as for a small one.
            mock.patch.object(flow_kernel, "_TILE_OF_FLOAT32", (128, 128, 4, 1)),
        ):
            rows = al.run(model, batches, metrics, **QUIET)
            with (
                mock.patch.object(way, "is_on_a_gpu", lambda model: True),
                mock.patch.object(fused_attention, "RowAttention", mock.Mock(apply=counting)),
            ):
                ours = al.run(model, batches, metrics, **QUIET)
                found[name] = difference(ours, rows)
                found[f"{name}, layers by rows"] = len(used)
                found[f"{name}, why"] = ours["saliency_flows"].info["attention"]
                if name == "gpt2":
                    again = al.run(model, batches, metrics, gradient_checkpointing=True, **QUIET)
                    found[f"{name} again"] = difference(again, rows)
                    own = al.SegmentFlows(weight=lambda a, slope: (a * slope).sum(1), name="own")
                    of_table = al.SaliencyFlows({"own": lambda batch: al.edges.wp(batch).table()})
                    for each in (own, of_table, al.LabelHeads(draws=1)):
                        info = al.run(model, batches, [each], **QUIET)[each.name].info
                        found[f"{each.name} why"] = info["attention"]
    return found


def difference(ours: Any, expected: Any) -> float:
    pairs = [
        (getattr(ours[name], field), getattr(expected[name], field))
        for name, fields in {
            "saliency_flows": ("flows", "per_head", "per_prompt"),
            "segment_flows": ("flow", "flow_of_heads"),
        }.items()
        for field in fields
    ]
    assert all(torch.equal(one.isnan(), other.isnan()) for one, other in pairs)
    return max(
        float((one - other).nan_to_num().abs().max() / other.nan_to_num().abs().max())
        for one, other in pairs
    )


def compiled() -> dict[str, Any]:
    """What the kernels take of a GPU with compute capability 9.0: no GPU is needed for it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = flow_kernel._flow_kernel
    names, tile = kernel.arg_names, flow_kernel._TILES[1][1]
    constants = {"S": 1, "GROUP": 1, "D": 128, "BD": 128, "DV": 128, "BDV": 128}
    constants |= {"BM": tile[0], "BN": tile[1], "WEIGHT": 0, "UP": False}
    types = dict.fromkeys(("Q", "K", "V", "DO"), "*bf16") | dict.fromkeys(("LSE", "OUT"), "*fp32")
    types |= dict.fromkeys(("CLASS", "PRESENT"), "*i32") | {"scale": "fp32"}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    divisible = [
        n for n, kind in signature.items() if kind[0] == "*" or re.fullmatch("s[qkvo][bhn]", n)
    ]
    made = compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tile[2], "num_stages": tile[3]},
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = {name: len(re.findall(rf"\b{name}", code)) for name in ("HGMMA", "LDGSTS", "LDL")}
    return {"shared": made.metadata.shared, **count}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(globals()[sys.argv[2]]()))
