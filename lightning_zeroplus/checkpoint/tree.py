"""A checkpoint as a nested dictionary, taken apart into tensors and a skeleton, and put together.

Pure bookkeeping: where a tensor was, the skeleton has a mark with the key under which the tensor is
stored. Marks are plain dictionaries, so a skeleton loads with ``weights_only=True``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Path", "free_key", "join_key", "key_of_mark", "map_leaves", "mark", "set_at"]

Path = tuple[str | int, ...]

_MARK = "zeroplus_tensor"

_PREFIXES = {"state_dict": "model"}


def mark(key: str) -> dict[str, str]:
    """Return what stands in a skeleton for the tensor that is stored under ``key``."""
    return {_MARK: key}


def key_of_mark(value: object) -> str | None:
    """Return the key if ``value`` is a mark.

    >>> key_of_mark(mark("model.weight")), key_of_mark({"lr": 0.1})
    ('model.weight', None)
    """
    if isinstance(value, dict) and len(value) == 1:
        key = value.get(_MARK)
        return key if isinstance(key, str) else None
    return None


def join_key(path: Path) -> tuple[str, tuple[str | int, ...]]:
    """Return the key of a tensor at ``path`` of a checkpoint, and its place in PyTorch's own terms.

    Weights and optimizer states have the keys that Lightning's FSDP strategies give them.

    >>> join_key(("state_dict", "net.weight"))
    ('model.net.weight', ('model', 'net.weight'))
    >>> join_key(("optimizer_states", 0, "state", "net.weight", "exp_avg"))[0]
    'optimizer_0.state.net.weight.exp_avg'
    >>> join_key(("callbacks", "EMA", "shadow", 3))[0]
    'callbacks.EMA.shadow.3'
    """
    first: tuple[str | int, ...] = path[:1]
    if first == ("optimizer_states",) and len(path) > 1:
        place: Path = (f"optimizer_{path[1]}", *path[2:])
    else:
        place = (_PREFIXES.get(str(path[0]), path[0]), *path[1:])
    plain = tuple(str(step) if isinstance(step, str) else step for step in place)
    return ".".join(map(str, plain)), plain


class _Other(str):
    """Unlike any key of a checkpoint, should one read alike."""

    __slots__ = ()


def free_key(key: str) -> str:
    """Return a first part of paths that no weight and no optimizer has.

    >>> free_key("callbacks"), free_key("model")
    ('callbacks', 'other.model')
    """
    return _Other(f"other.{key}") if re.fullmatch(r"model|optimizer_\d+", key) else key


def map_leaves(tree: Any, change: Callable[[Path, Any], Any], at: Path = ()) -> Any:
    """Return ``tree`` with ``change(path, leaf)`` for what is neither a dict, a list nor a tuple.

    Dictionaries of other kinds become plain ones; a named tuple stays what it is. Marks are leaves.
    """
    if key_of_mark(tree) is not None:
        return change(at, tree)
    if isinstance(tree, Mapping):
        changed = {key: map_leaves(value, change, (*at, key)) for key, value in tree.items()}
        return changed if type(tree) is dict else _as_before(tree, changed)
    if isinstance(tree, list | tuple):
        items = [map_leaves(value, change, (*at, n)) for n, value in enumerate(tree)]
        if isinstance(tree, list):
            return items if type(tree) is list else change(at, tree)
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return tuple(items)
    return change(at, tree)


def _as_before(tree: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return ``changed`` in the kind that ``tree`` has, where that is a plain matter."""
    if any(a is not b for a, b in zip(tree.values(), changed.values(), strict=True)):
        try:
            copied = tree.copy()  # type: ignore[attr-defined]
            copied.update(changed)
        except (AttributeError, TypeError):
            return changed
        return copied
    return tree


def set_at(tree: dict[Any, Any], path: Path, value: Any) -> None:
    """Put ``value`` at ``path`` of nested dictionaries and lists; missing dictionaries are made."""
    here: Any = tree
    for step in path[:-1]:
        here = here.setdefault(step, {}) if isinstance(here, dict) else here[step]
    here[path[-1]] = value
