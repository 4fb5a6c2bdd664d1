"""Flows of one text as a page of its own, which a notebook shows, and as a part of a report."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup

from ..printable import printable
from ..prompts.prompt_html import PROMPT_CSS, Picture, prompt_legend, token_spans
from ..prompts.segment_names import SEGMENTS
from ..system.files import write_text
from .templates import as_json, static, template


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowPage:
    """Flows of one text: what its pages have in common."""

    tokens: Sequence[str]
    segments: Sequence[int]
    names: Sequence[str] = SEGMENTS
    layers: Sequence[Sequence[Any]]
    heading: str
    start: int = 0
    pictures: Sequence[Picture] = ()
    template: ClassVar[str]

    def __repr__(self) -> str:
        layers = sum(name.isdecimal() for name in self.layer_names())
        counts = f"{len(self.tokens)} tokens, {layers} layers"
        return printable(f"{type(self).__name__}({counts}; {self.heading})")

    def layer_names(self) -> list[str]:
        """What the slider of layers shows at each step."""
        return [str(layer) for layer in range(len(self.layers))]

    def rows(self) -> list[tuple[int, int, str]]:
        """First and last token and kind of each row, between which arcs go."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """What the template shows besides the values of all pages."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """The numbers that the script reads besides the tokens and the names of layers."""
        raise NotImplementedError

    def fragment(self) -> Markup:
        """The HTML of the text, for a page that holds the style and the script once."""
        names = self.layer_names()
        text = template(self.template).render(
            heading=self.heading,
            legend=Markup(prompt_legend(self.segments, self.names)),
            rows=[(kind, self._spans(first, last + 1)) for first, last, kind in self.rows()],
            n_layers=len(names),
            layer_name=names[self.start],
            start=self.start,
            data=as_json(
                {"tokens": list(self.tokens), "names": names, "start": self.start, **self.data()}
            ),
            **self.values(),
        )
        return Markup(text)

    def _spans(self, first: int, end: int) -> Markup:
        tokens, segments = self.tokens[first:end], self.segments[first:end]
        return Markup(token_spans(tokens, segments, self.names, first, self.pictures))

    def page(self) -> str:
        """One HTML page, which needs no other file and no network."""
        text: str = template("prompt_page.html").render(
            title=self.heading,
            style=static("page.css") + style(),
            fragment=self.fragment(),
            script=static("save.js") + script(),
        )
        return text

    def save(self, path: str | Path) -> Path:
        """Write the page into a file and return its path; a StoreError if it cannot be written."""
        path = Path(path)
        write_text(path, self.page())
        return path

    def _repr_html_(self) -> str:
        # A frame of its own: neither style nor scripts of the notebook and of the page mix.
        source = escape(self.page(), quote=True)
        return (
            f'<iframe srcdoc="{source}" title="Flows of one prompt" '
            'style="width: 100%; height: 760px; border: 0"></iframe>'
        )


def style() -> Markup:
    """The style of fragments, to which a page adds its own."""
    return Markup(PROMPT_CSS) + static("prompt.css")


def script() -> Markup:
    return Markup("").join(map(static, ("prompt.js", "answer.js", "flows.js")))


def rounded(values: Iterable[float]) -> list[float]:
    """Numbers with three digits, which a page shows."""
    return [float(f"{value:.3g}") for value in values]


def packed(values: Sequence[int] | Sequence[float], kind: str) -> str:
    """Numbers of a type of numpy as text, which takes a third of the room of json."""
    return b64encode(np.array(values, dtype=kind).tobytes()).decode()
