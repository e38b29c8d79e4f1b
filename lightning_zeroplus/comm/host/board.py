"""The words by which ranks of one host tell each other how far they are.

A board is written by its own rank only. Of each channel it says how many operations the rank has
*posted*, with a record of each of the last ones, and up to which it has *taken* what it needed of
its peers; two slots hold the numbers of small exchanges. A rank is never more than a few
operations ahead of another, so that records are read long before they are written over.
"""

from __future__ import annotations

import enum
import functools
import os
import select
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_zeroplus.comm.host import futex
from lightning_zeroplus.comm.host.memory import HostFile, Mapping, Place, open_peer
from lightning_zeroplus.comm.transport import Operation, Tag, check_tags
from lightning_zeroplus.errors import CollectiveError

__all__ = ["Board", "Channel", "Patience", "Posted"]

_POLLS = 50
_SLICE_S = 0.02
"""How long one sleep is at most: between two, peers' lives are looked at."""

_RING = 1024
_AHEAD = _RING // 2
"""Operations by which one rank may be ahead of another."""

_RECORD_WORDS = 9
_SLOT_FLOATS = 4096
_MOST_RANKS = 1024


class Channel(enum.IntEnum):
    """Operations of one channel come in one order on all ranks."""

    WEIGHTS = 0
    GRADIENTS = 1


_Peer = tuple[int, memoryview, int]

_TOKEN, _EVENT, _POSTED, _TAKEN = 0, 8, 16, 24
_SLEEPING = 32
"""Of each peer that this rank waits for: which of its words, the value awaited, a serial number."""

_ANY = -1
_RECORDS = _SLEEPING + 3 * _MOST_RANKS
_SLOTS = _RECORDS + len(Channel) * _RING * _RECORD_WORDS
_WORDS = _SLOTS + len(Channel) * 2 * _SLOT_FLOATS
BOARD_NBYTES = 8 * _WORDS
MOST_FLOATS = _SLOT_FLOATS


class Patience(Protocol):
    """What decides how long a slow wait goes on; the watch of the transport."""

    def __call__(self, tag: Tag, attempt: Callable[[float], bool], peer: int) -> None:
        """Repeat ``attempt(seconds)``, which waits for ``peer``, until it is True, or raise."""


