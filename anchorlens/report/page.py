"""Writes results into one HTML page that opens offline: the answer first, then every number."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from html import unescape
from inspect import cleandoc
from itertools import takewhile
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.io

from ..errors import AnchorlensError
from ..results.answer import Answer, drawn_from, scope_in
from ..results.estimate import in_digits
from ..results.record import RANDOM_MODELS, Record, has_plot, meaning_of
from ..runs.identity import versions
from ..system.arguments import checked, fitted
from ..system.files import write_text
from . import flow_page
from .ability import reason_against_ability
from .answer import answer_of, sentences, surprises
from .claims import HOW_VERDICTS_ARE_REACHED, Claim, claims
from .contents import Contents, contents_of
from .forest import HEADING, forest
from .prompt_flows import PromptFlows
from .templates import TERMS, json_in_script, static, template

# A Record, PromptFlows or AnswerFlows by name, or a mapping of several records.
ReportResults = Mapping[str, Any]

# The kinds of traces in plotly's cartesian bundle.
_DRAWN = {
    *("bar", "box", "contour", "heatmap", "histogram", "histogram2d", "histogram2dcontour"),
    *("image", "pie", "scatter", "scatterternary", "violin"),
}
_NUMERIC = ("value", "low", "high")
# Names of results and of their settings that say too little to a reader of the page.
_TITLES = {
    "attention_aucroc": "attention and prediction",
    "anchor_distances": "distances and confusions",
    "drawn": "intervals draw",
    "units": "how many of these",
    "skipped_layers": "first layers that are not run again",
}
# Digests of queries, which tell processes what a training used, and what tables and figures show.
_NOT_SHOWN = {"queries_in_training", "of_sets", RANDOM_MODELS, "claims", "reasons", "missing"}
_NOT_SHOWN |= {"first_prompts", "one_by_one"}
_HEIGHT, _MIN_WIDTH = 420, 300  # pixels of a figure that names none


@dataclass(frozen=True)
class _Section:
    """A heading with a figure, what it shows, and its numbers."""

    id: str
    heading: str
    caption: str = ""
    note: str = ""  # what bands and brackets are, and from how many prompts
    scope: str = ""  # of what intervals speak
    sentence: str = ""
    title: str = ""
    figure: str = ""
    height: int = _HEIGHT
    min_width: int = _MIN_WIDTH
    table: pd.DataFrame | None = None
    fields: Sequence[tuple[str, str]] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[tuple[str, str]]] = ()
    settings: Sequence[tuple[str, str]] = ()

    @property
    def has_intervals(self) -> bool:
        """Whether a cell of the table has brackets."""
        return self.table is not None and "[" in self.table.to_csv(index=False, header=False)

    @property
    def alternative(self) -> str:
        """What a reader who does not see the figure is told."""
        return f"{self.title or self.heading}. {self.caption}".strip()

    @property
    def file(self) -> str:
        """What its files are called, after the model and the task."""
        return _id(self.heading) or self.id


@dataclass(frozen=True)
class _OfPrompt:
    id: str
    heading: str
    html: Any
    choice: str = ""
    largest: tuple[float, str] | None = None  # of all prompts that can be chosen, and of which


@dataclass(frozen=True)
class _Chapter:
    id: str
    name: str = ""
    source: str = ""  # the model and the task
    claims: Sequence[Claim] = ()
    scope: str = ""  # of what the intervals of most claims speak
    note: str = ""
    answer: Answer | None = None
    forest: str = ""
    cannot_tell: str = ""
    sentences: Sequence[str] = ()
    surprises: Sequence[str] = ()
    prompts: Sequence[_OfPrompt] = ()
    answers: Sequence[_OfPrompt] = ()
    sections: Sequence[_Section] = ()
    kind: str = "Results"  # what a screen reader calls it where it has no name


@checked
def write_report(
    results: ReportResults | Mapping[str, ReportResults],
    path: str | Path,
    *,
    title: str = "How the model learns from the examples in its prompt",
    settings: Mapping[str, Any] | None = None,
    figures: Mapping[str, go.Figure | None] | None = None,
    summary: str = "",
    command: str = "",
    answers: Mapping[str, Answer] | None = None,
) -> Path:
    """Write results as one HTML page: the answer first, one prompt, figures, and all numbers.

    The page begins with a sentence that answers, the pictures of single prompts, those with right
    answers first, and the claims of the paper (``claims``). It needs no other file and no network,
    and each figure can be saved as SVG or PNG. Numbers of single prompts and tokens are left out.

    Args:
        results: Records by heading, as ``al.run`` returns them; also what ``al.plot_prompt`` and
            ``al.plot_answer`` return. Several tasks are a mapping of such results by task.
        settings: Settings of the run, such as task and seeds; the records hold model and versions.
        figures: Plotly figures by heading. One that names a record replaces its plot (None for no
            plot); others are sections at the end, with the caption in ``layout.meta["caption"]``.
        summary: Plain text with further tables.
        command: The command that makes the page again.
        answers: What is said before the numbers of each task ("" for results without tasks), in
            place of what ``claims``, or ``answer`` of a record, says.

    Raises:
        AnchorlensError: There is nothing to report, a result is none of these, two of a task have
            one name, or a figure has a kind of trace that the page does not draw.

    Examples:
        >>> results = al.run(model, batches, [al.SaliencyFlows()], progress=False)
        >>> prompt = al.plot_prompt(model, batches[0])
        >>> al.write_report(results | {"one prompt": prompt}, folder / "report.html").name
        'report.html'
    """
    if not (results or figures or summary):
        raise AnchorlensError("there are no results to report")
    has_tasks = all(isinstance(value, Mapping) for value in results.values())
    by_task = results if has_tasks else {"": results}
    contents = {name: contents_of(chapter) for name, chapter in by_task.items()}
    every = [record for chapter in contents.values() for record in chapter.records.values()]
    common = _common_info(every)
    given, extra, given_answers = dict(settings or {}), dict(figures or {}), answers or {}
    for heading in extra:
        if sum(heading in chapter.records for chapter in contents.values()) > 1:
            raise AnchorlensError(
                f"the figure {heading!r} would replace the plots of several tasks; give it another "
                "heading, or write a report for each task"
            )
    chapters = [
        _chapter(_id("task", number, name), name, chapter, extra, common, given_answers.get(name))
        for number, (name, chapter) in enumerate(contents.items())
    ]
    own = [
        _figure_section(_id("figure", number, heading), heading, figure)
        for number, (heading, figure) in enumerate(extra.items())
    ]
    if own:
        source = "".join(_model_of(common))
        chapters.append(_Chapter("figures", source=source, sections=own, kind="Figures"))
    chapters = [*_with_terms(chapters)]
    has_figures = any(section.figure for chapter in chapters for section in chapter.sections)
    has_prompts = any(chapter.prompts or chapter.answers for chapter in chapters)
    of_prompts = (flow_page.style(), flow_page.script()) if has_prompts else ("", "")
    page = template("report.html").render(
        title=title,
        subtitle=_subtitle({**given, **common}, [name for name in by_task if name]),
        style=static("page.css") + static("report.css") + of_prompts[0],
        chapters=chapters,
        summary=summary,
        command=command,
        settings=_facts({**given, **{key: common[key] for key in common if key not in given}}),
        how=HOW_VERDICTS_ARE_REACHED,
        of_forest=HEADING,
        version=versions()["anchorlens"],
        numeric=_NUMERIC,
        has_figures=has_figures,
        sortable=static("sortable.min.js"),
        plotly=static("plotly-cartesian.min.js") if has_figures else "",
        script=static("save.js") + static("report.js") + of_prompts[1],
    )
    path = Path(path)
    write_text(path, page)
    return path


def _with_terms(chapters: Sequence[_Chapter]) -> Iterator[_Chapter]:
    """The chapters, in which the first caption or table with a word of the field explains it."""
    known = {"nats"} if any(chapter.prompts for chapter in chapters) else set[str]()
    for chapter in chapters:
        sections = list[_Section]()
        for section in chapter.sections:
            columns = section.table.columns if section.table is not None else ()
            text = " ".join([section.caption, section.title, section.figure, *columns])
            new = [term for term in TERMS if term not in known and re.search(rf"\b{term}\b", text)]
            known.update(new)
            caption = " ".join([section.caption, *map(TERMS.__getitem__, new)]).strip()
            sections.append(replace(section, caption=caption))
        yield replace(chapter, sections=sections)


def _chapter(
    chapter_id: str,
    name: str,
    contents: Contents,
    figures: dict[str, Any],
    common: Mapping[str, Any],
    answer: Answer | None,
) -> _Chapter:
    """The chapter of a task; figures that replace plots are taken out of ``figures``."""
    judged, records = claims(contents.records), list(contents.records.values())
    answer = answer or answer_of(records, judged)
    pages = {
        name: _OfPrompt(_id(chapter_id, "prompt", number), _heading(name), page.fragment())
        for number, (name, page) in enumerate(contents.prompts.items())
    }
    flows = {name: page for name, page in contents.prompts.items() if isinstance(page, PromptFlows)}
    choices = _choices(flows)
    largest = _largest_arc(flows, choices)
    prompts = [
        replace(pages.pop(name), choice=choice, largest=largest) for name, choice in choices.items()
    ]
    sections = [
        _section(_id(chapter_id, number, name), name, record, figures, common)
        for number, (name, record) in enumerate(contents.records.items())
    ]
    scopes = Counter(claim.scope for claim in judged if claim.estimate.has_interval)
    [info] = [record.info for record in records if "prompts" in record.info][:1] or [{}]
    note = (
        f"{drawn_from(info, 'brackets')} A dot without a bracket is a draw, grey is what it is "
        "compared with, and the dotted line is the limit of the claim."
    ).strip()
    return _Chapter(
        chapter_id,
        name,
        ", ".join([*_model_of(common), *([name] if name else [])]),
        judged,
        scopes.most_common(1)[0][0] if scopes else "",
        note,
        answer,
        forest(judged, note) if judged else "",
        reason_against_ability(records),
        sentences(records),
        surprises(records),
        prompts,
        [*pages.values()],
        sections,
    )


def _largest_arc(
    flows: Mapping[str, PromptFlows], choices: Mapping[str, str]
) -> tuple[float, str] | None:
    """The largest arc of several prompts, and the words by which its prompt is chosen."""
    if len(flows) < 2:
        return None
    name = max(flows, key=lambda name: flows[name].largest())
    return float(f"{flows[name].largest():.3g}"), f"“{choices[name]}”"


def _same(texts: Sequence[Sequence[str]]) -> int:
    """With how many words all texts begin, of several."""
    same = takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))
    return len([*same]) if len(texts) > 1 else 0


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _choices(flows: Mapping[str, PromptFlows]) -> dict[str, str]:
    """The words by which a prompt is chosen, right answers first, without those that all share."""
    queries = [page.query.split() for page in flows.values()]
    # The template of the task is the same in all of them.
    begin, end = _same(queries), _same([query[::-1] for query in queries])
    signs = {True: "✓ ", None: "", False: "✗ "}
    words = {
        name: signs[page.is_right] + _short(" ".join(query[begin : len(query) - end]))
        for (name, page), query in zip(flows.items(), queries, strict=True)
    }
    order = [*signs]
    return dict(sorted(words.items(), key=lambda item: order.index(flows[item[0]].is_right)))


def _section(
    section_id: str, name: str, record: Record, figures: dict[str, Any], common: Mapping[str, Any]
) -> _Section:
    frame, tensors = _frame(record), record.tensors()
    counted = {field for field in tensors if not tensors[field].is_floating_point()}
    if name not in figures and has_plot(record):
        figures[name] = _made_by(record, "plot", go.Figure)
    section = _figure_section(section_id, _heading(name), figures.pop(name, None))
    caption = section.caption or record.caption or meaning_of(type(record))
    return replace(
        section,
        caption="" if section.sentence else caption,
        note=_note(section.figure, record),
        scope=scope_in(record.info),
        table=_made_by(record, "table", pd.DataFrame) if hasattr(record, "table") else None,
        fields=_fields(record),
        columns=list(frame.columns),
        rows=[
            [_text(str(axis), row[axis], is_counted=row["quantity"] in counted) for axis in row]
            for row in frame.to_dict("records")
        ],
        settings=_facts({key: value for key, value in record.info.items() if key not in common}),
    )


def _note(figure: str, record: Record) -> str:
    """What bands and brackets of the figure of a record are, and from how many prompts."""
    if not figure:
        return ""
    traces = json.loads(figure)["data"] if record.intervals else ()
    outlines = [t["y"] for t in traces if t.get("fill") == "toself" and "fillpattern" not in t]
    ends = [trace.get(f"error_{axis}", {}) for trace in traces for axis in "xy"]
    arrays = [each.get("array", ()) for each in ends if each.get("visible", True)]
    marks = {"pale bands": outlines, "brackets": arrays}
    known = (mark for mark, of in marks.items() if any(n is not None for each in of for n in each))
    return drawn_from(record.info, *known)


def _figure_section(section_id: str, heading: str, figure: go.Figure | None) -> _Section:
    """A section with a figure alone; its title becomes text, which wraps on a narrow screen."""
    if figure is None:
        return _Section(section_id, heading)
    if unknown := {trace.type for trace in figure.data} - _DRAWN:  # would be drawn as lines
        raise AnchorlensError(
            f"the figure {heading!r} has traces of the kind {', '.join(sorted(unknown))}, which "
            f"the page does not draw; it draws {', '.join(sorted(_DRAWN))}"
        )
    meta = figure.layout.meta if isinstance(figure.layout.meta, dict) else {}
    if "sentence" in meta:
        return _Section(section_id, heading, sentence=str(meta["sentence"]))
    title, subtitle = figure.layout.title.text, figure.layout.title.subtitle.text
    drawn = figure.to_plotly_json()
    plain = [plotly.io.templates[name] for name in ("plotly_white", "plotly")]
    if figure.layout.template in plain:
        drawn["layout"].pop("template", None)  # 7 kB in each figure; the page has its own colours
    drawn["layout"].pop("title", None)
    return _Section(
        section_id,
        heading,
        # Without its markup.
        title=". ".join(unescape(re.sub(r"<[^>]*>", " ", t)) for t in (title, subtitle) if t),
        figure=json_in_script(plotly.io.json.to_json_plotly(drawn, engine="json")),
        height=int(figure.layout.height or _HEIGHT),
        min_width=int(meta.get("min_width", _MIN_WIDTH)),
        caption=str(meta.get("caption", "")),
    )


def _made_by(record: Record, name: str, kind: type) -> Any:
    """What a method of a record gives; an error where a report cannot show it."""
    what = f"what {name}() of {type(record).__name__} returns"
    return fitted(what, getattr(record, name)(), kind)


def _common_info(records: Sequence[Record]) -> dict[str, Any]:
    """What all records say of their model and prompts."""
    first = records[0].info if records else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in record.info and record.info[key] == value for record in records)
    }


def _subtitle(known: Mapping[str, Any], tasks: Sequence[str]) -> str:
    today = date.today()
    given = next(filter(None, map(known.get, ("tasks", "task", "data"))), None)
    named = tasks or [Path(name).stem for name in _items(given)]
    parts = [", ".join(named)] if named else []
    return " · ".join([*_model_of(known), *parts, f"{today.day} {today:%B %Y}"])


def _model_of(known: Mapping[str, Any]) -> list[str]:
    """The name of the model, or the names of those that are compared."""
    names = [Path(name).name for name in _items(known.get("model"))]
    return [", ".join(names)] if names else []


def _items(value: Any) -> list[str]:
    """The texts of a list, or of what stands in place of one."""
    if value is None:
        return []
    return [str(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _facts(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values as text; of parts by name, such as sites, each value by itself."""
    pairs: list[tuple[str, str]] = []
    for key, value in info.items():
        if key in _NOT_SHOWN:
            continue
        values = value.values() if isinstance(value, Mapping) else ()
        if values and all(isinstance(each, Mapping) for each in values):
            parts = ((part, _facts(inside)) for part, inside in value.items())
            pairs += [(f"{part}: {name}", text) for part, inside in parts for name, text in inside]
        else:
            pairs.append((_phrase(key), _as_words(value)))
    return pairs


