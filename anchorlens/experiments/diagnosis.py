"""Diagnose errors: does the distance of keys predict which classes are confused? (section 3.3)"""

from dataclasses import dataclass
from itertools import permutations
from math import isnan
from typing import ClassVar

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..metrics.distances import AnchorDistancesRecord, confusions, rank_correlation
from ..models.hooked import indices_of
from ..results import figures
from ..results.figure_parts import with_ends
from ..results.record import Record
from ..system.arguments import checked

ALL_UP_TO, DRAWS = 7, 5000  # classes whose permutations are all compared; of more classes a sample


@dataclass(frozen=True, eq=False, kw_only=True)
class DiagnosisRecord(Record):
    """Predicted and actual confusion in a layer, and their correlation in every layer.

    Attributes:
        predicted: Distance of two classes' keys in the layer over its largest, from 0 to 1, 0 on
            the diagonal; low predicts confusion.
        actual: AUC-ROC of p_a / (p_a + p_b) among prompts of the two classes, from 0 to 1; low:
            confused, 0.5: not told apart. NaN on the diagonal and for pairs without prompts.
        correlation: Spearman correlation of the two over pairs of classes, from -1 to 1; high:
            distance predicts confusion. NaN with fewer than three pairs, or no distances.
        p_value: Share of the permutations of the classes (the identity included) whose correlation
            is at least the observed one, above 0 and up to 1. Small: distance predicts confusion
            better than keys assigned to classes at random. At least 1/6 with three classes.
        position_correlation: Spearman correlation of distance with that in position of the label
            words, from -1 to 1. Where it is high, the p-value does not tell keys from positions;
            average over several orders of the demonstrations.
        layer: The layer of ``predicted``.
    """

    predicted: Float[Tensor, "class class"]
    actual: Float[Tensor, "class class"]
    correlation: Float[Tensor, " layer"]
    p_value: Float[Tensor, " layer"]
    position_correlation: Float[Tensor, " layer"]
    layer: Int[Tensor, ""]

    caption: ClassVar[str] = (
        f"{AnchorDistancesRecord.caption} Below: rank correlation of distance and confusion over "
        "pairs of classes, by layer; near 1, keys predict confusion. Dashed: correlation of "
        "distance with the positions of the label words; where it is high, too, position may be "
        "the reason."
    )

    def pairs(self) -> pd.DataFrame:
        """All pairs of classes as a table, the most confused first.

        Of ``predicted_rank`` and ``actual_rank`` 1 is the most confused; equal values share their
        mean rank. Pairs without an AUC come last, without a rank.
        """
        names, size = self._class_names(), len(self.actual)
        first, second = torch.triu_indices(size, size, 1, device="cpu")
        frame = pd.DataFrame(
            {
                "class": [names[k] for k in first.tolist()],
                "class_2": [names[k] for k in second.tolist()],
                "predicted": self.predicted[first, second].tolist(),
                "actual": self.actual[first, second].tolist(),
            }
        )
        for kind in ("predicted", "actual"):
            frame[f"{kind}_rank"] = frame[kind].rank()
        return frame.sort_values(["actual", "predicted"], ignore_index=True)

    def plot(self) -> go.Figure:
        """Predicted and actual confusion side by side (the paper's Figure 6), correlation below."""
        layer = int(self.layer)
        correlation, p_value = float(self.correlation[layer]), float(self.p_value[layer])
        known = f"rank correlation {correlation:.2f}, p = {p_value:.2g}"
        agreement = "no rank correlation" if isnan(correlation) else known
        matrices = confusions(
            self.predicted,
            self.actual,
            self._class_names(),
            f"Which classes are confused (layer {layer}, {agreement})",
        )
        curves = figures.lines_by_layer(
            **with_ends(self, "correlation", "position_correlation"),
            names=["distance with confusion", "distance with position"],
            title="",
            y_title="rank correlation",
            dashed=["distance with position"],
        )
        mark = {"annotation_text": f"layer {layer}", "annotation_position": "bottom right"}
        curves.update_yaxes(range=[-1.05, 1.05]).add_vline(layer, line=figures.DOTTED, **mark)
        return figures.stacked(matrices, curves)

    def _class_names(self) -> list[str]:
        names = self.axis_names("class") or [f"class {k}" for k in range(len(self.actual))]
        return [name.strip() for name in names]


