"""Flows of one text as a page of its own, which a notebook shows, and as a part of a report."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from markupsafe import Markup

from ..prompts.prompt_html import PROMPT_CSS
from ..system.files import write_text
from .templates import static, template


class FlowPage:
    """Flows of one text: what its pages have in common.

    Attributes:
        heading: What the page is about, in one sentence.
    """

    heading: str

    def fragment(self) -> Markup:
        """The HTML of the text, for a page that holds the style and the script once."""
        raise NotImplementedError

    def page(self) -> str:
        """One HTML page, which needs no other file and no network."""
        text: str = template("prompt_page.html").render(
            title=self.heading,
            style=static("page.css") + style(),
            fragment=self.fragment(),
            script=script(),
        )
        return text

    def save(self, path: str | Path) -> Path:
        """Write the page into a file and return its path.

        Raises:
            StoreError: The file cannot be written.
        """
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
    """The script of fragments."""
    return static("prompt.js") + static("answer.js") + static("flows.js")


def rounded(values: Iterable[float]) -> list[float]:
    """Numbers with three digits, which a page shows."""
    return [float(f"{value:.3g}") for value in values]
