"""Where a new checkpoint goes: nothing is overwritten unasked, and nothing appears half-written."""

from __future__ import annotations

import contextlib
import io
import os
import re
import uuid
from collections.abc import Callable, Iterator
from typing import IO

from lightning_zeroplus.checkpoint.folder import (
    Folder,
    folder_at,
    local_path,
    remove_local,
    take_place,
)
from lightning_zeroplus.checkpoint.full import draft_of, flush_folder
from lightning_zeroplus.checkpoint.read import form_of
from lightning_zeroplus.errors import CheckpointError

__all__ = ["new_file", "new_folder", "refuse_taken"]

OpenFile = Callable[[str], contextlib.AbstractContextManager[IO[bytes]]]

_EXPORTED = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def refuse_taken(
    target: str | os.PathLike[str], source: str | os.PathLike[str], *, force: bool
) -> None:
    """Check that something may be written to ``target``.

    With ``force`` a file, a link, a checkpoint or an empty folder may be replaced; no other folder.

    Raises:
        FileExistsError: there is something at ``target``, and no ``force`` or not such a thing.
        CheckpointError: to replace ``target`` would take ``source`` with it.
    """
    local = local_path(target)
    if local is None:
        _refuse_remote(os.fspath(target), os.fspath(source), force=force)
        return
    if not os.path.lexists(local):
        return
    if not force:
        raise _taken(target)
    if local.is_symlink() or not local.is_dir():
        return
    origin = local_path(source)
    if origin is not None and local.resolve() in origin.resolve().parents:
        raise CheckpointError(
            f"Expected a target apart from the checkpoint, got the folder that it is in "
            f"({target}). Choose another name."
        )
    names = sorted(entry.name for entry in local.iterdir())
    if form_of(local) == "" and not all(map(_EXPORTED.fullmatch, names)):
        raise FileExistsError(
            f"Expected a checkpoint or an empty folder to replace, got a folder of "
            f"{', '.join(names[:3])} ({target}). Choose another name."
        )


def _refuse_remote(target: str, source: str, *, force: bool) -> None:
    import fsspec

    if target.rstrip("/") == source.rstrip("/"):
        raise CheckpointError(
            f"Expected another place on a remote store, got the checkpoint's own ({target}). "
            f"Choose another name."
        )
    fs, root = fsspec.core.url_to_fs(target)
    if not force and fs.exists(root):
        raise _taken(target)


def _taken(target: object) -> FileExistsError:
    return FileExistsError(
        f"Expected no file or folder at the target, got one ({target}). "
        f"Choose another name, or replace it: --force, or force=True."
    )


@contextlib.contextmanager
def new_file(target: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a stream; what was written to it is at ``target`` afterwards, or nothing is changed.

    On the local disk it can be read too, and a link at ``target`` is replaced.

    Raises:
        CheckpointError: it cannot be written.
    """
    local = local_path(target)
    with _named(target):
        if local is None:
            with _remote_file(os.fspath(target)) as file:
                yield file
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        # Not `*.ckpt`: a half-written file must never be taken for a checkpoint.
        draft = draft_of(local, uuid.uuid4().hex)
        try:
            with draft.open("xb+") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if local.is_dir() and not local.is_symlink():
                take_place(draft, local)
            else:
                draft.replace(local)
            flush_folder(local.parent)
        finally:
            with contextlib.suppress(OSError):
                remove_local(draft)


@contextlib.contextmanager
def _remote_file(target: str) -> Iterator[IO[bytes]]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(target)
    file = fs.open(root, "wb")
    try:
        yield file
    except BaseException:
        with contextlib.suppress(Exception):
            file.close()
            fs.rm_file(root)
        raise
    file.close()


@contextlib.contextmanager
def new_folder(target: str | os.PathLike[str]) -> Iterator[OpenFile]:
    """Give a function that opens a file by name; all are in ``target`` afterwards, or none.

    Raises:
        CheckpointError: they cannot be written.
    """
    folder, token = folder_at(target), uuid.uuid4().hex
    with _named(target):
        folder.prepare(token)
        try:
            yield lambda name: _file_of(folder, token, name)
            folder.commit(token)
        except BaseException:
            folder.abandon(token)
            raise


@contextlib.contextmanager
def _file_of(folder: Folder, token: str, name: str) -> Iterator[IO[bytes]]:
    raw = folder.open(token, name)
    file = io.BufferedWriter(raw) if isinstance(raw, io.RawIOBase) else raw
    with contextlib.closing(file):
        yield file
        file.flush()
        if isinstance(raw, io.FileIO):
            os.fsync(raw.fileno())


@contextlib.contextmanager
def _named(target: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        # torch turns a failed write into a RuntimeError whose context has the reason.
        cause = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
        raise CheckpointError(
            f"Expected to write a checkpoint, got {type(cause).__name__}: {cause} ({target}). "
            f"What was there before is unchanged; free space or choose another place."
        ) from error
