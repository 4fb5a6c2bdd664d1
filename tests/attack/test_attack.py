"""Random and wrong inputs: each gives the right numbers, or an error with a reason.

Hypothesis draws the inputs, and makes one that fails smaller. For other and more inputs:

    pytest tests/attack -m '' --hypothesis-profile=attack --hypothesis-seed=1
"""

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import anchorlens as al
from anchorlens.models import rotary
from anchorlens.prompts import batch as prompt_batch
from anchorlens.prompts.label_positions import WrittenPrompt
from anchorlens.runs import identity, study, way
from anchorlens.runs.by_value import Identity
from tests.attack.attack_configurations import random_configurations
from tests.attack.attack_every_prompt import odd_edges, odd_lengths, odd_turns
from tests.attack.attack_inputs import check_extreme_values, wrong_values
from tests.attack.attack_interrupts import left_by_interrupts
from tests.attack.attack_prompts import fuzzed_prompts
from tests.attack.attack_stale import stale_results

pytestmark = pytest.mark.filterwarnings("ignore")

Section = Callable[[random.Random], None]

settings.register_profile("attack", max_examples=3000, derandomize=False)
SMALL: list[tuple[Section, int]] = [
    (fuzzed_prompts, 30),
    (random_configurations, 3),
    (stale_results, 12),
    (odd_lengths, 6),
    (odd_edges, 3),
    (odd_turns, 10),
    (wrong_values, 40),
]


def is_long() -> bool:
    return settings().max_examples == 3000


def attack(section: Section, count: int, **options: Any) -> None:
    """Give the section random numbers ``count`` times, or 100 times as often."""
    drawn = settings(
        max_examples=count * 100 if is_long() else count,
        derandomize=not is_long(),
        deadline=None,
        database=None,
        **options,
    )
    drawn(given(st.randoms(use_true_random=False))(section))()


@pytest.mark.quick_cases("many passes", "fuzzed_prompts", "odd_turns")
@pytest.mark.parametrize(("section", "count"), SMALL)
def test_a_section_finds_no_fault(section: Section, count: int) -> None:
    attack(section, count)


@pytest.mark.quick_cases("many passes", "fuzzed_prompts-20", "60")
@pytest.mark.parametrize(
    ("section", "count", "owners", "name", "instead"),
    [
        (stale_results, 40, [identity, study], "identity_of", lambda *_: Identity("same", ())),
        (odd_lengths, 50, [rotary, way], "rotate_alike", lambda *_: True),
        (odd_edges, 6, [Tensor], "nanmean", Tensor.mean),
        (odd_turns, 60, [al.ChatTask], "written_word", lambda *given: given[-1]),
        (fuzzed_prompts, 20, [WrittenPrompt], "words", lambda *given: ends_early(*given)),
        (wrong_values, 40, [prompt_batch], "_check_axes", lambda values: None),
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
    with pytest.raises(AssertionError):
        attack(section, count, phases=[Phase.generate], report_multiple_bugs=False)


def ends_early(*given: Any, find: Any = WrittenPrompt.words) -> list[tuple[int, int, int]]:
    return [(first, max(first, last - 1), label) for first, last, label in find(*given)]


@pytest.mark.release("attacks for long")
def test_no_extreme_value_ends_in_another_error() -> None:
    check_extreme_values()


@pytest.mark.release("attacks for long")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that signals")
def test_interrupts_leave_nothing() -> None:
    assert not left_by_interrupts(2000 if is_long() else 20, seed=0)
