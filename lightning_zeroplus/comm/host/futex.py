"""Waiting for a word of shared memory to change, by Linux's futex call.

Only x86-64: the boards' plain loads and stores rely on its order of memory accesses (stores of one
core are seen in their order), for which Python has no fence.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

__all__ = ["is_proven", "wait", "wake"]

_FUTEX = 202  # the system call's number on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_proven() -> bool:
    """Return whether this machine's memory order is one that was tried: 64-bit x86 on Linux."""
    return (
        sys.platform == "linux"
        and platform.machine() in {"x86_64", "AMD64"}
        and ctypes.sizeof(ctypes.c_void_p) == 8
    )


@functools.cache
def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until `wake` is called on the 32-bit word at ``address``, at most ``seconds``.

    Returns at once if the word is not ``seen`` any more, and now and then for no reason.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _call()(
        ctypes.c_long(_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_long(_WAIT),
        ctypes.c_uint32(seen),
        ctypes.byref(limit),
        None,
        ctypes.c_long(0),
    )


def wake(address: int) -> None:
    """Wake all that wait on the word at ``address``, in every process that maps it."""
    _call()(
        ctypes.c_long(_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_long(_WAKE),
        ctypes.c_long(_EVERYBODY),
        None,
        None,
        ctypes.c_long(0),
    )
