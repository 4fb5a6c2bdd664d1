"""What predicted labels follow: the truth, the model's own belief, or the labels of the prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..contexts.protocol import NoContext
from ..errors import PromptError
from ..metrics.accuracy import predicted_class, require_gold
from ..models.hooked import HookedModel
from ..models.load import ensure_prepared
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.demonstration_sets import demonstrations_by_query
from ..prompts.examples import Example
from ..prompts.relabeling import Relabeling, relabel
from ..prompts.tasks import Task
from ..results import figures
from ..results.figure_parts import with_ends
from ..results.kinds import difference, of_prompts, share
from ..results.record import Record
from ..results.text_frame import TextFrame
from ..runs.study import Study, checked_batches
from ..system.arguments import checked
from ..system.processes import fails_together

_SHARES = ("truth", "prior", "prompt", "override")


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelDependenceRecord(Record):
    """What predictions agree with after each relabeling, in the order of ``info["relabelings"]``.

    Attributes:
        truth: Share of queries whose prediction is the true class, from 0 to 1.
        prior: Share whose prediction is that of the query alone, from 0 to 1; high: little changes.
        prompt: Share whose prediction is the class that demonstrations give to the true class, from
            0 to 1; high: the model follows them. Queries without one do not count.
        override: Share that follows them against the query alone, from 0 to 1, of the queries whose
            class has another one there. NaN where there are none.
        change: ``truth`` minus that of the first relabeling, paired by query, from -1 to 1.
        correct: 1 for each query whose prediction is the true class, else 0.
    """

    truth: Float[Tensor, " relabeling"] = share("correct")
    prior: Float[Tensor, " relabeling"] = share("as_alone")
    prompt: Float[Tensor, " relabeling"] = share("as_taught")
    override: Float[Tensor, " relabeling"] = share("overridden")
    change: Float[Tensor, " relabeling"] = difference("correct", minus=0)
    correct: Float[Tensor, "prompt relabeling"] = of_prompts("correct")

    caption: ClassVar[str] = (
        "Share of predictions that are the true class (truth), that of the query alone (prior), or "
        "the class that demonstrations give to the true one (prompt; override: another one, not "
        "that of the prior)."
    )
    names_in_info: ClassVar[Mapping[str, str]] = {"relabeling": "relabelings"}

    def table(self) -> TextFrame:
        """The shares as text, with intervals: a row for each relabeling."""
        rows, fields = range(len(self.truth)), (*_SHARES, "change")
        columns = {name: [str(self.estimate(name, k)) for k in rows] for name in fields}
        return TextFrame(columns, index=self.info["relabelings"])

    def plot(self) -> go.Figure:
        """The four shares of each relabeling as bars with their intervals."""
        title = "What predictions follow, by labels of the demonstrations"
        numbers = with_ends(self, *_SHARES, shaped=lambda numbers: numbers.T[None])
        names = ["share of queries"], list(self.info["relabelings"]), _SHARES
        return figures.bars(numbers.pop("values"), *names, **numbers, title=title)


@fails_together()
@checked
def label_dependence(
    model: HookedModel,
    task: Task,
    demonstrations: Sequence[Example] | Sequence[Sequence[Example]],
    queries: Sequence[Example],
    relabelings: Mapping[str, Relabeling],
    *,
    batch_size: int = 8,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> LabelDependenceRecord:
    r"""Do predictions follow the truth, the model's prior, or the labels of the prompt?

    For a query of the class g, y is the prediction after relabeled demonstrations, z that of the
    query alone, and f(g) the class that all demonstrations of g now have. If they have several,
    prompt and override leave the query out.

    $$
    \text{truth} = P(y = g) \quad \text{prior} = P(y = z) \quad \text{prompt} = P(y = f(g)) \quad
    \text{override} = P(y = f(g), \, y \ne z \mid f(g) \ne g)
    $$

    Range:
        0 to 1, ``change`` -1 to 1.

    How to read:
        With flipped labels, a model that learns from its prompt has a high prompt and override, one
        that knows the answers a high truth, and one that ignores its prompt a high prior. With
        symbols, only demonstrations can raise truth above chance.

    Pitfalls:
        Answers count for all that they agree with. Random labels need several seeds: one may be
        near gold.

    Source:
        Relabelings as in Min et al. (EMNLP 2022) and Wei et al. (2023). The formulas are ours.

    Arguments and errors that are not named here are those of ``run``.

    Args:
        model: A hooked model with its tokenizer.
        task: Template and label words.
        demonstrations: With true labels: one set, or one set for each query.
        queries: Examples with true labels.
        relabelings: Functions of ``al.relabeling`` by name, or your own; usually ``gold`` first.
        batch_size: The most prompts of a batch.
        folder: It gets one for each relabeling and for queries alone; more can be added later.

    Raises:
        PromptError: No relabeling, one changes more than labels and words, or as ``build_prompts``.
        MetricError: Queries have no true labels. All this is raised before any pass.

    Examples:
        >>> queries = al.sample_queries(al.load_examples("questions"), 6, exclude=demos)
        >>> labels = {"gold": al.relabeling.gold, "flipped": al.relabeling.flipped()}
        >>> record = al.label_dependence(
        ...     model, task, demos, queries, labels, resamples=0, progress=False)
    """
    ensure_prepared(model)
    if not relabelings or not all(name.strip() for name in relabelings):
        raise PromptError(
            "relabelings are functions by name, {'gold': al.relabeling.gold, 'flipped': "
            f"al.relabeling.flipped()}}; got {list(relabelings)}"
        )

    def built(task: Task, demonstrations: Any) -> list[PromptBatch]:
        tokenizer = getattr(model, "tokenizer", None)
        return build_prompts(tokenizer, task, demonstrations, queries, batch_size=batch_size)

    prompts, taught = {"alone": built(task, demonstrations)}, []
    require_gold(prompts["alone"][0].gold, "label_dependence")
    sets = demonstrations_by_query(task, demonstrations, queries)
    for name, how in relabelings.items():
        other, changed = relabel(demonstrations, task, how)
        prompts[f"labels {name}"] = built(other, changed)
        others = demonstrations_by_query(other, changed, queries)
        if len(other.labels) != len(task.labels) or _texts_of_sets(others) != _texts_of_sets(sets):
            raise PromptError(
                f"the relabeling {name!r} must keep the number of classes, and the demonstrations "
                "in their order; change labels and words"
            )
        taught.append([_class_of(*each) for each in zip(queries, sets, others, strict=True)])
    studies: list[Study] = []
    for name, batches in prompts.items():
        checked_batches(model, batches)
        path = folder and Path(folder) / quote(name, safe=" ")
        options: dict[str, Any] = {"folder": path, "progress": progress}
        options["resamples"] = 0 if studies else resamples
        studies.append(
            Study(model, batches, {"experiment": f"label dependence, {name}"}, **options)
        )
    alone, *after = [_predictions(study, study is studies[0]) for study in studies]
    gold = torch.tensor([query.label for query in queries], device="cpu")[:, None]
    given = torch.tensor(taught, dtype=torch.double, device="cpu").T
    predicted = torch.stack(after, dim=1)
    follows = (predicted == given).double().masked_fill(given.isnan(), torch.nan)
    as_alone = predicted == alone[:, None]
    contributions = {
        "correct": predicted == gold,
        "as_alone": as_alone,
        "as_taught": follows,
        "overridden": (follows * ~as_alone).masked_fill(given == gold, torch.nan),
    }
    info = {"relabelings": [*relabelings], "compared_with": next(iter(relabelings))}
    return studies[0].record(LabelDependenceRecord.of, contributions, info)


def _predictions(study: Study, alone: bool) -> Int[Tensor, " prompt"]:
    """The class that each query gets, alone or after the demonstrations of its prompt."""
    with study.entered():
        passes, model = study.passes(), study.model

        def predicted(batch: PromptBatch) -> dict[str, Tensor]:
            run = NoContext().query_pass(model, batch).logits if alone else None
            scores = batch.label_scores(run(model) if run else passes.clean(batch))
            return {"predicted": predicted_class(scores).cpu()}

        return study.collect(predicted)["predicted"]


def _texts_of_sets(sets: Sequence[Sequence[Example]]) -> list[list[str]]:
    return [[demo.text for demo in demos] for demos in sets]


def _class_of(query: Example, demos: Sequence[Example], relabeled: Sequence[Example]) -> Any:
    """The class that all demonstrations of the query's class now have; NaN for several."""
    pairs = zip(demos, relabeled, strict=True)
    classes = {new.label for old, new in pairs if old.label == query.label}
    return classes.pop() if len(classes) == 1 else torch.nan
