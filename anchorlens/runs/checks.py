"""Checks of questions, hooks and losses before the model runs."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import AnchorlensError, HookError, MetricError, ModelError
from ..metrics.question import Further, HooksOfBatch, Metric, Question
from ..models.batch_hooks import BatchHook, EdgeHook
from ..models.hooked import Hook, HookedModel, check_fits, layer_numbers
from ..passes.loss_checks import check_gradient_of_loss
from ..passes.losses import LossOfBatch, gold_of, label_cross_entropy
from ..passes.provide import Observation, check_columns
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from ..results.record import Record
from ..system.arguments import called, fitted
from ..system.texts import described
from .installed import PACKAGE


def check_questions(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    questions: Sequence[Question],
    hooks: HooksOfBatch | None,
    loss: LossOfBatch | None,
) -> list[Observation]:
    """What questions observe in the first batch; an error for wrong questions, hooks or losses."""
    observed = list[Observation]()
    for question in questions:
        if hooks is not None and not question.sees_hooks:
            raise MetricError(
                f"{question.name} makes passes of its own, which do not have the hooks that change "
                "this run; run it without hooks, or write these into the model (model.add_hook)"
            )
        question.check(model, batches, changed=hooks is not None)
        observed.append(Observation(model, question, batches[0]))
        observed[-1].check()
    gradient = [each.question.name for each in observed if each.needs_gradient]
    if gradient and loss is None:
        raise MetricError(
            f"{', '.join(gradient)} needs a gradient, and passes here have none; give it to al.run"
        )
    if gradient and loss is label_cross_entropy:  # known to be of each prompt alone
        gold_of(*batches)
    elif gradient and loss is not None:
        check_gradient_of_loss(loss, batches, model)
    # A question of the user may take it from its passes.
    if loss not in (None, label_cross_entropy) and not gradient and all(map(_is_ours, questions)):
        asked = ", ".join(each.name for each in questions) or "nothing"
        raise MetricError(
            f"no question of this run takes its loss (asked: {asked}), as none needs a gradient; "
            "leave loss= out, or ask for its mean, al.Loss(loss)"
        )
    for each in observed:
        check_columns(each.question, batches, each.reads)
        named = {name: each.question.name for name, _ in (*each.hooks, *each.backward_hooks)}
        _check_points(model, {n: owner for n, owner in named.items() if isinstance(n, str)})
    return observed


def _is_ours(question: Question) -> bool:
    """Whether it is known that a question without a gradient takes no loss of the run."""
    return isinstance(question, Metric) or type(question).__module__.startswith(f"{PACKAGE}.")


def require_questions(questions: Sequence[Question]) -> None:
    """Raise an error unless these are questions with different names."""
    names = [getattr(question, "name", None) for question in questions]
    if any(not isinstance(name, str) or not name or "/" in name for name in names):
        raise MetricError(f'a question needs a string for a name without "/"; got {names}')
    if len(set(names)) < len(names):
        raise MetricError(f"two questions of one run need different names; got {names}")
    for question in questions:
        record = getattr(question, "record", None)
        if not (isinstance(record, type) and issubclass(record, Record)):
            if type(question).result is Question.result:  # otherwise it makes a record itself
                raise MetricError(
                    f"{question.name} has no record; write into its class: record = YourRecord, a "
                    f"class of al.Record whose fields are of al.kinds; got {described(record)}"
                )
        elif "__dataclass_fields__" not in vars(record):
            raise MetricError(
                f"{record.__name__}, the record of {question.name}, has no fields yet; write "
                "@dataclass(frozen=True, eq=False, kw_only=True) before the class"
            )


def asked_of(question: Question, model: HookedModel, batches: Sequence[PromptBatch]) -> Question:
    asked: Any = question.of_run(model, batches)
    if not isinstance(asked, Question) or asked.name != question.name:
        raise MetricError(
            f"of_run of {question.name} must return the question that is asked, an al.Question of "
            f"this name; got {described(asked)}"
        )
    return asked


def further_of(question: Question, model: HookedModel, batches: Sequence[PromptBatch]) -> Further:
    """The passes that a question makes besides that of the run, with layers from 0 on."""
    what = f"what further of {question.name} returns"
    needed: Further = fitted(what, question.further(model, batches), Further)
    if not needed.layers:
        return needed
    return replace(needed, layers=layer_numbers(model, needed.layers))


def once_of(question: Question, passes: Any, contributions: Mapping[str, Tensor]) -> dict[str, Any]:
    once = question.once(passes, contributions)
    found = dict(fitted(f"what once of {question.name} returns", once, Mapping[str, Any]))
    info = fitted(f"info of once of {question.name}", found.get("info", {}), Mapping[str, Any])
    return {**found, "info": info}


def check_hooks(model: HookedModel, hooks: HooksOfBatch, batches: Sequence[PromptBatch]) -> None:
    """Raise an error unless ``hooks`` is a function of the batch to hooks that the model has."""
    for batch in batches:
        acting = hooks_of(hooks, batch)
        if not all(act.is_for(batch) for _, act in acting if isinstance(act, BatchHook)):
            raise HookError(
                "hooks were made for other prompts than those that run; make them of the batch "
                "that your function gets: hooks=lambda batch: al.isolate_labels(model, batch, ...)"
            )
        _check_points(model, {name: "hooks" for name, _ in acting if isinstance(name, str)})


def hooks_of(hooks: HooksOfBatch, batch: PromptBatch) -> Sequence[Hook]:
    """What a function of the batch gives, or an error if these are no hooks."""
    given = called("hooks", hooks, "the batch", batch)
    return fitted("what hooks returns", given, Sequence[Hook])


def check_edges_of_hooks(hooks: HooksOfBatch, batches: Sequence[PromptBatch]) -> None:
    """Raise an error for hooks on edges that no prompt has."""
    has_edges: dict[tuple[int, Any], bool] = {}  # by the number of a hook, and its point
    for batch in batches:
        has_some = functools.cache(EdgeSet.has_edges)  # hooks of several layers share a set
        for number, (point, act) in enumerate(hooks(batch)):
            if isinstance(act, EdgeHook):
                had_some = has_edges.get((number, point), False)
                has_edges[number, point] = had_some or has_some(act.edges)
    if empty := [point for (_, point), is_found in has_edges.items() if not is_found]:
        raise HookError(
            f"nothing is cut or scaled at {empty[0]}: no prompt has an edge of these hooks; leave "
            "them out, or choose other edges (are queries and keys exchanged?)"
        )


def possible(
    model: HookedModel, batches: Sequence[PromptBatch], questions: Sequence[Question]
) -> tuple[list[Question], dict[str, AnchorlensError]]:
    """The questions that have a result for this model and prompts, and errors of the others."""
    check_fits(model, *batches)
    able: list[Question] = []
    errors: dict[str, AnchorlensError] = {}
    for question in questions:
        try:
            question.check(model, batches, changed=False)
            Observation(model, question, batches[0]).check()
            able.append(question)
        except (MetricError, ModelError) as error:
            errors[question.name] = error
    return able, errors


def _check_points(model: HookedModel, users: Mapping[str, str]) -> None:
    points = model.hook_dict if users else {}
    # One line of TransformerLens silently skips a name that does not exist.
    if unknown := [point for point in users if point not in points]:
        raise HookError(
            f"the model has no hook point {unknown[0]!r}, which {users[unknown[0]]} names; see "
            "model.hook_dict"
        )


def refuse_moved_hooks(
    given: Sequence[PromptBatch], batches: Sequence[PromptBatch], hooks: HooksOfBatch
) -> None:
    """Raise an error for a user's own hooks, which may act where padding on the left was."""
    if any(_may_stay(*pair, hooks) for pair in zip(given, batches, strict=True)):
        raise HookError(
            "prompts are run with their padding on the right, and these are padded on the left, "
            "where hooks of your own may act elsewhere; make both of batch.padded_right()"
        )


def _may_stay(before: PromptBatch, batch: PromptBatch, hooks: HooksOfBatch) -> bool:
    """Whether hooks may act at the same positions although prompts were moved."""
    moved = before.target_positions != batch.target_positions
    if not moved.any():
        return False
    acting = [act for _, act in hooks(batch)]
    if not all(isinstance(act, BatchHook) for act in acting):
        return True
    of_edges = [act.edges for act in acting if isinstance(act, EdgeHook)]
    # Edges that follow their prompt are not where they were before.
    earlier = [act.edges for _, act in hooks(before) if isinstance(act, EdgeHook)]
    pairs = dict.fromkeys(zip(of_edges, earlier, strict=True))  # those of several layers once
    return any(_equal_in(moved, *pair) for pair in pairs)


def _equal_in(moved: Bool[Tensor, " batch"], edges: EdgeSet, old: EdgeSet) -> bool:
    """Whether a prompt that was moved has edges, and has them at the same positions as before."""
    differ, found = torch.zeros_like(moved), torch.zeros_like(moved)
    for rows, of_rows in edges.pieces():
        found |= of_rows.any((1, 2))
        differ |= (of_rows != old.rows(rows)).any((1, 2))
    return bool((moved & found & ~differ).any())
