"""Several models, one after another: how each is named, loaded, given prompts, and fails."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch

from ..errors import AnchorlensError, ModelError, PromptError
from ..models.hooked import why_not_hooked
from ..models.load import load_model
from ..models.read_weights import refuse_revision
from ..passes.memory import is_out_of_memory
from ..prompts.batch import PromptBatch
from ..prompts.sampled import prompts_of_draws, sample_draws
from ..prompts.tasks import Task
from ..system.arguments import check_counts
from ..system.files import kind_of
from ..system.hidden_warnings import recorded_warnings
from ..system.processes import fails_together, gather_from_processes
from ..system.warn import log_of

MakePrompts = Callable[[Any], Sequence[PromptBatch]]  # from a tokenizer

_log = log_of(__name__)


class Outcome(NamedTuple):
    """What became of a model."""

    failed: str  # "failed: " and the reason; "" if it did not fail
    warnings: Sequence[str]  # each text once; the last is the reason, if it failed


def outcome_of(load: Callable[[], Any], work: Callable[[Any], object]) -> Outcome:
    """Load a model and work with it; nothing here holds it at the end."""
    failed = ""
    with recorded_warnings() as recorded:
        try:
            with fails_together():
                model = load()
                if reason := why_not_hooked(model):
                    raise ModelError(reason)
                work(model)
        except Exception as error:  # architectures fail in many ways, and the others are to run
            failed = str(error).partition("\n")[0]
            if not isinstance(error, AnchorlensError):
                failed = f"{type(error).__name__}: {failed}"
                if not isinstance(error, OSError) and not is_out_of_memory(error):
                    _log.warning("a model failed with an unexpected error", exc_info=error)
    # All processes give the same reason, and where one is lost, this raises its error.
    failed = next(filter(None, gather_from_processes("status of a model", failed)), "")
    failed = f"failed: {failed}" if failed else ""
    # Isolations warn again of what the metrics warned of.
    texts = dict.fromkeys([*(str(each.message) for each in recorded), *filter(None, [failed])])
    return Outcome(failed, [*texts])


def sources_of(
    models: str | Path | Sequence[str | Path] | Mapping[str, Any],
    revisions: Sequence[str] | None,
    loading: Mapping[str, Any],
) -> dict[str, Callable[[], Any]]:
    """A function that gives the model of each name; that of a folder or file is its last part."""
    if isinstance(models, Mapping):
        named = [*models.items()]
    else:
        given = [str(model) for model in ([models] if isinstance(models, str | Path) else models)]
        named = [(Path(m).resolve().name if kind_of(m, ModelError) else m, m) for m in given]
    for _, model in named if revisions is not None else []:
        refuse_revision(model)
    sources, count = dict[str, Callable[[], Any]](), 0
    for name, model in named:
        for revision in [None] if revisions is None else revisions:
            of_model = {**loading, "revision": revision}
            at = "" if revision is None else f"@{revision}"
            sources[f"{name}{at}"], count = partial(_loaded_model, model, of_model), count + 1
    if not 0 < len(sources) == count or "" in sources:
        raise ModelError(
            f"expected models of different names, at least one; got {[name for name, _ in named]}"
            f"{'' if revisions is None else f' at {list(revisions)}'}. A mapping names models"
        )
    return sources


def folder_of(folder: str | Path | None, name: str) -> Path | None:
    """Where the batches of a model are stored; None where nothing is."""
    return None if folder is None else Path(folder) / f"model {quote(name, safe=' @')}"


def _loaded_model(model: Any, loading: Mapping[str, Any]) -> Any:
    """A model as it was given: hooked, by a function, or by a name."""
    if not why_not_hooked(model):
        return model
    is_function = callable(model) and not isinstance(model, torch.nn.Module)
    return model() if is_function else load_model(model, **loading)


def maker_of_prompts(
    task: str | Task | MakePrompts, examples: Any, sampling: Mapping[str, Any]
) -> MakePrompts:
    """The function of a tokenizer that makes the prompts; demonstrations are drawn here."""
    given = {name: value for name, value in sampling.items() if value is not None}
    if not callable(task):
        batch_size = given.pop("batch_size", 8)
        check_counts(PromptError, batch_size=batch_size)
        draws = sample_draws(task, examples, **given)
        return partial(prompts_of_draws, draws=draws, batch_size=batch_size)
    if examples is not None or given:
        names = [*(["examples"] if examples is not None else []), *given]
        raise PromptError(
            f"a function makes the prompts, so that {', '.join(names)} would have no effect; leave "
            "them out, or give a task"
        )
    return task
