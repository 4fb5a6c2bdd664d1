"""The same analyses of models of the same architecture with random weights, as a control.

What such a model shows is shown by the architecture and the prompts alone.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import AnchorlensError, ModelError, RunError
from ..metrics.question import Metric, Question
from ..models.facts import take_over
from ..models.hooked import HookedModel, device_of
from ..models.kinds import original_of
from ..models.load import bridge_of
from ..passes.memory import is_out_of_memory
from ..prompts.batch import PromptBatch, count_tokens
from ..results.record import RANDOM_MODELS, Record, Results
from ..runs.checks import possible
from ..runs.run import run
from ..system.hidden_warnings import hidden_warnings
from ..system.processes import fails_together, is_main
from ..system.put_back import each_call_inside
from ..system.steps import step
from ..system.torch_state import gradient_mode, own_random_state, tensor_defaults
from ..system.warn import warn_user

SEEDS = (0, 1, 2)
PROMPTS = 12  # as many as anchor distances need
DRAWING = 1500  # tokens, in a run of the metrics, that take as long as drawing weights does
MOST_PARAMETERS = 300_000_000  # a second model of so many takes 1.2 GB in float32


def with_random_models(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    records: Mapping[str, Record],
    *,
    asked: bool | None = None,
    folder: Path | None = None,
    progress: bool = True,
) -> Results:
    """The records with the numbers of random models (None: of small ones), or with the reason."""
    reason = "left out" if asked is False else _why_not(model, asked is True)
    found: list[Mapping[str, Record]] = []
    if not reason:
        few = _few(batches)
        options: dict[str, Any] = {"resamples": 0, "progress": progress}
        try:
            for seed in SEEDS:
                store = None if folder is None else folder / f"random weights {seed}"
                # All processes have these numbers, or none has.
                with fails_together(), step(_name(seed)):
                    found.append(_records(model, few, metrics, seed, folder=store, **options))
        except (AnchorlensError, RuntimeError, MemoryError) as error:
            if not isinstance(error, AnchorlensError) and not is_out_of_memory(error):
                raise
            found, reason = [], str(error).partition("\n")[0]
            if is_main():
                warn_user(f"no models of random weights to compare with: {reason}")
    seeds = ", ".join(map(str, SEEDS))
    used = {"random_weights": reason or f"seeds {seeds}, on {sum(map(len, few))} prompts"}
    shown = Results()
    for name, record in records.items():
        numbers = _stacked([of_seed[name] for of_seed in found if name in of_seed])
        named = {RANDOM_MODELS: numbers} if numbers else {}
        shown[name] = replace(record, info={**record.info, **used, **named})
    return shown


def random_steps(
    model: HookedModel, batches: Sequence[PromptBatch], asked: bool | None
) -> dict[str, int | float]:
    """The step of each random model, and what it costs in tokens of the model itself."""
    if asked is False or _why_not(model, asked is True):
        return {}
    return dict.fromkeys(map(_name, SEEDS), DRAWING + count_tokens(_few(batches)))


def _name(seed: int) -> str:
    return f"random weights, seed {seed}"


def _why_not(model: HookedModel, asked: bool) -> str:
    """Why no random weights are drawn; "" where they are."""
    if original_of(model) is None or getattr(model, "tokenizer", None) is None:
        return "left out: the model is no TransformerBridge that was loaded with a tokenizer"
    count = sum(parameter.numel() for parameter in original_of(model).parameters())
    if count > MOST_PARAMETERS and not asked:
        return (
            f"left out: a second model of {count / 1e6:,.0f} million parameters "
            "(random_weights=True draws it)"
        )
    return ""


def _few(batches: Sequence[PromptBatch]) -> list[PromptBatch]:
    few, missing = list[PromptBatch](), PROMPTS
    for batch in batches:
        if missing > 0:
            few.append(batch.prompts(0, min(missing, len(batch))))
            missing -= len(batch)
    return few


def _records(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    seed: int,
    **options: Any,
) -> Mapping[str, Record]:
    drawn = _new_model(model, seed)
    with hidden_warnings():  # such a model may predict one class only: a metric has no number
        able, _ = possible(drawn, batches, metrics)
        return answered(drawn, batches, able, **options)


def answered(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    questions: Sequence[Question],
    **options: Any,
) -> Results:
    """The results of a run; of those questions that have one, with a warning, if some have none."""
    try:
        return run(model, batches, questions, **options)
    except RunError as error:
        if is_main():
            warn_user(str(error))
        return Results(error.results)


@each_call_inside(gradient_mode, True)
def _new_model(model: Any, seed: int) -> HookedModel:
    """A model of the same architecture with weights of a seed."""
    original = original_of(model)
    try:
        # In float32 the draw itself differs between processors.
        dtype = torch.promote_types(original.dtype, torch.float32)
        with own_random_state(seed=seed), tensor_defaults("cpu", dtype):
            weights = type(original)(copy.deepcopy(original.config))
    except Exception as error:  # of a class that was written elsewhere
        raise ModelError(
            f"{type(original).__name__} cannot be made from its configuration alone: {error}"
        ) from error
    weights = weights.to(device=device_of(model), dtype=original.dtype).eval()
    # A whole copy of the tokenizer takes a second. What it holds was set when the model was loaded.
    drawn = bridge_of(type(original).__name__, weights, copy.copy(model.tokenizer))
    for size in ("n_layers", "n_heads", "d_model"):
        now, before = getattr(drawn.cfg, size), getattr(model.cfg, size)
        if now != before:
            raise ModelError(
                f"the configuration was changed after loading: its {size} was {before} and is {now}"
            )
    take_over(drawn, model)
    return drawn


def _stacked(records: Sequence[Record]) -> dict[str, Any]:
    """The numbers of no head, class or prompt, a list for each field."""
    return {
        name: [getattr(record, name).tolist() for record in records]
        for name, axes in (records[0].axes().items() if records else ())
        if set(axes) <= {"layer", "flow"} and getattr(records[0], name).is_floating_point()
    }
