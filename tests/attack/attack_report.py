"""Texts that are html: the page has the same elements as with a harmless word in their place."""

import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from attack_damages import folder
from attack_scene import scene
from attempts import Ending, Fault

import anchorlens as al

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
]


class Elements(HTMLParser):
    """What a browser would make: elements with the names of their attributes, and their texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}",))

    def handle_comment(self, data: str) -> None:
        self.found.append(("comment",))

    def handle_decl(self, decl: str) -> None:
        self.found.append(("declaration",))

    def handle_pi(self, data: str) -> None:
        self.found.append(("instruction",))

    def unknown_decl(self, data: str) -> None:
        self.found.append(("declaration", "unknown"))


def page(text: str, where: str) -> Path:
    """A report with a text somewhere."""
    here = scene()
    record = here.results["saliency_flows"]
    confusions = here.results["anchor_distances"]
    labels = [text, *"bcdef"]
    settings: dict[str, dict[str, Any]] = {
        "title": {"title": text},
        "summary": {"summary": text},
        "setting": {"settings": {"model": text}},
        "name of a setting": {"settings": {text: 1}},
        "figure": {"figures": {text: here.isolation.plot()}},
    }
    records: dict[str, dict[str, al.Record]] = {
        "info": {"flows": replace(record, info={"model": text, "list": [text]})},
        "name in info": {"flows": replace(record, info={text: {text: 1}})},
        "name of a result": {text: record},
        "label": {"distances": replace(confusions, info={**confusions.info, "labels": labels})},
    }
    results = records.get(where, {"flows": record})
    return al.write_report(results, folder() / "page.html", **settings.get(where, {}))


PLACES = [
    *("title", "summary", "setting", "name of a setting", "figure", "info", "name in info"),
    *("name of a result", "label"),
]


def payloads(chance: random.Random) -> Ending:
    text, where = chance.choice(PAYLOADS), chance.choice(PLACES)
    if chance.random() < 0.3:
        text += chance.choice(PAYLOADS)
    found, expected = (Elements(page(one, where)).found for one in (text, WORD))
    if found != expected:
        more = [one for one in found if one not in expected]
        raise Fault(f"{text!r} as {where}: the page has other elements, {more[:3]}")
    return "right"
