"""What the figures share: colours, a layout, literal texts, and checks of their arguments."""

import html
from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor

from ..errors import AnchorlensError

# The colours of Okabe and Ito, which colour-blind readers can distinguish; grey in place of black,
# which dark pages hide.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
VISIBLE = str.maketrans({" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\xa0": "⍽"})


def literal(text: str) -> str:
    """Escape a text so that plotly shows it literally; plotly does not know `&quot;`."""
    return html.escape(text, quote=False).replace("$", "&#36;")


def check(fits: bool, expected: str, got: object, cure: str) -> None:
    if not fits:
        raise AnchorlensError(f"expected {expected}, got {got}; {cure}")


def check_shape(values: Tensor, shape: tuple[int, ...], cure: str) -> None:
    check(values.shape == shape, f"shape {shape}", f"shape {tuple(values.shape)}", cure)


def with_ends(
    record: Any, *fields: str, shaped: Callable[[Tensor], Tensor] = lambda numbers: numbers
) -> dict[str, Any]:
    """``values``, ``low`` and ``high`` of fields, for a figure (None without intervals).

    Fields are stacked along a first axis, and ``shaped`` gives them the shape of the figure.
    """

    def stacked(numbers: Sequence[Tensor]) -> Tensor:
        return shaped(torch.stack(torch.broadcast_tensors(*numbers)))

    found: dict[str, Any] = {"low": None, "high": None}
    if all(name in record.intervals for name in fields):
        bounds = zip(*(record.intervals[name] for name in fields), strict=True)
        found = dict(zip(("low", "high"), map(stacked, bounds), strict=True))
    return {"values": stacked([getattr(record, name) for name in fields]), **found}


def name_ticks(names: Sequence[str]) -> dict[str, Any]:
    """Write names at 0, 1, ... of an axis; as values plotly would merge equal names and sort."""
    lines = [[literal(line) for line in wrap(name, 18) or [name]] for name in names]
    texts = {"tickvals": list(range(len(names))), "ticktext": ["<br>".join(of) for of in lines]}
    return texts | {"showgrid": False, "zeroline": False}  # they mean nothing between names


def thinned(names: Sequence[str], most: int) -> list[str]:
    """Every name, or every second, third, ... where more than ``most`` would overlap."""
    stride = 1 + (len(names) - 1) // most
    return [name if k % stride == 0 else "" for k, name in enumerate(names)]


def visible(texts: Sequence[str]) -> list[str]:
    return [text.translate(VISIBLE) for text in texts]


def color_bar(title: str) -> dict[str, Any]:
    return {"title": {"text": literal(title), "side": "right"}, "thickness": 12}


def layout(title: str, height: int) -> dict[str, Any]:
    top = {"text": literal(title), "x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 16}}
    known = {"template": "plotly_white", "title": top, "height": height}
    numbers = {"exponentformat": "power"}  # and not 600µ
    return known | {"margin": {"t": 60, "b": 60, "r": 20}, "yaxis": numbers}
