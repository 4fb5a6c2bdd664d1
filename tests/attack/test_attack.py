"""A small seeded part of the attack (benchmarks/attack.py) must find no fault."""

import signal
from typing import Any

import pytest
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
from attack_interrupts import random_interrupts
from attack_metrics import odd_metrics
from attack_prompts import fuzzed_prompts
from attack_report import payloads
from attack_stale import stale_results
from attempts import Section, attack, listing
from tiny_models import tiny_gpt2
from torch import Tensor

import anchorlens as al
from anchorlens.models import rotary
from anchorlens.prompts import build
from anchorlens.runs import fingerprint, study, trial
from anchorlens.runs.identity import Identity

pytestmark = pytest.mark.without_jaxtyping

SMALL: list[tuple[Section, int]] = [
    (fuzzed_prompts, 60),
    (bad_values, 25),
    (odd_metrics, 12),
    (damaged_rows, 10),
    (damaged_record, 10),
    (damaged_context, 10),
    (damaged_data, 10),
    (forged_files, 15),
    (odd_settings, 15),
    (random_configurations, 5),
    (payloads, 6),
    (stale_results, 25),
    (odd_lengths, 12),
    (odd_edges, 6),
    (odd_turns, 20),
]


@pytest.mark.parametrize(
    ("section", "count"), SMALL, ids=[section.__name__ for section, _ in SMALL]
)
def test_a_section_finds_no_fault(section: Section, count: int) -> None:
    tally = attack(section.__name__, section, range(count), seed=0)
    assert tally.tried == count
    assert not tally.faults, listing(tally, seed=0)


def test_the_attack_finds_label_words_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """This fault is put into the package, and the section must find it."""
    original = build._word

    def ends_early(*arguments: Any) -> tuple[int, int]:
        first, last = original(*arguments)
        return first, max(first, last - 1)

    monkeypatch.setattr(build, "_word", ends_early)
    tally = attack("fuzzed_prompts", fuzzed_prompts, range(20), seed=0)
    assert all("label segments" in text for _, text in tally.faults)
    assert len(tally.faults) > 3


@pytest.mark.parametrize(
    ("section", "count", "owners", "name", "instead"),
    [
        (stale_results, 20, [fingerprint, study], "identity_of", lambda *_: Identity("same", ())),
        (odd_lengths, 20, [rotary, trial], "rotate_alike", lambda *_: True),
        (odd_edges, 6, [Tensor], "nanmean", Tensor.mean),
        (odd_turns, 20, [al.ChatTask], "written_word", lambda *given: given[-1]),
    ],
)
def test_the_attack_finds_each_kind(
    section: Section,
    count: int,
    owners: list[Any],
    name: str,
    instead: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check of the package is switched off, and its section must find it."""
    for owner in owners:
        monkeypatch.setattr(owner, name, instead)
    tally = attack(section.__name__, section, range(count), seed=0)
    assert tally.faults and not any("Traceback" in text for _, text in tally.faults)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that signals")
@pytest.mark.filterwarnings("ignore")
def test_interrupts_leave_nothing(byte_level: Any) -> None:
    model = al.load_model(tiny_gpt2(len(byte_level), n_layer=2), tokenizer=byte_level)
    attempts = random_interrupts(model, count=20, seed=0)
    assert sum(attempts.counts.values()) == 20
    assert not attempts.left
