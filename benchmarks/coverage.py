"""How often a 95 % interval holds the true value: the table of docs/benchmarks.md.

    python benchmarks/coverage.py --repeats 500
    python benchmarks/coverage.py --unequal --repeats 500

Rows of prompts are drawn from distributions whose true values are known. The package's own results
and ``with_intervals`` are computed from them. Each layer or method is a trial, so one call makes
many trials. The first number of a cell is the coverage of plain percentiles within sets of
demonstrations, the second that of the package's intervals.

With ``--unequal`` given sets have different sizes, numbers and ratios. Their true value is the mean
over sets of the value of each. A cell has the share of the package's intervals that hold it, and
how many of 100 lie wholly above / below it.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtr
from scipy.stats import bootstrap
from torch import Tensor

import anchorlens as al
from anchorlens.metrics.distances import pair_auc, rank_correlation
from anchorlens.results.bootstrap import with_intervals
from anchorlens.results.population import population_of

Contributions = al.Contributions
Trial = tuple[dict[str, Tensor], Tensor]
TRIALS = 25  # independent trials in a call: layers, or methods
CLASSES = 6

# Sizes of the sets of demonstrations, and how much the sets differ.
LAYOUTS: dict[str, tuple[list[int], float]] = {
    **{f"one set of {n}": ([n], 0.0) for n in (5, 10, 20, 50, 200)},
    "20 sets of 1": ([1] * 20, 0.0),
    "20, of which two share a set": ([2] + [1] * 18, 0.0),
    "50, of which two share a set": ([2] + [1] * 48, 0.0),
    "sets of 20 and 2": ([20, 2], 0.0),
    "sets of 10 and 1": ([10, 1], 0.0),
    "3 unlike sets of 20": ([20] * 3, 1.0),
    "unlike sets of 100 and 10": ([100, 10], 1.0),
    "20 sets of 5": ([5] * 20, 0.0),
    "20 unlike sets of 5": ([5] * 20, 1.0),
}
UNEQUAL = {
    "sets of 10 and 90": [10, 90],
    "4 sets of 10, one of 200": [10] * 4 + [200],
    "5 sets of 20": [20] * 5,
}
FOR_CUTS = ("one set of 20", "one set of 50", "one set of 200", "3 unlike sets of 20")
FOR_DISTANCES = ("one set of 20", "one set of 50", "3 unlike sets of 20")


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanRecord(al.Record):
    """The mean over sets of each set's mean over prompts."""

    mean: Float[Tensor, " layer"] = al.kinds.mean("value")


@dataclass(frozen=True, eq=False, kw_only=True)
class CutRecord(al.Record):
    """What ``EdgeSweepRecord`` has, for many sites at once."""

    word_loyalty: Float[Tensor, " layer"] = al.kinds.mean("word_overlap", 0, 1)
    kl: Float[Tensor, " layer"] = al.kinds.mean("kl", 0)
    label_gap: Float[Tensor, " layer"] = al.kinds.difference(
        al.kinds.over_draws("random_label_kept"), "label_kept"
    )
    word_gap: Float[Tensor, " layer"] = al.kinds.mean(
        al.kinds.over_draws("random_word_overlap"), -1, 1, minus="word_overlap"
    )


@dataclass(frozen=True)
class Prompts:
    """Prompts of a layout: the set of each prompt, and how far each set is from the average."""

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
        """The random effect of each set, [set, ...]."""
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
    """The mean of the sets' shares if the sets are given, else the share of all prompts."""
    rows, means = flow_sums(prompts)
    three = means[..., :3]
    true = (three / three.sum(-1, keepdim=True)).mean(0)
    return rows, true if prompts.given else torch.tensor([1, 2, 4]).double().expand(TRIALS, 3) / 7


def attention(prompts: Prompts, distance: float) -> tuple[dict[str, Tensor], Tensor]:
    """Scores of two classes, and the AUCROC that follows from the distance of their means."""
    sets = prompts.sets
    predicted = (prompts.uniform(len(sets)) < 0.5).long()
    if predicted.sum() in (0, len(sets)):
        predicted[0] = 1 - predicted[0]
    effects = prompts.effects(TRIALS)
    second = prompts.normal(len(sets), TRIALS) + distance * predicted[:, None] + effects[sets]
    spread = 1.0 if prompts.given else 1 + prompts.effect**2
    true = torch.full((TRIALS,), float(ndtr(distance / sqrt(2 * spread))))
    scores = torch.stack([torch.ones_like(second), second + 100], dim=-1)
    certain = torch.nn.functional.one_hot(predicted, 2).double()
    rows = {"attention": scores[:, :, None], "probabilities": certain}
    return rows | {"rounding": torch.zeros(len(sets), 2)}, true


