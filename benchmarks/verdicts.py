"""How often a verdict is wrong under the null of its claim: the table of docs/benchmarks.md.

    python benchmarks/verdicts.py --repeats 300

Rows of prompts are drawn such that the number of the claim is its limit but for chance. Results,
intervals and verdicts are those of the package.
"""

import argparse
import warnings

import torch

from anchorlens.report.claims import Verdict
from tests.references.nulls import NULLS, verdicts

DESIGNS = ((20, 1), (100, 1), (300, 1), (20, 3), (100, 3))  # queries of a set, and sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about few prompts, and about classes without prompts
    names = [f"{queries} queries" + f", {sets} sets" * (sets > 1) for queries, sets in DESIGNS]
    print(f"| claim | {' | '.join(names)} |")
    print("| --- " * (1 + len(DESIGNS)) + "|")
    for name in NULLS:
        cells = []
        for queries, sets in DESIGNS:
            found = [claim.verdict for claim in verdicts(name, queries, sets, repeats)]
            shares = (
                100 * found.count(verdict) / repeats
                for verdict in (Verdict.AGREES, Verdict.DOES_NOT_AGREE)
            )
            cells.append(" / ".join(f"{share:.1f}" for share in shares))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