def _as_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_as_words, value))
    text = str(value)
    # Spaces at its ends and line breaks are a part of a template or of a label word.
    return json.dumps(text, ensure_ascii=False) if text != " ".join(text.split()) else text


def _phrase(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " "))


def _heading(name: str) -> str:
    words = _phrase(name)
    return words[:1].upper() + words[1:]


def _id(*parts: str | int) -> str:
    """An id as it can stand in a link; numbers make it different from all others."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, parts)).lower()).strip("-")


def _fields(record: Record) -> list[tuple[str, str]]:
    """The meaning of each field: the docstring of the record's class."""
    # Python 3.13 strips the indentation of docstrings; cleandoc does so on every version.
    _, _, attributes = cleandoc(type(record).__doc__ or "").partition("Attributes:")
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE)
    return [(name, " ".join(meaning.split())) for name, meaning in entries]


def _frame(record: Record) -> pd.DataFrame:
    """The numbers of no single prompt and no single token."""
    frame = record.to_frame()
    for axis in ("prompt", "position"):
        if axis in frame:
            frame = frame[frame[axis].isna()].drop(columns=axis)
    # Axes that no number has. The values stay, also where all are NaN.
    empty = [name for name in frame if name not in _NUMERIC and frame[name].isna().all()]
    return frame.drop(columns=empty)


def _text(column: str, value: Any, *, is_counted: bool) -> tuple[str, str]:
    """The text of a cell, and of a number all digits, by which it is sorted and downloaded."""
    if pd.isna(value):
        return "", ""
    if column not in _NUMERIC:
        return str(value), ""
    is_whole = column == "value" and is_counted
    return (f"{value:.0f}" if is_whole else in_digits(value)), f"{value:.6g}"
