"""How often a 95 % interval holds the true value: the table of docs/benchmarks.md.

    PYTHONPATH=tests python tests/benchmarks/coverage.py --repeats 1000

Rows of prompts are drawn from distributions whose true values are known, and go through the
package's own results and ``with_intervals``. Layers and methods are independent trials, so that
one call makes many of them. *Before* are plain percentiles within sets of demonstrations.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import norm
from torch import Tensor

import anchorlens as al
from anchorlens.intervals import with_intervals
from anchorlens.metrics.accuracy import _comparison

Rows = Mapping[str, Tensor]
Trial = tuple[dict[str, Tensor], Tensor]
TRIALS = 50  # independent trials of a call: layers, or methods
CLASSES = 4

LAYOUTS: dict[str, tuple[list[int], float]] = {
    **{f"one set of {n}": ([n], 0.0) for n in (5, 10, 20, 50, 200)},
    **{f"{n} sets of 1": ([1] * n, 0.0) for n in (5, 10, 20, 50, 200)},
    **{f"{n} prompts, two share a set": ([2] + [1] * (n - 2), 0.0) for n in (20, 50)},
    "sets of 20 and 2": ([20, 2], 0.0),
    "sets of 10 and 1": ([10, 1], 0.0),
    "sets of 100 and 10, given": ([100, 10], 1.0),
    "3 sets of 20, given": ([20] * 3, 1.0),
    "20 sets of 5, all alike": ([5] * 20, 0.0),
    "20 sets of 5, unlike": ([5] * 20, 1.0),
    "10 sets of 5, unlike": ([5] * 10, 1.0),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanRecord(al.Record):
    """A mean over prompts, of sets in turn."""

    mean: Float[Tensor, " layer"]


def mean_result(rows: Rows) -> MeanRecord:
    sets = rows["demonstrations_id"]
    means = [rows["value"][sets == number].mean(0) for number in sets.unique()]
    return MeanRecord(mean=torch.stack(means).mean(0))


@dataclass(frozen=True)
class Prompts:
    """Prompts of a layout: the set of each, and how far each set is from the average one."""

    sizes: Sequence[int]
    effect: float
    generator: torch.Generator

    @property
    def sets(self) -> Tensor:
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))

    @property
    def given(self) -> bool:
        return min(self.sizes) >= 10

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.double)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.double)

    def effects(self, *shape: int) -> Tensor:
        """Of each set, [set, ...]."""
        return self.effect * self.normal(len(self.sizes), *shape)


def normal_mean(prompts: Prompts) -> Trial:
    effects = prompts.effects(TRIALS)
    value = prompts.normal(len(prompts.sets), TRIALS) + effects[prompts.sets]
    return {"value": value}, effects.mean(0) if prompts.given else torch.zeros(TRIALS)


def flow_sums(prompts: Prompts) -> tuple[dict[str, Tensor], Tensor]:
    """Skewed flows, [prompt, layer, flow], and the mean of each set and layer."""
    means = torch.tensor([0.5, 1.0, 2.0, 1.0]) * (0.5 * prompts.effects(TRIALS, 4)).exp()
    noise = -prompts.uniform(len(prompts.sets), TRIALS, 4).log()  # exponential
    sums = noise * means[prompts.sets]
    rows = {"sums": sums, "head_sums": sums[:, :, None], "counts": torch.ones(len(sums), 4)}
    return rows, means


def skewed_mean(prompts: Prompts) -> Trial:
    rows, means = flow_sums(prompts)
    expected = torch.tensor([0.5, 1.0, 2.0]) * np.exp(0.125 * prompts.effect**2)
    return rows, means[..., :3].mean(0) if prompts.given else expected.expand(TRIALS, 3)


def share(prompts: Prompts) -> Trial:
    """Sets are given: the mean of their shares. They are drawn: the share of all prompts."""
    rows, means = flow_sums(prompts)
    three = means[..., :3]
    true = (three / three.sum(-1, keepdim=True)).mean(0)
    return rows, true if prompts.given else torch.tensor([1, 2, 4]).double().expand(TRIALS, 3) / 7


def attention(prompts: Prompts, distance: float) -> tuple[dict[str, Tensor], Tensor]:
    """Scores of two classes, and AUCROC: how far the predicted class moves the second's score."""
    sets = prompts.sets
    predicted = (prompts.uniform(len(sets)) < 0.5).long()
    if predicted.sum() in (0, len(sets)):
        predicted[0] = 1 - predicted[0]
    effects = prompts.effects(TRIALS)
    second = prompts.normal(len(sets), TRIALS) + distance * predicted[:, None] + effects[sets]
    spread = 1.0 if prompts.given else 1 + prompts.effect**2
    true = torch.full((TRIALS,), float(norm.cdf(distance / sqrt(2 * spread))))
    scores = torch.stack([torch.ones_like(second), second + 100], dim=-1)
    return {"attention": scores[:, :, None], "predicted": predicted}, true


