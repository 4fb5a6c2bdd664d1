"""Signs of life of the processes that share a run: who is there, who died, who waits.

A thread of each process writes into the store that accelerate's processes met in, and reads what
the others wrote. The main thread never waits for that store, whose server may have died too.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from threading import Condition, Thread
from time import monotonic
from typing import Any, TypeVar

from ..errors import ProcessError

# Seconds between two signs, and between two readings where this process waits for another.
BEAT, POLL = 1.0, 0.01
# Seconds without a sign, after which a process that gave some is taken for dead.
SILENCE = 60.0
# Seconds at most for the first sign of a process that never gave one.
PATIENCE = 30 * 60.0
AGAIN = "its own output says why. Start all of them again"

T = TypeVar("T")


@dataclass(frozen=True)
class Sign:
    """What a process tells the others.

    Attributes:
        beats: A counter that goes up while the process lives.
        arrived: The number of the last exchange that it began.
        failed: The number of the exchange before which it failed; -1 where it did not.
        left: Whether its interpreter ended.
    """

    beats: int = 0
    arrived: int = -1
    failed: int = -1
    left: bool = False


class Heart:
    """The thread of one process, and what it knows of the others.

    Args:
        store: Where the signs are; a ``torch.distributed`` store.
        rank: Number of this process.
        count: Number of all.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        # The time-out that the user gave to accelerate's state.
        self.patience = min(store.timeout.total_seconds(), PATIENCE)
        self._store = store
        self._rank, self._count = rank, count
        self._sign = Sign()
        self._peers: dict[int, Sign] = {}
        self._silence = {peer: 0.0 for peer in range(count) if peer != rank}
        self._lost: RuntimeError | None = None
        self._rounds = 0
        self._woken = self._waiting = False
        self._changed = Condition()
        self.thread = Thread(target=self._beat, daemon=True, name="anchorlens heart")
        self.thread.start()
        # The first sign is given before anything else, so that the others know of a process that
        # dies at once.
        with self._changed:
            self._changed.wait_for(lambda: self._rounds or self._lost, timeout=SILENCE)

    def fail(self, exchange: int) -> None:
        """Tell the others that this process failed before an exchange."""
        self._tell(failed=exchange)

    def someone_failed(self, exchange: int) -> bool:
        """Whether another process failed before an exchange."""
        self._require_store()
        return any(sign.failed == exchange for sign in self._peers.values())

    def arrive(self, exchange: int) -> None:
        """Announce this process at an exchange, and wait until all others are there.

        Raises:
            ProcessError: One of them died, ended, or was never heard of.
        """
        self._tell(arrived=exchange)
        for waited, stuck in self._turns():
            missing = [peer for peer in self._silence if self._arrival(peer) < exchange]
            if not missing:
                return
            self._require_store()
            self._require_server(stuck)
            for peer in missing:
                self._require_called(peer, waited)
                self._require_beats(peer)

    def watch(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, while all others live; it may wait for them.

        One that ended has done its share of the work, so that this is no error.

        Raises:
            ProcessError: One of them, or the server of the store, was silent for too long.
        """
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        Thread(target=run, daemon=True, name="anchorlens exchange").start()
        for _, stuck in self._turns():
            if outcome.done():
                break
            self._require_server(stuck)
            for peer in self._silence:
                self._require_beats(peer)
        return outcome.result()

    def stop(self) -> None:
        """End the thread; the others are told."""
        self._tell(left=True)
        self.thread.join(timeout=2 * BEAT)  # it may wait for a server that is dead

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            self._sign = replace(self._sign, **changes)
            self._woken = True
            self._changed.notify_all()

    def _turns(self) -> Iterator[tuple[float, float]]:
        """After each turn of the thread: seconds waited in all, and since its last turn."""
        waited = stuck = 0.0
        self._waiting = True
        try:
            while True:
                yield waited, stuck
                with self._changed:
                    rounds, before = self._rounds, monotonic()
                    self._changed.wait(BEAT)
                    # A process that was stopped for a night has not waited all night.
                    passed = min(monotonic() - before, 2 * BEAT)
                    waited += passed
                    stuck = 0.0 if self._rounds != rounds else stuck + passed
        finally:
            self._waiting = False

    def _arrival(self, peer: int) -> int:
        return self._peers.get(peer, Sign()).arrived

    def _require_called(self, peer: int, waited: float) -> None:
        if peer not in self._peers and waited > self.patience:
            raise ProcessError(
                f"process {peer} of {self._count} did not call anchorlens within "
                f"{self.patience:.0f} s (accelerate's own time-out, half an hour at most), "
                f"so that it died or does something else; {AGAIN}"
            )
        if peer in self._peers and self._peers[peer].left:
            raise ProcessError(
                f"process {peer} of {self._count} ended before it did what the others do; {AGAIN}"
            )

    def _require_beats(self, peer: int) -> None:
        if peer in self._peers and self._silence[peer] > SILENCE:
            raise ProcessError(
                f"process {peer} of {self._count} gave no sign of life for {SILENCE:.0f} s: it "
                f"died or was stopped; {AGAIN}"
            )

    def _require_server(self, stuck: float) -> None:
        if stuck > SILENCE:
            raise ProcessError(
                f"the process that started the others, or process 0, does not answer; {AGAIN}"
            )

    def _require_store(self) -> None:
        if self._lost is not None:
            raise ProcessError(
                "the connection to another process is lost, to that which started the others or to "
                f"process 0 ({self._lost}); {AGAIN}"
            ) from self._lost

    def _beat(self) -> None:
        """What the thread does, with a connection of its own, which may take long to make."""
        if hasattr(self._store, "clone"):
            try:
                self._store = self._store.clone()
            except RuntimeError as error:
                self._lost = error
                return
        last = monotonic()
        while not self._sign.left:
            with self._changed:
                self._woken = False
            now = monotonic()
            try:
                self._round(min(now - last, 2 * BEAT))
            except RuntimeError as error:
                self._lost = error
            last = now
            with self._changed:
                self._rounds += 1
                self._changed.notify_all()
                if self._lost is not None:
                    return
                self._changed.wait_for(lambda: self._woken, POLL if self._waiting else BEAT)
        with suppress(RuntimeError):  # the server may be gone
            self._give()

    def _give(self) -> None:
        with self._changed:
            self._sign = replace(self._sign, beats=self._sign.beats + 1)
            text = json.dumps(asdict(self._sign))
        self._store.set(_key(self._rank), text)

    def _round(self, passed: float) -> None:
        """Give a sign, and read those of the others."""
        self._give()
        there = [p for p in self._silence if p in self._peers or self._store.check([_key(p)])]
        for peer, data in zip(there, self._read(there), strict=True):
            sign = Sign(**json.loads(data))
            same = sign == self._peers.get(peer)
            self._silence[peer] = self._silence[peer] + passed if same else 0.0
            self._peers[peer] = sign

    def _read(self, peers: list[int]) -> list[bytes]:
        keys = [_key(peer) for peer in peers]
        if keys and self._store.has_extended_api():  # one message to the server instead of many
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]


def _key(rank: int) -> str:
    return f"anchorlens/sign/{rank}"
