"""Templates and files of the pages, read from the package."""

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

# What a word of the field means, which a page says where the word stands first.
TERMS = {
    "nats": "A nat is the unit of losses and KL: 0.7 nats more mean half the probability.",
    "main directions": "The main directions are those in which the query vectors of the prompts "
    "differ most (principal components).",
}


@cache
def _environment() -> Environment:
    loader = PackageLoader("anchorlens", "report/pages")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    environment.globals["terms"] = TERMS
    return environment


def _code(text: str) -> Markup:
    """A text of a docstring, whose ``code`` becomes an element."""
    return Markup(re.sub(r"``(.+?)``", r"<code>\1</code>", str(escape(text))))


def template(name: str) -> Template:
    """A template whose values are escaped."""
    return _environment().get_template(name)


@cache
def static(name: str) -> Markup:
    """A style sheet or script of the package, which a page holds as it is."""
    return Markup((files("anchorlens") / "report" / "static" / name).read_text(encoding="utf-8"))


def as_json(value: Any) -> Markup:
    """A value as json that can stand in a script element, whatever its texts are."""
    return json_in_script(json.dumps(value, separators=(",", ":"), allow_nan=False))


def json_in_script(text: str) -> Markup:
    """A json text in which nothing can end a script element."""
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028"))