def accuracies(prompts: Prompts) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Right or wrong by several methods, and how often each is right and what it gains."""
    chances = torch.tensor([0.5, 0.6, 0.8, 0.95]).repeat_interleave(TRIALS // 4)
    thresholds = torch.from_numpy(norm.ppf(chances.numpy()))
    effects = prompts.effects(len(chances))
    # What the methods share makes a prompt hard for all of them.
    hard = prompts.normal(len(prompts.sets), 1)
    noise = sqrt(0.5) * prompts.normal(len(prompts.sets), len(chances)) + sqrt(0.5) * hard
    correct = (noise < thresholds + effects[prompts.sets]).double()
    of_sets = torch.special.ndtr(thresholds + effects)
    weights = torch.tensor(prompts.sizes).double() / sum(prompts.sizes)
    drawn = torch.special.ndtr(thresholds / sqrt(1 + prompts.effect**2))
    true = weights @ of_sets if prompts.given else drawn
    return {"correct": correct}, true, true - true[0]


@cache
def clouds(classes: int, channels: int) -> tuple[Tensor, Tensor]:
    """Spread of the queries' channels, and keys of the classes."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.linspace(2, 0.1, channels).double() ** 2
    return spread, torch.randn(classes, channels, generator=generator, dtype=torch.double)


@cache
def true_distances(directions: int) -> Tensor:
    """Of the queries' own distribution: main directions are the channels of the largest spread."""
    spread, keys = clouds(CLASSES, 24)
    main = (keys * spread)[:, :directions]
    distances = torch.cdist(main, main)
    return distances / distances.max()


def distances(prompts: Prompts) -> dict[str, Tensor]:
    spread, keys = clouds(CLASSES, 24)
    n = len(prompts.sets)
    queries = prompts.normal(n, TRIALS, 24) * spread
    # Which class is right, and logits by which near classes are confused.
    gold = torch.arange(n) % CLASSES
    gold = gold[torch.randperm(n, generator=prompts.generator)]
    near = 3 * true_distances(10)
    logits = -(near[gold] ** 2) / 2 + prompts.normal(n, CLASSES)
    return {
        "queries": queries.float(),
        "keys": keys.float().expand(n, TRIALS, -1, -1),
        "positions": torch.arange(CLASSES).double().expand(n, -1),
        "label_logits": logits,
        "gold": gold,
    }


def auc_trial(distance: float) -> Callable[[Prompts], Trial]:
    return lambda prompts: attention(prompts, distance)


def accuracy_trial(prompts: Prompts) -> Trial:
    rows, true, _ = accuracies(prompts)
    return rows, true


def gain_trial(prompts: Prompts) -> Trial:
    rows, _, true = accuracies(prompts)
    return rows, true


def anchor_result(rows: Rows) -> Any:
    return al.AnchorDistances().result(rows)


def distance_trial(prompts: Prompts) -> Trial:
    return distances(prompts), true_distances(10).expand(TRIALS, -1, -1)


QUANTITIES: dict[str, tuple[Callable[[Prompts], Trial], Callable[[Rows], Any], str]] = {
    "mean, normal": (normal_mean, mean_result, "mean"),
    "mean, skewed": (skewed_mean, al.SaliencyFlows().result, "flows"),
    "share": (share, al.SaliencyFlows().result, "share"),
    "AUCROC 0.76": (auc_trial(1.0), al.AttentionAUCROC().result, "aucroc"),
    "AUCROC 0.92": (auc_trial(2.0), al.AttentionAUCROC().result, "aucroc"),
    "accuracy": (accuracy_trial, _comparison, "accuracy"),
    "gain": (gain_trial, _comparison, "gain"),
}


def before(result: Callable[[Rows], Any], rows: Rows, name: str, resamples: int) -> Tensor:
    """The interval of plain percentiles within sets; pooled only where every prompt has its own."""
    sets = rows["demonstrations_id"]
    if len(sets.unique()) == len(sets):
        sets = torch.zeros_like(sets)
    rows = {**rows, "demonstrations_id": sets}
    strata = [(sets == number).nonzero().flatten() for number in sets.unique()]
    drawn = []
    for _ in range(resamples):
        chosen = torch.cat([one[torch.randint(len(one), (len(one),))] for one in strata])
        drawn.append(getattr(result({k: v[chosen] for k, v in rows.items()}), name))
    ends = torch.tensor([0.025, 0.975], dtype=torch.double)
    return torch.stack(drawn).double().nanquantile(ends, dim=0)


def coverage(quantity: str, layout: str, repeats: int, resamples: int, old: bool) -> Tensor:
    """Share of the intervals that hold the true value, and their mean width."""
    trial, result, name = QUANTITIES[quantity]
    sizes, effect = LAYOUTS[layout]
    held, widths = [], []
    for seed in range(-(-repeats // TRIALS)):
        prompts = Prompts(sizes, effect, torch.Generator().manual_seed(seed))
        rows, true = trial(prompts)
        rows["demonstrations_id"] = prompts.sets
        if old:
            torch.manual_seed(seed)
            low, high = before(result, rows, name, resamples)
        else:
            made = with_intervals(result, rows, resamples=resamples, info={}, seed=seed)
            low, high = made.intervals[name]
        inside = ((low <= true + 1e-12) & (true <= high + 1e-12)).double()
        known = high.isfinite() & (true != 0 if name in ("gain", "anchor_distance") else True)
        held.append(inside[known])
        widths.append((high - low)[known])
    return torch.stack([torch.cat(held).mean(), torch.cat(widths).mean()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import warnings

    warnings.simplefilter("ignore")
    print("| " + " | ".join(["prompts", *QUANTITIES]) + " |")
    for layout in LAYOUTS:
        cells = [layout]
        for quantity in QUANTITIES:
            if args.only and args.only not in quantity:
                continue
            old, new = (
                coverage(quantity, layout, args.repeats, args.resamples, flag)
                for flag in (True, False)
            )
            cells.append(f"{old[0]:.2f} -> {new[0]:.2f} (w {old[1]:.2f} {new[1]:.2f})")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
