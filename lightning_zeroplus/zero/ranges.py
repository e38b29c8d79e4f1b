"""Named ranges for torch's profiler: ``ZeroPlus::<verb> <unit>``, and nothing where none runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from lightning_zeroplus.comm.private import is_profiled

if TYPE_CHECKING:
    from lightning_zeroplus.zero.unit import Unit

__all__ = ["OpenRange", "named_range", "of_unit"]

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")


def of_unit(
    verb: str,
) -> Callable[[Callable[Concatenate[_S, Unit, _P], _T]], Callable[Concatenate[_S, Unit, _P], _T]]:
    """Return a decorator that shows what a method does to a unit, its first argument."""

    def decorate(
        method: Callable[Concatenate[_S, Unit, _P], _T],
    ) -> Callable[Concatenate[_S, Unit, _P], _T]:
        @functools.wraps(method)
        def run(self: _S, unit: Unit, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            if not is_profiled():
                return method(self, unit, *args, **kwargs)
            with torch.profiler.record_function(f"ZeroPlus::{verb} {unit.name}"):
                return method(self, unit, *args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def named_range(verb: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that shows a call which concerns all units."""

    def decorate(call: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(call)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if not is_profiled():
                return call(*args, **kwargs)
            with torch.profiler.record_function(f"ZeroPlus::{verb}"):
                return call(*args, **kwargs)

        return run

    return decorate


class OpenRange:
    """A range that begins in one call and ends in another."""

    def __init__(self, verb: str) -> None:
        self._name = f"ZeroPlus::{verb}"
        self._range: torch.profiler.record_function | None = None

    def open(self) -> None:
        """Begin, if a profiler runs."""
        if is_profiled():
            self._range = torch.profiler.record_function(self._name)
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End, if it has begun."""
        opened, self._range = self._range, None
        if opened is not None:
            opened.__exit__(None, None, None)
