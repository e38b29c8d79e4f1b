"""One file that holds a whole checkpoint: written at once or not at all, read without a copy."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import uuid
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.errors import CheckpointError

__all__ = ["draft_of", "flush_folder", "read_full", "write_full"]


def draft_of(target: Path, token: str) -> Path:
    """Return where ``target`` is written before it takes its name.

    The target's name is no part of it: what is half-written must never be taken for a checkpoint,
    and Lightning takes every name that contains ``hpc_ckpt_`` for one.
    """
    name = hashlib.sha256(target.name.encode()).hexdigest()[:16]
    return target.with_name(f".zeroplus-{name}-{token}.tmp")


def write_full(checkpoint: object, path: str | os.PathLike[str]) -> None:
    """Put ``checkpoint`` at ``path`` on the local disk, complete and flushed, or change nothing.

    A link at ``path`` is replaced, never written through. Missing folders are made.

    Raises:
        CheckpointError: the file cannot be written; what was at ``path`` is still there.
    """
    target = Path(path)
    draft = draft_of(target, uuid.uuid4().hex)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
        flush_folder(target.parent)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        # torch turns a failed write into a RuntimeError whose context has the reason.
        cause = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
        raise CheckpointError(
            f"Expected to write a checkpoint, got {type(cause).__name__}: {cause} ({target}). "
            f"Earlier checkpoints are unchanged; free space or choose another folder."
        ) from error
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read_full(
    path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool | None = None
) -> Any:
    """Return what `write_full` or `torch.save` put at ``path`` on the local disk.

    Tensors are mapped from the file: memory is taken when, and as far as, they are read.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: it is a folder, or the file is damaged or incomplete.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {source}")
    if source.is_dir():
        raise CheckpointError(
            f"Expected a checkpoint in one file, got a folder ({source}). "
            f"Give the path of the file that was saved with save_format='full'."
        )
    with damage_as(lambda error: _damaged(source, error)):
        mapped = _is_archive(source)
        return torch.load(source, map_location=map_location, mmap=mapped, weights_only=weights_only)


@contextlib.contextmanager
def damage_as(named: Callable[[Exception], CheckpointError]) -> Generator[None, None, None]:
    """Raise ``named(error)`` for what `torch.load` raises on damaged files.

    What it says of classes that ``weights_only`` keeps out stays as it is.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error).lower() or "weights only" in str(error).lower():
            raise  # says what is not allowed and how to allow it
        raise named(error) from error
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        raise named(error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(
        f"Expected a complete checkpoint file, got {path.stat().st_size} unreadable bytes: "
        f"{reason} ({path}). Resume from an earlier checkpoint."
    )


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(b"\x80"):
        return False  # a pickle, as written before torch 1.6
    if start != b"PK\x03\x04":
        raise ValueError("they do not start as a checkpoint does")
    # The table of contents stands at the end of the file.
    if not zipfile.is_zipfile(path):
        raise EOFError("the file ends early")
    return True


def flush_folder(folder: Path) -> None:
    """Make the rename itself last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
