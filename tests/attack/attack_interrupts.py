"""Interrupts calls of the package at random moments, and sees what they leave on the model.

Every attempt starts a timer whose signal raises KeyboardInterrupt, as Ctrl-C does; two of five
attempts are interrupted twice. Then hooks, modes, forwards, patterns and global state must be those
of before, and the logits equal bit for bit.
"""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

import anchorlens as al
from anchorlens.passes.forward import run_pass
from anchorlens.passes.fused_attention import run_fused
from tests.attack.attack_inputs import right
from tests.support.catalogue import ALL
from tests.support.unchanged import changed, everything_of

# Calls of the catalogue that change a model for a while, each in another way.
CHANGING = ["isolate_labels", "scale_edges", "maps", "isolated", "checkpoints of whole prompts"]
CHANGING += ["integrated", "sweep of windows"]


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


def left_by_interrupts(count: int, seed: int) -> list[str]:
    """Interrupt ``count`` calls at random moments: the first fault, if there is one."""
    chosen, scene, seconds = random.Random(seed), right(), dict[str, float]()
    model, batch = scene.model, scene.batch
    calls = {name: partial(ALL[name], scene) for name in CHANGING}
    calls |= {"prepare": partial(al.prepare_model, model)}
    calls |= {"fused": partial(run_fused, run_pass, model, batch)}
    for name, call in calls.items():
        call()  # a model gets hooks of libraries in its first passes
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    logits, before = al.target_logits(model, [batch], progress=False), everything_of(model)
    interrupted = 0
    while interrupted < count:
        name = chosen.choice(list(calls))
        again = chosen.uniform(1e-5, 1e-3) if chosen.random() < 0.4 else None
        try:
            with interrupted_after(chosen.uniform(0, seconds[name]) + 1e-6, again):
                calls[name]()
        except KeyboardInterrupt:
            interrupted += 1
            if changes := changed(before, everything_of(model)):
                return [f"{name}: {changes[:3]}"]
            if not torch.equal(al.target_logits(model, [batch], progress=False), logits):
                return [f"{name}: other logits"]
        else:
            before = everything_of(model)  # prepared anew, where that was the call
    return []
