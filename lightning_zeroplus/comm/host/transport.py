"""The transport of CPU ranks that share one host.

Gathers of registered weights and reductions of host buckets read peers' memory; small exchanges go
over the boards. Whatever else there is goes over the transport beneath, after tags were compared
on the boards, so that ranks which diverge are named at once there too.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from typing_extensions import override

from lightning_zeroplus.comm.host import futex
from lightning_zeroplus.comm.host.board import MOST_FLOATS, Board, Channel, Posted, new_board
from lightning_zeroplus.comm.host.memory import HostFile, Mapping, Place
from lightning_zeroplus.comm.transport import Operation, Tag, Transport, Work

__all__ = ["HostTransport", "over_host"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class HostTransport(Transport):
    """Ranks that read each other's memory.

    Args:
        beneath: joins the same ranks; carries what is not in shared memory.
        board: this rank's, joined with its peers'.
        pids: of all ranks.
        file: in which ``board`` lies, kept open.
    """

    def __init__(
        self, beneath: Transport, board: Board, pids: Sequence[int], file: HostFile
    ) -> None:
        self.rank = beneath.rank
        self.world_size = beneath.world_size
        self.preferred_bucket_nbytes = beneath.preferred_bucket_nbytes
        self.least_unit_nbytes = beneath.least_unit_nbytes
        self.sent_nbytes = 0
        self.beneath = beneath
        self.board = board
        self.pids = tuple(pids)
        self._file = file
        self._readers: list[Callable[[], None]] = []
        board.patience = beneath.wait_for
        board.labels = lambda: self.labels
        board.on_slow_wait = self._read_what_is_there

    @property
    def labels(self) -> list[str]:
        """Names of units by number, for messages about peers."""
        return self.beneath.labels

    @labels.setter
    def labels(self, labels: list[str]) -> None:
        self.beneath.labels = labels

    @override
    def note(self, tag: Tag) -> None:
        self.beneath.note(tag)

    @override
    def wait_for(self, tag: Tag, attempt: Callable[[float], bool], peer: int) -> None:
        self.beneath.wait_for(tag, attempt, peer)

    def post(self, channel: Channel, tag: Tag, place: Place | None = None, bits: int = 0) -> Posted:
        """Say that this rank has come to an operation. *Local.*"""
        self.beneath.note(tag)
        return self.board.post(channel, tag, place, bits)

    def _agree(self, channel: Channel, tag: Tag) -> None:
        self.post(channel, tag).places()

    # -- reads that peers may wait for

    def add_reader(self, read: Callable[[], None]) -> None:
        """Have ``read`` called when this rank waits: it may take what is ready meanwhile."""
        self._readers.append(read)

    def remove_reader(self, read: Callable[[], None]) -> None:
        """Undo `add_reader`."""
        self._readers.remove(read)

    def _read_what_is_there(self) -> None:
        for read in tuple(self._readers):
            read()

    # -- weights channel

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        small = out.dtype == torch.float64 and 0 < shard.numel() <= MOST_FLOATS
        if not small:
            self._agree(Channel.WEIGHTS, tag)
            before = self.beneath.sent_nbytes
            work = self.beneath.all_gather(out, shard, tag)
            self.sent_nbytes += self.beneath.sent_nbytes - before
            return work
        self.beneath.note(tag)
        rows = self.board.exchange(Channel.WEIGHTS, shard.tolist(), tag)
        out.copy_(torch.tensor(rows, dtype=torch.float64).view(-1))
        self.sent_nbytes += (self.world_size - 1) * 8 * shard.numel()
        return _Done()

    @override
    def announce(self, tag: Tag) -> list[Tag]:
        return self.board.read_tags(self.post(Channel.WEIGHTS, tag))

    # -- gradients channel

    @override
    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_numels: Sequence[int],
        source_numels: Sequence[int],
        tag: Tag,
    ) -> Work:
        # Compared in the wait: a peer may start its reductions after a gather that needs this rank.
        posted = self.post(Channel.GRADIENTS, tag)
        before = self.beneath.sent_nbytes
        work = self.beneath.all_to_all(out, source, out_numels, source_numels, tag)
        self.sent_nbytes += self.beneath.sent_nbytes - before
        return _Agreed(posted, work)

    @override
    def exchange(self, payload: Sequence[float], tag: Tag) -> list[list[float]]:
        if len(payload) > MOST_FLOATS:
            return self._under(lambda: self.beneath.exchange(payload, tag), tag)
        self.beneath.note(tag)
        rows = self.board.exchange(Channel.GRADIENTS, payload, tag)
        self.sent_nbytes += (self.world_size - 1) * 8 * len(payload)
        return [list(row) for row in rows]

    # -- set-up and state, in no hot path

    def _under(self, act: Callable[[], _T], tag: Tag) -> _T:
        self._agree(Channel.GRADIENTS, tag)
        before = self.beneath.sent_nbytes
        found = act()
        self.sent_nbytes += self.beneath.sent_nbytes - before
        return found

    @override
    def exchange_bytes(self, payload: bytes, tag: Tag) -> list[bytes]:
        return self._under(lambda: self.beneath.exchange_bytes(payload, tag), tag)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        self._under(lambda: self.beneath.broadcast(tensor, source, tag), tag)

    @override
    def collect(self, shard: torch.Tensor, destination: int, tag: Tag) -> list[torch.Tensor] | None:
        return self._under(lambda: self.beneath.collect(shard, destination, tag), tag)

    @override
    def fail(self, message: str) -> None:
        self.beneath.fail(message)

    @override
    def close(self) -> None:
        self.beneath.close()


class _Agreed:
    def __init__(self, posted: Posted, work: Work) -> None:
        self._posted = posted
        self._work = work

    def wait(self) -> None:
        """Compare tags, then wait for the transport beneath."""
        self._posted.places()
        self._work.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._posted.is_ready() and self._work.is_completed()


class _Done:
    def wait(self) -> None:
        """Have nothing to wait for."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


