"""A field of a record by layer, as lines beside all that is known of it."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from ..results import figures
from ..results.figure_parts import with_ends
from ..results.record import Record


def lines(
    record: Record, field: str, names: Sequence[str], *, title: str = "", **options: Any
) -> go.Figure:
    """A field by layer, of one series or several, beside all that is known of it."""
    random = torch.tensor(record.of_random_models(field), dtype=torch.double, device="cpu")
    known: dict[str, Any] = {
        **with_ends(record, field, shaped=lambda numbers: numbers[0].view(-1, len(names)).T),
        "reference": record.kinds()[field].reference,
        "random": random.reshape(-1, *getattr(record, field).shape[:1], len(names)).mT,
    }
    return figures.lines_by_layer(names=names, title=title, **known | options)
