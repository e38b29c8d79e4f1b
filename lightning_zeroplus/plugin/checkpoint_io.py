"""How one `.ckpt` file is written and read."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_zeroplus.checkpoint import read_full, remove_full, write_full

__all__ = ["ZeroPlusCheckpointIO"]


class ZeroPlusCheckpointIO(TorchCheckpointIO):
    """Lightning's own files, written atomically and read without a second copy in memory.

    On the local disk a checkpoint is complete and flushed before it gets its name, a link in its
    place is replaced instead of written through, and reading maps the file. Paths on other file
    systems go Lightning's way.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        """Put ``checkpoint`` at ``path``.

        Raises:
            CheckpointError: the file cannot be written; what was at ``path`` is unchanged.
            TypeError: ``storage_options`` is given, which this format has no use for.
        """
        local = _local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_full(checkpoint, local)

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``; its tensors are mapped from a local file.

        Raises:
            FileNotFoundError: there is nothing at ``path``.
            CheckpointError: the file is damaged, incomplete or no checkpoint.
        """
        local = _local_path(path)
        if local is None:
            return super().load_checkpoint(path, map_location, weights_only)
        checkpoint: dict[str, Any] = read_full(
            local, map_location=map_location, weights_only=weights_only
        )
        return checkpoint

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Leave nothing at ``path``; what a link there points to stays."""
        local = _local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        else:
            remove_full(local)


def _local_path(path: _PATH) -> str | None:
    if not _is_local_file_protocol(path):
        return None
    return str(get_filesystem(path)._strip_protocol(str(path)))
