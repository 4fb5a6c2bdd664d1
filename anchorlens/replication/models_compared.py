"""``across_models``: the claims of the paper in many models, a verdict for each model and claim.

All that needs no weights is checked first. Then each model is loaded, runs ``analyse`` on prompts
of its own tokenizer, and is freed; of one that fails the reason is kept, and what came before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isnan, nan
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import HookError
from ..experiments.analysis import analyse
from ..models.read_weights import device_or_map
from ..passes.memory import free_memory
from ..printable import printable
from ..prompts.examples import Example
from ..prompts.tasks import Task
from ..report.ability import ability_of, reason_against_ability
from ..report.answer import YES_OR_NO
from ..report.claims import LIMITS, NEEDED, SIGNS, Claim, Verdict, claims
from ..results import figures
from ..results.answer import Answer, cannot_tell, listed, speaks_of
from ..results.estimate import Estimate
from ..results.population import check_resamples
from ..results.record import Record
from ..results.text_frame import TextFrame, note, titled
from ..results.text_tables import Section
from ..runs.identity import versions
from ..runs.several_models import MakePrompts, folder_of, maker_of_prompts, outcome_of, sources_of
from ..runs.store import make_folder
from ..system.arguments import check_counts, checked
from ..system.hidden_warnings import warnings_kept
from ..system.processes import fails_together, is_main
from ..system.put_back import each_call_inside
from ..system.steps import planned, step
from ..system.warn import warn_user

_VERDICTS = tuple(Verdict)
_VERDICT_COLORS = (figures.PALETTE[2], figures.PALETTE[1], figures.OTHER)
TITLE = f"The paper's claims ({', '.join(f'{SIGNS[v]} {v}' for v in SIGNS)})"
_SHARED = ("labels", "prompts", "demonstration_sets")  # in ``info``, if models have the same


@dataclass(frozen=True, eq=False, kw_only=True)
class AcrossModelsRecord(Record):
    """The claims of the paper in several models, with their verdicts; ``print`` shows a table.

    Attributes:
        number: The number of each claim in each model, in the unit of the claim (see ``claims``);
            NaN where there is none, for which ``info["missing"]`` or ``info["reasons"]`` says why.
        verdict: 0 agrees, 1 does not agree, 2 cannot tell, as ``claims`` of this model alone.
        limit: A claim agrees where the whole interval of its number is above this.
        accuracy: Share of queries that each model answers right, from 0 to 1; NaN where it is not
            known. No claim is judged of a model that does not do the task.
    """

    number: Float[Tensor, "model claim"]
    verdict: Int[Tensor, "model claim"]
    limit: Float[Tensor, " claim"]
    accuracy: Float[Tensor, " model"]

    caption: ClassVar[str] = (
        "Each claim of the paper in each model: its number with a 95 % interval, and as a dotted "
        "line the limit, which speaks neither for nor against it. A claim agrees with a model if "
        "the whole interval is above the limit, the model does the task, and models of random "
        "weights do not reach its number."
    )
    names_in_info: ClassVar[Mapping[str, str]] = {"model": "models", "claim": "claims"}

    def table(self) -> TextFrame:
        """A row for each model: accuracy, sign and number of each claim, and what is missing."""
        models, statements = (
            self.axis_names(axis) or [*map(str, range(count))]
            for axis, count in zip(("model", "claim"), self.number.shape, strict=True)
        )
        columns = {"accuracy": [str(self.estimate("accuracy", k)) for k in range(len(models))]}
        for claim, statement in enumerate(statements):
            columns[statement.rstrip(".")] = [
                f"{SIGNS[self._verdict(model, claim)]} {self._number(model, claim)}"
                for model in range(len(models))
            ]
        if missing := self.info.get("missing"):
            columns["what is missing"] = [missing.get(name, "") for name in models]
        return TextFrame(columns, index=pd.Index([*map(printable, models)], name="model"))

    @checked
    def answer(self, unable: str) -> Answer:
        """In how many of the models that do the task predictions need what label words gather."""
        missing, names = self.info.get("missing", {}), self.info["models"]
        able = [k for k, name in enumerate(names) if name not in missing]
        limits = (
            f"{speaks_of(self.info)} It speaks of these models, not of others; up to 5 of 100 "
            "verdicts agree although the claim is false."
        )
        asked = "In which models are label words anchors?"
        if not able:
            rights = [
                f"{name} ({'failed' if isnan(right.value) else f'{right.percent()} right'})"
                for k, name in enumerate(names)
                if (right := self.estimate("accuracy", k))
            ]
            reason = f"no model is clearly better than naming the commonest class: {listed(rights)}"
            return Answer(asked, cannot_tell(reason), limits)
        needed = self.info["claims"].index(NEEDED)
        number = {k: self._estimate(k, needed) for k in able}
        told = {
            verdict: [k for k in able if self._verdict(k, needed) == verdict] for verdict in SIGNS
        }
        texts = [
            f"{YES_OR_NO[verdict].lower()} for {listed([f'{names[k]} ({number[k]})' for k in of])}"
            for verdict, of in told.items()
            if of
        ]
        sentence = (
            f"Of {len(names)} models {len(able)} do{'es' * (len(able) == 1)} the task. Isolating "
            "the label words in the first layers changes a larger share of predictions than "
            f"isolating random words: {'; '.join(texts)}."
        )
        return Answer(asked, sentence, limits, number[able[0]])

    def to_frame(self) -> pd.DataFrame:
        """All numbers as one long table; verdicts and their reasons are texts beside them."""
        frame = super().to_frame()
        frame = frame[frame["quantity"] != "verdict"].reset_index(drop=True)
        numbers = frame["quantity"] == "number"
        frame.loc[numbers, "verdict"] = [_VERDICTS[k].value for k in self.verdict.flatten()]
        frame.loc[numbers, "reason"] = [*chain.from_iterable(self.info["reasons"])]
        return frame

    def plot(self) -> go.Figure:
        """A panel for each claim, with a row for each model, its interval and the limit."""
        low, high = self.intervals["number"]
        return figures.forest(
            self.number.T,
            low.T,
            high.T,
            self.verdict.T,
            self.limit.tolist(),
            [statement.rstrip(".") for statement in self.info["claims"]],
            self.info["models"],
            [verdict.value for verdict in _VERDICTS],
            title=TITLE,
            colors=_VERDICT_COLORS,
        )

    def __str__(self) -> str:
        return Section(f"{TITLE} [95 % intervals]", self.table().by_row(), "", "model").text()

    def _repr_html_(self) -> str:
        how = note("to_frame() has all numbers with their reasons, plot() draws them")
        heading = ": ".join(filter(None, [TITLE, self._source()]))
        return titled(heading, self.table()._repr_html_(), how)

    def _estimate(self, model: int, claim: int) -> Estimate:
        is_difference = self.info["claims"][claim] == NEEDED
        return replace(self.estimate("number", model, claim), is_difference=is_difference)

    def _number(self, model: int, claim: int) -> str:
        """A number with its interval, or why there is none."""
        number = self._estimate(model, claim)
        if not isnan(number.value):
            return str(number)
        missing = self.info.get("missing", {}).get(self.info["models"][model], "")
        failed = missing.startswith("failed")
        reason = self.info["reasons"][model][claim].partition("; for ")[0]  # without the scope
        return f"no number: {'the model failed' if failed else reason}"

    def _verdict(self, model: int, claim: int) -> Verdict:
        return _VERDICTS[int(self.verdict[model, claim])]


@checked  # the outermost, so that warnings are at the line of the user
@fails_together()
@each_call_inside(warnings_kept)
def across_models(
    models: str | Path | Sequence[str | Path] | Mapping[str, Any],
    task: str | Task | MakePrompts,
    examples: Sequence[Example] | Sequence[Sequence[Example]] | None = None,
    *,
    revisions: Sequence[str] | None = None,
    queries: int | None = None,
    shots: int | None = None,
    seeds: Sequence[int] | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    device_map: str | int | torch.device | None = None,
    dtype: torch.dtype | None = None,
    depth: int | None = None,
    draws: int = 10,
    random_weights: bool | None = None,
    gradient_checkpointing: bool = False,
    resamples: int = 200,
    keep: Callable[[AcrossModelsRecord], Any] = lambda record: None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> AcrossModelsRecord:
    """The claims of the paper in many models: ``claims`` of ``analyse``, one model after another.

    Each model is freed before the next is loaded. One that fails (it is not found, has too few
    layers, does not fit into memory) is a row with the reason, and a warning; the others are
    computed, and of the one that failed the claims before it count. Arguments that are not listed
    are those of ``sample_prompts`` (whose defaults count), ``load_model`` and ``analyse``.

    How to read:
        A row is what ``claims`` says of that model alone. Its intervals speak of other queries or
        other sets of demonstrations, not of other models.

    Pitfalls:
        Texts are the same for all models, and tokens are not: lengths and BOS differ. Many models
        have many verdicts, of which up to 5 in 100 agree although the claim is false.

    Args:
        models: Names on the hub, folders or ``.gguf`` files, one or a list; or a mapping by names
            of your own to these, hooked models (which stay in memory) or functions that load one.
        task: As in ``sample_prompts``; or a function of the tokenizer that makes the prompts.
        revisions: Branches, tags or commits on the hub, at each of which each model is analysed.
        keep: Called with the claims of all models so far after each model, in the main process.
        folder: Stores what each batch contributed; after an interruption, or with more models, the
            same call goes on from there. A row fails if another run of its model is stored.

    Raises:
        ModelError: There is no model, one comes twice, one on this machine has revisions, or the
            device does not exist: before any weights are loaded, as for other wrong arguments.

    Examples:
        >>> few = {"queries": 12, "depth": 1, "draws": 2, "progress": False}
        >>> record = al.replication.across_models({"tiny": model}, "questions", **few)
        >>> record.number.shape  # one model, six claims
        torch.Size([1, 6])
    """
    device_or_map(device, device_map)  # an error for what cannot be used
    loading = {"device": device, "device_map": device_map, "dtype": dtype}
    sources = sources_of(models, revisions, loading)
    sampling = {"queries": queries, "shots": shots, "seeds": seeds, "batch_size": batch_size}
    make_prompts = maker_of_prompts(task, examples, sampling)
    check_counts(HookError, depth=depth, draws=draws)
    check_resamples(resamples)
    if folder is not None:
        make_folder(folder)
    run = partial(
        analyse,
        depth=depth,
        draws=draws,
        random_weights=random_weights,
        gradient_checkpointing=gradient_checkpointing,
        resamples=resamples,
        progress=progress,
    )
    rows: dict[str, _Row] = {}
    with planned(dict.fromkeys(sources, 1.0)):
        for name, load in sources.items():
            of_model = folder_of(folder, name)
            with step(name):
                rows[name] = _row_of(load, make_prompts, partial(run, folder=of_model))
            free_memory()  # the references of a model form cycles, which are freed only here
            for warning in rows[name].warnings:
                warn_user(f"{name}: {warning}")
            record = _record(rows)
            with fails_together():
                if is_main():
                    keep(record)
    return record


class _Row(NamedTuple):
    claims: Sequence[Claim]
    accuracy: Estimate
    is_failed: bool
    missing: str  # why it failed, or why none of its claims is judged; "" else
    warnings: Sequence[str]
    info: Mapping[str, Any]


def _row_of(load: Callable[[], Any], make_prompts: MakePrompts, run: Callable[..., Any]) -> _Row:
    """The claims of a model, which nothing holds at the end."""
    kept: dict[str, Record] = {}
    outcome = outcome_of(
        load, lambda model: run(model, make_prompts(model.tokenizer), keep=kept.__setitem__)
    )
    missing = outcome.failed or reason_against_ability(kept.values())
    info = next((record.info for record in kept.values()), {})
    ability = ability_of(kept.values())
    accuracy = ability.accuracy if ability else Estimate(nan)
    return _Row(claims(kept), accuracy, bool(outcome.failed), missing, outcome.warnings, info)


def _record(rows: Mapping[str, _Row]) -> AcrossModelsRecord:
    cells = [[_claim_in(row, statement) for statement in LIMITS] for row in rows.values()]
    numbers = [
        [row.accuracy, *(claim.estimate for claim in of_model)]
        for row, of_model in zip(rows.values(), cells, strict=True)
    ]
    ends = [[(each.value, each.low, each.high) for each in of_model] for of_model in numbers]
    value, *bounds = torch.tensor(ends, dtype=torch.double, device="cpu").unbind(-1)
    interval = torch.stack(bounds)
    verdicts = [[_VERDICTS.index(claim.verdict) for claim in of_model] for of_model in cells]
    first, *others = [row.info for row in rows.values() if row.info] or [{}]
    shared = [key for key in _SHARED if all(first.get(key) == other.get(key) for other in others)]
    return AcrossModelsRecord(
        number=value[:, 1:],
        verdict=torch.tensor(verdicts, device="cpu"),
        limit=torch.tensor([*LIMITS.values()], dtype=torch.double, device="cpu"),
        accuracy=value[:, 0],
        intervals={"number": interval[..., 1:], "accuracy": interval[..., 0]},
        info={
            "models": [*rows],
            "claims": [*LIMITS],
            "reasons": [
                [f"{each.reason}; for {each.scope}" if each.scope else each.reason for each in of]
                for of in cells
            ],
            "missing": {name: row.missing for name, row in rows.items() if row.missing},
            "warnings": {k: "; ".join(row.warnings) for k, row in rows.items() if row.warnings},
            **{key: first[key] for key in shared if key in first},
            "versions": versions(),
        },
    )


def _claim_in(row: _Row, statement: str) -> Claim:
    """The claim of a model, without a number if it has none."""
    reason = row.missing if row.is_failed else "the model gives no such result; a warning says why"
    none = Claim(statement, "", Estimate(nan), nan, "", "", Verdict.CANNOT_TELL, reason)
    return next((claim for claim in row.claims if claim.statement == statement), none)
