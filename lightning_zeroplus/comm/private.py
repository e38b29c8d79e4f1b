"""Every private torch call that the engine's memory tricks need, each behind one function.

A resting weight keeps its tensor and its storage object; only the memory under the storage is
exchanged, against an arena of NaN that is flagged to throw on writes. What gets past Python then
reads NaN instead of freed memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_zeroplus.comm.host.memory import Repeated, can_repeat
from lightning_zeroplus.errors import ConfigError

__all__ = [
    "Arena",
    "forbid_raw_memory",
    "hide_frame_from_compiler",
    "hide_from_compiler",
    "is_profiled",
    "missing_private_calls",
    "resize_fallback",
    "swap_memory",
    "tensor_over",
]

log = logging.getLogger(__name__)

_FALLBACK_VARIABLE = "ZEROPLUS_ALLOW_RESIZE_FALLBACK"


def missing_private_calls() -> list[str]:
    """Return the names of the calls that this build of torch lacks."""
    needed = {
        "UntypedStorage._swap_data_ptr_": hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
        "torch._C._construct_storage_from_data_pointer": hasattr(
            torch._C, "_construct_storage_from_data_pointer"
        ),
        "torch._C._set_throw_on_mutable_data_ptr": hasattr(
            torch._C, "_set_throw_on_mutable_data_ptr"
        ),
    }
    return [name for name, present in needed.items() if not present]


def resize_fallback() -> bool:
    """Return whether stage 3 frees storages by `resize_` because the swap is missing.

    Raises:
        ConfigError: calls are missing and the environment does not allow the fallback.
    """
    missing = missing_private_calls()
    if not missing:
        return False
    if os.environ.get(_FALLBACK_VARIABLE) == "1":
        return True
    raise ConfigError(
        f"Expected a torch build with {', '.join(missing)} for stage 3, got {torch.__version__}. "
        f"Use torch 2.13 or newer, or stage 1 or 2."
    )


def swap_memory(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of equal size and device; tensors keep their storage."""
    a._swap_data_ptr_(b)  # type: ignore[attr-defined]


def tensor_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, numel: int, device: torch.device
) -> torch.Tensor:
    """Return a 1-D tensor ``[numel]`` over a storage, without touching the memory."""
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage, 0, (numel,), (1,))


class Arena:
    """NaN-filled memory that all resting weights of one device point at.

    One per process and device; grows, and old memory stays alive while something rests on it. On
    Linux it is one small piece, mapped over and over.
    """

    _lock = threading.Lock()
    _blocks: ClassVar[dict[torch.device, list[_ArenaBlock]]] = {}

    @classmethod
    def resting_storage(cls, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Return a non-owning storage of ``nbytes`` on the arena that throws on writes."""
        with cls._lock, torch.inference_mode(False), torch.no_grad():
            blocks = cls._blocks.setdefault(device, [])
            if not blocks or blocks[-1].nbytes < nbytes:
                blocks.append(_arena_block(max(nbytes, 1), device))
            address = blocks[-1].address
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        # The flag is set through a tensor, which must go: it would hold swapped-in memory.
        flagged = tensor_over(storage, torch.uint8, nbytes, device)
        torch._C._set_throw_on_mutable_data_ptr(flagged)
        del flagged
        return storage  # type: ignore[no-any-return]

    @classmethod
    def nbytes(cls, device: torch.device) -> int:
        """Return the bytes that the arena holds on ``device``."""
        return sum(block.held_nbytes for block in cls._blocks.get(device, []))

    @staticmethod
    def price(nbytes: int, device: torch.device) -> int:
        """Return how many bytes an arena for blocks of ``nbytes`` will hold."""
        if device.type == "cpu" and can_repeat() and nbytes >= _LEAST_REPEATED_NBYTES:
            return Repeated.piece_nbytes(nbytes)
        return nbytes


class _ArenaBlock(NamedTuple):
    address: int
    nbytes: int
    held_nbytes: int
    keeps: object


_LEAST_REPEATED_NBYTES = 1 << 20


def _arena_block(nbytes: int, device: torch.device) -> _ArenaBlock:
    if Arena.price(nbytes, device) < nbytes:
        try:
            repeated = Repeated(nbytes, 255)
            return _ArenaBlock(repeated.address, nbytes, repeated.held_nbytes, repeated)
        except OSError as error:
            log.debug("the arena lies in memory of its own: %s", error)
    whole = torch.full((nbytes,), 255, dtype=torch.uint8, device=device)
    return _ArenaBlock(whole.data_ptr(), nbytes, nbytes, whole)


def forbid_raw_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, whose data pointer raises from now on where it would be null."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return whether torch's profiler runs."""


def hide_from_compiler(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` so that dynamo runs it, and what it calls, as plain Python."""
    return torch.compiler.disable(fn)  # type: ignore[no-any-return,no-untyped-call]


def hide_frame_from_compiler(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` itself, whose own frame dynamo leaves alone; costs nothing per call."""
    from torch._dynamo.decorators import skip

    return skip(fn)
