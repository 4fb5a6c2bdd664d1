"""Draws the small pictures of docs/definitions.md: python docs/theme/diagrams.py

Colours are those of the figures (Okabe and Ito), which colour-blind readers can distinguish; each
cell also has a letter or a number.
"""

from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
BLUE, RED, GREEN, GREY, WHITE, INK = "#0072B2", "#D55E00", "#009E73", "#d9dde1", "#fff", "#1c2024"
STYLE = "font-family: system-ui, sans-serif; font-size: 13px"


def svg(name: str, width: int, height: int, parts: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{STYLE}">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="{WHITE}"/>'
    (IMAGES / f"{name}.svg").write_text("\n".join([head, ground, *parts, "</svg>"]) + "\n")


def box(x: float, y: float, size: tuple[float, float], fill: str, text: str = "") -> str:
    ink = INK if fill in (GREY, WHITE) else WHITE
    width, height = size
    cell = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}"/>'
    return cell + words(x + width / 2, y + height / 2 + 4.5, text, ink)


def words(x: float, y: float, text: str, fill: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}">{text}</text>'


def edges() -> None:
    """The triangle of attention edges, with the flow that each belongs to."""
    tokens = ["fun", ":", "Pos", "dull", ":", "Neg", "great", ":"]
    labels, target, step, left, top = (2, 5), 7, 36, 120, 40
    parts = [words(left + step * 4, 16, "key: the token that is read")]
    for i, token in enumerate(tokens):
        mark = "q" if i == target else f"p{labels.index(i) + 1}" if i in labels else ""
        name = f"{token}  ({mark})" if mark else token
        parts.append(words(left - 8, top + step * i + 22, name, anchor="end"))
        parts.append(words(left + step * i + 17, top - 6, mark or token))
        for j in range(i):
            fill, text = GREY, "ww"
            if i in labels:
                fill, text = BLUE, "wp"
            elif i == target:
                fill, text = (RED, "pq") if j in labels else (GREEN, "tq")
            parts.append(box(left + step * j, top + step * i, (step - 3, step - 3), fill, text))
    parts.append(
        words(4, 16, "query: the token that reads", anchor="start").replace("16", "336", 1)
    )
    legend = [(BLUE, "S_wp"), (RED, "S_pq"), (GREEN, "S_tq, part of S_ww"), (GREY, "S_ww")]
    for number, (fill, text) in enumerate(legend):
        y = top + 26 * number
        parts += [box(430, y, (16, 16), fill), words(452, y + 13, text, anchor="start")]
    svg("edges", 590, 346, parts)


def isolation() -> None:
    """A pattern of five tokens: clean, and with the third cut before and after the softmax."""
    clean = [[1.0], [0.6, 0.4], [0.5, 0.3, 0.2], [0.4, 0.1, 0.3, 0.2], [0.3, 0.1, 0.3, 0.1, 0.2]]
    before, after = [row[:] for row in clean], [row[:] for row in clean]
    before[2], after[2] = [0.0, 0.0, 1.0], [0.0, 0.0, 0.2]
    titles = ["clean", "cut before the softmax", "cut after the softmax"]
    parts = []
    for number, (title, rows) in enumerate(zip(titles, (clean, before, after), strict=True)):
        left = 16 + 210 * number
        parts.append(words(left + 84, 18, title))
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                fill = BLUE if i == 2 and value else WHITE if not value else GREY
                text = f"{value:.1f}" if value else "0"
                parts.append(box(left + 34 * j, 30 + 34 * i, (31, 31), fill, text))
    svg("isolation", 640, 210, parts)


def compression() -> None:
    """Which tokens of two demonstrations a compressed context stores."""
    tokens = ["so", "much", "fun", ":", "Pos", "\u21b5", "very", "dull", ":", "Neg", "\u21b5"]
    query = ["great", "acting", ":"]
    parts, x = [], 8.0
    for number, token in enumerate([*tokens, *query]):
        width = 20 + 7.2 * len(token)
        fill = BLUE if token in ("Pos", "Neg") else GREY if token in ":\u21b5" else WHITE
        if number >= len(tokens):
            fill = GREEN
        cell = box(x, 34, (width, 30), fill, token)
        if fill == WHITE:
            cell = cell.replace("/>", ' stroke="#8a9096" stroke-dasharray="3 3"/>', 1)
        parts.append(cell)
        x += width + 4
    legend = [(BLUE, "stored: label word"), (GREY, "stored: format"), (WHITE, "dropped: text")]
    for number, (fill, text) in enumerate([*legend, (GREEN, "run: query")]):
        left = 8 + 170 * number
        mark = box(left, 84, (16, 16), fill)
        if fill == WHITE:
            mark = mark.replace("/>", ' stroke="#8a9096" stroke-dasharray="3 3"/>', 1)
        parts += [mark, words(left + 22, 97, text, anchor="start")]
    svg("compression", 690, 112, parts)


def images() -> None:
    """Which tokens of a prompt with images read which image."""
    texts = ["image 1", "what?", "red", "image 2", "what?", "blue", "image 3", "what?", ":"]
    parts, centres, x = [], [], 8.0
    for text in texts:
        width = 66.0 if "image" in text else 18 + 7.5 * len(text)
        fill = GREEN if "image" in text else BLUE if text in ("red", "blue") else GREY
        parts.append(box(x, 84, (width, 30), RED if text == ":" else fill, text))
        centres.append(x + width / 2)
        x += width + 6
    for key, query, colour in ((0, 2, BLUE), (3, 5, BLUE), (2, 8, RED), (5, 8, RED), (6, 8, GREEN)):
        start, end = centres[key], centres[query]
        top = 80 - min(76, (end - start) / 5)
        line = f'd="M{start} 82 C{start} {top},{end} {top},{end} 82"'
        parts.append(f'<path {line} fill="none" stroke="{colour}" stroke-width="2"/>')
    svg("images", int(x) + 2, 122, parts)


if __name__ == "__main__":
    images()
    edges()
    isolation()
    compression()
