"""`anchorlens check`: what works on a model, tried on three short prompts."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..contexts.compressed import compress
from ..errors import AnchorlensError, ModelError
from ..metrics.aucroc import AttentionAUCROC
from ..metrics.distances import AnchorDistances
from ..metrics.question import Metric
from ..metrics.saliency_flows import SaliencyFlows
from ..models.hooked import attentions_of, has_sinks, layers_without_pattern
from ..models.kinds import original_of
from ..models.load import load_model
from ..models.native_attention import is_native
from ..models.quiet_libraries import quiet_libraries
from ..passes.running import why_not_native
from ..passes.shortcuts import why_no_fused_prefix, why_not_fused, why_not_shared
from ..prompts.batch import PromptBatch
from ..prompts.sampled import sample_prompts
from ..questions.edge_sweep import EdgeSweep
from ..questions.sites import first_and_last
from ..results.text_tables import Section
from ..runs.run import run
from ..system.hidden_warnings import hidden_warnings
from ..system.processes import fails_together
from ..system.put_back import each_call_inside
from .options import Check, command_of
from .output import Output

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TRIED: tuple[Metric, ...] = (SaliencyFlows(), AttentionAUCROC(), AnchorDistances(directions=1))
ANALYSES = (*(metric.name for metric in TRIED), "isolation", "compression")
NO = "no: "
SHORTCUTS = {
    "native_passes": why_not_native,
    "shared_tokens_run_once": why_not_shared,
    "fused_attention": why_not_fused,
    "fused_attention_of_shared_tokens": why_no_fused_prefix,
}


@fails_together()
@each_call_inside(quiet_libraries)
def check(options: Check) -> None:
    """Load a model, verify its hooks, and print what works on it."""
    started = time.perf_counter()
    model, output = options.model, Output(options.quiet, options.as_json)
    output.note(f"loading {model}")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    loaded = load_model(model, device=options.device, dtype=dtype)
    output.note("trying the analyses on three prompts")
    with hidden_warnings():  # three prompts are too few for numbers that are read
        facts, findings = known(loaded), tried(loaded)
    status = [findings[name] for name in ANALYSES]
    reasons = [each.removeprefix(NO) if each.startswith(NO) else "" for each in status]
    findings["seconds"] = round(time.perf_counter() - started, 1)
    everything = facts | findings
    rows = {("", name.replace("_", " ")): {"": _told(value)} for name, value in everything.items()}
    possible = "cannot be analysed" if all(reasons) else "can be analysed"
    in_part = " in part" if any(reasons) and not all(reasons) else ""
    output.tables([Section(f"{model} {possible}{in_part}", rows)])
    output.document({"model": model, **everything})
    if all(reasons):
        raise ModelError(f"no analysis works on {model}: {'; '.join(dict.fromkeys(reasons))}")
    output.last_line(command_of("run", "--model", model, "--task", "sentiment"))


def known(model: Any) -> dict[str, Any]:
    """What is known of a loaded model without a prompt."""
    parameters = list(model.parameters())
    attentions = attentions_of(model)
    wrapped, others = sum(map(is_native, attentions.values())), layers_without_pattern(model)
    of_layers = f"all {len(attentions)} layers" + f" but {others}, which have none" * bool(others)
    return {
        "architecture": type(original_of(model) or model).__name__,
        "parameters": sum(weights.numel() for weights in parameters),
        "layers": model.cfg.n_layers,
        "heads": model.cfg.n_heads,
        "context": f"{model.cfg.n_ctx} tokens",
        "dtype": ", ".join(
            sorted({str(weights.dtype).removeprefix("torch.") for weights in parameters})
        ),
        "device": ", ".join(sorted({str(weights.device) for weights in parameters})),
        "attention_hooks": f"verified in {of_layers}",
        "attention": f"of transformers, wrapped in {wrapped} layers"
        if wrapped
        else "of TransformerLens",
        "attention_sinks": has_sinks(model),
        **{
            name: f"{NO}{reason}" if (reason := why_not(model)) else "yes"
            for name, why_not in SHORTCUTS.items()
        },
    }


def tried(model: Any) -> dict[str, Any]:
    """What works on three prompts of the bundled sentiments."""
    try:
        batches = sample_prompts(model, "sentiment", queries=3)
    except AnchorlensError as error:
        return {name: f"{NO}{error}" for name in ("prompts", *ANALYSES)}
    prefixes: list[str] = []

    def of_metric(metric: Metric) -> str:
        prefixes.append(run(model, batches, [metric], **QUIET)[metric.name].info["shared_prefix"])
        return "yes"

    # Each alone, so that one that fails does not hide what the others do.
    attempts: dict[str, Callable[[], str]] = {
        **{metric.name: partial(of_metric, metric) for metric in TRIED},
        "isolation": partial(_isolation, model, batches),
        "compression": partial(_compression, model, batches),
    }
    status = {}
    for name, attempt in attempts.items():
        try:
            status[name] = attempt()
        except AnchorlensError as error:
            status[name] = f"{NO}{error}"
    return {
        "prompts": f"yes, {int(batches[0].attention_mask.sum(1).max())} tokens for two "
        "demonstrations and a query",
        "begins_with_BOS": batches[0].begins_with_bos,
        "shared_demonstrations": next(iter(prefixes), "not tried"),
        **status,
    }


def _isolation(model: Any, batches: Sequence[PromptBatch]) -> str:
    sweep = EdgeSweep.isolation(first_and_last(model, [1]), draws=1)
    sites = run(model, batches, [sweep], **QUIET)[sweep.name].info["sites"]
    skipped = [*sites.values()][-1]["skipped_layers"]
    how = f"runs of the last layer skip {skipped} layers" if isinstance(skipped, int) else skipped
    return f"yes, {how}"


def _compression(model: Any, batches: Sequence[PromptBatch]) -> str:
    context = compress(model, batches[0])
    return f"yes, {len(context.prefix)} of the cached tokens are enough to answer"


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