class Posted:
    """One operation that this rank has posted, and what its peers posted for it."""

    __slots__ = ("board", "channel", "number", "tag")

    def __init__(self, board: Board, channel: Channel, number: int, tag: Tag) -> None:
        self.board = board
        self.channel = channel
        self.number = number
        self.tag = tag

    def is_ready(self) -> bool:
        """Return whether all peers have posted theirs. *Local.*"""
        return self.board.has_reached(_POSTED + self.channel, self.number)

    def await_ready(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether all peers have posted theirs."""
        return self.board.reach_within(_POSTED + self.channel, self.number, self.tag, seconds)

    def places(self) -> list[Place]:
        """Wait for all peers, compare tags, and return where each rank's memory lies.

        Raises:
            CollectiveError: a peer diverged, died, finished or stayed silent.
        """
        self.board.reach(_POSTED + self.channel, self.number, self.tag)
        return self.board.read_records(self.channel, self.number, self.tag)


class Board:
    """This rank's board and its peers', mapped.

    Args:
        mapping: this rank's own.
        rank: of this process.
        token: by which peers know that they have opened this one.
    """

    def __init__(self, mapping: Mapping, rank: int, token: int) -> None:
        self.rank = rank
        self._mapping = mapping
        self._mine = mapping.words
        self._mine[_TOKEN] = token
        self._peers: list[_Peer] = []
        """Rank, words and the address of the event word of each peer."""

        self._boards: list[memoryview] = []
        self._mark = _SLEEPING + 3 * rank
        self._sleeps = 0
        self._woken: dict[int, int] = {}
        """Of each peer the serial number of the sleep from which this rank has woken it."""

        self._lives: dict[int, select.poll] = {}
        self._pids: dict[int, int] = {}
        self._posted = [0] * len(Channel)
        self._exchanges = [0] * len(Channel)
        self._untaken: list[set[int]] = [set() for _ in Channel]
        self.patience: Patience = _forever
        self.labels: Callable[[], Sequence[str]] = tuple
        self.on_slow_wait: Callable[[], None] = _nothing
        """Does what peers may wait for while this rank waits itself."""

    # -- set-up

    @staticmethod
    def map_peer(pid: int, descriptor: int, token: int) -> Mapping:
        """Return a peer's board.

        Raises:
            OSError: it cannot be opened, or is another process's file.
        """
        opened = open_peer(pid, descriptor)
        try:
            if os.fstat(opened).st_size < BOARD_NBYTES:
                raise OSError(f"descriptor {descriptor} of process {pid} is another file")
            mapping = Mapping(opened, 0, BOARD_NBYTES)
        finally:
            os.close(opened)
        if mapping.words[_TOKEN] != token:
            raise OSError(f"process {pid} is another one there")
        return mapping

    def join(self, mappings: Sequence[Mapping | None], pids: Sequence[int]) -> None:
        """Take peers' boards by rank; None at this rank's own place."""
        for peer, mapping in enumerate(mappings):
            words = self._mine if mapping is None else mapping.words
            self._boards.append(words)
            if mapping is not None:
                self._peers.append((peer, words, mapping.address + 8 * _EVENT))
                self._pids[peer] = pids[peer]
                self._follow(peer, pids[peer])

    def _follow(self, peer: int, pid: int) -> None:
        if pid == os.getpid():  # a virtual rank
            return
        descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, descriptor)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        self._lives[peer] = poll

    # -- posting

    def post(self, channel: Channel, tag: Tag, place: Place | None = None, bits: int = 0) -> Posted:
        """Say that this rank has come to an operation. *Local.*

        With a ``place`` peers may read there, and keep theirs for this rank, until `take`;
        ``bits`` go with it, as many as a word has.
        """
        number = self._posted[channel] = self._posted[channel] + 1
        if number > _AHEAD:  # records are written over: nobody may still need that one
            self.reach(_POSTED + channel, number - _AHEAD, tag)
        at = _record_at(channel, number)
        mine = self._mine
        mine[at] = tag.sequence
        mine[at + 1] = int(tag.operation)
        mine[at + 2] = tag.unit
        mine[at + 3] = tag.detail
        if place is not None:
            mine[at + 4], mine[at + 5], mine[at + 6], mine[at + 7] = place
            mine[at + 8] = bits
            self._untaken[channel].add(number)
        mine[_POSTED + channel] = number
        self.tell()
        return Posted(self, channel, number, tag)

    def take(self, posted: Posted) -> None:
        """Say that what was needed of an operation has been read. *Local.*"""
        untaken = self._untaken[posted.channel]
        untaken.discard(posted.number)
        self._mine[_TAKEN + posted.channel] = (
            min(untaken) - 1 if untaken else self._posted[posted.channel]
        )
        self.tell()

    def await_taken(self, posted: Posted) -> None:
        """Wait until all peers have read what they need of an operation."""
        self.reach(_TAKEN + posted.channel, posted.number, posted.tag)

    def exchange(
        self, channel: Channel, payload: Sequence[float], tag: Tag
    ) -> list[tuple[float, ...]]:
        """Return every rank's numbers (equal counts, at most `MOST_FLOATS`), in rank order."""
        # A peer that writes the slot again has seen this rank at the exchange after this one.
        turn = self._exchanges[channel] = self._exchanges[channel] + 1
        at = 8 * (_SLOTS + (2 * channel + turn % 2) * _SLOT_FLOATS)
        form = f"={len(payload)}d"
        struct.pack_into(form, self._mine.cast("B"), at, *payload)
        self.post(channel, tag).places()
        return [struct.unpack_from(form, words.cast("B"), at) for words in self._boards]

    def tell(self) -> None:
        """Wake peers that wait for a word of this rank. *Local.*"""
        mine = self._mine
        mine[_EVENT] = (mine[_EVENT] + 1) & 0x7FFFFFFF
        mark = self._mark
        due = False
        for peer, words, _ in self._peers:
            word = words[mark]
            # Waking is dearer than all else here: only who has what it waits for, and once.
            if word and (word == _ANY or mine[word] >= words[mark + 1]):
                serial = words[mark + 2]
                if self._woken.get(peer) != serial:
                    self._woken[peer] = serial
                    due = True
        if due:
            futex.wake(self._mapping.address + 8 * _EVENT)

    # -- reading and waiting

    def read_records(self, channel: Channel, number: int, tag: Tag) -> list[Place]:
        """Return where each rank's memory of an operation lies, after comparing tags."""
        at = _record_at(channel, number)
        mine = self._mine[at : at + 4].tolist()
        places = []
        for words in self._boards:
            record = words[at : at + 8].tolist()
            if record[:4] != mine:
                check_tags(self._tags_at(at), tag, self.rank, self.labels())
            places.append(Place(*record[4:]))
        return places

    def read_bits(self, posted: Posted) -> int:
        """Return the bits that came with an operation, of any rank; all have posted. *Local.*"""
        at = _record_at(posted.channel, posted.number) + 8
        union = 0
        for words in self._boards:
            union |= words[at]
        return union

    def read_tags(self, posted: Posted) -> list[Tag]:
        """Wait for all peers and return every rank's tag, uncompared."""
        self.reach(_POSTED + posted.channel, posted.number, posted.tag)
        return self._tags_at(_record_at(posted.channel, posted.number))

    def _tags_at(self, at: int) -> list[Tag]:
        return [
            Tag(words[at], Operation(words[at + 1]), words[at + 2], detail=words[at + 3])
            for words in self._boards
        ]

    def has_reached(self, word: int, target: int) -> bool:
        """Return whether a counter of every peer is at ``target`` or beyond. *Local.*"""
        for _, words, _ in self._peers:  # noqa: SIM110 - in every backward, for every unit
            if words[word] < target:
                return False
        return True

    def reach(self, word: int, target: int, tag: Tag) -> None:
        """Wait until a counter of every peer's board is at ``target`` or beyond.

        Raises:
            CollectiveError: a peer died, failed, finished or stayed silent.
        """
        for peer in self._peers:
            if peer[1][word] < target:
                self._await(peer, peer[1], word, target, tag)

    def reach_in(self, rows: Sequence[memoryview], word: int, target: int, tag: Tag) -> None:
        """Do the same with words that ranks keep elsewhere, by rank, and `tell` of."""
        for peer in self._peers:
            if rows[peer[0]][word] < target:
                self._await(peer, rows[peer[0]], word, target, tag)

    def _await(self, peer: _Peer, words: memoryview, word: int, target: int, tag: Tag) -> None:
        for _ in range(_POLLS):
            if words[word] >= target:
                return
        self.on_slow_wait()
        attempt = functools.partial(self._sleep, peer, words, word, target, tag)
        self.patience(tag, attempt, peer[0])

    def reach_within(self, word: int, target: int, tag: Tag, seconds: float) -> bool:
        """Return whether a counter of every peer is at ``target`` after at most ``seconds``."""
        deadline = time.monotonic() + seconds
        for peer in self._peers:
            while peer[1][word] < target:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._sleep(peer, peer[1], word, target, tag, left)
        return True

    def _sleep(
        self,
        peer: _Peer,
        words: memoryview,
        word: int,
        target: int,
        tag: Tag,
        seconds: float,
    ) -> bool:
        rank, board, event = peer
        slices = max(1, round(seconds / _SLICE_S))
        mark = _SLEEPING + 3 * rank
        for _ in range(slices):
            seen = board[_EVENT]
            self._sleeps += 1
            self._mine[mark + 1] = target
            self._mine[mark + 2] = self._sleeps
            self._mine[mark] = word if words is board else _ANY
            try:
                if words[word] >= target:
                    return True
                futex.wait(event, seen, min(seconds, _SLICE_S))
            finally:
                self._mine[mark] = 0
            if words[word] >= target:
                return True
            if self._is_dead(rank):
                if words[word] >= target:  # its last act
                    return True
                self._refuse_dead(rank, tag)
            self.on_slow_wait()
        return False

    def _is_dead(self, rank: int) -> bool:
        life = self._lives.get(rank)
        return life is not None and bool(life.poll(0))

    def _refuse_dead(self, rank: int, tag: Tag) -> None:
        raise CollectiveError(
            f"Expected rank {rank} to join {tag} (rank {self.rank}), but its process "
            f"{self._pids[rank]} has ended. Look for its error, or for what killed it."
        )


def _record_at(channel: Channel, number: int) -> int:
    return _RECORDS + (channel * _RING + number % _RING) * _RECORD_WORDS


def _forever(tag: Tag, attempt: Callable[[float], bool], peer: int) -> None:
    while not attempt(1.0):
        pass


def _nothing() -> None:
    """Stand-in where nothing is pending."""


def new_board(rank: int, token: int) -> tuple[Board, HostFile, Place]:
    """Return a board of this rank's own, the file that it is in, and where peers find it."""
    file = HostFile()
    mapping, place = file.block(BOARD_NBYTES)
    return Board(mapping, rank, token), file, place
