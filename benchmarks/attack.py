"""Runs the package on random invalid inputs and damaged files, and counts right outcomes.

    python benchmarks/attack.py [--seed 0] [--prompts 3000] [--inputs 280] [--metrics 90]
        [--damages 80] [--configurations 60] [--payloads 40] [--stale 400] [--together 300]
        [--kills 20]
    python benchmarks/attack.py --seed 0 --repeat damaged_rows:17

Random prompts, bad inputs, misbehaving metrics, damaged files, configurations of models, html in
texts, changed code of the user, and prompts that differ from those beside them, each compared with
the expected outcome; then killed runs (kill_runs.py). Prints a table of attempts and outcomes, and
each fault with the command that repeats it. Exit status 1 for any fault.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.extend(
    str(Path(__file__).parents[1] / "tests" / name) for name in ("support", "attack", "references")
)
from attack_configurations import random_configurations
from attack_damages import (
    damaged_context,
    damaged_data,
    damaged_record,
    damaged_rows,
    forged_files,
    odd_settings,
)
from attack_every_prompt import odd_edges, odd_lengths, odd_turns
from attack_inputs import bad_values
from attack_metrics import odd_metrics
from attack_prompts import fuzzed_prompts
from attack_report import payloads
from attack_scene import scene
from attack_stale import stale_results
from attempts import Section, Tally, attack, listing, table
from kill_runs import METRICS, Trials, digest_of

import anchorlens as al

# Each section, with the option that sets its number of attempts.
SECTIONS: list[tuple[str, Section]] = [
    ("prompts", fuzzed_prompts),
    ("inputs", bad_values),
    ("metrics", odd_metrics),
    ("damages", damaged_rows),
    ("damages", damaged_record),
    ("damages", damaged_context),
    ("damages", damaged_data),
    ("damages", forged_files),
    ("damages", odd_settings),
    ("configurations", random_configurations),
    ("payloads", payloads),
    ("stale", stale_results),
    ("together", odd_lengths),
    ("together", odd_edges),
    ("together", odd_turns),
]
SIZES = {"prompts": 3000, "inputs": 280, "metrics": 90, "damages": 80, "configurations": 60}
SIZES |= {"payloads": 40, "stale": 400, "together": 300, "kills": 20}


def killed_runs(kills: int, seed: int) -> Tally:
    """Runs that are killed: half at random moments, half at a write, an fsync or a rename."""
    setup = scene()

    def work(folder: Path) -> str:
        options: dict[str, Any] = {"folder": folder, "resamples": 5, "progress": False}
        return digest_of(al.run(setup.model, setup.batches, METRICS, **options))

    tally = Tally("killed_runs")
    with tempfile.TemporaryDirectory() as root:
        trials = Trials(work, Path(root))
        equal, _ = trials.at_random(kills - kills // 2, seed)
        tally.endings["right"] += equal
        lost = kills - kills // 2 - equal
        tally.faults += [(number, "killed at a random moment") for number in range(lost)]
        count = trials.steps()
        for number in range(kills // 2):
            step = 1 + (seed + number * 7) % count
            if trials.at_step(step):
                tally.endings["right"] += 1
            else:
                tally.faults.append((step, "killed at this write, fsync or rename"))
    return tally


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads stop working in a fork
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")  # about intervals of few prompts
    by_name = {section.__name__: section for _, section in SECTIONS}
    if options.repeat is not None:
        name, _, number = options.repeat.partition(":")
        tallies = [attack(name, by_name[name], [int(number)], options.seed)]
    else:
        tallies = [
            attack(section.__name__, section, range(getattr(options, size)), options.seed)
            for size, section in SECTIONS
        ]
        if options.kills:
            tallies.append(killed_runs(options.kills, options.seed))
    print(table(tallies))
    print("".join(listing(tally, options.seed) for tally in tallies))
    return 1 if any(tally.faults for tally in tallies) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", metavar="SECTION:NUMBER", help="run only this attempt")
    for name, size in SIZES.items():
        parser.add_argument(
            f"--{name}", type=int, default=size, help=f"attempts, {size} by default"
        )
    sys.exit(main(parser.parse_args()))
