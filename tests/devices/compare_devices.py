"""Runs every call on the CPU and on another device, and writes how far the numbers differ.

    python -m tests.devices.compare_devices FILE KIND [KIND ...]

A KIND is a function of this file. FILE gets JSON: for each kind and call the largest difference, as
a share of the largest number of the same tensor, and the name of this tensor; or the error that it
raised. A process of its own, because a simulated device cannot be unregistered, and functions of
torch are replaced for it.
"""

import contextlib
import copy
import dataclasses
import io
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.system import devices
from benchmarks import operations
from tests.support import simulated_device
from tests.support.catalogue import ALL, scene_of
from tests.support.docstrings import failed_docstrings
from tests.support.measures import tensors_of
from tests.support.printed_code import ROOT, run_page
from tests.support.quick_analyses import quick_analyses
from tests.support.tiny_models import (
    byte_level_tokenizer,
    sentencepiece_like_tokenizer,
    tiny_gpt2,
    tiny_llama,
)

Calls = Mapping[str, Callable[[], Any]]


def calls_with(model: Any) -> Calls:
    scene = scene_of(model, Path(tempfile.mkdtemp()))
    return {name: partial(call, scene) for name, call in ALL.items()}


def gpt2_on(device: str) -> Calls:
    tokenizer = byte_level_tokenizer()
    weights = tiny_gpt2(len(tokenizer), n_layer=2)
    return calls_with(al.load_model(weights, tokenizer=tokenizer, device=device))


def cuda() -> dict[str, Any]:
    """On a GPU, where there is one."""
    return differences(results_of(gpt2_on("cpu")), results_of(gpt2_on("cuda")))


def two_devices() -> dict[str, Any]:
    """A model whose first layer is on one device and the second on another, both without float64.

    Neither changes what the other can break: a tensor that is on a wrong device, or of a type that
    the device has not. ``default_device`` has one device, with float64.
    """
    tokenizer = sentencepiece_like_tokenizer()
    weights = tiny_llama(len(tokenizer), num_hidden_layers=2)
    first = ("model.embed_tokens", "model.rotary_emb", "model.layers.0")
    second = ("model.layers.1", "model.norm", "lm_head")
    places = dict.fromkeys(first, "sim:0") | dict.fromkeys(second, "sim:1")
    whole = al.load_model(copy.deepcopy(weights), tokenizer=tokenizer, device="cpu")
    expected = results_of(calls_with(whole))
    spread = al.load_model(weights, tokenizer=tokenizer, device_map=places)
    assert {str(each.device) for each in spread.parameters()} == {"sim:0", "sim:1"}
    simulated_device.RULES.float64 = False
    devices.widest.cache_clear()
    try:
        return differences(expected, results_of(calls_with(spread)))
    finally:
        simulated_device.RULES.float64 = True
        devices.widest.cache_clear()


def default_device() -> dict[str, Any]:
    """In a notebook whose tensors are made on the device: what draws, trains, sorts and writes."""
    names = ["metrics", "isolate_random", "sweep of windows", "attribution", "reweighting"]
    names += ["prefix", "hard prompt", "trace"]
    names += ["of tensors", "integrated"]  # float64 where the device has it

    def some(of_device: Calls) -> Calls:
        return {name: of_device[name] for name in names}

    expected, on_device = results_of(some(gpt2_on("cpu"))), some(gpt2_on("sim"))
    torch.set_default_device("sim")
    try:
        return differences(expected, results_of(on_device))
    finally:
        torch.set_default_device(None)


def started() -> dict[str, float]:
    """Operations that runs start, over those of plain transformers, and waits of a first batch."""
    found = dict[str, float]()
    for kind, layers in (("gpt2", 48), ("llama", 32)):
        counts = operations.metrics_of_a_run(kind)
        found[kind] = operations.share_of_plain(*counts, layers, batches=4)
        batch, rest = counts[1:]
        found[f"{kind}, waits"] = max(float((batch.at(n) + rest.at(n))[1]) for n in (3, 6))
    _, batch, _ = operations.metrics_of_a_run("gpt2", device="cpu")
    found["calls of a layer"] = float(batch.at(1)[0] - batch.at(0)[0])
    alone, further = operations.isolated_pass("gpt2")
    return found | {"isolated": float((further.at(12) / alone.at(12))[0])}


def docstrings() -> dict[str, str]:
    return failed_docstrings("sim")


def readme() -> dict[str, Any]:
    """The README from the first to the last line: what its names hold in the end."""

    def named_on(device: str) -> dict[str, Tensor]:
        printed, folder = io.StringIO(), Path(tempfile.mkdtemp())
        tokenizer = byte_level_tokenizer()
        weights = tiny_gpt2(len(tokenizer), n_layer=6, n_embd=16)
        model = al.load_model(weights, tokenizer=tokenizer, device=device)
        sample = al.sample_prompts
        few = lambda *g, queries, **o: sample(*g, queries=min(queries, 12), **o)  # noqa: E731
        with (
            mock.patch.object(al, "load_model", lambda name: model),
            mock.patch.object(al, "sample_prompts", few),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(printed),
        ):
            names = run_page(ROOT / "README.md")
        assert (folder / "report.html").exists() and "cannot tell: " in printed.getvalue()
        assert names["results"]["saliency_flows"].share.shape == (6, 3)
        return tensors_of({"results": names["results"]})

    return {"README": largest_difference(named_on("cpu"), named_on("sim"))}


