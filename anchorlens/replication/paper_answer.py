"""What the numbers of ``paper`` say first: whether label words are anchors in the tasks it does."""

from collections.abc import Mapping
from math import isnan, nan, sqrt

import pandas as pd
import torch
from scipy.special import ndtri, stdtrit

from ..report.answer import ARE_ANCHORS, YES_OR_NO
from ..report.claims import Verdict, isolation_changes
from ..results.answer import Answer, cannot_tell, listed
from ..results.estimate import Estimate
from ..results.intervals import wilson
from .paper_parts import COMMONEST
from .tables import AVERAGE, task_name


def paper_answer(numbers: pd.DataFrame) -> Answer:
    """What the isolation of Figure 4 changes in the tasks that the model does."""
    numbers = numbers[numbers["task"] != AVERAGE]
    of_tasks = {str(task): rows for task, rows in numbers.groupby("task", sort=False)}
    able = {task: _of_isolation(rows) for task, rows in of_tasks.items() if _is_able(rows)}
    known = {task: of_task for task, of_task in able.items() if len(of_task)}
    seeds = numbers["seed"].nunique()
    drawn = f"{seeds} sets of demonstrations for each task"
    limits = (
        f"From {drawn}: it speaks of other sets for these tasks, and of no other tasks."
        if seeds > 1
        else "From one set of demonstrations for each task: without an interval it speaks of no "
        "other sets."
    )
    if not known:
        reason = (
            "Figure 4 has no numbers for the tasks that the model does; a warning says why"
            if able
            else f"the model clearly does none of these tasks: {_accuracies(of_tasks)}"
        )
        shown = f"{task_name(next(iter(of_tasks), ''))}: Figure 4"
        return Answer(ARE_ANCHORS, cannot_tell(reason), limits, figure=shown)
    label, control = (
        Estimate(sum(of_task[words].mean() for of_task in known.values()) / len(known))
        for words in ("label", "random")
    )
    gap = _gap(known)
    verdict = Verdict.AGREES if gap.low > 0 else Verdict.DOES_NOT_AGREE
    if not (gap.low > 0 or gap.high < 0):
        verdict = Verdict.CANNOT_TELL
    layers = next(iter(known.values())).attrs["site"]
    changes = isolation_changes(f"the {layers}", label, control, gap)
    of = listed([task_name(task) for task in known])
    not_done = [task_name(task) for task in of_tasks if task not in able]
    without = f" Left out, as the model does not clearly do them: {listed(not_done)}."
    sentence = f"{YES_OR_NO[verdict]}: {changes}, on average over {of}.{without * bool(not_done)}"
    shown = f"{task_name(next(iter(known)))}: Figure 4"
    return Answer(ARE_ANCHORS, sentence, limits, gap, shown)


def _table_1(rows: pd.DataFrame, row: str, part: str = "Table 1") -> float:
    """The mean over seeds of a number of a task; NaN where there is none."""
    of_row = rows[(rows["part"] == part) & (rows["row"] == row)]
    return float(of_row["value"].mean())


def _accuracy(rows: pd.DataFrame) -> Estimate:
    """A task's accuracy over all seeds, with its 95 % interval over queries (Wilson's)."""
    accuracy = _table_1(rows, "vanilla")
    count = _table_1(rows, "queries", "Table 1, queries") * rows["seed"].nunique()
    share, cases = torch.tensor([accuracy, count], dtype=torch.double, device="cpu")
    low, high = wilson(share, cases, float(ndtri(0.975))).tolist()
    return Estimate(accuracy, low, high)


def _is_able(rows: pd.DataFrame) -> bool:
    """Whether a task's accuracy is clearly above that of naming the commonest class."""
    return _accuracy(rows).low > _table_1(rows, COMMONEST)


def _accuracies(of_tasks: Mapping[str, pd.DataFrame]) -> str:
    """The accuracy of each task, beside that of naming the commonest class."""
    texts = []
    for task, rows in of_tasks.items():
        accuracy, commonest = _accuracy(rows), 100 * _table_1(rows, COMMONEST)
        shares = f"{accuracy.percent()} right, the commonest class is {commonest:.0f} %"
        texts.append(f"{task_name(task)} ({'no accuracy' if isnan(accuracy.value) else shares})")
    return listed(texts)


def _of_isolation(rows: pd.DataFrame) -> pd.DataFrame:
    """For each seed, the label loyalty with label words and with random words isolated.

    In the first layers, and where prompts begin with a BOS, with its edges kept.
    """
    rows = rows[(rows["part"] == "Figure 4") & (rows["column"] == "label loyalty")]
    sites = rows["row"].str.partition(", ")[2]
    chosen = sorted({site for site in sites if site.startswith("first")}, key=len)[-1:]
    table = rows.assign(words=rows["row"].str.partition(" ")[0])[sites.isin(chosen)]
    table = table.pivot_table(index="seed", columns="words", values="value")
    table.attrs["site"] = (chosen or [""])[0].partition(", BOS")[0]
    return table


def _gap(tables: Mapping[str, pd.DataFrame]) -> Estimate:
    """Random words' loyalty minus the label words', mean over tasks; the interval is over seeds.

    The variance of seeds is pooled over tasks (Student's t).
    """
    gaps = [table["random"] - table["label"] for table in tables.values()]
    value = float(sum(gap.mean() for gap in gaps)) / len(gaps)
    freedom = sum(len(gap) - 1 for gap in gaps)
    if not freedom:
        return Estimate(value, nan, nan, is_difference=True)
    variance = sum(float((gap - gap.mean()).pow(2).sum()) for gap in gaps) / freedom
    error = sqrt(variance * sum(1 / len(gap) for gap in gaps)) / len(gaps)
    half = float(stdtrit(freedom, 0.975)) * error
    ends = max(-1.0, value - half), min(1.0, value + half)
    return Estimate(value, *ends, is_difference=True)
