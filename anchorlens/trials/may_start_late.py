"""May passes begin in a later layer, whose input an earlier pass stored?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from ..models.hooked import HookedModel, device_of
from ..models.kv_cache import entries_of, layers_of_entries
from ..models.model_state import frozen_in_eval_mode, has_user_hooks
from ..passes.late_start import Start, stored_starts
from ..passes.memory import of_what_fits
from ..passes.shared_prefix import HooksOfBatch, no_hooks
from ..prompts.batch import PromptBatch
from ..system.processes import gather_from_processes
from .comparison import HOOKS_OF_USER, TOLERANCE, difference_of, reason_of, two_of

# Gets a batch, hooks that change the run, and where it starts; returns the logits at the targets.
LogitsOfBatch = Callable[[PromptBatch, HooksOfBatch, Start | None], Tensor]


def why_not_late(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Mapping[int, HooksOfBatch],
    logits: LogitsOfBatch,
    is_fused: bool,
) -> dict[int, str]:
    """By layer, why a change that acts from there on cannot start there; empty if all can."""
    few = two_of(batches[0]).to(device_of(model))
    if is_fused:
        reasons = {layer: "a long prefix runs from the first layer on" for layer in changes}
        reasons.pop(0, None)
    elif has_user_hooks(model):
        reasons = {layer: HOOKS_OF_USER for layer in changes if layer}
    else:
        with frozen_in_eval_mode(model):
            reasons = of_what_fits(few, partial(_compare_starts, model, changes, logits))
    # Every process takes part, also with hooks on its model, because the others would wait for it.
    of_processes = gather_from_processes("late starts", reasons)
    return dict(item for of_process in of_processes for item in of_process.items())


def _compare_starts(
    model: HookedModel,
    changes: Mapping[int, HooksOfBatch],
    logits_of: LogitsOfBatch,
    batch: PromptBatch,
) -> dict[int, str]:
    """The reason for each change that cannot start at its first layer, by layer."""
    reasons = _of_shared_keys(model, changes)
    tried = sorted(set(changes) - {0} - reasons.keys())
    with stored_starts(model, tried) as starts:
        logits_of(batch, no_hooks, None)
    for layer in tried:
        expected = logits_of(batch, changes[layer], None)
        try:
            logits = logits_of(batch, changes[layer], starts[layer])
        except Exception as error:  # a layer may need more than the output of the layer before
            reasons[layer] = f"no start at layer {layer} ({reason_of(error)})"
            continue
        difference = difference_of(logits, expected)
        if not difference <= TOLERANCE:
            reasons[layer] = f"a start at layer {layer} changes logits by {difference:.1e}"
    return reasons


def _of_shared_keys(model: HookedModel, layers: Iterable[int]) -> dict[int, str]:
    """The reason for each layer after which keys and values of an earlier layer are read again."""
    entries, computed = entries_of(model), layers_of_entries(model)
    read = [computed[entry] for entry in entries]  # the layer whose keys each layer reads
    return {
        layer: f"no start at layer {layer}, after which keys of layer {min(read[layer:])} are read"
        for layer in layers
        if min(read[layer:]) < layer
    }
