"""Draws the pictures of docs/gallery.md: runs each block of code and writes its `figure`.

python docs/theme/gallery.py [picture ...]     # from the root of the repository, after `make demo`

It needs Chromium (apt install chromium), which draws the figures without a window.
"""

import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

DOCS = Path(__file__).parents[1]
PARTS = re.compile(r"^```python\n(.*?)^```|\]\((images/gallery/\S+)\)", re.MULTILINE | re.DOTALL)
WIDTH = 900  # pixels
PAGE = """<meta charset="utf-8"><body><pre id="svg"></pre><script>{library}</script><script>
Plotly.toImage({figure}, {{format: "svg", width: {width}, height: {height}}})
  .then(url => {{ document.getElementById("svg").textContent = url; }});
</script>"""
CHROMIUM = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom")


def pictures(page: Path) -> list[tuple[str, str]]:
    """The code and the picture of each figure."""
    found, setup, code = [], "", ""
    for block, picture in PARTS.findall(page.read_text()):
        if picture:
            found.append((setup + code, picture))
        elif not setup:
            setup = block
        else:
            code = block
    return found


def svg_of(figure: go.Figure) -> str:
    """The figure as svg, drawn by a browser."""
    height = figure.layout.height or 420
    page = PAGE.format(library=get_plotlyjs(), figure=figure.to_json(), width=WIDTH, height=height)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.html"
        path.write_text(page)
        command = [*CHROMIUM, "--virtual-time-budget=10000", path.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [url] = re.findall(r'<pre id="svg">data:image/svg\+xml,(.*?)</pre>', shown, re.DOTALL)
    return unquote(html.unescape(url))


def main() -> None:
    for code, picture in pictures(DOCS / "gallery.md"):
        if sys.argv[1:] and Path(picture).stem not in sys.argv[1:]:
            continue
        names: dict[str, Any] = {}
        exec(code, names)
        (DOCS / picture).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / picture).write_text(svg_of(names["figure"]))
        print(picture)


if __name__ == "__main__":
    main()
