"""Ctrl-C at every moment leaves Python and torch as they were.

Without types checked at run time: beartype makes code inside ``warnings.catch_warnings`` too.
"""

import contextlib
import gc
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import datasets
import gguf
import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from torch.autograd import grad_mode
from torch.utils import _device, checkpoint
from transformers import modeling_gguf_pytorch_utils as of_gguf
from transformers.utils import logging as of_transformers

from anchorlens.cli import output
from anchorlens.models import gguf_settings, quiet_libraries
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.system import hidden_warnings, put_back, signals, steps, torch_state
from anchorlens.system.put_back import each_call_inside, safe_context
from anchorlens.system.torch_state import own_random_state
from tests.support.interrupting import at_every_moment
from tests.support.unchanged import global_state

LOGGERS = [logging.getLogger(name) for name in (*quiet_libraries._NOISY, "datasets")]


def state_of_python() -> dict[str, Any]:
    """Everything but a model that the package changes for a while."""
    return global_state(with_python=False) | {
        "filters of warnings": list(warnings.filters),
        "how warnings are shown": [warnings.showwarning, vars(warnings)["_showwarnmsg_impl"]],
        "loggers": [(logger.level, *logger.handlers) for logger in LOGGERS],
        "bars": [
            of_transformers.is_progress_bar_enabled(),
            are_progress_bars_disabled(),
            datasets.are_progress_bars_disabled(),
            of_gguf.tqdm,
        ],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "streams": [sys.stdout, sys.stderr],
        "inference mode": torch.is_inference_mode_enabled(),
        "the default device and type of torch": (
            torch.get_default_device(),
            torch.get_default_dtype(),
        ),
        "the end of checkpoints": vars(checkpoint)["_enable_checkpoint_early_stop"],
        "the reader of .gguf files": gguf.GGUFReader,
        "the names in .gguf files": gguf.get_tensor_name_map,
        "the step that runs": steps._running.get(),
    }


@safe_context
def kept_while_changed() -> Iterator[None]:
    with hidden_warnings.warnings_kept(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@safe_context
def step_of_a_plan() -> Iterator[None]:
    with steps.planned({"first": 1.0}), steps.step("first"):
        yield


# Every function that changes something of Python or torch for a while, by its name, and what of
# other packages is interrupted with it; tests/models/test_interrupts.py has those of models.
CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], list[Any]]] = {
    "hidden_warnings": (hidden_warnings.hidden_warnings, [warnings]),
    "warnings_kept": (kept_while_changed, [warnings]),
    "recorded_warnings": (hidden_warnings.recorded_warnings, [warnings]),
    "quiet_libraries": (quiet_libraries.quiet_libraries, [warnings, of_transformers]),
    "warnings_of_transformers": (quiet_libraries.warnings_of_transformers, []),
    "quiet_datasets": (quiet_libraries.quiet_datasets, []),
    "parsed_once": (lambda: gguf_settings.parsed_once("a.gguf"), []),
    "signals_raise": (signals.signals_raise, [signal]),
    "lasting_streams": (output.lasting_streams, []),
    "gradient_mode": (lambda: torch_state.gradient_mode(True), [grad_mode]),
    "tensor_defaults": (lambda: torch_state.tensor_defaults("meta", torch.float64), [_device]),
    "checkpoints_run_to_the_end": (torch_state.checkpoints_run_to_the_end, [checkpoint]),
    "own_random_state": (lambda: own_random_state(seed=1), []),
    "planned": (lambda: steps.planned({"first": 1.0}), []),
    "step": (step_of_a_plan, []),
}
OURS = [
    *(put_back, contextlib, hidden_warnings, gguf_settings, quiet_libraries, signals, output),
    *(torch_state, steps),
]


# Two interrupts of the longest take seconds, and its parts are those of others; the shortest has
# too few moments.
TRIED = [(name, interrupts) for name in CONTEXTS for interrupts in (1, 2)]
for name in ("quiet_libraries", "gradient_mode"):
    TRIED.remove((name, 2))


