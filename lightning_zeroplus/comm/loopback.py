"""Virtual ranks: the threads of one process, for tests and for trying things out.

Numbers are those of real ranks: nothing is approximated, only the bytes do not leave the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import override

from lightning_zeroplus.comm.transport import Operation, Tag, Transport, Work, check_tags
from lightning_zeroplus.errors import CollectiveError

__all__ = ["LoopbackTransport", "run_virtual_ranks", "solo_transport"]

T = TypeVar("T")


class _Hub:
    """Where the threads meet: one table per channel and position."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.posts: dict[tuple[str, int], dict[int, Any]] = {}
        self.taken: dict[tuple[str, int], int] = {}
        self.stopped: dict[int, str] = {}

    def post(self, key: tuple[str, int], rank: int, payload: object) -> None:
        with self.changed:
            self.posts.setdefault(key, {})[rank] = payload
            self.changed.notify_all()

    def full(self, key: tuple[str, int]) -> bool:
        return len(self.posts.get(key, {})) == self.world_size

    def take(self, key: tuple[str, int], rank: int, tag: Tag) -> list[Any]:
        with self.changed:
            arrived = self.changed.wait_for(
                lambda: self.full(key) or bool(self._missing_stopped(key)), self.timeout_s
            )
            if not self.full(key):
                raise CollectiveError(self._absence(key, rank, tag, arrived))
            rows = self.posts[key]
            self.taken[key] = self.taken.get(key, 0) + 1
            if self.taken[key] == self.world_size:
                del self.posts[key], self.taken[key]
            return [rows[r] for r in range(self.world_size)]

    def _missing_stopped(self, key: tuple[str, int]) -> list[int]:
        return [r for r in self.stopped if r not in self.posts.get(key, {})]

    def absence_of(self, peer: int, rank: int, tag: Tag) -> str:
        """Return why ``rank`` waits no longer for ``peer``."""
        if peer in self.stopped:
            return (
                f"Expected rank {peer} to join {tag} (rank {rank}), but it {self.stopped[peer]}. "
                f"Run the same steps on every rank."
            )
        return (
            f"Expected rank {peer} to join {tag} (rank {rank}) within {self.timeout_s:g} s. "
            f"Run the same steps on every rank."
        )

    def _absence(self, key: tuple[str, int], rank: int, tag: Tag, arrived: bool) -> str:
        if arrived:
            return self.absence_of(self._missing_stopped(key)[0], rank, tag)
        absent = [r for r in range(self.world_size) if r not in self.posts.get(key, {})]
        return self.absence_of(absent[0], rank, tag)


