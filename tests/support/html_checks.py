"""Reads HTML as a browser does, and fails where tags do not match."""

from html.parser import HTMLParser

EMPTY = ("br",)


class Parsed(HTMLParser):
    """The elements of a piece of HTML, and its text without styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open += [] if tag in EMPTY else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}
