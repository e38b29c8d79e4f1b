"""Reading whatever checkpoint is at a path, in one form: Lightning's dictionary."""

from __future__ import annotations

import os
from typing import Any

from lightning_zeroplus.checkpoint.dcp import METADATA
from lightning_zeroplus.checkpoint.folder import Folder, folder_at, local_path
from lightning_zeroplus.checkpoint.full import read_full
from lightning_zeroplus.checkpoint.load import has_manifest, open_dcp, open_universal
from lightning_zeroplus.checkpoint.save import META
from lightning_zeroplus.errors import CheckpointError

__all__ = ["form_of", "read_checkpoint"]


def form_of(path: str | os.PathLike[str], options: dict[str, Any] | None = None) -> str:
    """Return which form of checkpoint is at ``path``, as far as names tell.

    "universal", "dcp" (PyTorch's own or Lightning's FSDP), "deepspeed", "file", or "" for a folder
    that is none of them.

    Raises:
        FileNotFoundError: there is nothing.
    """
    local = local_path(path)
    if local is not None and not local.is_dir():
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        return "file"
    folder = folder_at(path, options)
    if has_manifest(folder):
        return "universal"
    if folder.nbytes_of(METADATA) is not None:
        return "dcp"
    if local is None:
        return "" if folder.is_folder() else "file"
    from lightning_zeroplus.checkpoint.deepspeed import detect_deepspeed

    return "deepspeed" if detect_deepspeed(local) else ""


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    weights_only: bool | None = None,
    map_location: Any = "cpu",
    check: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, Any]:
    """Return the checkpoint at ``path``; its tensors are read when they are used.

    Universal checkpoints, directories of `torch.distributed.checkpoint` and of Lightning's FSDP
    strategies, DeepSpeed's, and single files. Optimizer states of directories are keyed by
    parameter name.

    Args:
        path: a local path, or one that fsspec reaches.
        weights_only: as in `torch.load`.
        map_location: for tensors of single files.
        check: compare checksums, where the form has them.
        rank: of this process among ``world_size`` that read together: each checks its share.
        world_size: how many read together.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: what is there is damaged, incomplete, or no checkpoint.
    """
    form = form_of(path)
    folder = folder_at(path)
    if form == "universal":
        return open_universal(
            folder, weights_only=weights_only, check=check, rank=rank, world_size=world_size
        )
    if form == "dcp":
        return open_dcp(folder, weights_only=weights_only)
    if form == "deepspeed":
        from lightning_zeroplus.checkpoint.deepspeed import read_deepspeed

        return read_deepspeed(os.fspath(path))
    if form == "":
        raise CheckpointError(f"Expected a checkpoint, got {_describe(folder)} ({path}). {_HINT}")
    found = read_full(path, map_location=map_location, weights_only=weights_only)
    if not isinstance(found, dict):
        raise CheckpointError(
            f"Expected a checkpoint dictionary, got a {type(found).__name__} ({path}). "
            f"Give the path of a file that a Trainer has saved."
        )
    return found


_HINT = (
    "Give the path of one that a Trainer, torch.distributed.checkpoint or DeepSpeed has saved, or "
    "resume from another."
)


def _describe(folder: Folder) -> str:
    names = folder.names()
    if not names:
        return "an empty folder"
    if META in names or any(name.endswith(".distcp") for name in names):
        return "an incomplete one, without its manifest.json, which is written last"
    return f"a folder of {', '.join(names[:3])}"
