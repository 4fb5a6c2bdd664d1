"""What mkdocs does with each page: formulas become MathML, public names link to the reference,
options of commands stay on one line.

MathML is drawn by the browser itself, so the pages need no script and no network for formulas.
"""

import ast
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

PACKAGE = Path(__file__).parents[2] / "anchorlens" / "__init__.py"
PUBLIC = {
    alias.asname
    for node in ast.walk(ast.parse(PACKAGE.read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# Links, blocks of code and headings stay as they are.
CODE = re.compile(
    r"<a\b.*?</a>|<pre\b.*?</pre>|<h\d\b.*?</h\d>|<code>(al\.)?(\w[\w.]*)(\(.*?\))?</code>",
    re.DOTALL,
)
INLINE = re.compile(r"<pre\b.*?</pre>|<code>.*?</code>", re.DOTALL)
OPTION = re.compile(r"--\w[\w-]*")


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the html of each page."""
    return CODE.sub(_linked, INLINE.sub(_unbroken, FORMULA.sub(_mathml, content)))


def _unbroken(match: re.Match[str]) -> str:
    """An option with its hyphens in a span: a browser may end a line after a hyphen."""
    if match[0].startswith("<pre"):
        return match[0]
    return OPTION.sub(r'<span class="option">\g<0></span>', match[0])


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    formula = convert(html.unescape(match[2]).strip(), display=display)
    # On a phone a wide formula scrolls, and so the keyboard has to reach it.
    return formula.replace('display="block"', 'display="block" tabindex="0"')


def _linked(match: re.Match[str]) -> str:
    """A public name as a link. A bare word in small letters may be an argument, so it is none."""
    prefix, name = match[1], match[2]
    is_clear = prefix or (name and re.search("[A-Z_]", name))
    if not is_clear or name.split(".")[0] not in PUBLIC:
        return match[0]
    return f'<autoref optional identifier="anchorlens.{name}">{match[0]}</autoref>'
