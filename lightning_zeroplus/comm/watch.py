"""Who is where: what each rank did last, published off the hot path, read only when a wait is slow.

A thread publishes this rank's last operation five times a second. A wait that takes longer than a
second reads what the peers published: one that has finished or failed is an error at once, a silent
one (slow dataloader, logger, checkpoint) gets one warning after 10 s and is an error after the
time-out.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from lightning_zeroplus.comm.transport import Tag
from lightning_zeroplus.errors import CollectiveError

__all__ = ["Store", "Watch"]

log = logging.getLogger(__name__)

_WARN_AFTER_S = 10.0
_BEAT_S = 0.2
"""Short, because launchers end the other ranks within about a second of a rank's death."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; the key exists."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""


class PeerState(NamedTuple):
    """What one rank published."""

    state: str
    last: str
    beat: int


class Watch:
    """Publishes this rank's last operation and explains waits for peers. *Local.*"""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self.current: Tag | None = None
        self._state = "running"
        self._beat = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.publish()  # at once: a peer that dies soon must be known to have been here
        interval = self._interval_s = max(0.05, min(_BEAT_S, timeout_s / 10))
        self._thread = threading.Thread(
            target=_beat, args=(weakref.ref(self), self._stop, interval), daemon=True
        )
        self._thread.start()
        # Also at the interpreter's exit, where a thread inside a store call would be cut off.
        weakref.finalize(self, self._stop.set)

    @property
    def is_on(self) -> bool:
        """Whether this rank neither failed nor finished."""
        return not self._stop.is_set()

    def publish(self, state: str | None = None) -> None:
        """Write this rank's state, and that it is alive."""
        with self._lock:
            if state is not None and self._state == "running":
                self._state = state
            self._beat += 1
            last = "nothing yet" if self.current is None else str(self.current)
            self._store.set(f"rank{self._rank}", json.dumps([self._state, last, self._beat]))

    def stop(self, state: str) -> None:
        """Publish a last state and end the thread."""
        try:
            self.publish(state)
        except RuntimeError as error:
            # The store lives in rank 0's process, which may be gone by now.
            log.debug("could not publish %r: %s", state, error)
        self._stop.set()

    def peers(self) -> dict[int, PeerState]:
        """Return what each peer published last."""
        found: dict[int, PeerState] = {}
        for rank in range(self._world_size):
            key = f"rank{rank}"
            if rank != self._rank and self._store.check([key]):
                found[rank] = PeerState(*json.loads(self._store.get(key)))
        return found

    def who_is_gone(self) -> str:
        """Return which peers have ended or no longer publish, in up to half a second. *Local.*"""
        try:
            before = self.peers()
            ended = {r: p.state for r, p in before.items() if p.state != "running"}
            if not ended and self._world_size == 2:
                ended = dict.fromkeys(before, "no longer answers")
            elif not ended:
                time.sleep(2.5 * self._interval_s)
                after = self.peers()
                silent = [r for r, p in after.items() if r in before and p.beat == before[r].beat]
                ended = dict.fromkeys(silent, "no longer answers")
                ended |= {r: p.state for r, p in after.items() if p.state != "running"}
        except RuntimeError:
            return "rank 0, which keeps the store, is gone"
        names = [f"rank {r} {state} (at {before[r].last})" for r, state in sorted(ended.items())]
        return ", ".join(names) or "a peer closed its connection"

    def wait(self, tag: Tag, attempt: Callable[[float], bool], peer: int | None = None) -> None:
        """Repeat ``attempt(seconds)`` until it returns True; None: all peers are waited for.

        Raises:
            CollectiveError: a peer finished or failed, or ``timeout`` passed.
        """
        started = time.monotonic()
        warned = False
        step = min(1.0, self._timeout_s / 5)
        while not attempt(step):
            waited = time.monotonic() - started
            self._raise_if_gone(tag, peer)
            if waited >= self._timeout_s:
                message = self._absence(tag, waited)
                raise CollectiveError(message)
            if waited >= _WARN_AFTER_S and not warned:
                warned = True
                log.warning("%s", self._absence(tag, waited))

    def _raise_if_gone(self, tag: Tag, peer: int | None) -> None:
        for rank, found in self._read_peers().items():
            if found.state != "running" and peer in (None, rank):
                raise CollectiveError(
                    f"Expected rank {rank} to join {tag} (rank {self._rank}), but it "
                    f"{found.state}; its last engine operation was {found.last}. "
                    f"Run the same steps on every rank."
                )

    def _absence(self, tag: Tag, waited_s: float) -> str:
        lasts = ", ".join(
            f"rank {rank}: {peer.last}" for rank, peer in sorted(self._read_peers().items())
        )
        return (
            f"Expected all ranks to join {tag} (rank {self._rank}), still waiting after "
            f"{waited_s:.0f} s; last engine operations of the others: {lasts or 'unknown'}. "
            f"Run the same modules and touch the same parameters on every rank."
        )

    def _read_peers(self) -> dict[int, PeerState]:
        try:
            return self.peers()
        except RuntimeError as error:
            raise CollectiveError(
                f"Expected the store of rank 0 to answer (rank {self._rank}), got {error}. "
                f"Rank 0 has probably ended."
            ) from error


def _beat(ref: weakref.ref[Watch], stop: threading.Event, interval_s: float) -> None:
    while not stop.wait(interval_s):
        watch = ref()
        if watch is None:
            return
        try:
            watch.publish()
        except RuntimeError as error:
            log.debug("could not publish: %s", error)
            return
        del watch
