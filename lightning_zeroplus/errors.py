"""The error hierarchy. Every message reads ``Expected X, got Y (fqn, axis, rank). Do Z.``"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "LayoutError",
    "PhaseError",
    "ZeroPlusError",
    "name_offenders",
]

_MOST_OFFENDERS = 10


class ZeroPlusError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ZeroPlusError, ValueError):
    """A setting, a model or an optimizer that cannot work; found at set-up."""


class LayoutError(ZeroPlusError, ValueError):
    """Layout arithmetic was asked for something that has no answer."""


class PhaseError(ZeroPlusError, RuntimeError):
    """A call at a moment at which it cannot be right."""


class CollectiveError(ZeroPlusError, RuntimeError):
    """Ranks that should act together did not: a divergence, a dead or a silent peer."""


class CheckpointError(ZeroPlusError, RuntimeError):
    """A checkpoint that is missing, damaged, incomplete or of another model."""


def name_offenders(offenders: Iterable[str]) -> str:
    """List at most ten offenders, then a count of the rest.

    >>> name_offenders(["a", "b"])
    'a, b'
    >>> name_offenders([str(n) for n in range(12)])
    '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more'
    """
    names = list(offenders)
    text = ", ".join(names[:_MOST_OFFENDERS])
    rest = len(names) - _MOST_OFFENDERS
    return f"{text} and {rest} more" if rest > 0 else text
