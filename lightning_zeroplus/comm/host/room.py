"""One engine's shared memory: its own file, peers' files, and counters that ranks read."""

from __future__ import annotations

import os

import torch

from lightning_zeroplus.comm.host.board import Channel, Posted
from lightning_zeroplus.comm.host.memory import HostFile, Mapping, Place, open_peer
from lightning_zeroplus.comm.host.transport import HostTransport
from lightning_zeroplus.comm.transport import Operation, Tag
from lightning_zeroplus.errors import CollectiveError

__all__ = ["Room"]

_COUNTERS = 8192
_NOWHERE = Place(0, -1, 0, 0)


class Room:
    """Where one engine keeps what its ranks share. *Local* unless it says otherwise.

    Raises:
        OSError: the system gives no more memory of this kind.
    """

    def __init__(self, transport: HostTransport) -> None:
        self.transport = transport
        self.file = HostFile()
        self.gathers = False
        """Whether weights are copied together, which needs all ranks."""

        self.outstanding: set[Posted] = set()
        """Operations of which peers' memory is yet to be read."""

        self._mappings: dict[tuple[int, Place], Mapping] = {}
        self._first_file: HostFile | None = None
        self._counters: list[memoryview] = []
        self._next_counter = 0

    def bytes_of(self, peer: int, place: Place) -> torch.Tensor:
        """Return the memory that a peer has posted, as uint8; mapped when it is first read.

        Raises:
            CollectiveError: it cannot be opened: the peer has ended.
        """
        found = self._mappings.get((peer, place))
        if found is None:
            opened = self._open(peer, place)
            try:
                found = Mapping(opened, place.offset, place.nbytes)
            finally:
                os.close(opened)
            self._mappings[peer, place] = found
        return found.bytes

    def _open(self, peer: int, place: Place) -> int:
        try:
            return open_peer(self.transport.pids[peer], place.descriptor, place.inode)
        except OSError as error:
            raise CollectiveError(
                f"Expected the memory of rank {peer} to be there (rank {self.transport.rank}), "
                f"got {error}. Its process has probably ended: look for its error."
            ) from error

    def close(self, *, alone: bool) -> None:
        """Let go of files, and of what is mapped of peers; what is outstanding is not read."""
        for posted in self.outstanding:
            posted.board.take(posted)
        self.outstanding.clear()
        self._mappings.clear()
        self._counters.clear()
        if not alone:  # else a peer that lags may still map what this rank has posted
            self.file.close()
        if self._first_file is not None:
            self._first_file.close()

    # -- memory that all ranks map

    def shared_block(self, nbytes: int) -> tuple[Mapping, Mapping]:
        """Return one block of the host, mapped shared and private; collective.

        Raises:
            OSError: there is no room, on rank 0.
            CollectiveError: there is none, on the other ranks.
        """
        tag = Tag(0, Operation.SETUP, -1, "weights of the host")
        if self.transport.rank == 0:
            place = _NOWHERE
            try:
                mapping, place = self.file.block(nbytes)
            finally:
                posted = self.transport.post(Channel.WEIGHTS, tag, place)
            posted.places()
            file = self.file
        else:
            posted = self.transport.post(Channel.WEIGHTS, tag, _NOWHERE)
            place = posted.places()[0]
            if place.descriptor < 0:
                raise CollectiveError(
                    f"Expected shared memory for weights (rank {self.transport.rank}), got none "
                    f"on rank 0. See its error, or use transport='c10d'."
                )
            if self._first_file is None:
                self._first_file = HostFile(self._open(0, place))
            file = self._first_file
            mapping = file.map(place)
        posted.board.take(posted)
        return mapping, file.map_private(place)

    # -- counters

    @property
    def has_counters(self) -> bool:
        """Whether there is room for two more."""
        return self._next_counter + 2 <= _COUNTERS

    def new_counter(self) -> int:
        """Return the place of a counter, 0 on every rank; collective."""
        if not self._counters:
            mapping, place = self.file.block(8 * _COUNTERS)
            tag = Tag(0, Operation.SETUP, -1, "counters")
            posted = self.transport.post(Channel.WEIGHTS, tag, place)
            for rank, theirs in enumerate(posted.places()):
                if rank == self.transport.rank:
                    self._counters.append(mapping.words)
                else:
                    self.bytes_of(rank, theirs)
                    self._counters.append(self._mappings[rank, theirs].words)
            posted.board.take(posted)
        self._next_counter += 1
        return self._next_counter - 1

    def count(self, counter: int, value: int, *, tell: bool = True) -> None:
        """Set this rank's counter; peers that wait hear of it with the next that is told."""
        self._counters[self.transport.rank][counter] = value
        if tell:
            self.transport.board.tell()

    def await_all(self, counter: int, value: int, tag: Tag) -> None:
        """Wait until the counter of every peer is at ``value`` or beyond.

        Raises:
            CollectiveError: a peer died, failed, finished or stayed silent.
        """
        self.transport.note(tag)
        self.transport.board.reach_in(self._counters, counter, value, tag)
