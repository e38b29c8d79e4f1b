"""How checkpoints are written and read: universal directories, and single files."""

from __future__ import annotations

import threading
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_zeroplus.checkpoint import (
    Group,
    ShardedCheckpoint,
    folder_at,
    local_path,
    read_checkpoint,
    read_whole,
    remove_at,
    save_universal,
    write_full,
)
from lightning_zeroplus.errors import CheckpointError

__all__ = ["PendingSave", "ZeroPlusCheckpointIO", "innermost", "is_async"]


class PendingSave:
    """A sharded checkpoint on its way through `CheckpointIO`, with the ranks that write it.

    Reads like the dictionary that Lightning made, for plugins that look into it; tensors in it are
    marks. It is no mapping and no dataclass, so that wrappers hand it on as it is.

    What is to be removed once it is written is removed only then: until that moment it may be the
    last whole checkpoint.
    """

    def __init__(self, sharded: ShardedCheckpoint, group: Group) -> None:
        self._sharded = sharded
        self._group = group
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._obsolete: list[_PATH] = []
        self._expired = False
        self._failure: BaseException | None = None

    def __getitem__(self, key: str) -> Any:
        return self._sharded.rest[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._sharded.rest[key] = self._sharded.take((key,), value, inline=True)

    def __contains__(self, key: object) -> bool:
        return key in self._sharded.rest

    def get(self, key: str, default: Any = None) -> Any:
        """Return what is under ``key``."""
        return self._sharded.rest.get(key, default)

    def keys(self) -> list[str]:
        """Return the keys of Lightning's dictionary."""
        return list(self._sharded.rest)

    def wait(self) -> None:
        """Return when it is written, or has failed."""
        self._finished.wait()

    def raise_failure(self) -> None:
        """Raise what kept it from being written; by `wait` it is known."""
        if self._failure is not None:
            raise self._failure

    def remove_after(self, path: _PATH) -> bool:
        """Have ``path`` removed when this is written; False if it is already."""
        with self._lock:
            if self._finished.is_set():
                return False
            self._obsolete.append(path)
            return True

    def expire(self) -> None:
        """Refuse to be written from now on: training goes on with what it is made of."""
        self._expired = True

    def write(self, path: _PATH, options: dict[str, Any] | None) -> None:
        """Write it; collective over its group.

        Raises:
            CheckpointError: it cannot be written, or not any more.
        """
        if self._expired:
            raise CheckpointError(
                f"Expected a CheckpointIO that writes before it returns, got a later write "
                f"({path}). Save in the background with Lightning's AsyncCheckpointIO."
            )
        written = False
        try:
            save_universal(self._sharded, folder_at(path, options), self._group)
            written = True
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._sharded.forget_tensors()
            with self._lock:
                self._finished.set()
        if written:
            for obsolete in self._obsolete:
                remove_at(obsolete)


class ZeroPlusCheckpointIO(TorchCheckpointIO):
    """Writes what `ZeroPlusStrategy` saves as a universal directory, anything else as one file.

    Under the strategy every rank writes its own part. On the local disk a checkpoint is complete
    and flushed before it gets its name, a link in its place is replaced instead of written through,
    and reading maps files. Reads universal directories, those of `torch.distributed.checkpoint`, of
    Lightning's FSDP strategies and of DeepSpeed, and single files, with any strategy.
    """

    reading_ranks: tuple[int, int] | None = None
    """This rank, and how many read the same checkpoint together: each checks its share of it.

    Set by `ZeroPlusStrategy`, which reads what it needs of tensors when it needs it.
    """

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any] | PendingSave,
        path: _PATH,
        storage_options: Any | None = None,
    ) -> None:
        """Put ``checkpoint`` at ``path``.

        Args:
            checkpoint: from the strategy, on every rank; or a dictionary, on one.
            path: local, or one that fsspec reaches.
            storage_options: for fsspec's file system.

        Raises:
            CheckpointError: it cannot be written; what was at ``path`` is unchanged.
            TypeError: ``storage_options`` for a single file.
        """
        if isinstance(checkpoint, PendingSave):
            checkpoint.write(path, storage_options)
            return
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_full(checkpoint, local)

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``.

        Raises:
            FileNotFoundError: there is nothing at ``path``.
            CheckpointError: it is damaged, incomplete, or no checkpoint.
        """
        if local_path(path) is None and get_filesystem(path).isfile(path):
            return super().load_checkpoint(path, map_location, weights_only)
        rank, world_size = self.reading_ranks or (0, 1)
        found = read_checkpoint(
            path,
            map_location=map_location,
            weights_only=weights_only,
            rank=rank,
            world_size=world_size,
        )
        # Other strategies keep what they get as their own state.
        return found if self.reading_ranks is not None else read_whole(found)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Leave nothing at ``path``: a file, a folder, or a link without what it points at."""
        remove_at(path)


def innermost(io: CheckpointIO) -> CheckpointIO:
    """Return what does the work behind wrappers."""
    while isinstance(io, _WrappingCheckpointIO) and io.checkpoint_io is not None:
        io = io.checkpoint_io
    return io


def is_async(io: CheckpointIO) -> bool:
    """Return whether ``io``, or what it wraps, saves while training goes on."""
    while isinstance(io, _WrappingCheckpointIO):
        if isinstance(io, AsyncCheckpointIO):
            return True
        if io.checkpoint_io is None:
            return False
        io = io.checkpoint_io
    return False
