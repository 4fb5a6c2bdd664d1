"""Texts that are html: the page has the same elements as with a harmless word instead."""

import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

import anchorlens as al
from tests.attack.attack_damages import folder
from tests.attack.attack_scene import scene

WORD = "harmless"
PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "</title><script>alert(1)</script>",
    "</style><b>bold</b>",
    "</pre></details></table><h1>x</h1>",
    "<!--",
    "-->",
    "<![CDATA[<b>x</b>]]>",
    "&lt;b&gt;&amp;#60;b",
    "<svg/onload=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "\u202e<b>\u2028</script>",
    "<\u0000b>x",
    "<b\nclass=x>",
    "{{7*7}}${7*7}`alert(1)`",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16") + "<i>",
    "<plaintext>",
    "latin-1 caf\udce9",
    "\ud800 \x1b]0;title\x07",
]


class Elements(HTMLParser):
    """The elements that a browser would make, with the names of their attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}",))

    def handle_comment(self, data: str) -> None:
        self.elements.append(("comment",))

    def handle_decl(self, decl: str) -> None:
        self.elements.append(("declaration",))

    def handle_pi(self, data: str) -> None:
        self.elements.append(("instruction",))

    def unknown_decl(self, data: str) -> None:
        self.elements.append(("declaration", "unknown"))


def page(text: str, field: str) -> Path:
    """A report with the text in this field."""
    setup = scene()
    record = setup.results["saliency_flows"]
    confusions = setup.results["anchor_distances"]
    labels = [text, *"bcdef"]
    settings: dict[str, dict[str, Any]] = {
        "title": {"title": text},
        "summary": {"summary": text},
        "setting": {"settings": {"model": text}},
        "name of a setting": {"settings": {text: 1}},
        "figure": {"figures": {text: setup.isolation.plot()}},
        "title of a figure": {"figures": {"x": go.Figure(layout={"title": {"text": text}})}},
    }
    records: dict[str, dict[str, al.Record]] = {
        "info": {"flows": replace(record, info={"model": text, "list": [text]})},
        "name in info": {"flows": replace(record, info={text: {text: 1}})},
        "name of a result": {text: record},
        "label": {"distances": replace(confusions, info={**confusions.info, "labels": labels})},
    }
    results = records.get(field, {"flows": record})
    return al.write_report(results, folder() / "page.html", **settings.get(field, {}))


FIELDS = [
    *("title", "summary", "setting", "name of a setting", "figure", "title of a figure", "info"),
    *("name in info", "name of a result", "label"),
]


def payloads(rng: random.Random) -> None:
    text, field = rng.choice(PAYLOADS), rng.choice(FIELDS)
    if rng.random() < 0.3:
        text += rng.choice(PAYLOADS)
    elements, expected = (Elements(page(word, field)).elements for word in (text, WORD))
    if elements != expected:
        added = [element for element in elements if element not in expected]
        raise AssertionError(f"{text!r} as {field}: the page has other elements, {added[:3]}")
