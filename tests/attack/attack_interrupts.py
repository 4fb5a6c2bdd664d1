"""Interrupts calls of the package at random moments, and sees what they leave on the model.

Every attempt starts a timer whose signal raises KeyboardInterrupt, as Ctrl-C does; two of five
attempts are interrupted twice. Then hooks, modes, forwards, patterns and global state must be those
of before, and the logits equal bit for bit.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

import anchorlens as al
from anchorlens.passes.forward import run_pass
from anchorlens.passes.fused_attention import run_fused
from tests.support.tiny_models import questions
from tests.support.unchanged import everything_of

QUIET: dict[str, Any] = {"progress": False}


def calls_of(model: Any) -> dict[str, Callable[[], Any]]:
    """What is interrupted: each way in which the package changes a model for a while."""
    batches = questions(model, count=4, batch_size=4)
    halve = [("blocks.0.hook_resid_post", lambda resid, hook: resid * 0.5)]
    run: dict[str, Any] = {"resamples": 0, **QUIET}

    def fused() -> None:
        run_fused(run_pass, model, batches[0].to(model.cfg.device))

    return {
        "own hooks": lambda: al.target_logits(model, batches, hooks=lambda batch: halve, **QUIET),
        "isolated": lambda: al.target_logits(
            model, batches, hooks=lambda batch: al.isolate_labels(model, batch, 0), **QUIET
        ),
        "saliency": lambda: al.saliency(model, batches[0]),
        "run": lambda: al.run(model, batches, [al.SaliencyFlows()], **run),
        "checkpoints": lambda: al.run(
            model, batches, [al.SaliencyFlows()], gradient_checkpointing=True, **run
        ),
        "integrated": lambda: al.run(model, batches, [al.IntegratedFlows(steps=1)], **run),
        "sweep": lambda: al.run(
            model,
            batches,
            [al.Accuracy(), al.EdgeSweep.isolation(al.sites.windows(model, 1), draws=1)],
            **run,
        ),
        "fused": fused,
        "prepare": lambda: al.prepare_model(model),
    }


@contextmanager
def interrupted_after(seconds: float, again: float | None) -> Iterator[None]:
    """Raise KeyboardInterrupt inside after some seconds, and after some more a second time."""
    delays = [] if again is None else [again]

    def interrupt(number: int, frame: Any) -> None:
        if delays:
            signal.setitimer(signal.ITIMER_REAL, delays.pop())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        with suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def left_by_interrupts(model: Any, count: int, seed: int) -> list[str]:
    """Interrupt ``count`` calls at random moments: the first fault, if there is one."""
    chosen, calls, seconds = random.Random(seed), calls_of(model), dict[str, float]()
    batches = questions(model, count=4, batch_size=4)
    for name, call in calls.items():
        call()  # a model gets hooks of libraries in its first passes
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    logits, before = al.target_logits(model, batches, **QUIET), everything_of(model)
    interrupted = 0
    while interrupted < count:
        name = chosen.choice(list(calls))
        again = chosen.uniform(1e-5, 1e-3) if chosen.random() < 0.4 else None
        try:
            with interrupted_after(chosen.uniform(0, seconds[name]) + 1e-6, again):
                calls[name]()
        except KeyboardInterrupt:
            interrupted += 1
            after = everything_of(model)
            if changed := [key for key in after if after[key] != before[key]]:
                return [f"{name}: {changed[:3]}"]
            if not torch.equal(al.target_logits(model, batches, **QUIET), logits):
                return [f"{name}: other logits"]
    return []
