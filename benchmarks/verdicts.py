"""How often a verdict is wrong under the null of its claim: the tables of docs/benchmarks.md.

    python benchmarks/verdicts.py --repeats 300
    python benchmarks/verdicts.py --sets --repeats 300
    python benchmarks/verdicts.py --ratios --repeats 2000

Rows of prompts are drawn such that the number of the claim is its limit but for chance. Results,
intervals and verdicts are those of the package. Each cell has how many of 100 verdicts agree / do
not agree: at most 5 should.

With ``--sets`` sets are unequal, or their ratios differ much. A cell then begins with the share of
intervals that hold the limit, which should be 0.93 to 0.97, or more where one cannot tell.

With ``--ratios`` a ratio has other noise and other distributions over sets. A cell has the mean
of its values, where 2 is true, the two shares at the limit, and how many agree at twice the limit.
"""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

import anchorlens as al
from anchorlens.report.claims import Verdict
from tests.references.nulls import (
    NOISES,
    NULLS,
    RATIOS,
    SHARES,
    Null,
    drawn_ratios,
    estimated_ratios,
    isolation,
    normal,
    of_flows,
    sets_of,
    verdicts,
)

# The numbers of queries after each set of demonstrations.
DESIGNS = {
    **{f"{queries} queries": [queries] for queries in (20, 100, 300)},
    **{f"3 sets of {queries}": [queries] * 3 for queries in (20, 100)},
}
OF_SETS = {
    "10 and 90": [10, 90],
    "4 of 10, 1 of 200": [10] * 4 + [200],
    "5 of 20": [20] * 5,
    "10 of 20": [20] * 10,
}
OF_RATIOS = {
    **{f"{sets} of {size}": [size] * sets for sets in (5, 10, 20, 40) for size in (10, 20, 50)},
    "10 of 10, 1 of 300": [10] * 10 + [300],
    "10, 10 and 200": [10, 10, 200],
}


def print_ratios(repeats: int) -> None:
    for noise in NOISES:
        print(f"| {noise} | {' | '.join(RATIOS)} |")
        print("| --- " * (1 + len(RATIOS)) + "|")
        for name, sizes in OF_RATIOS.items():
            cells = []
            for ratios in RATIOS:
                drawn = drawn_ratios(noise, ratios, sizes, repeats)
                value, low, high = estimated_ratios(*drawn, sizes)
                shares = [100 * np.mean(each) for each in (low > 2, high < 2, 2 * low > 2)]
                cells.append("{:.2f}, {:.1f} / {:.1f}, {:.0f}".format(value.mean(), *shares))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def unlike_ratios(
    spread: float, is_mean: bool, sizes: Sequence[int], generator: torch.Generator
) -> al.Record:
    """S_pq / S_tq of sets whose logarithms have this standard deviation.

    The mean over all sets is the limit (``is_mean``), or their median is. Within a set prompts
    differ by a factor for all flows, so that the ratio of the set is known exactly.
    """
    sets, ids = len(sizes), sets_of(sizes)
    logs = spread * normal(generator, sets, 1) - is_mean * spread**2 / 2
    common = -torch.rand(len(ids), 1, 1, generator=generator).double().log()
    return of_flows(SHARES.expand(sets, -1, -1), 2 * logs.exp(), ids, common)


# Sets that differ much: of a mean of sets that are as different as that, little is known.
UNLIKE_SETS: Mapping[str, tuple[Null, int]] = {
    "predictions need label words, very unlike sets": (partial(isolation, spread=1.0), 0),
    **{
        f"the answer is read off: ratios of sets {spread} apart, {middle} at the limit": (
            partial(unlike_ratios, spread, middle == "mean"),
            1,
        )
        for middle in ("mean", "median")
        for spread in (0.2, 0.5, 0.8)
    },
}


def cell(name: str, sizes: Sequence[int], repeats: int, with_coverage: bool) -> str:
    claims = verdicts(*{**NULLS, **UNLIKE_SETS}[name], sizes, repeats)
    found = [claim.verdict for claim in claims]
    counts = [found.count(each) for each in (Verdict.AGREES, Verdict.DOES_NOT_AGREE)]
    text = " / ".join(f"{100 * count / repeats:.1f}" for count in counts)
    held = [claim.estimate.low <= claim.limit <= claim.estimate.high for claim in claims]
    return f"{sum(held) / repeats:.2f}, {text}" if with_coverage else text


def print_table(
    names: Sequence[str], designs: Mapping[str, Sequence[int]], repeats: int, with_coverage: bool
) -> None:
    print(f"| claim | {' | '.join(designs)} |")
    print("| --- " * (1 + len(designs)) + "|")
    for name in names:
        cells = [cell(name, sizes, repeats, with_coverage) for sizes in designs.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--sets", action="store_true", help="unequal and very unlike sets")
    parser.add_argument("--ratios", action="store_true", help="ratios with other noise")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about few prompts, and about classes without prompts
    if given.ratios:
        print_ratios(given.repeats)
    elif given.sets:
        print_table([*NULLS][:4], OF_SETS, given.repeats, with_coverage=True)
        print_table([*UNLIKE_SETS], OF_SETS, given.repeats, with_coverage=True)
        # An AUCROC takes seconds. The last claim is judged by a test over classes, not over sets.
        print_table([*NULLS][4:5], OF_SETS, given.repeats // 10, with_coverage=True)
    else:
        print_table([*NULLS], DESIGNS, given.repeats, with_coverage=False)


if __name__ == "__main__":
    main()
