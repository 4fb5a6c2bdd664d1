"""What was changed is put back, wherever interrupts come."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anchorlens.system import put_back as module
from anchorlens.system.put_back import put_back, safe_context
from anchorlens.system.torch_state import own_random_state
from tests.support.interrupting import at_every_moment


@pytest.mark.parametrize("interrupts", [0, 1, 2])
def test_an_interrupted_restore_is_called_again(interrupts: int) -> None:
    calls: list[int] = []

    def restore() -> None:
        calls.append(len(calls))
        if len(calls) <= interrupts:
            raise KeyboardInterrupt

    try:
        with put_back(restore):
            assert not calls
    except KeyboardInterrupt:
        assert interrupts
    assert calls == list(range(interrupts + 1))


def test_a_context_gives_what_its_generator_yields_and_can_be_closed_before_its_end() -> None:
    steps: list[str] = []

    @safe_context
    def context(name: str) -> Iterator[str]:
        with put_back(lambda: steps.append(f"end of {name}")):
            yield f"inside {name}"

    with context("one") as value:
        steps.append(value)
    opened = context("two")
    with opened:
        opened.close()
        steps.append("closed")
    assert steps == ["inside one", "end of one", "end of two", "closed"]


@pytest.mark.parametrize(
    ("decorator", "interrupts"),
    [(safe_context, 1), (safe_context, 2), (contextlib.contextmanager, 1)],
)
def test_interrupts_at_every_moment_leave_something_only_in_contextlib(
    decorator: Callable[..., Any], interrupts: int
) -> None:
    """There it is an interrupt at the start of ``__exit__``."""
    settings: list[str] = []

    @decorator
    def changed() -> Iterator[None]:
        with put_back(settings.clear):
            settings.append("changed")
            yield

    def change() -> None:
        with changed():
            settings.append("inside")

    left = []
    for moment in at_every_moment([module, contextlib], interrupts, change):
        left += [moment] if settings else []
        settings.clear()
    assert bool(left) == (decorator is contextlib.contextmanager)


def test_the_random_state_of_every_device_of_a_kind_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = ["of the first", "of the second"]
    kind = SimpleNamespace(
        device_count=lambda: len(states),
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, number: states.__setitem__(number, state),
        manual_seed_all=lambda seed: states.__setitem__(slice(None), [seed, seed]),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: kind)
    of_cpu = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt), own_random_state([torch.device("cuda:1")], seed=7):
        assert states == [7, 7]
        torch.rand(1)
        raise KeyboardInterrupt
    assert states == ["of the first", "of the second"]
    assert torch.equal(torch.get_rng_state(), of_cpu)