class _Work:
    def __init__(self, finish: Callable[[], None], ready: Callable[[], bool]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._ready = ready

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        return self._finish is None or self._ready()


class LoopbackTransport(Transport):
    """One virtual rank of a hub."""

    preferred_bucket_nbytes = 16 << 20
    least_unit_nbytes = 4 << 20

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.world_size = hub.world_size
        self.sent_nbytes = 0
        self.labels: list[str] = []
        self._positions: dict[str, int] = {}

    @override
    def note(self, tag: Tag) -> None:
        """Have nothing to remember: the hub knows who is where. *Local.*"""

    @override
    def wait_for(self, tag: Tag, attempt: Callable[[float], bool], peer: int) -> None:
        deadline = time.monotonic() + self._hub.timeout_s
        while not attempt(min(0.1, self._hub.timeout_s)):
            if peer in self._hub.stopped or time.monotonic() > deadline:
                raise CollectiveError(self._hub.absence_of(peer, self.rank, tag))

    def _next(self, channel: str) -> tuple[str, int]:
        position = self._positions.get(channel, 0)
        self._positions[channel] = position + 1
        return channel, position

    def _meet(self, channel: str, payload: object, tag: Tag) -> list[Any]:
        key = self._next(channel)
        self._hub.post(key, self.rank, payload)
        return self._hub.take(key, self.rank, tag)

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        key = self._next("weights")
        self._hub.post(key, self.rank, (tag, shard.detach().clone()))
        self.sent_nbytes += (self.world_size - 1) * shard.numel() * shard.element_size()

        def finish() -> None:
            rows = self._hub.take(key, self.rank, tag)
            check_tags([row[0] for row in rows], tag, self.rank, self.labels)
            with torch.no_grad():
                torch.cat([row[1] for row in rows], out=out)

        return _Work(finish, lambda: self._hub.full(key))

    @override
    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_numels: Sequence[int],
        source_numels: Sequence[int],
        tag: Tag,
    ) -> Work:
        key = self._next("gradients")
        parts = torch.split(source.detach().clone(), list(source_numels))
        self._hub.post(key, self.rank, parts)
        mine = source_numels[self.rank]
        self.sent_nbytes += (sum(source_numels) - mine) * source.element_size()

        def finish() -> None:
            rows = self._hub.take(key, self.rank, tag)
            pieces = torch.split(out, list(out_numels))
            for piece, row in zip(pieces, rows, strict=True):
                if piece.numel() != row[self.rank].numel():
                    raise CollectiveError(f"Expected equal buckets on all ranks in {tag}.")
                piece.copy_(row[self.rank])

        return _Work(finish, lambda: self._hub.full(key))

    @override
    def exchange(self, payload: Sequence[float], tag: Tag) -> list[list[float]]:
        rows = self._meet("gradients", (tag, list(payload)), tag)
        self.sent_nbytes += (self.world_size - 1) * 8 * (len(payload) + 4)
        check_tags([_tag_of(row) for row in rows], tag, self.rank, self.labels)
        return [row[1] for row in rows]

    @override
    def exchange_bytes(self, payload: bytes, tag: Tag) -> list[bytes]:
        self.sent_nbytes += (self.world_size - 1) * len(payload)
        return list(self._meet("setup", payload, tag))

    @override
    def announce(self, tag: Tag) -> list[Tag]:
        return list(self._meet("weights", tag, tag))

    @override
    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        payload = tensor.detach().clone() if self.rank == source else None
        rows = self._meet("setup", payload, tag)
        if self.rank != source:
            with torch.no_grad():
                tensor.copy_(rows[source])
        else:
            self.sent_nbytes += (self.world_size - 1) * tensor.numel() * tensor.element_size()

    @override
    def collect(self, shard: torch.Tensor, destination: int, tag: Tag) -> list[torch.Tensor] | None:
        rows = self._meet("setup", shard.detach().clone(), tag)
        if self.rank != destination:
            self.sent_nbytes += shard.numel() * shard.element_size()
        return rows if self.rank == destination else None

    @override
    def fail(self, message: str) -> None:
        with self._hub.changed:
            self._hub.stopped.setdefault(self.rank, f"failed ({message})")
            self._hub.changed.notify_all()

    @override
    def close(self) -> None:
        with self._hub.changed:
            self._hub.stopped.setdefault(self.rank, "has finished")
            self._hub.changed.notify_all()


def _tag_of(row: object) -> Tag:
    if isinstance(row, tuple) and row and isinstance(row[0], Tag):
        return row[0]
    return Tag(-1, Operation.REDUCE, -1)


def solo_transport() -> LoopbackTransport:
    """Return the transport of a world of one rank."""
    return LoopbackTransport(_Hub(1, 60.0), 0)


def run_virtual_ranks(
    world_size: int, fn: Callable[[LoopbackTransport], T], *, timeout_s: float = 60.0
) -> list[T]:
    """Run ``fn(transport)`` on one thread per rank and return the results in rank order.

    The first rank that raises ends the others' waits; its exception is raised here.

    Raises:
        CollectiveError: a rank waited longer than ``timeout_s`` for a peer.
    """
    hub = _Hub(world_size, timeout_s)
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []

    def run(transport: LoopbackTransport) -> None:
        try:
            results[transport.rank] = fn(transport)
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            failures.append((transport.rank, error))
            transport.fail(f"{type(error).__name__}: {error}")
        else:
            transport.close()

    threads = [
        threading.Thread(target=run, args=(LoopbackTransport(hub, rank),), daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * 4)
        if thread.is_alive():
            raise CollectiveError(f"Expected virtual ranks to end within {timeout_s * 4:g} s.")
    if failures:
        raise failures[0][1]
    return [results[rank] for rank in range(world_size)]
