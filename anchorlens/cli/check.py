"""`anchorlens check`: what works on a model, tried on three short prompts."""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..contexts.compression import compress
from ..errors import AnchorlensError, PromptError, RunError
from ..experiments.isolation import isolation_sweep
from ..experiments.sites import first_and_last
from ..metrics.aucroc import AttentionAUCROC
from ..metrics.distances import AnchorDistances
from ..metrics.metric import Metric, possible
from ..metrics.saliency import SaliencyFlows
from ..models.hooked import has_sinks
from ..models.load import load_model
from ..models.native_attention import is_native
from ..models.quiet import quiet_libraries
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.examples import load_examples, sample_demonstrations, sample_queries
from ..prompts.tasks import TASKS
from ..runs.run import run
from ..system.processes import fails_together
from .output import Output, PrintedTable

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
PROMPTS = 3


@fails_together()
@quiet_libraries()
def check(model: str, device: str | None, dtype: torch.dtype | None, output: Output) -> None:
    """Load a model, verify its hooks, and print what works on it.

    Raises:
        ModelError: The model is refused.
    """
    started = time.perf_counter()
    output.note(f"loading {model}")
    loaded = load_model(model, device=device, dtype=dtype)
    output.note("trying the analyses on three prompts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three prompts are too few for numbers that are read
        findings = facts_of(loaded) | tried(loaded)
    findings["seconds"] = round(time.perf_counter() - started, 1)
    rows = {("", name.replace("_", " ")): {"": _text(value)} for name, value in findings.items()}
    output.tables([PrintedTable(rows, title=f"{model} can be analysed")])
    output.document({"model": model, **findings})
    output.last_line(f"Next: anchorlens run --model {model} --task sentiment")


def facts_of(model: Any) -> dict[str, Any]:
    """What is known of a loaded model without a prompt."""
    parameters = list(model.parameters())
    wrapped = sum(is_native(block.attn) for block in model.blocks)
    return {
        "architecture": type(getattr(model, "original_model", model)).__name__,
        "parameters": sum(weights.numel() for weights in parameters),
        "layers": model.cfg.n_layers,
        "heads": model.cfg.n_heads,
        "context": f"{model.cfg.n_ctx} tokens",
        "dtype": ", ".join(
            sorted({str(weights.dtype).removeprefix("torch.") for weights in parameters})
        ),
        "device": ", ".join(sorted({str(weights.device) for weights in parameters})),
        "attention_hooks": f"verified in all {model.cfg.n_layers} layers",
        "attention": f"of transformers, wrapped in {wrapped} layers"
        if wrapped
        else "of TransformerLens",
        "attention_sinks": has_sinks(model),
    }


def tried(model: Any) -> dict[str, Any]:
    """What works on three prompts of the bundled sentiments."""
    try:
        batches = _prompts(model)
    except PromptError as error:
        return {"prompts": f"no: {error}"}
    found: dict[str, Any] = {
        "prompts": f"yes, {int(batches[0].attention_mask.sum(1).max())} tokens for two "
        "demonstrations and a query",
        "begins_with_BOS": batches[0].begins_with_bos,
    }
    return (
        found | _metrics(model, batches) | _isolation(model, batches) | _compression(model, batches)
    )


def _prompts(model: Any) -> list[PromptBatch]:
    examples = load_examples("sentiment")
    demos = sample_demonstrations(examples, shots=1, seed=42)
    queries = sample_queries(examples, PROMPTS, seed=42, exclude=demos)
    return build_prompts(model.tokenizer, TASKS["sst2"], demos, queries)


def _metrics(model: Any, batches: Sequence[PromptBatch]) -> dict[str, Any]:
    wanted: list[Metric] = [SaliencyFlows(), AttentionAUCROC(), AnchorDistances(directions=1)]
    try:
        able, errors = possible(model, batches, wanted)
    except PromptError as error:  # the prompts do not fit the model
        return {metric.name: f"no: {error}" for metric in wanted}
    reasons: dict[str, Any] = {name: f"no: {error}" for name, error in errors.items()}
    try:
        records: Mapping[str, Any] = run(model, batches, able, **QUIET)
    except RunError as error:
        records = error.results
        reasons |= {metric.name: f"no: {error}" for metric in able if metric.name not in records}
    prefix = next((record.info["shared_prefix"] for record in records.values()), "not tried")
    return {metric.name: reasons.get(metric.name, "yes") for metric in wanted} | {
        "shared_demonstrations": prefix
    }


def _isolation(model: Any, batches: Sequence[PromptBatch]) -> dict[str, Any]:
    sites = first_and_last(model, [1])
    try:
        records = isolation_sweep(model, batches, sites, draws=1, **QUIET)
    except AnchorlensError as error:
        return {"isolation": f"no: {error}"}
    skipped = list(records.values())[-1].info["skipped_layers"]
    how = f"runs of the last layer skip {skipped} layers" if isinstance(skipped, int) else skipped
    return {"isolation": f"yes, {how}"}


def _compression(model: Any, batches: Sequence[PromptBatch]) -> dict[str, Any]:
    try:
        context = compress(model, batches[0])
    except AnchorlensError as error:
        return {"compression": f"no: {error}"}
    return {"compression": f"yes, {len(context.prefix)} of the cached tokens are enough to answer"}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
