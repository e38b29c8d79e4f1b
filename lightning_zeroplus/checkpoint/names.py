"""Names of saved tensors: the module's own, without what wrappers put in between."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from lightning_zeroplus.layout.names import plain_name

__all__ = ["align_names", "find_mismatches"]

_T = TypeVar("_T")


def align_names(state: Mapping[str, _T], expected: Iterable[str]) -> dict[str, _T]:
    """Return ``state`` under the ``expected`` names, whichever side has wrapped modules.

    Names without a counterpart stay as they are.

    >>> align_names({"net.weight": 1, "other": 2}, ["net._orig_mod.weight"])
    {'net._orig_mod.weight': 1, 'other': 2}
    """
    wanted = list(expected)
    by_plain_name = {plain_name(name): name for name in wanted}
    known = set(wanted)
    return {
        name if name in known else by_plain_name.get(plain_name(name), name): value
        for name, value in state.items()
    }


def find_mismatches(
    expected: Mapping[str, object], given: Mapping[str, object], optional: Collection[str] = ()
) -> list[str]:
    """Return what keeps ``given`` from being loaded where ``expected`` is, one text per name.

    Args:
        expected: by name, things with a ``shape``, or without one.
        given: likewise, what was saved.
        optional: names that may be missing from ``given``.

    >>> find_mismatches({"a": 0, "b": 0}, {"b": 0, "c": 0})
    ['a is missing', 'c is unexpected']
    """
    problems = [
        f"{name} is missing" for name in expected if name not in given and name not in optional
    ]
    for name, value in given.items():
        if name not in expected:
            problems.append(f"{name} is unexpected")
            continue
        saved = getattr(value, "shape", None)
        wanted = getattr(expected[name], "shape", None)
        if saved is not None and wanted is not None and tuple(saved) != tuple(wanted):
            problems.append(f"{name} is {list(saved)} instead of {list(wanted)}")
    return problems
