"""Metrics of passes that you ran yourself: from the logits and the cache of each batch.

What a metric reads is observed by hooks. Here the same hooks get the tensors of a cache, so that
there is one code for both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError, NotFiniteError, PromptError
from ..metrics.question import Metric, Question
from ..metrics.reads import KEYS, QUERIES, VALUES
from ..models.hooked import Hook, HookedModel, check_fits, pattern_name
from ..passes.provide import Observation, needs_of, reads_of
from ..prompts.batch import PromptBatch, check_prompts
from ..results.bootstrap import with_intervals
from ..results.population import check_resamples
from ..results.record import Results
from ..system.arguments import checked
from ..system.devices import holds_numbers, sent, wide
from ..system.texts import described
from ..system.torch_state import gradient_mode
from .checks import require_questions
from .identity import versions
from .passes import contributed, layer_of, results_of
from .study import cases_of, describe_layers, describe_prompts, in_order, require_batches

_GRADIENT = "_grad"  # what TransformerLens adds to the name where it caches gradients


@checked
def from_caches(
    metrics: Sequence[Question],
    batches: Sequence[PromptBatch],
    passes: Iterable[Any],
    *,
    model: HookedModel | None = None,
    resamples: int = 200,
) -> Results:
    """Compute metrics of passes that you ran yourself; no model runs.

    Args:
        metrics: Metrics of the package, or your own.
        batches: The prompts of the passes, with the tokens that you ran, padded on any side.
        passes: For each batch its logits and its cache, as ``model.run_with_cache`` returns them;
            a generator holds one cache at a time. The logits are those of all positions, or of the
            targets alone. The cache is an ``ActivationCache`` or a dict of tensors by hook point;
            ``names_filter`` says which. Metrics with a gradient need that of the loss summed over
            prompts, not of its mean: ``blocks.0.attn.hook_pattern_grad`` and so on.
        model: The prepared model of the passes, for metrics that depend on more than patterns and
            logits, such as ``AnchorDistances``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.

    Raises:
        MetricError: A cache lacks a hook point or a gradient, a tensor does not fit the batch, a
            metric needs ``model``, or there are more or fewer passes than batches.
        NotFiniteError: Logits or gradients are NaN or infinite.
        AnchorlensError: As ``run``, where prompts do not fit a metric or the model.
        RunError: A metric has no result for these contributions; all others are in its ``results``.

    Examples:
        >>> attention = al.AttentionAUCROC()
        >>> names = al.caches.names_filter([attention], model, batches[0])
        >>> device = model.cfg.device
        >>> passes = (model.run_with_cache(each.tokens.to(device), names_filter=names,
        ...     attention_mask=each.attention_mask.to(device)) for each in batches)
        >>> al.caches.from_caches([attention], batches, passes, resamples=0)["attention_aucroc"]
        AttentionAUCROCRecord(aucroc ...; 14 prompts)
    """
    check_resamples(resamples)
    metrics = _metrics(metrics)
    if not metrics:
        raise MetricError("there is nothing to compute: give at least one metric")
    require_batches(batches)
    check_prompts(*batches)
    if model is not None:
        check_fits(model, *batches)
    for metric in metrics:
        metric.check(_NoModel(metric.name) if model is None else model, batches, changed=False)
        if model is not None:
            Observation(model, metric, batches[0]).check()
        elif needs_of(reads_of(metric, batches[0])) & {QUERIES, KEYS, VALUES}:
            raise _needs_model(metric.name)
    collected: list[dict[str, Tensor]] = []
    for number, (batch, given) in enumerate(zip_longest(batches, passes)):
        if batch is None or given is None:
            raise MetricError(
                f"there are {len(batches)} batches, but {'more' if batch is None else number} "
                "passes; give one (logits, cache) for each batch"
            )
        of_pass = _GivenPass.of(given, batch, number, model)
        of_metrics = [of_pass.contributions(each, model) for each in metrics]
        collected.append({name: each[name] for each in of_metrics for name in each})
    info = {} if model is None else {"model": str(model.cfg.model_name), **describe_layers(model)}
    info |= describe_prompts(batches) | {"source": "caches of passes that were given"}
    sets, texts = cases_of(batches)
    options: dict[str, Any] = {"sets": sets, "texts": texts, "resamples": resamples}
    options["info"] = info | {"versions": versions()}
    contributions = in_order(batches, collected)
    return results_of(
        metrics, contributions, lambda each, of: with_intervals(each.result, of, **options), {}
    )


@checked
def names_filter(metrics: Sequence[Question], model: HookedModel, batch: PromptBatch) -> list[str]:
    """The hook points that these metrics observe: what a cache for ``from_caches`` must have.

    They are for ``run_with_cache(names_filter=...)`` and ``add_caching_hooks``; with
    ``incl_bwd=True`` TransformerLens stores the gradients there too.

    Raises:
        AnchorlensError: The batch does not fit the model or a metric.

    Examples:
        >>> al.caches.names_filter([al.SaliencyFlows()], model, batch)[0]
        'blocks.0.attn.hook_pattern'
    """
    metrics = _metrics(metrics)
    check_prompts(batch)
    check_fits(model, batch)
    names: dict[str, None] = {}
    for metric in metrics:
        observed = Observation(model, metric, batch)
        for name, _ in [*observed.hooks, *observed.backward_hooks]:
            points = [name] if isinstance(name, str) else filter(name, model.hook_dict)
            names.update(dict.fromkeys(points))
    return list(names)


@checked
def cache_of_attentions(
    attentions: Sequence[Float[Tensor, "batch head query key"] | None],
    gradients: Sequence[Float[Tensor, "batch head query key"]] | None = None,
) -> dict[str, Tensor]:
    """A cache for ``from_caches`` from the patterns of each layer, as plain transformers have them.

    Args:
        attentions: The pattern of each layer, after the softmax: ``output_attentions=True`` with
            ``attn_implementation="eager"``.
        gradients: Of the summed loss for each: ``torch.autograd.grad(loss.sum(), attentions)``.

    Raises:
        MetricError: A layer has no pattern, or there are more or fewer gradients.

    Examples:
        >>> pattern = torch.full((1, 2, 3, 3), 1 / 3)
        >>> list(al.caches.cache_of_attentions([pattern], [pattern]))
        ['blocks.0.attn.hook_pattern', 'blocks.0.attn.hook_pattern_grad']
    """
    slopes = [] if gradients is None else [*gradients]
    missing = [layer for layer, pattern in enumerate(attentions) if pattern is None]
    if missing or not attentions:
        raise MetricError(
            f"no pattern in layers {missing or 'at all'}: transformers returns patterns only with "
            'attn_implementation="eager" and output_attentions=True'
        )
    if gradients is not None and len(slopes) != len(attentions):
        raise MetricError(f"{len(attentions)} patterns, but {len(slopes)} gradients: one a layer")
    there = [pattern for pattern in attentions if pattern is not None]  # that is all of them
    patterns = {pattern_name(layer): pattern for layer, pattern in enumerate(there)}
    return patterns | {pattern_name(layer) + _GRADIENT: slope for layer, slope in enumerate(slopes)}


def _metrics(questions: Sequence[Question]) -> list[Metric]:
    """The same questions, all of which a pass that was made answers."""
    require_questions(questions)
    metrics = [each for each in questions if isinstance(each, Metric)]
    if len(metrics) < len(questions):
        names = [each.name for each in questions if not isinstance(each, Metric)]
        raise MetricError(
            f"{', '.join(names)} makes passes of its own, which no cache has; give it to al.run"
        )
    return metrics


@dataclass(frozen=True, eq=False)
class _GivenPass:
    """The logits at the targets of a batch, in float32 or wider, and its cache."""

    batch: PromptBatch
    number: int  # of the batch
    logits: Float[Tensor, "batch vocab"]
    cache: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, given: Any, batch: PromptBatch, number: int, model: HookedModel | None
    ) -> "_GivenPass":
        if not isinstance(given, tuple) or len(given) != 2 or not hasattr(given[1], "items"):
            raise MetricError(
                "a pass is (logits, cache), as model.run_with_cache returns it, or with a dict of "
                f"tensors; that of batch {number} is a {type(given).__name__}"
            )
        logits, cache = given[0], dict(given[1].items())
        shape = tuple(batch.tokens.shape)
        if not holds_numbers(logits) or tuple(logits.shape[:-1]) not in (shape, shape[:1]):
            raise MetricError(
                f"the logits of batch {number} must have the shape (batch, position, vocabulary) = "
                f"{(*shape, '...')}, or {(shape[0], '...')} of the targets; got {described(logits)}"
            )
        if logits.ndim == 3:
            prompts = torch.arange(len(batch), device=logits.device)
            logits = logits[prompts, sent(batch.target_positions, logits.device)]
        logits = wide(logits.detach())
        if not logits.isfinite().all():
            raise NotFiniteError(f"the logits of batch {number} are NaN or infinite at the targets")
        aliases = {  # a bridge stores each hook point under one of its names
            alias + suffix: cache[point.name + suffix]
            for alias, point in ({} if model is None else model.hook_dict).items()
            for suffix in ("", _GRADIENT)
            if point.name + suffix in cache
        }
        return cls(batch, number, logits, aliases | cache)

    def contributions(self, metric: Metric, model: HookedModel | None) -> dict[str, Tensor]:
        with gradient_mode(False):
            sizes = _sizes_in(self.cache) if model is None else model
            observation = Observation(sizes, metric, self.batch)
            self._show(metric.name, observation.hooks, "")
            self._show(metric.name, observation.backward_hooks[::-1], _GRADIENT)
            seen = observation.seen(self.logits, None)
            found = contributed(lambda batch: metric.contributions(batch, seen), self.batch)
        return {f"{metric.name}/{name}": values for name, values in found.items()}

    def _show(self, owner: str, hooks: Sequence[Hook], suffix: str) -> None:
        """Pass to each hook the tensor that it would have seen."""
        names = [name for name in self.cache if not name.endswith(_GRADIENT)]
        for name, act in hooks:
            for point in [name] if isinstance(name, str) else filter(name, names):
                tensor = self._fitting(owner, point, suffix)
                act(tensor.detach(), hook=SimpleNamespace(name=point))

    def _fitting(self, owner: str, point: str, suffix: str) -> Tensor:
        """The tensor of a hook point, or its gradient; an error if it does not fit the batch."""
        name = point + suffix
        tensor, forward = self.cache.get(name), self.cache.get(point)
        if not holds_numbers(tensor):
            cure = "store it: names_filter=al.caches.names_filter(metrics, model, batch)"
            cure = (
                "store gradients too (incl_bwd=True), or add them to the dict" if suffix else cure
            )
            raise MetricError(
                f"the cache of batch {self.number} has no {name!r}, which {owner} needs; {cure}"
            )
        what, shape = f"{name!r} in the cache of batch {self.number}", tuple(tensor.shape)
        size, length = self.batch.tokens.shape
        fits = shape[:1] == (size,) and length in shape[1:]
        if "hook_pattern" in name:
            fits = len(shape) == 4 and (shape[0], *shape[2:]) == (size, length, length)
        if not fits:
            raise PromptError(
                f"{what} has the shape {shape}, but the batch has {size} prompts of {length} "
                "positions; give the cache of its own pass over the same tokens, "
                "without a key-value cache and with its batch axis"
            )
        # NaN is outside too.
        if name.endswith("hook_pattern") and not ((tensor >= 0) & (tensor <= 1.01)).all():
            raise PromptError(
                f"{what} has values outside 0 to 1; a pattern is the attention after the softmax, "
                "and not its scores"
            )
        if suffix and not torch.stack(tensor.aminmax()).isfinite().all():
            raise NotFiniteError(f"{what} is NaN or infinite; run the model in float32")
        if suffix and isinstance(forward, Tensor) and forward.shape != tensor.shape:
            raise PromptError(
                f"{what} has the shape {shape}, and the tensor itself {tuple(forward.shape)}; both "
                "must come from one pass"
            )
        return tensor


def _sizes_in(cache: Mapping[str, Tensor]) -> Any:
    """What stands for the model of a cache: its numbers of layers and heads."""
    patterns = [cache[name] for name in cache if name.endswith("attn.hook_pattern")]
    heads = patterns[0].shape[1] if patterns and patterns[0].ndim == 4 else 1
    count = 1 + max(map(layer_of, cache), default=0)  # of an empty cache the first is missing
    return SimpleNamespace(cfg=SimpleNamespace(n_layers=count, n_heads=heads))


class _NoModel:
    """What the check of a metric gets where there is no model; it names the cure if it is used."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        raise _needs_model(self._owner)


def _needs_model(owner: str) -> MetricError:
    return MetricError(
        f"{owner} needs the prepared model of the passes, and not only their caches; give it: "
        "al.caches.from_caches(..., model=model)"
    )