def over_host(beneath: Transport) -> tuple[HostTransport | None, str]:
    """Return a transport over shared memory if all ranks can open each other's, or why not.

    Collective. Rank 0 logs one line that says why not.
    """
    tag = Tag(0, Operation.SETUP, -1, "shared memory of this host")
    token = secrets.randbits(62)
    board = file = None
    host = ""
    descriptor, reason = -1, _obstacle()
    if not reason:
        try:
            host = _host()
            board, file, place = new_board(beneath.rank, token)
            descriptor = place.descriptor
        except OSError as error:
            reason = f"rank {beneath.rank} gets no shared memory ({error})"
    row = [host, os.getpid(), descriptor, token]
    rows = [json.loads(raw) for raw in beneath.exchange_bytes(json.dumps(row).encode(), tag)]
    if not reason and board is not None:
        reason = _join(board, rows)
    # After this all have opened what they need.
    reasons = [raw.decode() for raw in beneath.exchange_bytes(reason.encode(), tag) if raw]
    if reasons or board is None or file is None:
        if beneath.rank == 0:
            log.info("Weights and gradients go over the process group: %s.", reasons[0])
        return None, reasons[0]
    return HostTransport(beneath, board, [row[1] for row in rows], file), ""


def _join(board: Board, rows: Sequence[Sequence[Any]]) -> str:
    """Map all peers' boards; return what keeps this rank from it."""
    mappings: list[Mapping | None] = [None] * len(rows)
    for peer, (host, pid, descriptor, token) in enumerate(rows):
        if peer == board.rank or descriptor < 0:  # which says so itself
            continue
        if host != rows[board.rank][0]:
            return "ranks are on several hosts, or in several containers"
        try:
            mappings[peer] = Board.map_peer(pid, descriptor, token)
        except OSError as error:
            return f"rank {board.rank} cannot open the memory of rank {peer} ({error})"
    try:
        board.join(mappings, [row[1] for row in rows])
    except OSError as error:
        return f"rank {board.rank} cannot follow the other processes ({error})"
    return ""


def _obstacle() -> str:
    if not futex.is_proven():
        return "shared memory is used on Linux with x86-64 only"
    if not hasattr(os, "pidfd_open"):
        return "this Python cannot follow processes (no os.pidfd_open)"
    return ""


def _host() -> str:
    """Return what is equal for processes that may see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
    return " ".join([boot, *spaces])
