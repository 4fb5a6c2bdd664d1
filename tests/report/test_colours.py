"""Colours by numbers: contrast of texts (WCAG), and what colour-blind readers can tell apart."""

import re
from collections.abc import Iterable
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

from anchorlens.prompts import segment_names
from anchorlens.prompts.prompt_html import PROMPT_CSS
from anchorlens.results.figure_parts import PALETTE

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
BLIND = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(color: str) -> np.ndarray:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    values = np.array([int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """Contrast ratio of WCAG 2, from 1 to 21."""
    high, low = sorted((linear(c) @ [0.2126, 0.7152, 0.0722] for c in (a, b)), reverse=True)
    return float((high + 0.05) / (low + 0.05))


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = to_xyz @ rgb.clip(0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def variables(name: str) -> list[dict[str, str]]:
    """The colours of a style sheet, for light pages and for dark ones."""
    text = files("anchorlens").joinpath("report", "static", name).read_text()
    light, dark = text.partition("@media print")[0].split("prefers-color-scheme: dark")
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", part)) for part in (light, dark)]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_texts_have_enough_contrast(scheme: int) -> None:
    page, prompt = (variables(name)[scheme] for name in ("page.css", "prompt.css"))
    for name in ("text", "soft", "link", "good", "bad", "open"):
        for ground in ("back", "panel"):
            assert contrast(page[name], page[ground]) >= 4.5, (name, ground)
    for name in ("into", "out"):  # names of rows, too
        assert contrast(prompt[name], page["back"]) >= 4.5, name
    for color in (prompt["other"], *PALETTE[:4]):  # of lines
        assert contrast(color, page["back"]) >= 3


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_kinds_of_arcs_and_lines_differ_for_colour_blind_readers(kind: str, scheme: int) -> None:
    prompt = variables("prompt.css")[scheme]
    for colors in ([prompt[name] for name in ("into", "out", "other")], PALETTE[:4]):
        seen = [lab(np.array(BLIND[kind]) @ linear(color)) for color in colors]
        for (a, first), (b, second) in combinations(zip(colors, seen, strict=True), 2):
            assert np.linalg.norm(first - second) >= 12, (kind, a, b)  # 2.3 is just noticeable


def over(color: Iterable[float], percent: float, ground: str) -> str:
    """A colour of 0 to 255 that covers so much of a ground."""
    below = (int(ground[k : k + 2], 16) for k in (1, 3, 5))
    mixed = (percent * c + (100 - percent) * b for c, b in zip(color, below, strict=True))
    return "#" + "".join(f"{round(each / 100):02x}" for each in mixed)


def tinted(name: str, ground: str) -> str:
    """The colour of a token: the tint of its class over the ground of a page."""
    (style,) = re.findall(rf"^\.al-{name} {{ background: (.*?);", PROMPT_CSS, re.MULTILINE)
    if style == "none":
        return ground
    *color, percent = map(int, re.findall(r"\d+", style))
    return over(color, percent, ground)


# A light page, JupyterLab dark, VS Code dark; the lightness of the text, and how much it covers.
GROUNDS = {"#ffffff": (0, 87), "#111111": (255, 87), "#1e1e1e": (204, 100)}
NAMES = (segment_names.SEGMENTS, [*(f"segment-{number}" for number in range(6)), "segment-none"])


@pytest.mark.parametrize("ground", GROUNDS)
def test_texts_of_tokens_have_enough_contrast(ground: str) -> None:
    lightness, percent = GROUNDS[ground]
    for name in (*NAMES[0], *NAMES[1]):
        tint = tinted(name, ground)
        assert contrast(over([lightness] * 3, percent, tint), tint) >= 4.5, name


@pytest.mark.parametrize("kind", ["all colours", *BLIND])
@pytest.mark.parametrize("ground", GROUNDS)
def test_groups_of_tokens_differ_for_every_reader(kind: str, ground: str) -> None:
    for names in NAMES:
        seen = [lab(BLIND.get(kind, np.eye(3)) @ linear(tinted(name, ground))) for name in names]
        for (a, first), (b, second) in combinations(zip(names, seen, strict=True), 2):
            assert np.linalg.norm(first - second) >= 10, (a, b)
