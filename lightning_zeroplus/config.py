"""What a user may type: frozen, keyword-only, checked when made.

Only scalars, ``Literal`` and ``Optional`` are used, so that YAML, ``--print_config`` and dotted
overrides work.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_zeroplus.errors import ConfigError, name_offenders

__all__ = [
    "EngineConfig",
    "FloatDtype",
    "SaveFormat",
    "Stage",
    "TransportName",
    "UnshardOnAccess",
    "UnusedGradients",
]

Stage = Literal[1, 2, 3]
FloatDtype = Literal["fp16", "bf16", "fp32", "fp64"]
UnusedGradients = Literal["skip", "zero"]
UnshardOnAccess = Literal["gather", "error"]
TransportName = Literal["auto", "c10d", "shared_memory"]
SaveFormat = Literal["universal", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of one engine, equal on all ranks.

    Raises:
        ConfigError: a value outside what its field allows.
    """

    stage: Stage = 2
    """1 shards optimizer state, 2 gradients too, 3 weights too."""

    units: tuple[str | type, ...] | None = None
    """Class names, import paths or classes that form units at stage 3; None: found by itself."""

    bucket_nbytes: int | None = None
    """Size in bytes of a unit of replicated weights; None: 16 MB over c10d."""

    prefetch: int = 1
    """Units unsharded ahead of need."""

    master_dtype: FloatDtype | None = None
    """Type of master weights; None: the wider of fp32 and the parameter's own."""

    reduce_dtype: FloatDtype | None = None
    """Type in which gradients are reduced and kept; None: as `master_dtype` by default."""

    unused_gradients: UnusedGradients = "skip"
    """What the optimizer sees of a parameter without a gradient on any rank."""

    unshard_on_access: UnshardOnAccess = "gather"
    """What an access to a resting stage-3 weight does."""

    def __post_init__(self) -> None:
        problems = [
            *_outside("stage", self.stage, get_args(Stage)),
            *_outside("unused_gradients", self.unused_gradients, get_args(UnusedGradients)),
            *_outside("unshard_on_access", self.unshard_on_access, get_args(UnshardOnAccess)),
            *_outside("master_dtype", self.master_dtype, (None, *get_args(FloatDtype))),
            *_outside("reduce_dtype", self.reduce_dtype, (None, *get_args(FloatDtype))),
        ]
        if self.bucket_nbytes is not None and not _whole(self.bucket_nbytes, 1):
            problems.append(
                f"bucket_nbytes={self.bucket_nbytes!r} (a whole number of bytes above 0)"
            )
        if not _whole(self.prefetch, 0):
            problems.append(f"prefetch={self.prefetch!r} (a whole number, 0 or more)")
        if self.units is not None and not isinstance(self.units, tuple):
            problems.append(f"units={self.units!r} (a tuple of class names, paths or classes)")
        elif self.units is not None:
            problems += [
                f"units entry {entry!r} (a class name, an import path or a class)"
                for entry in self.units
                if not isinstance(entry, (str, type)) or entry == ""
            ]
        if problems:
            raise ConfigError(
                f"Expected settings within their ranges, got {name_offenders(problems)}."
            )


def _outside(name: str, value: object, allowed: tuple[object, ...]) -> list[str]:
    if isinstance(value, bool) or not any(value == a and type(value) is type(a) for a in allowed):
        return [f"{name}={value!r} (one of {', '.join(repr(a) for a in allowed)})"]
    return []


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def import_class(path: str) -> type | None:
    """Return the class at a dotted import path, or None for a bare class name.

    Raises:
        ConfigError: the path has dots but names no class.
    """
    if "." not in path:
        return None
    home, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"Expected an importable class, got {path!r} ({error}).") from error
    if not isinstance(found, type):
        raise ConfigError(f"Expected a class, got {path!r}, a {type(found).__name__}.")
    return found
