"""Anonymous memory that other processes of this host can map.

It lives in a file without a name, which goes with the last process that has it open or mapped.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import operator
import os
import stat
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lightning_zeroplus.layout.span import round_up

__all__ = ["HostFile", "Mapping", "Place", "Repeated", "can_repeat", "find_edits", "open_peer"]

_SHM = "/dev/shm"  # noqa: S108 - a file there gets no name
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class Place(NamedTuple):
    """Where a block of a process lies, for its peers: plain numbers."""

    inode: int
    """Of the file: a descriptor may stand for another one later."""

    descriptor: int
    offset: int
    nbytes: int


class Mapping:
    """Part of a file, mapped; the memory lasts as long as ``bytes`` or what views it.

    With ``private`` what is written is seen by this process alone. Python's own `mmap` would keep
    a descriptor per mapping.

    Raises:
        OSError: the system maps no more.
    """

    def __init__(self, descriptor: int, offset: int, nbytes: int, *, private: bool = False) -> None:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self.address = _mmap(None, nbytes, flags, descriptor, offset)
        self.nbytes = nbytes
        # A class of its own, because plain arrays of ctypes cannot be referenced weakly.
        kind: Any = type("_Region", (ctypes.c_ubyte * nbytes,), {})
        self._region = kind.from_address(self.address)
        weakref.finalize(self._region, _libc().munmap, self.address, nbytes)
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(self._region, dtype=torch.uint8)
        self._part = _Part(self.address, nbytes, descriptor, offset)

    @property
    def words(self) -> memoryview:
        """The memory as signed 64-bit words."""
        return memoryview(self.bytes.numpy().data).cast("q")

    def _advise(self, advice: int) -> None:
        if _libc().madvise(self.address, self.nbytes, advice):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def drop_pages(self) -> None:
        """Free the memory for all processes; it reads as zeros until it is written again."""
        self._advise(mmap.MADV_REMOVE)

    def forget_edits(self) -> None:
        """Of private memory: read the file again where something was written."""
        self._advise(mmap.MADV_DONTNEED)

    def watch_forks(self, mappings: dict[int, _Part]) -> None:
        """Note the memory there as long as it is mapped."""
        mappings[self.address] = self._part
        weakref.finalize(self._region, mappings.pop, self.address, None)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.madvise.argtypes = [ctypes.c_void_p, size, number]
    return libc


def _mmap(address: int | None, nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc().mmap(address, nbytes, access, flags, descriptor, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


def find_edits(mappings: Sequence[Mapping]) -> list[bool]:
    """Return of each piece of private memory whether something was written to it, page by page.

    Raises:
        OSError: the system does not tell.
    """
    table = _page_table(os.getpid())
    found = dict.fromkeys(mappings, False)
    for run in _runs(mappings):
        start, stop = run[0].address, run[-1].address + run[-1].nbytes
        words = torch.empty((stop - start) // mmap.PAGESIZE, dtype=torch.int64)
        room = memoryview(words.numpy().data).cast("B")
        if os.preadv(table, [room], start // mmap.PAGESIZE * 8) != words.nbytes:
            raise OSError("the page table ends early")
        # A page that is there, in memory or swapped out, and is not the file's.
        own = ((words & (_PRESENT | _SWAPPED)) != 0) & ((words & _OF_FILE) == 0)
        if own.any():
            for mapping in run:
                first = (mapping.address - start) // mmap.PAGESIZE
                found[mapping] = bool(own[first : first + mapping.nbytes // mmap.PAGESIZE].any())
    return list(found.values())


def _runs(mappings: Sequence[Mapping]) -> list[list[Mapping]]:
    """Return the mappings by address, those together that are not far apart."""
    runs: list[list[Mapping]] = []
    stop = 0
    for mapping in sorted(mappings, key=operator.attrgetter("address")):
        if not runs or mapping.address - stop > _FAR_NBYTES:
            runs.append([])
        runs[-1].append(mapping)
        stop = mapping.address + mapping.nbytes
    return runs


_FAR_NBYTES = 1 << 20

_PRESENT, _SWAPPED, _OF_FILE = -(2**63), 2**62, 2**61
"""Bits of an entry of Linux's /proc/<pid>/pagemap."""


@functools.cache
def _page_table(pid: int) -> int:
    return os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def can_repeat() -> bool:
    """Return whether this system can map one piece of memory at many places."""
    return sys.platform == "linux"