def batches() -> dict[str, bool]:
    """Whether batches and sets of edges lie on the CPU, on whatever device is what makes them."""
    tokenizer, task = byte_level_tokenizer(), al.TASKS["trec"]
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    [batch] = al.build_prompts(tokenizer, task, demos, examples[-5:], batch_size=5)
    given: dict[str, Any] = {n: v for n, v in vars(batch).items() if isinstance(v, Tensor)}
    there: dict[str, Any] = {name: value.to("sim") for name, value in given.items()}
    names = ("label_positions", "label_classes", "target_positions", "attention_mask", "gold")

    def of_positions(of: dict[str, Any], words: Tensor) -> al.PromptBatch:
        known = {name: of[name] for name in names}
        return al.PromptBatch.from_positions(of["tokens"], label_token_ids=words, **known)

    def edges_of(of: dict[str, Any], table: Tensor) -> Tensor:
        at = al.edges.at(batch, of["label_positions"])
        assert at.device.type == "cpu"
        return al.edges.between(at.to(table.device), of["attention_mask"]) | table

    words, table = batch.label_token_ids, al.edges.pq(batch).table()
    of_segments = al.PromptBatch.from_segments
    pairs: dict[str, tuple[Any, Any]] = {
        "replaced": (dataclasses.replace(batch, **there), batch),
        "positions": (of_positions(there, words.to("sim")), of_positions(given, words)),
        "segments": (of_segments(there["tokens"]), of_segments(batch.tokens)),
        "edges": (edges_of(there, table.to("sim")), al.edges.wp(batch) | al.edges.pq(batch)),
    }
    return {name: are_equal(*pair) for name, pair in pairs.items()}


def are_equal(made: Any, expected: Any) -> bool:
    ours, theirs = (
        (each,) if isinstance(each, Tensor) else vars(each).values() for each in (made, expected)
    )
    return all(
        a.device.type == "cpu" and torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def waits() -> dict[str, list[int]]:
    """How often the host would wait for a GPU for one more batch, with 2 and with 4 layers."""
    tokenizer, task = byte_level_tokenizer(), al.TASKS["agnews"]
    examples = al.load_examples("news")
    demos = al.sample_demonstrations(examples, seed=1)
    queries = [example for example in examples if example not in demos]
    asked: dict[str, list[al.Question]] = {
        "flows and AUCROC": [al.SaliencyFlows(), al.AttentionAUCROC()],
        "distances": [al.AnchorDistances(directions=2)],
        "isolation, two draws": [al.EdgeSweep.isolation({"first": al.Site(0)}, draws=2)],
    }

    def counts(layers: int) -> Iterator[tuple[str, int]]:
        weights = tiny_gpt2(len(tokenizer), n_layer=layers)
        model = al.load_model(weights, tokenizer=tokenizer, device="sim")
        batches = al.build_prompts(tokenizer, task, demos, queries[:12], batch_size=4)
        held_out = al.build_prompts(tokenizer, task, demos, queries[12:16])

        def train(steps: int) -> Any:
            how = al.contexts.Training(steps=steps, check_every=9, progress=False)
            return al.train_prefix(model, batches, how, held_out=held_out, length=2)

        def run(of: list[al.Question], count: int) -> Any:
            return al.run(model, batches[:count], of, resamples=0, progress=False)

        runs: dict[str, Callable[[int], Any]] = {name: partial(run, asked[name]) for name in asked}
        for name, call in {**runs, "a step of training": train}.items():
            call(1)  # what is done once
            found = []
            for count in (2, 3):
                with simulated_device.waits() as counted:
                    call(count)
                found.append(sum(counted.values()))
            yield name, found[1] - found[0]

    of_sizes = [dict(counts(layers)) for layers in (2, 4)]
    return {name: [each[name] for each in of_sizes] for name in of_sizes[0]}


def results_of(of_device: Calls) -> dict[str, dict[str, Tensor] | str]:
    """The tensors of each call, or the error that it raised and the lines of the package."""
    results: dict[str, dict[str, Tensor] | str] = {}
    for name, call in of_device.items():
        try:
            results[name] = tensors_of(call())
        except Exception as error:
            lines = traceback.extract_tb(error.__traceback__)
            rows = [f"{Path(row.filename).name}:{row.lineno}" for row in lines[-12:]]
            results[name] = f"{type(error).__name__}: {error} ({' < '.join(reversed(rows))})"
    return results


def differences(expected: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, reference in expected.items():
        errors = [each for each in (reference, results[name]) if isinstance(each, str)]
        found[name] = errors[0] if errors else largest_difference(reference, results[name])
    return found


def largest_difference(expected: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> Any:
    if expected.keys() != results.keys():
        return f"other tensors: {sorted(expected.keys() ^ results.keys())}"
    largest, of_tensor = 0.0, ""
    for name, reference in expected.items():
        values = results[name]
        if reference.shape != values.shape:
            return f"another shape of {name}"
        if not torch.equal(reference.isnan(), values.isnan()):
            return f"another NaN in {name}"
        # How far an identity is off: 0 but for rounding, of which no share can be given.
        if reference.numel() and not name.endswith(".invariance"):
            before, after = (each.double().nan_to_num() for each in (reference, values))
            off = (after - before).abs().max() / before.abs().max().clamp(1e-30)
            largest, of_tensor = max((largest, of_tensor), (float(off), name))
    return largest, of_tensor


if __name__ == "__main__":
    file, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    quick_analyses(pytest.MonkeyPatch())
    if "cuda" not in kinds:
        simulated_device.install()
    warnings.simplefilter("ignore")
    Path(file).write_text(json.dumps({kind: globals()[kind]() for kind in kinds}))