@pytest.mark.slow_cases("a second interrupt", "quiet_libraries", "-2")
@pytest.mark.parametrize(("name", "interrupts"), TRIED)
def test_interrupts_at_every_moment_leave_python_as_it_was(name: str, interrupts: int) -> None:
    context_of, others = CONTEXTS[name]

    def change() -> None:
        with context_of():
            pass

    # As in many notebooks: then each change of the mode is seen.
    with torch.set_grad_enabled(False), contextlib.suppress(KeyboardInterrupt):
        before = state_of_python()
        with context_of():
            assert state_of_python() != before
        assert state_of_python() == before
        tried = 0
        for moments in at_every_moment([*OURS, *others], interrupts, change):
            tried += 1
            assert state_of_python() == before, moments
        gc.collect()  # what an error held open ends here
        assert tried > 1 and state_of_python() == before


def test_a_warning_is_seen_again_after_it_was_recorded() -> None:
    """Python stores at which lines a warning was shown; after recording it does not count."""

    def warn() -> None:
        warnings.warn("the same", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for interrupting in (False, True):
            with (
                contextlib.suppress(KeyboardInterrupt),
                hidden_warnings.recorded_warnings() as recorded,
            ):
                warn()
                if interrupting:
                    raise KeyboardInterrupt
            assert [str(each.message) for each in recorded] == ["the same"]
        with pytest.warns(UserWarning, match="the same"):
            warn()


def test_selected_warnings_are_hidden_and_others_are_seen() -> None:
    with (
        pytest.warns(UserWarning, match="another"),
        hidden_warnings.hidden_warnings("the first", UserWarning),
    ):
        warnings.warn("the first warning", stacklevel=1)
        warnings.warn("another", stacklevel=1)


def test_each_call_of_a_function_runs_inside_a_new_context() -> None:
    @each_call_inside(torch_state.gradient_mode, False)
    def records(value: int) -> tuple[int, bool]:
        return value, torch.is_grad_enabled()

    assert [records(1), records(value=2)] == [(1, False), (2, False)]
    assert torch.is_grad_enabled() and records.__name__ == "records"


def test_outside_of_the_inference_mode_of_a_caller_tensors_can_get_gradients() -> None:
    with torch.inference_mode():
        for records in (True, False):
            with torch_state.gradient_mode(records):
                made = torch.ones(1, device="cpu")
                assert torch.is_grad_enabled() == records and not made.is_inference()
            assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()


@pytest.mark.parametrize(
    "context_of", [hidden_warnings.warnings_kept, lambda: frozen_in_eval_mode(torch.nn.Identity())]
)
def test_warnings_are_as_before_though_another_library_was_interrupted(
    context_of: Callable[[], AbstractContextManager[Any]],
) -> None:
    before = state_of_python()
    with context_of():
        warnings.catch_warnings(record=True).__enter__()
        warnings.simplefilter("error")
        assert state_of_python() != before
    assert state_of_python() == before


def test_a_filter_that_a_library_adds_at_its_import_stays() -> None:
    with warnings.catch_warnings():
        with hidden_warnings.warnings_kept():
            warnings.filterwarnings("ignore", "of a library")
        assert warnings.filters[0][0] == "ignore"


@pytest.mark.parametrize("interrupts", [0, 1, 2])
def test_an_interrupted_restore_is_called_again(interrupts: int) -> None:
    calls: list[int] = []

    def restore() -> None:
        calls.append(len(calls))
        if len(calls) <= interrupts:
            raise KeyboardInterrupt

    try:
        with put_back.put_back(restore):
            assert not calls
    except KeyboardInterrupt:
        assert interrupts
    assert calls == list(range(interrupts + 1))


def test_a_context_gives_what_its_generator_yields_and_can_be_closed_before_its_end() -> None:
    steps: list[str] = []

    @safe_context
    def context(name: str) -> Iterator[str]:
        with put_back.put_back(lambda: steps.append(f"end of {name}")):
            yield f"inside {name}"

    with context("one") as value:
        steps.append(value)
    opened = context("two")
    with opened:
        opened.close()
        steps.append("closed")
    assert steps == ["inside one", "end of one", "end of two", "closed"]


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
