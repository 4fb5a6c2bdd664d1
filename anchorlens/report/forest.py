"""Draws the claims below each other: number, 95 % interval, limit, and controls in grey.

Each claim has an axis of its own, because the numbers have different units. Brackets are intervals
and dots are draws. All is SVG, so that it is there before any script has run.
"""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite, isnan, log
from textwrap import wrap

from markupsafe import Markup, escape

from ..results.estimate import Estimate
from .claims import SIGNS, Claim

Place = Callable[[float], float]  # from a number to its place along an axis
WIDE, TRACK, LEFT = 400, 150.0, 6.0
LINE, TITLE, GAP = 15.0, 14.0, 22.0
APART = 20.0  # of the middles of two numbers below an axis
LONGEST_LINE = 62  # characters of a line
HEADING = "The paper's claims, with 95\u00a0% intervals"


def forest(claims: Sequence[Claim], note: str = "") -> Markup:
    """The claims as one picture, 400 units wide; what is saved says the note."""
    parts, top = list[str](), 4.0
    for claim in claims:
        title = wrap(claim.statement.rstrip("."), LONGEST_LINE)
        parts += (
            _text_at(0.0, top + 11 + TITLE * k, line, "claim-name") for k, line in enumerate(title)
        )
        top += TITLE * len(title)
        parts += _rows_of_claim(claim, top)
        top += LINE * (1 + len(claim.controls)) + GAP
    texts = (f"{claim.statement} {claim.estimate}, {claim.verdict}." for claim in claims)
    alternative = " ".join(texts)
    return Markup(
        f'<svg class="forest" data-figure="claims" data-title="{escape(HEADING)}" '
        f'data-note="{escape(note)}" role="img" aria-label="{escape(alternative)}" '
        f'viewBox="0 0 {WIDE} {top:g}">{"".join(parts)}</svg>'
    )


def _rows_of_claim(claim: Claim, top: float) -> Iterator[str]:
    place, middle = _scale(claim), top + LINE / 2
    end = top + LINE * (1 + len(claim.controls))
    limit = place(claim.limit)
    yield f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top}" y2="{end}"/>'
    yield _text_at(limit, end + 9, f"{claim.limit:g}", "limit-name")
    if _is_ratio(claim):
        for tick in _ticks(claim.limit, place):
            yield _text_at(place(tick), end + 9, f"{tick:g}", "limit-name")
        yield _text_at(TRACK + 26, end + 9, "log scale", "scale-name")
    kind = f"forest-{claim.verdict.name.lower()}"
    yield from _interval(claim.estimate, place, middle, kind)
    sign = f"{claim.estimate}  {SIGNS[claim.verdict]} {claim.verdict}"
    yield _text_at(TRACK + 26, middle + 4, sign, f"number {kind}")
    for number, control in enumerate(claim.controls, start=1):
        at = middle + number * LINE
        yield from _interval(control.estimate, place, at, "control")
        for draw in control.draws:
            yield f'<circle class="control" cx="{place(draw):.1f}" cy="{at}" r="2.4"/>'
        yield _text_at(TRACK + 26, at + 4, str(control), "control-name")


def _interval(estimate: Estimate, place: Place, middle: float, kind: str) -> Iterator[str]:
    """A point, and a line with ends for its interval."""
    if isnan(estimate.value):
        return
    if estimate.has_interval:
        low, high = place(estimate.low), place(estimate.high)
        yield f'<path class="{kind}" d="M{low:.1f},{middle - 4} v8 m0,-4 H{high:.1f} m0,-4 v8"/>'
    yield f'<circle class="{kind}" cx="{place(estimate.value):.1f}" cy="{middle}" r="3.4"/>'


def _scale(claim: Claim) -> Place:
    """A function from a number to its place along the axis, which has all numbers of the claim."""
    estimates = [claim.estimate, *(control.estimate for control in claim.controls)]
    numbers = [claim.limit, *(draw for control in claim.controls for draw in control.draws)]
    numbers += [end for each in estimates for end in (each.value, each.low, each.high)]
    is_log = _is_ratio(claim)
    if not claim.estimate.has_interval and not is_log:  # a correlation: its ends say what is far
        numbers += [-1.0, 1.0]
    known = [n for n in numbers if isfinite(n) and (n > 0 or not is_log)]

    def along(number: float) -> float:
        return log(max(number, min(known) / 2)) if is_log else number

    low, high = along(min(known)), along(max(known))
    room = (high - low) * 0.06 or 1.0

    def place(number: float) -> float:
        share = (along(number) - low + room) / (high - low + 2 * room)
        return LEFT + TRACK * min(max(share, 0.0), 1.0)

    return place


def _is_ratio(claim: Claim) -> bool:
    """Whether the number of a claim is a ratio, of which 1/2 is as far from 1 as 2 is."""
    return claim.limit >= 1


def _ticks(limit: float, place: Place) -> list[float]:
    """Round numbers along a logarithmic axis, apart from each other and from its limit."""
    found = [limit]
    for digits in ((1, 2, 5), (1.5, 3, 4, 7), (1.2, 1.4, 1.6, 1.8, 2.5, 3.5)):
        for tick in (digit * 10.0**power for power in range(-6, 7) for digit in digits):
            at = place(tick)
            is_inside = LEFT < at < LEFT + TRACK
            if len(found) < 4 and is_inside and min(abs(at - place(n)) for n in found) > APART:
                found.append(tick)
    return found[1:]


def _text_at(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
