"""A parameter that lies in pieces of flat partitions, as one tensor that is read when needed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor
from lightning_zeroplus.layout.box import Box, span_boxes, whole_box
from lightning_zeroplus.layout.span import Span

__all__ = ["Piece", "Run", "cut_runs", "join_pieces", "view_saved"]


class Piece(NamedTuple):
    """Elements ``start`` to ``start + numel`` of a 1-D tensor in a mapped file."""

    flat: torch.Tensor
    start: int
    numel: int


class Run(NamedTuple):
    """Elements ``start`` to ``start + numel`` of one of several 1-D tensors."""

    which: int
    start: int
    numel: int


def cut_runs(lengths: Sequence[int], start: int, numel: int) -> list[Run]:
    """Return where a range lies in 1-D tensors of ``lengths`` that follow each other.

    It is shorter than ``numel`` if they end before it.

    >>> cut_runs([4, 0, 4], 3, 3)
    [Run(which=0, start=3, numel=1), Run(which=2, start=0, numel=2)]
    """
    runs = []
    ends = itertools.accumulate(lengths)
    for which, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        first, last = max(start, end - length), min(start + numel, end)
        if first < last:
            runs.append(Run(which, first - (end - length), last - first))
    return runs


def join_pieces(shape: Sequence[int], dtype: torch.dtype, pieces: list[Piece]) -> SavedTensor:
    """Return the row-major tensor of ``shape`` whose elements are ``pieces``, one after the other.

    Reading a box takes memory for that box; one piece alone is shown without a copy.
    """
    return SavedTensor(shape, dtype, _Join(tuple(shape), dtype, pieces))


def view_saved(tensor: torch.Tensor) -> SavedTensor:
    """Return a tensor of a mapped file as one that is read when needed."""
    source = tensor.detach()
    return SavedTensor(source.shape, source.dtype, lambda box: source[box.slices()])


class _Join:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[Piece]) -> None:
        self._shape, self._dtype, self._pieces = shape, dtype, pieces

    def __call__(self, box: Box) -> torch.Tensor:
        if len(self._pieces) == 1:
            return _elements(self._pieces[0]).view(self._shape)[box.slices()]
        if box == whole_box(self._shape):
            flat = torch.empty(box.numel, dtype=self._dtype)
            place = 0
            for piece in self._pieces:
                flat[place : place + piece.numel] = _elements(piece)
                place += piece.numel
            return flat.view(self._shape)
        return self._cut(box)

    def _cut(self, box: Box) -> torch.Tensor:
        out = torch.empty(box.sizes, dtype=self._dtype)
        if not box.numel:
            return out
        first, last = _extent(self._shape, box)
        place = 0
        for piece in self._pieces:
            span = Span(place, place + piece.numel)
            place = span.stop
            if span.stop <= first or span.start >= last:
                continue
            start = 0
            for region in span_boxes(self._shape, span):
                common = region.intersect(box)
                if common is not None:
                    source = _elements(piece)[start : start + region.numel].view(region.sizes)
                    to, of = common.relative_to(box.offsets), common.relative_to(region.offsets)
                    out[to.slices()] = source[of.slices()]
                start += region.numel
        return out


def _elements(piece: Piece) -> torch.Tensor:
    return piece.flat.detach()[piece.start : piece.start + piece.numel]


def _extent(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the range of elements from the first to the last of ``box``."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(a * stride for a, stride in zip(box.offsets, strides, strict=True))
    last = sum(
        (a + n - 1) * stride for a, n, stride in zip(box.offsets, box.sizes, strides, strict=True)
    )
    return first, last + 1
