"""A prompt as HTML: its tokens in the colours of their groups, as notebooks and the report show it.

The colours are tints that let the background through, and texts inherit their colour, so that both
light and dark pages are readable. Colour-blind readers can tell the tints apart. Label words are
also bold and underlined, the target is in a frame, and the query has a dotted underline. Without
style sheets ``strong`` and ``mark`` remain.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ..errors import PromptError
from ..system.texts import printable
from .groups import FORMAT, GROUPS, LABEL, OTHER, PADDING, QUERY, TARGET, TEXT

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
}
_COLORS = 6  # of segments with names of one's own
_ELEMENT = {LABEL: "strong", TARGET: "mark"}
_SIGN = {LABEL: "◆", TARGET: "■"}  # as in figures
_PART = "\ufffd"  # a token that is only a part of a character
_CONTROL = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡", 9: "⇥\t", 10: "↵<br>"}


def token_spans(tokens: Sequence[str], groups: Sequence[int], names: Sequence[str] = GROUPS) -> str:
    """Tokens as HTML elements that show their group; ``PROMPT_CSS`` has their style.

    Each element has the position of its token as ``data-token``. Tokens without a text of their
    own (bytes of one character) are joined with the next token if it has the same group: their
    element has the position of the first. Padding is left out.

    Args:
        tokens: Text of each token; all texts are escaped. A line break is shown by a mark and
            breaks the line, other control characters are shown by their symbols.
        groups: Segment of each token, as in ``PromptBatch.groups``.
        names: Names of the segments.

    Raises:
        PromptError: The numbers of tokens and groups differ, or a group does not exist.

    Examples:
        >>> token_spans(["dull", " Bad", "\\n"], [1, 2, 3])[:55]
        '<span class="al-text" data-token="0">dull</span><strong'
    """
    return "".join(
        _element(group, escape(text).translate(_CONTROL), names, f' data-token="{position}"')
        for position, text, group in _joined(tokens, groups, len(names))
    )


def segment_class(group: int, names: Sequence[str]) -> str:
    """The class of the elements of a segment, which gives them its colours."""
    if names == GROUPS:
        return f"al-{GROUPS[group]}"
    color = group % _COLORS if names[group] != NO_SEGMENT else "none"
    return f"al-segment al-segment-{color}"


def prompt_legend(groups: Iterable[int], names: Sequence[str] = GROUPS) -> str:
    """The segments that occur, each in its own colours, as HTML."""
    present = set(groups)
    meanings = _MEANING if names == GROUPS else dict(enumerate(names))
    return " ".join(
        _element(group, escape(text), names) for group, text in meanings.items() if group in present
    )


@dataclass(frozen=True)
class PromptView:
    """A prompt that a notebook shows in the colours of its groups, and a terminal as plain text.

    Attributes:
        tokens: Text of each token.
        groups: Segment of each token, as in ``PromptBatch.groups``.
        heading: What is above the prompt.
        names: Names of the segments.
    """

    tokens: Sequence[str]
    groups: Sequence[int]
    heading: str = ""
    names: Sequence[str] = GROUPS

    def __repr__(self) -> str:
        """The text of the prompt, with ◆ before each label word and ■ before the target."""
        parts: list[str] = []
        before: int | None = None
        signs = _SIGN if self.names == GROUPS else {}
        for _, text, group in _joined(self.tokens, self.groups, len(self.names)):
            parts += [signs[group]] if group in signs and group != before else []
            parts, before = [*parts, text], group
        return printable("".join(parts))

    def _repr_html_(self) -> str:
        return (
            f"<style>{PROMPT_CSS}</style><div><p>{escape(self.heading)}</p>"
            f"<p>{prompt_legend(self.groups, self.names)}</p>"
            f'<p class="al-tokens">{token_spans(self.tokens, self.groups, self.names)}</p></div>'
        )


def _joined(
    tokens: Sequence[str], groups: Sequence[int], count: int
) -> Iterator[tuple[int, str, int]]:
    """First position, text and segment of each element; there are ``count`` segments."""
    if len(tokens) != len(groups):
        raise PromptError(f"each token has a group; got {len(tokens)} and {len(groups)} groups")
    if wrong := [group for group in groups if not PADDING <= group < count]:
        raise PromptError(
            f"groups are numbers from 0 to {count - 1}, or {PADDING} for padding; got {wrong[0]}"
        )
    first = 0
    for position, (text, group) in enumerate(zip(tokens, groups, strict=True)):
        following = groups[position + 1 : position + 2]
        if not text and list(following) == [group]:
            continue
        if group != PADDING:
            yield first, text or _PART, group
        first = position + 1


def _element(group: int, html: str, names: Sequence[str], attributes: str = "") -> str:
    element = _ELEMENT.get(group, "span") if names == GROUPS else "span"
    return f'<{element} class="{segment_class(group, names)}"{attributes}>{html}</{element}>'
