"""Signs of life of the processes that share a run: which have arrived, failed, ended or died.

A thread of each process writes its sign into the store by which accelerate connected the processes,
and reads the signs of the others. The main thread never waits for that store, because the server of
the store may have died too.
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

# Seconds between two signs, and between two readings while this process waits for another.
BEAT, POLL = 1.0, 0.01
# Seconds without a new sign, after which a process that gave signs before counts as dead.
SILENCE = 60.0
# The longest wait for the first sign of a process, in seconds.
PATIENCE = 30 * 60.0
AGAIN = "see its own output for the reason. Start all of them again"

T = TypeVar("T")


@dataclass(frozen=True)
class Sign:
    """What a process tells the others.

    Attributes:
        beats: A counter that goes up while the process lives.
        arrived: The number of the last exchange that it began.
        failed: The number of the exchange before which it failed; -1 if it did not fail.
        left: Whether its interpreter ended.
    """

    beats: int = 0
    arrived: int = -1
    failed: int = -1
    left: bool = False


class Heart:
    """The thread of one process, and the signs that it read of the others.

    Args:
        store: The ``torch.distributed`` store that holds the signs.
        rank: The number of this process.
        count: The number of processes.
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
        # The first sign comes before all else, so that the others notice a process that dies early.
        with self._changed:
            self._changed.wait_for(lambda: self._rounds or self._lost, timeout=SILENCE)

    def fail(self, exchange: int) -> None:
        """Tell the others that this process failed before an exchange."""
        self._tell(failed=exchange)

    def another_failed(self, exchange: int) -> bool:
        """Whether another process failed before an exchange."""
        self._require_store()
        return any(sign.failed == exchange for sign in self._peers.values())

    def arrive(self, exchange: int) -> None:
        """Announce this process at an exchange, and wait until all others have arrived.

        Raises:
            ProcessError: Another process died, ended, or never gave a sign.
        """
        self._tell(arrived=exchange)
        for waited, stuck in self._waits():
            missing = [peer for peer in self._silence if self._arrival(peer) < exchange]
            if not missing:
                return
            self._require_store()
            self._require_server(stuck)
            for peer in missing:
                self._require_arrival(peer, waited)
                self._require_beats(peer)

    def watch(self, work: Callable[[], T]) -> T:
        """Do ``work``, which may wait for the others, and stop waiting if another process dies.

        A process that ended has done its part of the work, so that this is no error.

        Raises:
            ProcessError: Another process, or the server of the store, gave no sign for too long.
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
        for _, stuck in self._waits():
            if outcome.done():
                break
            self._require_server(stuck)
            for peer in self._silence:
                self._require_beats(peer)
        return outcome.result()

    def stop(self) -> None:
        """Tell the others that this process ends, and end the thread."""
        self._tell(left=True)
        self.thread.join(timeout=2 * BEAT)  # it may wait for a dead server

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            self._sign = replace(self._sign, **changes)
            self._woken = True
            self._changed.notify_all()

    def _waits(self) -> Iterator[tuple[float, float]]:
        """After each round of the thread: seconds waited in all, and since its last round."""
        waited = stuck = 0.0
        self._waiting = True
        try:
            while True:
                yield waited, stuck
                with self._changed:
                    rounds, before = self._rounds, monotonic()
                    self._changed.wait(BEAT)
                    # Limited, because the time while a process is suspended is no waiting.
                    passed = min(monotonic() - before, 2 * BEAT)
                    waited += passed
                    stuck = 0.0 if self._rounds != rounds else stuck + passed
        finally:
            self._waiting = False

    def _arrival(self, peer: int) -> int:
        return self._peers.get(peer, Sign()).arrived

    def _require_arrival(self, peer: int, waited: float) -> None:
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
                "the connection to another process is lost: to process 0, or to the process that "
                f"started the others ({self._lost}); {AGAIN}"
            ) from self._lost

    def _beat(self) -> None:
        """The loop of the thread. Its own connection to the store may take long to make."""
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
        """Give a sign, and read the signs of the others."""
        self._give()
        known = [
            peer for peer in self._silence if peer in self._peers or self._store.check([_key(peer)])
        ]
        for peer, data in zip(known, self._read(known), strict=True):
            sign = Sign(**json.loads(data))
            unchanged = sign == self._peers.get(peer)
            self._silence[peer] = self._silence[peer] + passed if unchanged else 0.0
            self._peers[peer] = sign

    def _read(self, peers: list[int]) -> list[bytes]:
        keys = [_key(peer) for peer in peers]
        if keys and self._store.has_extended_api():  # one message to the server instead of many
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]


def _key(rank: int) -> str:
    return f"anchorlens/sign/{rank}"
