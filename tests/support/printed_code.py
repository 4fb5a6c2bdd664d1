"""The code that is printed: blocks of the README and the documentation."""

import pkgutil
import re
from pathlib import Path
from typing import Any, NamedTuple

import anchorlens as al

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# On these pages the first block is what every other block needs, and nothing else is.
RECIPES = {"cookbook.md", "gallery.md"}
MODULES = [module.name for module in pkgutil.walk_packages(al.__path__, "anchorlens.")]


class Block(NamedTuple):
    """A block of code of a page, and the number of its first line there."""

    language: str
    code: str
    line: int


def blocks_of(page: Path, language: str) -> list[Block]:
    text = page.read_text()
    blocks = [
        Block(match[1], match[2], text.count("\n", 0, match.start(2)))
        for match in FENCE.finditer(text)
    ]
    return [block for block in blocks if block.language == language]


def printed(page: str, name: str) -> Any:
    """A function or class of a page, after what its first block imports and defines."""
    names: dict[str, Any] = {"__name__": page}
    first, *others = blocks_of(ROOT / "docs" / page, "python")
    defining = [each for each in others if re.search(rf"^(def|class) {name}\b", each.code, re.M)]
    for block in (first, *defining):
        exec(compile(block.code, page, "exec"), names)
    return names[name]


def run_page(page: Path) -> dict[str, Any]:
    """Run the blocks from top to bottom, as one script; recipes each after the first block."""
    blocks = blocks_of(page, "python")
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        alone = page.name in RECIPES and number > 0
        # Empty lines first, so that a traceback has the line number of the page.
        code = compile("\n" * block.line + block.code, str(page), "exec")
        exec(code, dict(names) if alone else names)
    return names
