"""The numbers of a task that matter most, as tables and as values for json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from ..report.ability import reason_against_ability
from ..report.answer import ARE_ANCHORS, answer_of, sentences, surprises
from ..report.claims import Verdict, claims
from ..results.answer import Answer, cannot_tell
from ..results.estimate import Estimate
from ..results.record import Record
from ..results.text_tables import Section, TextTable

JsonEntries = dict[str, Any]


class Found(NamedTuple):
    task: str  # its name
    answer: Answer  # what is said first, and what to try next
    tables: Sequence[Section]  # what is printed below
    values: Mapping[str, Any]  # numbers by name, for ``--json``
    results: Mapping[str, Any]  # what the page shows
    files: Mapping[str, Any] = {}  # what is yet to be saved, by name


def summarised(
    task: str, records: Mapping[str, Record], after: str, pictures: Mapping[str, Any]
) -> Found:
    """What the records of a task say: the claims with their numbers, and the isolations."""
    every, judged = [*records.values()], claims(records)
    isolation = records.get("isolation")
    sites = isolation.axis_names("site") if isolation else None
    verdicts: TextTable = {
        ("", claim.statement): {"this model": claim.number, "verdict": claim.verdict}
        for claim in judged
    }
    unable = reason_against_ability(every)
    reasons = [
        f"Cannot tell: {claim.statement} {claim.reason[:1].upper()}{claim.reason[1:]}."
        for claim in judged
        if claim.verdict == Verdict.CANNOT_TELL
        and claim.reason != unable
        and claim.reason not in claim.number
    ]
    lines = [*sentences(every), *surprises(every), *reasons]
    loyalties: TextTable = {
        ("", f"{words}, {site}"): {
            f"{kind} loyalty": str(records["isolation"].estimate(f"{of}{kind}_loyalty", number))
            for kind in ("label", "word")
        }
        for number, site in enumerate(sites or ())
        for words, of in (("label words", ""), ("random words", "control_"))
    }
    tables = (
        Section(f"{task}, claims of the paper", verdicts, "\n".join(lines)),
        Section(f"{task}, isolation", loyalties, corner="isolated"),
    )
    reason = "no part of the results tells it; a warning says why"
    answer = answer_of(every, judged) or Answer(ARE_ANCHORS, cannot_tell(reason))
    values = {
        "claims": [
            {**asdict(claim), "estimate": as_entry(claim.estimate), "verdict": claim.verdict.value}
            for claim in judged
        ],
        **{name: entries_in(record) for name, record in records.items()},
    }
    shown = tuple(table for table in tables if table.table)
    return Found(task, replace(answer, next=after), shown, values, {**pictures, **records})


def is_sure(records: Mapping[str, Record]) -> bool:
    """Whether the model does the task, and no interval includes the limit of its claim."""
    sure = all(
        not claim.estimate.low <= claim.limit <= claim.estimate.high for claim in claims(records)
    )
    return sure and not reason_against_ability([*records.values()])


def entries_in(record: Record) -> JsonEntries:
    """The numbers of a record that are no long list: single ones, and those with named entries."""
    numbers: JsonEntries = {}
    for name, axes in record.axes().items():
        entries = record.axis_names(axes[0]) if len(axes) == 1 else None
        if not axes:
            numbers[name] = _value_of(record, name)
        elif entries:
            numbers[name] = {
                str(entry): _value_of(record, name, k) for k, entry in enumerate(entries)
            }
        elif axes[0] == "draw":
            numbers[name] = getattr(record, name).tolist()
    return numbers


def _value_of(record: Record, name: str, *entry: int) -> JsonEntries:
    """A number and its interval; what is counted is so of these prompts alone, and has none."""
    estimate = record.estimate(name, *entry)
    is_counted = not getattr(record, name).is_floating_point()
    return as_entry(Estimate(estimate.value) if is_counted else estimate)


def values_of_answer(answer: Answer) -> JsonEntries:
    """The answer by name, and the number of its sentence."""
    texts = {name: getattr(answer, name) for name in ("question", "sentence", "limits", "next")}
    return texts | as_entry(answer.estimate)


def as_entry(estimate: Estimate) -> JsonEntries:
    """A number and its interval, if it has one."""
    interval = {"interval": [estimate.low, estimate.high]} if estimate.has_interval else {}
    return {"value": estimate.value, **interval}
