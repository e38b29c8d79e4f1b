"""Fields of a file that someone else wrote: each is checked when it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_zeroplus.errors import CheckpointError

__all__ = ["check_name", "fault", "own", "shapes_of", "take"]

_T = TypeVar("_T")

_LONGEST_NAME = 255  # bytes, of common file systems
_DAMAGED = "Use another checkpoint; this one is damaged or of an unknown version."


def fault(expected: str, got: str, path: Path, do: str = _DAMAGED) -> CheckpointError:
    """Return the error for ``path``; ``do`` says how to go on."""
    return CheckpointError(f"Expected {expected}, got {got} ({path}). {do}")


def take(data: Mapping[str, Any], key: str, kind: type[_T], path: Path) -> _T:
    """Return ``data[key]``, which must be a ``kind``.

    Raises:
        CheckpointError: it is missing or something else.
    """
    if key not in data:
        raise fault(f"the entry {key!r}", "a file without it", path)
    value = data[key]
    if not isinstance(value, kind):
        raise fault(f"{key!r} to be {kind.__name__}", type(value).__name__, path)
    return value


def shapes_of(value: Any, what: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a file lists by parameter name.

    Raises:
        CheckpointError: it is not such a list.
    """
    if not isinstance(value, Mapping):
        raise fault(f"{what} to map names to shapes", type(value).__name__, path)
    for name, shape in value.items():
        sizes = shape if isinstance(shape, tuple | list) else [None]
        if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in sizes):
            raise fault(f"{what} to map names to shapes", f"{name!r}: {shape!r}", path)
        if math.prod(sizes) >= 2**62:
            raise fault(f"{name} of a size that memory can have", str(tuple(sizes)), path)
    return {name: tuple(shape) for name, shape in value.items()}


def check_name(name: str, what: str, path: Path) -> str:
    """Return ``name``, which is to name an entry right inside a folder.

    Raises:
        CheckpointError: it would lead out of the folder.
    """
    too_long = len(name.encode("utf-8", "replace")) > _LONGEST_NAME
    if name in ("", ".", "..") or too_long or any(sign in name for sign in "/\\\0"):
        raise fault(
            f"{what} to be the name of a folder",
            repr(name[:100]),
            path,
            "Do not use this checkpoint if you did not make it yourself.",
        )
    return name


def own(value: Any) -> Any:
    """Return ``value`` with every tensor in it in memory of its own, off the mapped file."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: own(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(own(item) for item in value)
    return value