def answers(
    prompts: Prompts, chances: Sequence[float], common: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Right or wrong answers of each method and prompt, and each method's true accuracy.

    ``common`` is the part of the variance that makes a prompt hard for all methods.
    """
    sets, n_methods = prompts.sets, len(chances)
    limits = torch.special.ndtri(torch.tensor(chances, dtype=torch.double))
    effects = prompts.effects(n_methods)
    hard = prompts.normal(len(sets), 1)
    noise = sqrt(1 - common) * prompts.normal(len(sets), n_methods) + sqrt(common) * hard
    correct = (noise < limits + effects[sets]).double()
    given = torch.special.ndtr(limits + effects).mean(0)
    drawn = torch.special.ndtr(limits / sqrt(1 + prompts.effect**2))
    return {"correct": correct}, given if prompts.given else drawn


def accuracy_of(chance: float) -> Callable[[Prompts], Trial]:
    return lambda prompts: answers(prompts, [chance] * TRIALS, 0.0)


def gain_of(chances: Sequence[float], common: float) -> Callable[[Prompts], Trial]:
    def trial(prompts: Prompts) -> Trial:
        rows, true = answers(prompts, chances, common)
        return rows, true - true[0]

    return trial


@cache
def clouds(classes: int, channels: int) -> tuple[Tensor, Tensor]:
    """Standard deviation of each channel of the queries, and keys of the classes."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.linspace(2, 0.1, channels).double() ** 2
    return spread, torch.randn(classes, channels, generator=generator, dtype=torch.double)


@cache
def true_distances(directions: int) -> Tensor:
    """Distances for the distribution of queries; its main directions are the widest channels."""
    spread, keys = clouds(CLASSES, 24)
    main = (keys * spread)[:, :directions]
    distances = torch.cdist(main, main)
    return distances / distances.max()


def distances(prompts: Prompts, trials: int = TRIALS) -> dict[str, Tensor]:
    spread, keys = clouds(CLASSES, 24)
    n = len(prompts.sets)
    queries = prompts.normal(n, trials, 24) * spread
    # True classes, and logits that confuse near classes.
    gold = torch.arange(n) % CLASSES
    gold = gold[torch.randperm(n, generator=prompts.generator)]
    near = 1.5 * (true_distances(10) + true_distances(10).roll((2, 2), (0, 1)))
    logits = -(near[gold] ** 2) / 2 + prompts.normal(n, CLASSES)
    return {
        "queries": queries.float(),
        "keys": keys.float().expand(n, trials, -1, -1),
        "positions": torch.arange(CLASSES).double().expand(n, -1),
        "label_logits": logits,
        "gold": gold,
    }


def overlaps(latent: Tensor) -> Tensor:
    """Jaccard similarities of five words, from normal numbers: none to five in common."""
    common = (5 * torch.special.ndtr(latent)).round()
    return common / (10 - common)


def cut(prompts: Prompts) -> dict[str, Tensor]:
    """Words of prompts under a cut and under ten random draws, which differ."""
    n, draws = len(prompts.sets), 10
    hard = 0.5 * prompts.normal(n, TRIALS)
    cut_words = hard + 0.7 * prompts.normal(n, TRIALS) - 0.5
    of_draws = 0.25 * prompts.normal(draws, TRIALS)
    random = hard[:, None] + 0.7 * prompts.normal(n, draws, TRIALS) + of_draws + 0.5
    label, random_label = (
        (latent + 0.7 * prompts.normal(*latent.shape) > 0).double()
        for latent in (cut_words, random)
    )
    return {
        "word_overlap": overlaps(cut_words),
        "kl": -prompts.uniform(n, TRIALS).log() * (prompts.uniform(n, TRIALS) < 0.3),
        "label_kept": label,
        "random_word_overlap": overlaps(random),
        "random_label_kept": random_label,
    }


def nearly_all(share: float) -> Callable[[Prompts], Trial]:
    """All five words of most prompts, four of the others."""

    def trial(prompts: Prompts) -> Trial:
        rows = cut(prompts)
        other = prompts.uniform(len(prompts.sets), TRIALS) >= share
        rows["word_overlap"] = 1 - other.double() / 3
        return rows, torch.full((TRIALS,), 1 - (1 - share) / 3)

    return trial


@cache
def true_gaps() -> CutRecord:
    """The gaps of very many prompts, each with draws of its own."""
    one = Prompts([1], 0.0, torch.Generator().manual_seed(1))
    every = [{name: values.mean() for name, values in cut(one).items()} for _ in range(40000)]
    means = {name: torch.stack([each[name] for each in every]).mean() for name in every[0]}
    return CutRecord(
        word_loyalty=means["word_overlap"],
        kl=means["kl"],
        label_gap=means["random_label_kept"] - means["label_kept"],
        word_gap=means["random_word_overlap"] - means["word_overlap"],
    )


def cut_trial(name: str) -> Callable[[Prompts], Trial]:
    return lambda prompts: (cut(prompts), getattr(true_gaps(), name).expand(TRIALS))


def auc_of(distance: float) -> Callable[[Prompts], Trial]:
    return lambda prompts: attention(prompts, distance)


def distance_trial(prompts: Prompts) -> Trial:
    true = true_distances(10)
    return distances(prompts), true.expand(TRIALS, -1, -1)


@cache
def true_correlation() -> Tensor:
    """The correlation with very many prompts."""
    many = Prompts([20000], 0.0, torch.Generator().manual_seed(1))
    rows = distances(many, 1)
    confusion = pair_auc(rows["label_logits"], rows["gold"])
    upper = torch.ones(CLASSES, CLASSES).triu(1).bool()
    return rank_correlation(true_distances(10)[None, upper], confusion[upper])


def correlation_trial(prompts: Prompts) -> Trial:
    return distances(prompts), true_correlation().expand(TRIALS)


QUANTITIES: dict[str, tuple[Callable[[Prompts], Trial], Callable[[Contributions], Any], str]] = {
    "mean, normal": (normal_mean, MeanRecord.of, "mean"),
    "mean, skewed": (skewed_mean, al.SaliencyFlows().result, "flows"),
    "share": (share, al.SaliencyFlows().result, "share"),
    "AUCROC 0.76": (auc_of(1.0), al.AttentionAUCROC().result, "aucroc"),
    "AUCROC 0.92": (auc_of(2.0), al.AttentionAUCROC().result, "aucroc"),
    "accuracy 0.5": (accuracy_of(0.5), al.records.AccuracyComparisonRecord.of, "accuracy"),
    "accuracy 0.8": (accuracy_of(0.8), al.records.AccuracyComparisonRecord.of, "accuracy"),
    "accuracy 0.95": (accuracy_of(0.95), al.records.AccuracyComparisonRecord.of, "accuracy"),
    "gain 0.2": (gain_of((0.6, *[0.8] * 10), 0.5), al.records.AccuracyComparisonRecord.of, "gain"),
    "gain 0.05": (
        gain_of((0.9, *[0.95] * 10), 0.8),
        al.records.AccuracyComparisonRecord.of,
        "gain",
    ),
}
SLOW: dict[str, tuple[Callable[[Prompts], Trial], Callable[[Contributions], Any], str]] = {
    "anchor distance": (distance_trial, al.AnchorDistances().result, "anchor_distance"),
    "correlation": (correlation_trial, al.AnchorDistances().result, "correlation"),
}


OF_CUTS: dict[str, tuple[Callable[[Prompts], Trial], Callable[[Contributions], Any], str]] = {
    "label gap": (cut_trial("label_gap"), CutRecord.of, "label_gap"),
    "word gap": (cut_trial("word_gap"), CutRecord.of, "word_gap"),
    "word loyalty": (cut_trial("word_loyalty"), CutRecord.of, "word_loyalty"),
    "word loyalty 0.98": (nearly_all(0.95), CutRecord.of, "word_loyalty"),
    "word loyalty 0.997": (nearly_all(0.99), CutRecord.of, "word_loyalty"),
    "KL, 0 in 0.7": (cut_trial("kl"), CutRecord.of, "kl"),
}


def one_accuracy(chance: float) -> Callable[[Prompts], Trial]:
    """What ``Accuracy`` gets."""

    def trial(prompts: Prompts) -> Trial:
        rows, true = answers(prompts, [chance], 0.0)
        classes = torch.ones(len(prompts.sets), 1)
        return {"correct": rows["correct"][:, 0], "classes": classes}, true[0]

    return trial


def one_loyalty(name: str) -> Callable[[Prompts], Trial]:
    """What ``Loyalty`` gets; the numbers of a prompt are shares of words, and exponential."""

    def trial(prompts: Prompts) -> Trial:
        rows, true = answers(prompts, [0.8], 0.0)
        kept = rows["correct"][:, 0]
        means = (0.5 * prompts.effects()).exp()
        kl = -prompts.uniform(len(kept)).log() * means[prompts.sets]
        trues = {"label_loyalty": true[0], "word_loyalty": (1 + true[0]) / 2, "kl": means.mean()}
        return {"label_kept": kept, "word_overlap": (1 + kept) / 2, "kl": kl}, trues[name]

    return trial


def ratio_of_sets(prompts: Prompts) -> Trial:
    """S_pq / S_tq; the logarithms of the sets' ratios have the effect as standard deviation."""
    ratio = 2 * prompts.effects(TRIALS).exp()
    means = torch.ones(len(ratio), TRIALS, 4).double()
    means[..., 3] = 1 / ratio
    sums = -prompts.uniform(len(prompts.sets), TRIALS, 4).log() * means[prompts.sets]
    rows = {"sums": sums, "head_sums": sums[:, :, None], "counts": torch.ones(len(sums), 4)}
    return rows, ratio.mean(0)


# With how much the sets differ.
OF_UNEQUAL: dict[str, tuple[float, Callable[[Prompts], Trial], Callable[..., Any], str]] = {
    "accuracy 0.5": (1.0, one_accuracy(0.5), al.Accuracy().result, "accuracy"),
    "accuracy 0.8": (1.0, one_accuracy(0.8), al.Accuracy().result, "accuracy"),
    "accuracy 0.5, alike": (0.0, one_accuracy(0.5), al.Accuracy().result, "accuracy"),
    "gain 0.2": (
        1.0,
        gain_of((0.6, *[0.8] * 10), 0.5),
        al.records.AccuracyComparisonRecord.of,
        "gain",
    ),
    **{
        name.replace("_", " "): (1.0, one_loyalty(name), al.Loyalty().result, name)
        for name in ("label_loyalty", "word_loyalty", "kl")
    },
    "flows": (1.0, skewed_mean, al.SaliencyFlows().result, "flows"),
    **{
        f"S_pq / S_tq, {s} apart": (s, ratio_of_sets, al.SaliencyFlows().result, "pq_over_tq")
        for s in (0.2, 0.5, 0.8)
    },
    "label gap": (0.0, cut_trial("label_gap"), CutRecord.of, "label_gap"),
    "word gap": (0.0, cut_trial("word_gap"), CutRecord.of, "word_gap"),
}


def plain_interval(
    result: Callable[[Contributions], Any], rows: Contributions, name: str, resamples: int
) -> Tensor:
    """Plain percentiles within sets. Prompts are pooled only if each has a separate set."""
    sets = rows.sets
    if len(sets.unique()) == len(sets):
        sets = torch.zeros_like(sets)
    rows = Contributions(rows, sets)
    strata = [(sets == number).nonzero().flatten() for number in sets.unique()]
    drawn = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(resamples):
        chosen = torch.cat(
            [of[torch.randint(len(of), (len(of),), generator=generator)] for of in strata]
        )
        drawn.append(getattr(result(rows.prompts(chosen)), name))
    ends = torch.tensor([0.025, 0.975], dtype=torch.double)
    return torch.stack(drawn).double().nanquantile(ends, dim=0)


def coverage(
    quantity: str, layout: str, repeats: int, interval: Callable[..., Tensor], resamples: int
) -> float:
    """Share of the intervals that hold the true value, over at least ``repeats`` trials."""
    trial, result, name = (QUANTITIES | SLOW | OF_CUTS)[quantity]
    sizes, effect = LAYOUTS[layout]
    make = partial(interval, result, name=name, resamples=resamples)
    held, *_ = sides(trial, make, name, Prompts(sizes, effect, torch.Generator()), repeats)
    return held


def sides(
    trial: Callable[[Prompts], Trial],
    interval: Callable[[Contributions], Tensor],
    name: str,
    prompts: Prompts,
    repeats: int,
) -> list[float]:
    """Share of the intervals that hold the true value, that lie above it, and below it."""
    found: list[Tensor] = []
    while sum(of_call.shape[1] for of_call in found) < repeats:
        prompts.generator.manual_seed(len(found))
        rows, true = trial(prompts)
        low, high = interval(Contributions(rows, prompts.sets))
        # By definition, a gain over itself and a distance from itself are 0, and the largest is 1.
        trials = torch.ones_like(true).bool()
        if name in ("gain", "anchor_distance"):
            trials = (true != 0) & (true != 1)
        above, below = low > true + 1e-9, high < true - 1e-9
        # An interval of NaN does not hold it either.
        held = (low <= true + 1e-9) & (high >= true - 1e-9)
        found.append(torch.stack([held, above, below])[:, trials])
    shares: list[float] = torch.cat(found, dim=1).double().mean(1).tolist()
    return shares


def package_interval(
    result: Callable[[Contributions], Any], rows: Contributions, name: str, resamples: int
) -> Tensor:
    """The package's interval."""
    record = with_intervals(result, rows, sets=rows.sets, resamples=resamples, info={})
    return record.intervals[name]


def print_table(
    quantities: Sequence[str], layouts: Sequence[str], repeats: int, resamples: int
) -> None:
    print(f"| prompts | {' | '.join(quantities)} |")
    print("| --- " * (1 + len(quantities)) + "|")
    for layout in layouts:
        cells = []
        for quantity in quantities:
            plain, ours = (
                coverage(quantity, layout, repeats, f, resamples)
                for f in (plain_interval, package_interval)
            )
            cells.append(f"{plain:.2f} / {ours:.2f}")
        print(f"| {layout} | {' | '.join(cells)} |", flush=True)
    print()


def print_unequal(repeats: int, resamples: int) -> None:
    print(f"| prompts | {' | '.join(OF_UNEQUAL)} |")
    print("| --- " * (1 + len(OF_UNEQUAL)) + "|")
    for layout, sizes in UNEQUAL.items():
        cells = []
        for effect, trial, result, name in OF_UNEQUAL.values():
            interval = partial(package_interval, result, name=name, resamples=resamples)
            prompts = Prompts(sizes, effect, torch.Generator())
            held, above, below = sides(trial, interval, name, prompts, repeats)
            cells.append(f"{held:.2f}, {100 * above:.1f} / {100 * below:.1f}")
        print(f"| {layout} | {' | '.join(cells)} |", flush=True)
    print()


def studentised(values: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    """The bootstrap-t interval of a mean."""
    n, mean, error = len(values), values.mean(), values.std(ddof=1) / sqrt(len(values))
    drawn = generator.choice(values, (1000, n))
    errors = np.maximum(drawn.std(1, ddof=1) / sqrt(n), 1e-12)
    low, high = np.quantile((drawn.mean(1) - mean) / errors, [0.025, 0.975])
    return mean - high * error, mean - low * error


def print_methods(repeats: int) -> None:
    """Coverage and width of other intervals of a mean, 1,000 resamples each."""
    print("| mean of | percentile | expanded percentile | BCa | studentised |")
    print("| --- | --- | --- | --- | --- |")
    generator = np.random.default_rng(0)
    for kind, n in product(("normal", "skewed"), (5, 10, 20, 50)):
        draw = generator.normal if kind == "normal" else generator.exponential
        true = 0.0 if kind == "normal" else 1.0
        tail = population_of(torch.zeros(n)).tail
        ends = []
        for _ in range(repeats):
            values = draw(size=n)
            means = generator.choice(values, (1000, n)).mean(1)
            bca = bootstrap((values,), np.mean, n_resamples=1000, method="BCa", rng=generator)
            ends.append(
                [
                    np.quantile(means, [0.025, 0.975]),
                    np.quantile(means, [tail, 1 - tail]),
                    tuple(bca.confidence_interval),
                    studentised(values, generator),
                ]
            )
        low, high = np.moveaxis(np.array(ends), -1, 0)
        covered = ((low <= true) & (true <= high)).mean(0)
        cells = [
            f"{c:.2f}, {w:.2f}" for c, w in zip(covered, np.median(high - low, 0), strict=True)
        ]
        print(f"| {n}, {kind} | {' | '.join(cells)} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--cuts", action="store_true", help="the table of cuts alone")
    parser.add_argument("--unequal", action="store_true", help="the table of unequal sets alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about few prompts, and about classes without prompts
    if args.unequal:
        print_unequal(args.repeats, args.resamples)
        return
    print_table([*OF_CUTS], FOR_CUTS, args.repeats, args.resamples)
    if args.cuts:
        return
    print_methods(args.repeats)
    print_table([*QUANTITIES], [*LAYOUTS], args.repeats, args.resamples)
    print_table([*SLOW], FOR_DISTANCES, args.repeats // 5, args.resamples)


if __name__ == "__main__":
    main()