@checked
def diagnose(distances: Record, *, layer: int | None = None) -> DiagnosisRecord:
    r"""Test whether the distance of keys predicts which classes are confused (section 3.3).

    The p-value comes from a one-sided permutation test (Mantel's),

    $$
    p = \frac{\# \{ f : \rho(D_{f(a) f(b)}, U_{ab}) \ge \rho(D_{ab}, U_{ab}) \}}{\# \{ f \}} ,
    $$

    with the distances D, the actual AUCs U, the rank correlation rho over pairs of classes, and
    permutations f of the classes: pairs that share a class are not independent. Pairs without an
    AUC are left out in every permutation. Up to 7 classes all permutations are used; with more the
    identity and 5000, drawn with a fixed seed.

    Range:
        ``correlation`` -1 to 1, NaN with two classes; ``p_value`` above 0 to 1.

    How to read:
        A correlation above 0: classes with near keys are confused. A small p-value: keys assigned
        to classes at random would seldom predict as well.

    Pitfalls:
        The best of many layers correlates well by chance, whatever its p-value: use the default
        layer, or one chosen before. Where ``position_correlation`` is high, it may be by position.

    Source:
        Section 3.3 shows the two matrices (Figure 6); the correlation and its test are ours.
        Mantel, *The Detection of Disease Clustering and a Generalized Regression Approach* (1967).

    Args:
        distances: The record of ``AnchorDistances``, which averages over sets of demonstrations.
        layer: The layer to report, negative from the end; by default at two thirds of the depth.

    Raises:
        MetricError: The record does not come from ``AnchorDistances``.
        HookError: There is no such layer.

    Examples:
        >>> results = al.run(model, batches, [al.AnchorDistances()], progress=False)
        >>> figure = al.diagnose(results["anchor_distances"]).plot()
    """
    n_layers = len(distances.anchor_distance)
    requested = int(distances.default_layer) if layer is None else layer
    [chosen] = indices_of("layer", requested, n_layers)
    names = {"predicted": "anchor_distance", "actual": "pair_auc"}
    names |= {name: name for name in ("correlation", "position_correlation")}
    known = distances.intervals
    intervals = {ours: known[theirs] for ours, theirs in names.items() if theirs in known}
    if "predicted" in intervals:
        intervals["predicted"] = intervals["predicted"][:, chosen]
    orders = class_orders(len(distances.pair_auc))
    correlation, p_value, _ = permutation_test(
        distances.anchor_distance, distances.pair_auc, orders
    )
    return DiagnosisRecord(
        predicted=distances.anchor_distance[chosen],
        actual=distances.pair_auc,
        correlation=correlation,
        p_value=p_value,
        position_correlation=distances.position_correlation,
        layer=torch.tensor(chosen, device="cpu"),
        intervals=intervals,
        info={**distances.info, "class_permutations": len(orders)},
    )


def permutation_test(
    predicted: Float[Tensor, "layer class class"],
    actual: Float[Tensor, "class class"],
    orders: Int[Tensor, "order class"],
) -> tuple[Float[Tensor, " layer"], Float[Tensor, " layer"], Float[Tensor, " layer"]]:
    """Correlation in each layer for the first order, the shares of orders as high, and as low."""
    first, second = torch.triu_indices(len(actual), len(actual), 1, device="cpu")
    # The distances are permuted, not the confusions: so every order leaves out the same pairs
    # without a confusion, and all orders are compared over the same confusions.
    pairs, of_pairs = (orders[:, first], orders[:, second]), actual[first, second]
    by_order = torch.stack([rank_correlation(distance[pairs], of_pairs) for distance in predicted])
    observed = by_order[:, 0]  # the identity
    # An order without a correlation counts as reaching it, so that p is never too small. Equal
    # correlations are bitwise equal: ranks are multiples of 1/2, whose products sum exactly.
    reached = (~(by_order < observed[:, None]), ~(by_order > observed[:, None]))
    above, below = (
        side.double().mean(1).masked_fill(observed.isnan(), torch.nan) for side in reached
    )
    return observed, above, below


def class_orders(n_classes: int) -> Int[Tensor, "order class"]:
    """Permutations of the classes, the identity first: all of them, or a sample."""
    if n_classes <= ALL_UP_TO:
        return torch.tensor(list(permutations(range(n_classes))), device="cpu")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(
        DRAWS, n_classes, generator=generator, dtype=torch.float32, device="cpu"
    ).argsort(1)
    return torch.cat([torch.arange(n_classes, device="cpu")[None], drawn])
