"""How one tensor lies in a file so that `torch.load` reads it, written without a copy of it.

A blob is what `torch.save` makes of one tensor. `torch.save` itself lays it out, told to leave the
elements out; they are then written from where they are. A whole dictionary of tensors is written
likewise, each tensor when its turn comes, so a file of any size takes memory for one.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch

__all__ = ["ALIGNMENT_NBYTES", "Frame", "bytes_of", "frame_of", "save_streamed"]

ALIGNMENT_NBYTES = 64
"""Blobs start on it in a file; inside a blob torch aligns elements alike."""

_COPY_NBYTES = 32 * 2**20


class Frame(NamedTuple):
    """What stands before and after the elements of a blob."""

    head: bytes
    tail: bytes


class _Recorder:
    """A stream for `torch.save` under `skip_data`: elements arrive as a seek over their bytes."""

    def __init__(self, fill: Callable[[int], None], sink: Callable[[bytes], object]) -> None:
        self._fill, self._sink = fill, sink
        self._position = 0

    def write(self, part: Any) -> int:
        view = memoryview(part)
        self._sink(bytes(view))
        self._position += view.nbytes
        return view.nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != io.SEEK_CUR or offset < 0:
            raise io.UnsupportedOperation("only forward, over a tensor's elements")
        self._fill(offset)
        self._position += offset
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Have nothing to do."""


@functools.lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    """Return the frame of a row-major tensor; it is the same for all of the dtype and sizes."""
    parts: list[list[bytes]] = [[]]
    recorder = _Recorder(lambda _: parts.append([]), lambda part: parts[-1].append(part))
    with torch.serialization.skip_data():
        torch.save(torch.empty(sizes, dtype=dtype), recorder)  # type: ignore[arg-type]
    if len(parts) == 1:  # no element, and so no seek
        return Frame(b"".join(parts[0]), b"")
    head, tail = (b"".join(part) for part in parts)
    return Frame(head, tail)


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a 1-D contiguous ``tensor`` in order.

    Memory on the CPU is shown as it is; elements on a device are copied a part at a time.
    """
    raw = tensor.detach().view(torch.uint8) if tensor.numel() else tensor.new_empty(0).cpu()
    if raw.device.type == "cpu":
        if raw.numel():
            yield raw.numpy().data
        return
    for part in raw.tensor_split(range(_COPY_NBYTES, raw.numel(), _COPY_NBYTES)):
        yield part.cpu().numpy().data


def save_streamed(skeleton: Any, tensors: Iterator[torch.Tensor], file: IO[bytes]) -> None:
    """Write what `torch.save` would for ``skeleton`` with ``tensors`` in place of its own.

    Args:
        skeleton: its tensors have the right shape and dtype; their values are never looked at.
        tensors: the values in the order in which pickling meets those of ``skeleton``; each is
            asked for when its turn comes and may be freed afterwards.
        file: at its start.
    """
    # All but the elements first: asked for under skip_data, values that `torch.load` reads would
    # be skipped as well.
    parts: list[bytes | int] = []
    with torch.serialization.skip_data():
        torch.save(skeleton, _Recorder(parts.append, parts.append))  # type: ignore[arg-type]
    for part in parts:
        if isinstance(part, bytes):
            file.write(part)
        else:
            _write_elements(next(tensors), part, file)


def _write_elements(tensor: torch.Tensor, nbytes: int, file: IO[bytes]) -> None:
    if tensor.nbytes != nbytes:
        raise ValueError(f"Expected {nbytes} bytes of a tensor, got {tensor.nbytes}.")
    for part in bytes_of(tensor.contiguous().reshape(-1)):
        file.write(part)
