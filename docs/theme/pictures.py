"""Draws the pictures of the pages: runs their code and writes each figure, prompt or report.

python docs/theme/pictures.py [page or picture ...]   # from the root, after `make demo`

A picture stands after the block of code that makes its ``figure`` (svg), ``prompt`` or ``report``
(png). A page may show one before that block too. On the gallery each block runs alone after the
first, on other pages they run from top to bottom.

It needs Chromium and Liberation Sans, a font with the widths of Arial (apt install chromium
fonts-liberation). Chromium draws the figures without a window.
"""

import html
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

DOCS = Path(__file__).resolve().parents[1]
PARTS = re.compile(r"^```python\n(.*?)^```|\]\((?:\.\./)*(images/\S+)\)", re.MULTILINE | re.DOTALL)
ALONE = {"gallery.md"}
DIAGRAMS = {f"images/{name}.svg" for name in ("edges", "isolation", "compression", "images")}
MEASURED = {"images/faithfulness.svg"}  # the figure of examples/faithfulness.py on real models
WIDTH = 900  # pixels
FONT = "Arial, Helvetica, sans-serif"
# Another font would make texts wider than the legend that clips them, so each text gets its width.
PAGE = """<meta charset="utf-8"><body><pre id="svg"></pre><div></div>
<script>{library}</script><script>
Plotly.toImage({figure}, {{format: "svg", width: {width}, height: {height}}}).then((url) => {{
  const holder = document.querySelector("div");
  holder.innerHTML = decodeURIComponent(url.slice(url.indexOf(",") + 1));
  const texts = [...holder.querySelectorAll("text, tspan")].filter((text) => !text.children.length);
  for (const text of texts.filter((text) => text.textContent.trim())) {{
    text.setAttribute("textLength", text.getComputedTextLength().toFixed(1));
    text.setAttribute("lengthAdjust", "spacingAndGlyphs");
  }}
  document.getElementById("svg").textContent =
    new XMLSerializer().serializeToString(holder.firstElementChild);
  holder.remove();
}});
</script>"""
CHROMIUM = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
LEFT_OUT = ".controls, .detail, .caption:not(.arc-keys), .save"
ANSWER_LEFT_OUT = ".controls, .caption, .tables, .save"
# Of each picture of a page: width and height in pixels (None: all of it), pixels for each of the
# page, and what is left out.
PAGES = {
    "one_prompt": (1572, None, 1.5, LEFT_OUT),
    "one_prompt_phone": (780, None, 2, f"{LEFT_OUT}, .legend"),
    "one_answer": (1572, None, 1.5, ANSWER_LEFT_OUT),
    "one_answer_phone": (780, None, 2, ANSWER_LEFT_OUT),
    "report": (1400, 900, 1, ""),
    "report_phone": (780, 1688, 2, ""),
    "tokens": (1000, None, 1.5, ""),
}
HEIGHT = """<script>
addEventListener("load", () => setTimeout(() => {
  document.documentElement.dataset.height = Math.ceil(document.body.getBoundingClientRect().bottom);
}, 500));
</script>"""


def pictures(page: Path) -> list[tuple[str, list[str]]]:
    """The blocks of a page up to each picture; of a picture that stands twice, the last place."""
    found, blocks = dict[str, list[str]](), list[str]()
    for block, picture in PARTS.findall(page.read_text()):
        if not picture:
            blocks.append(block)
        elif picture not in DIAGRAMS and blocks:
            found[picture] = list(blocks)
    return sorted(found.items(), key=lambda item: len(item[1]))


def draw(picture: str, names: dict[str, Any]) -> None:
    """Write a picture from the names that the code of its page has made."""
    path = DOCS / picture
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(_svg_of(names["figure"]))
    else:
        kind = path.stem.split("_")[0]
        shown = names["report" if kind == "report" else "prompt"]
        _photograph(shown.read_text() if isinstance(shown, Path) else _html_of(shown), path)


def _html_of(shown: Any) -> str:
    """The page of a prompt; of what a notebook shows, a page with nothing else."""
    return shown.page() if hasattr(shown, "page") else f"<style></style>{shown._repr_html_()}"


def _svg_of(figure: go.Figure) -> str:
    """The figure as svg, drawn by a browser."""
    height = figure.layout.height or 420
    figure = go.Figure(figure).update_layout(font_family=FONT)
    page = PAGE.format(library=get_plotlyjs(), figure=figure.to_json(), width=WIDTH, height=height)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.html"
        path.write_text(page)
        shown = _chromium("--dump-dom", "--virtual-time-budget=10000", path.as_uri())
    [svg] = re.findall(r'<pre id="svg">(.+?)</pre>', shown, re.DOTALL)
    return html.unescape(svg)


def _photograph(page: str, picture: Path) -> None:
    """Write the picture of a page, as a browser shows it."""
    width, height, zoom, left_out = PAGES[picture.stem]
    style = f"body {{ zoom: {zoom} }}"
    if left_out:
        style += f" {left_out} {{ display: none !important }}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page.replace("</style>", f"{style}</style>{HEIGHT}", 1))
        wait = "--virtual-time-budget=10000"
        if height is None:
            shown = _chromium("--dump-dom", wait, f"--window-size={width},200", path.as_uri())
            height = int(re.findall(r'data-height="(\d+)"', shown)[0]) + 16
        size = f"--window-size={width},{height}"
        _chromium(f"--screenshot={picture}", size, wait, path.as_uri())


def _chromium(*arguments: str) -> str:
    command = [*CHROMIUM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    font = subprocess.run(["fc-match", "Arial"], capture_output=True, text=True, check=True).stdout
    if "Liberation Sans" not in font:
        sys.exit(f"texts would be as wide as in {font.strip()}; apt install fonts-liberation")
    wanted = set(sys.argv[1:])
    go.Figure.show = lambda figure, *args, **options: None
    model = Path(".venv/weights").resolve()
    for page in sorted(DOCS.rglob("*.md")):
        found = [
            (picture, blocks)
            for picture, blocks in pictures(page)
            if not wanted or wanted & {page.stem, Path(picture).stem}
        ]
        if not found:
            continue
        with tempfile.TemporaryDirectory() as folder:  # what the code of a page writes goes here
            os.chdir(folder)
            Path(".venv").mkdir()
            Path(".venv/weights").symlink_to(model)
            names, done = dict[str, Any](), 0
            for picture, blocks in found:
                if page.name in ALONE:
                    if not names:
                        exec(blocks[0], names)
                    alone = dict(names)
                    exec(blocks[-1], alone)
                    draw(picture, alone)
                else:
                    for block in blocks[done:]:
                        exec(block, names)
                    done = len(blocks)
                    draw(picture, names)
                print(page.name, picture, flush=True)
            os.chdir(DOCS)


if __name__ == "__main__":
    main()
