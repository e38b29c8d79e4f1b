"""Where a checkpoint's directory is: on a local disk or behind fsspec.

A local directory is written beside its place and takes it by one rename, so there is always a whole
checkpoint under the name: the old one or the new one. Remote stores know no rename: files go to
their place and the manifest, which makes them a checkpoint, goes last.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any

from lightning_zeroplus.checkpoint.full import draft_of, flush_folder
from lightning_zeroplus.checkpoint.manifest import MANIFEST

__all__ = [
    "Folder",
    "LocalFolder",
    "RemoteFolder",
    "folder_at",
    "local_path",
    "remove_at",
    "take_place",
]


class Folder(ABC):
    """The directory of one checkpoint. *Local.*"""

    @abstractmethod
    def __str__(self) -> str:
        """Return the path for messages."""

    @abstractmethod
    def prepare(self, token: str) -> None:
        """Make room for files; on one rank, before any calls `open`."""

    @abstractmethod
    def open(self, token: str, name: str) -> IO[bytes]:
        """Return a stream that writes the file ``name``."""

    @abstractmethod
    def commit(self, token: str) -> None:
        """Make what was written the checkpoint; on one rank, after the manifest was written."""

    @abstractmethod
    def abandon(self, token: str) -> None:
        """Leave nothing of what was written, as far as possible; on one rank."""

    @abstractmethod
    def nbytes_of(self, name: str) -> int | None:
        """Return the length of a file, or None."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Return whether there is a folder at all."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of what is in it, sorted."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Return bytes of a file as a buffer, mapped where that can be.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
            EOFError: it ends early.
        """


class LocalFolder(Folder):
    """A directory of this machine, or of a file system that is mounted on it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def _draft(self, token: str) -> Path:
        return draft_of(self.path, token)

    def prepare(self, token: str) -> None:
        """Make the draft; drafts of this name that a killed run has left are removed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ours = re.compile(draft_of(self.path, "[0-9a-f]{32}").name.replace(".", r"\."))
        for left in self.path.parent.iterdir():
            if ours.fullmatch(left.name):
                remove_local(left)
        self._draft(token).mkdir()

    def open(self, token: str, name: str) -> IO[bytes]:
        """Return an unbuffered file in the draft."""
        return (self._draft(token) / name).open("xb", buffering=0)

    def commit(self, token: str) -> None:
        """Put the draft in place of whatever has the name; a link is replaced."""
        draft = self._draft(token)
        flush_folder(draft)
        if os.path.lexists(self.path):
            take_place(draft, self.path)
        else:
            draft.rename(self.path)
        flush_folder(self.path.parent)

    def abandon(self, token: str) -> None:
        """Remove the draft."""
        with contextlib.suppress(OSError):
            remove_local(self._draft(token))

    def nbytes_of(self, name: str) -> int | None:
        """Return the length of a file, or None."""
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_folder(self) -> bool:
        """Return whether there is a folder at all."""
        return self.path.is_dir()

    def names(self) -> list[str]:
        """Return the names of what is in it, sorted."""
        return sorted(entry.name for entry in self.path.iterdir())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Return a map of part of the file; it lasts as long as what is made of it."""
        with (self.path / name).open("rb") as file:
            stop = os.fstat(file.fileno()).st_size if stop is None else stop
            if stop <= start:
                return b""
            page = start - start % mmap.ALLOCATIONGRANULARITY
            whole = mmap.mmap(file.fileno(), stop - page, access=mmap.ACCESS_COPY, offset=page)
        return memoryview(whole)[start - page :]

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` straight from the file."""
        with (self.path / name).open("rb", buffering=0) as file:
            file.seek(start)
            while out.nbytes:
                taken = file.readinto(out)
                if not taken:
                    raise EOFError(f"{name} ends early ({self.path})")
                out = out[taken:]


class RemoteFolder(Folder):
    """A directory of a store that fsspec reaches.

    Args:
        path: with its protocol.
        options: for fsspec's file system.
    """

    def __init__(self, path: str, options: dict[str, Any] | None = None) -> None:
        import fsspec

        self.path = path.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.path, **(options or {}))

    def __str__(self) -> str:
        return self.path

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def prepare(self, token: str) -> None:
        """Take the mark of an earlier checkpoint away: its files will be overwritten."""
        self._fs.invalidate_cache()
        if self._fs.isfile(self._root):
            self._fs.rm_file(self._root)
        if self._fs.exists(self._at(MANIFEST)):
            self._fs.rm_file(self._at(MANIFEST))
        self._fs.makedirs(self._root, exist_ok=True)

    def open(self, token: str, name: str) -> IO[bytes]:
        """Return a stream into the store."""
        return self._fs.open(self._at(name), "wb")  # type: ignore[no-any-return]

    def commit(self, token: str) -> None:
        """Have nothing to do: the manifest was the mark."""

    def abandon(self, token: str) -> None:
        """Remove the directory."""
        with contextlib.suppress(OSError):
            self._fs.rm(self._root, recursive=True)

    def nbytes_of(self, name: str) -> int | None:
        """Return the length of a file, or None."""
        try:
            return int(self._fs.size(self._at(name)))
        except FileNotFoundError:
            return None

    def is_folder(self) -> bool:
        """Return whether there is a folder at all."""
        return bool(self._fs.isdir(self._root))

    def names(self) -> list[str]:
        """Return the names of what is in it, sorted."""
        return sorted(found.rpartition("/")[2] for found in self._fs.ls(self._root, detail=False))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Return bytes that were fetched."""
        return bytearray(self._fs.cat_file(self._at(name), start=start, end=stop))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that were fetched."""
        found = self._fs.cat_file(self._at(name), start=start, end=start + out.nbytes)
        if len(found) != out.nbytes:
            raise EOFError(f"{name} ends early ({self.path})")
        out[:] = found


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Return ``path`` on this machine's file system, or None if it is elsewhere."""
    text = os.fspath(path)
    for prefix in ("file://", "local://"):
        if text.startswith(prefix):
            return Path(text.removeprefix(prefix))
    return None if "://" in text else Path(text)


def folder_at(path: str | os.PathLike[str], options: dict[str, Any] | None = None) -> Folder:
    """Return the folder at ``path``; nothing needs to be there."""
    local = local_path(path)
    return RemoteFolder(os.fspath(path), options) if local is None else LocalFolder(local)


def remove_at(path: str | os.PathLike[str]) -> None:
    """Leave nothing at ``path``: a file, a folder, or a link without what it points at."""
    local = local_path(path)
    if local is not None:
        remove_local(local)
        return
    import fsspec

    fs, root = fsspec.core.url_to_fs(os.fspath(path))
    with contextlib.suppress(FileNotFoundError):
        fs.rm(root, recursive=True)


def remove_local(path: Path) -> None:
    """Leave nothing at ``path`` on the local disk; the target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        # Without its mark a folder that is only partly removed is no checkpoint.
        with contextlib.suppress(FileNotFoundError):
            (path / MANIFEST).unlink()
        shutil.rmtree(path)
        return
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def take_place(draft: Path, target: Path) -> None:
    """Put ``draft`` in place of whatever has the name ``target``, and remove that. *Local.*"""
    if _exchange(draft, target):
        remove_local(draft)
        return
    aside = draft.with_suffix(".old")
    target.rename(aside)
    try:
        draft.rename(target)
    except OSError:
        aside.rename(target)
        raise
    remove_local(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths at once, where the system can: no moment without a checkpoint."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, exchange = -100, 2
    return call(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0  # type: ignore[no-any-return]
