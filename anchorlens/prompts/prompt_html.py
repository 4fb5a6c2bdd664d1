"""A prompt as HTML: its tokens in the colours of their segments, as notebooks and reports show it.

The colours are tints that let the background through, and texts inherit their colour, so that both
light and dark pages are readable. Colour-blind readers can tell the tints apart, and some segments
have a frame or a line, too. Without style sheets ``strong`` and ``mark`` remain.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from ..errors import PromptError
from ..printable import printable
from .segment_names import (
    FORMAT,
    IMAGE,
    LABEL,
    OTHER,
    PADDING,
    QUERY,
    SEGMENTS,
    TARGET,
    TEXT,
    of_task,
)

PROMPT_CSS = """\
.al-tokens { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.8; }
.al-text, .al-label, .al-format, .al-query, .al-target, .al-other
{ color: inherit; border-radius: 2px; padding: 1px 0; }
.al-text { background: rgb(255 195 0 / 27%); }
.al-label { background: rgb(2 118 215 / 32%); font-weight: bold; text-decoration: underline; }
.al-format { background: rgb(128 128 128 / 28%); }
.al-query { background: rgb(5 241 108 / 30%); text-decoration: underline dotted; }
.al-target { background: rgb(207 44 0 / 33%); font-weight: bold; outline: 2px solid;
margin: 0 .15em; padding: 1px .2em; }
.al-other { background: none; }
.al-image { background: rgb(187 100 240 / 37%); border-radius: 2px; padding: 1px 0; }
.al-tokens img { height: 2.6em; margin: 0 .2em; vertical-align: middle; border-radius: 2px; }
.al-segment { color: inherit; border-radius: 2px; padding: 1px 0; }
.al-segment-0 { background: rgb(5 76 130 / 39%); }
.al-segment-1 { background: rgb(247 191 0 / 30%); }
.al-segment-2 { background: rgb(20 168 154 / 35%); text-decoration: underline dotted; }
.al-segment-3 { background: rgb(187 100 240 / 37%); }
.al-segment-4 { background: rgb(106 73 250 / 41%); text-decoration: underline dotted; }
.al-segment-5 { background: rgb(213 94 5 / 30%); }
.al-segment-none { background: none; }
.al-tokens [data-token]:hover::after { content: attr(data-token); position: absolute;
font-size: .7em; font-weight: normal; padding: 0 .3em; background: Canvas; color: CanvasText; }
"""
"""Style of the elements that ``token_spans`` and ``prompt_legend`` make."""

NO_SEGMENT = "no segment"
"""What the legend calls tokens that are in none of the segments that a user named."""

_MEANING = {
    TEXT: "text",
    LABEL: "label word",
    FORMAT: "format",
    QUERY: "query",
    TARGET: "target",
    OTHER: "other (BOS, instructions)",
    len(SEGMENTS): IMAGE,
}
_COLORS = 6  # of segments with names of one's own
_ELEMENT = {LABEL: "strong", TARGET: "mark"}
_SIGN = {LABEL: "◆", TARGET: "■"}  # as in figures
_PART_OF_CHARACTER = "\ufffd"  # a token that is only a part of a character
_CONTROL = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡", 9: "⇥\t", 10: "↵<br>"}


class Picture(NamedTuple):
    """An image of a prompt, small, as pages draw it in the place of its tokens."""

    first: int  # its first token, counted from that of the prompt
    length: int  # in tokens
    source: str  # the image itself, as an address of HTML

    @property
    def text(self) -> str:
        """What stands beside it, or for it."""
        return f"image, {self.length} tokens"


def token_spans(
    tokens: Sequence[str],
    segments: Sequence[int],
    names: Sequence[str] = SEGMENTS,
    start: int = 0,
    pictures: Sequence[Picture] = (),
) -> str:
    """Tokens, the first at ``start``, as HTML elements that show their segment, and images.

    Tokens without a text of their own (bytes of one character) are joined with the next one.
    """
    return "".join(
        _element(segment, _html(text), names, f' data-token="{start + position}"')
        for position, text, segment in _joined_tokens(tokens, segments, len(names), start, pictures)
    )


def _html(text: str | Picture) -> str:
    if isinstance(text, Picture):
        return f'<img src="{escape(text.source)}" alt="">{text.text}'
    return escape(text).translate(_CONTROL)


def prompt_legend(segments: Iterable[int], names: Sequence[str] = SEGMENTS) -> str:
    """The segments that occur, each in its own colours, as HTML."""
    present = set(segments)
    meanings = _MEANING if of_task(names) else dict(enumerate(names))
    return " ".join(
        _element(segment, escape(text), names)
        for segment, text in meanings.items()
        if segment in present
    )


@dataclass(frozen=True)
class PromptView:
    """A prompt: in the colours of its segments in a notebook, and as plain text in a terminal."""

    tokens: Sequence[str]
    segments: Sequence[int]
    heading: str = ""
    names: Sequence[str] = SEGMENTS
    pictures: Sequence[Picture] = ()

    def __repr__(self) -> str:
        """The text of the prompt, with ◆ before each label word and ■ before the target."""
        parts: list[str] = []
        before: int | None = None
        signs = _SIGN if of_task(self.names) else {}
        joined = _joined_tokens(self.tokens, self.segments, len(self.names), 0, self.pictures)
        for _, text, segment in joined:
            parts += [signs[segment]] if segment in signs and segment != before else []
            parts.append(f"[{text.text}]" if isinstance(text, Picture) else text)
            before = segment
        return printable("".join(parts))

    def _repr_html_(self) -> str:
        spans = token_spans(self.tokens, self.segments, self.names, 0, self.pictures)
        return (
            f"<style>{PROMPT_CSS}</style><div><p>{escape(self.heading)}</p>"
            f"<p>{prompt_legend(self.segments, self.names)}</p>"
            f'<p class="al-tokens">{spans}</p></div>'
        )


def _joined_tokens(
    tokens: Sequence[str],
    segments: Sequence[int],
    count: int,
    start: int,
    pictures: Sequence[Picture],
) -> Iterator[tuple[int, str | Picture, int]]:
    """First position, text or picture and segment of each element; there are ``count`` segments."""
    picture_at = {each.first - start + k: each for each in pictures for k in range(each.length)}
    if len(tokens) != len(segments):
        raise PromptError(f"a token has a segment; got {len(tokens)} and {len(segments)} segments")
    if wrong := [segment for segment in segments if not PADDING <= segment < count]:
        raise PromptError(
            f"segments are numbers from 0 to {count - 1}, or {PADDING} for padding; got {wrong[0]}"
        )
    first = 0
    for position, (text, segment) in enumerate(zip(tokens, segments, strict=True)):
        if (picture := picture_at.get(position)) is not None:
            if position == picture.first - start:
                yield position, picture, segment
            first = position + 1
            continue
        following = segments[position + 1 : position + 2]
        if not text and list(following) == [segment]:
            continue
        if segment != PADDING:
            yield first, text or _PART_OF_CHARACTER, segment
        first = position + 1


def _element(segment: int, html: str, names: Sequence[str], attributes: str = "") -> str:
    if of_task(names):
        element, kind = _ELEMENT.get(segment, "span"), f"al-{names[segment]}"
    else:
        color = segment % _COLORS if names[segment] != NO_SEGMENT else "none"
        element, kind = "span", f"al-segment al-segment-{color}"
    return f'<{element} class="{kind}"{attributes}>{html}</{element}>'
