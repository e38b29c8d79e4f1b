"""One file of a checkpoint being written: summed block by block on the way, flushed at its end."""

from __future__ import annotations

import ctypes
import functools
import io
import os
from collections.abc import Sequence
from typing import IO, Any

import torch

from lightning_zeroplus.checkpoint.blob import ALIGNMENT_NBYTES, bytes_of, frame_of
from lightning_zeroplus.checkpoint.checksum import Checksum
from lightning_zeroplus.checkpoint.manifest import BLOCK_NBYTES, FileSums, SavedBox
from lightning_zeroplus.layout.box import Box, dimension_order, span_boxes
from lightning_zeroplus.layout.span import Span

__all__ = ["DataFile"]


_PIECE_NBYTES = 8 * 2**20


@functools.cache
def _sync_file_range() -> Any:
    """Return Linux's call of the name, or None elsewhere; it only ever makes things faster."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


class DataFile:
    """Appends to ``stream`` and keeps account. *Local.*

    Args:
        name: of the file in the checkpoint's directory.
        stream: open for writing, empty.
    """

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self.name = name
        self._stream = stream
        self._place = 0
        self._sums: list[Checksum] = []
        self._left = 0
        """Bytes that the last block still takes."""

        self._unhurried = 0
        self._start_writing = _sync_file_range() if isinstance(stream, io.FileIO) else None

    @property
    def sums(self) -> FileSums:
        """Length and checksums of what has been written."""
        return FileSums(self._place, [found.value for found in self._sums])

    def write(self, part: Any) -> int:
        """Append bytes; return how many."""
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        start = 0
        while start < view.nbytes:
            if not self._left:
                self._sums.append(Checksum())
                self._left = BLOCK_NBYTES
            piece = view[start : start + min(self._left, _PIECE_NBYTES)]
            self._write_all(piece)
            self._hurry(piece.nbytes)
            self._sums[-1].update(piece)
            self._left -= piece.nbytes
            start += piece.nbytes
        self._place += view.nbytes
        return view.nbytes

    def _hurry(self, nbytes: int) -> None:
        """Have the system start on what was written; the flush at the end then waits for less."""
        self._unhurried += nbytes
        if self._start_writing is None or self._unhurried < _PIECE_NBYTES:
            return
        stop = self._stream.tell()
        self._start_writing(self._stream.fileno(), stop - self._unhurried, self._unhurried, 2)
        self._unhurried = 0

    def _write_all(self, view: memoryview) -> None:
        while view.nbytes:  # an unbuffered file may take less than it is given
            taken = self._stream.write(view)
            if not taken:
                raise OSError(f"the file took none of {view.nbytes} bytes")
            view = view[taken:]

    def write_span(
        self,
        local: torch.Tensor,
        shape: Sequence[int],
        span: Span,
        stride: Sequence[int] | None = None,
    ) -> list[SavedBox]:
        """Append the boxes of one span of a tensor; return where they are.

        Args:
            local: the elements, 1-D ``[span.numel]``, on any device.
            shape: of the whole tensor.
            span: its range in memory order.
            stride: of the whole tensor; None: row-major.
        """
        order = dimension_order(shape, stride) if stride is not None else tuple(range(len(shape)))
        saved = []
        place = 0
        for box in span_boxes(shape, span, stride):
            part = local[place : place + box.numel]
            place += box.numel
            if order != tuple(range(len(shape))):
                part = part.view([box.sizes[dim] for dim in order])
                part = part.permute([order.index(dim) for dim in range(len(shape))])
            saved.append(self._write_box(part.reshape(-1), box))
        return saved

    def _write_box(self, flat: torch.Tensor, box: Box) -> SavedBox:
        self.write(bytes(-self._place % ALIGNMENT_NBYTES))
        start = self._place
        frame = frame_of(flat.dtype, box.sizes)
        self.write(frame.head)
        body = self._place
        for part in bytes_of(flat):
            self.write(part)
        self.write(frame.tail)
        return SavedBox(self.name, start, self._place, body, box)

    def close(self) -> None:
        """Have everything on the disk, where there is one."""
        self._stream.flush()
        try:
            descriptor = self._stream.fileno()
        except (AttributeError, OSError):  # not a file of this machine
            descriptor = None
        if descriptor is not None:
            os.fsync(descriptor)
        self._stream.close()