class Repeated:
    """Memory that reads as ``byte`` all over and is one small piece, mapped over and over.

    What is written goes to pages of this process alone. It lasts as long as the process.

    Raises:
        OSError: the system maps no more.
    """

    def __init__(self, nbytes: int, byte: int) -> None:
        self.held_nbytes = piece = self.piece_nbytes(nbytes)
        whole = round_up(nbytes, piece)
        descriptor, _ = _open_unnamed()
        try:
            if os.write(descriptor, bytes([byte]) * piece) < piece:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self.address = _mmap(None, whole, flags, -1, 0)
            for start in range(self.address, self.address + whole, piece):
                _mmap(start, piece, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0)
        finally:
            os.close(descriptor)

    @staticmethod
    def piece_nbytes(nbytes: int) -> int:
        """Return the size of the piece for ``nbytes``."""
        return round_up(-(-nbytes // _PIECES), mmap.ALLOCATIONGRANULARITY)


_PIECES = 64


class _Part(NamedTuple):
    address: int
    nbytes: int
    descriptor: int
    offset: int

    def part_from_parent(self) -> None:
        """In a forked child: pages that it writes are its own from now on."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        _mmap(self.address, self.nbytes, flags, self.descriptor, self.offset)


class HostFile:
    """A growing file without a name, in memory, or a peer's that was ``opened``. *Local.*

    Raises:
        OSError: the system gives none, or has no room.
    """

    def __init__(self, opened: int | None = None) -> None:
        self._is_tmpfs = False
        if opened is None:
            opened, self._is_tmpfs = _open_unnamed()
        self._descriptor = opened
        self._stop = 0
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        _FILES.add(self)
        self._mappings: dict[int, _Part] = {}

    def block(self, nbytes: int) -> tuple[Mapping, Place]:
        """Return ``nbytes`` of zeros, and where peers find them.

        Raises:
            OSError: there is no room.
        """
        whole = round_up(max(nbytes, 1), mmap.ALLOCATIONGRANULARITY)
        offset, self._stop = self._stop, self._stop + whole
        if self._is_tmpfs:
            # Reserved, because a page without room would end the process at its first touch.
            os.posix_fallocate(self._descriptor, offset, whole)
        else:
            os.ftruncate(self._descriptor, self._stop)
        place = Place(os.fstat(self._descriptor).st_ino, self._descriptor, offset, whole)
        return self.map(place), place

    def map(self, place: Place) -> Mapping:
        """Return a block of the file, shared; a forked child's writes stay in the child."""
        mapping = Mapping(self._descriptor, place.offset, place.nbytes)
        mapping.watch_forks(self._mappings)
        return mapping

    def map_private(self, place: Place) -> Mapping:
        """Return a block of the file in which this process may write for itself."""
        return Mapping(self._descriptor, place.offset, place.nbytes, private=True)

    def close(self) -> None:
        """Peers can map no more of it; what is mapped stays."""
        self._closing()

    def part_from_parent(self) -> None:
        """In a forked child: what it writes stays in it, as with ordinary memory."""
        for part in list(self._mappings.values()):
            part.part_from_parent()


_FILES: weakref.WeakSet[HostFile] = weakref.WeakSet()


def _part_all() -> None:
    for file in list(_FILES):
        file.part_from_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_part_all)


def _open_unnamed() -> tuple[int, bool]:
    """Return a descriptor, and whether the file counts against a size that is set for `_SHM`."""
    try:
        return os.memfd_create("zeroplus", os.MFD_CLOEXEC), False
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and not _is_missing(error):
            raise
    return os.open(_SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), True


def _is_missing(error: OSError) -> bool:
    return error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL)


def open_peer(pid: int, descriptor: int, inode: int | None = None) -> int:
    """Return an open descriptor of a peer's file; close it after mapping.

    Raises:
        OSError: it is not there, not ours to open, no regular file, or not that of ``inode``.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    # Whatever has that number in another process must not make us wait.
    found = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    about = os.fstat(found)
    if not stat.S_ISREG(about.st_mode):
        os.close(found)
        raise OSError(f"{path} is no regular file")
    if inode not in (None, about.st_ino):
        os.close(found)
        raise OSError(f"{path} is another file by now")
    return found
