"""N-d boxes of tensors, and the few boxes that make up an element range.

A span of a row-major tensor is a run of elements; cut along the dimensions it is at most ``2N - 1``
boxes, each of which is a run of elements too. Tensors that lie in memory in another order of
dimensions (channels last) are cut along that order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_zeroplus.errors import LayoutError
from lightning_zeroplus.layout.span import Span

__all__ = ["Box", "dimension_order", "find_gaps", "span_boxes", "whole_box"]


class Box(NamedTuple):
    """A region of a tensor: where it starts and how long it is in each dimension.

    >>> Box((0, 2), (4, 3)).intersect(Box((3, 0), (9, 4)))
    Box(offsets=(3, 2), sizes=(1, 2))
    >>> Box((3, 2), (1, 2)).relative_to((1, 2))
    Box(offsets=(2, 0), sizes=(1, 2))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(*self, *other, offsets, strict=True)
        )
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same region counted from ``origin``."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects the region."""
        return tuple(slice(a, a + n) for a, n in zip(*self, strict=True))


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def dimension_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return dimensions from the slowest to the fastest in memory.

    >>> dimension_order((2, 3, 4, 5), (60, 1, 15, 3))
    (0, 2, 3, 1)
    """
    kept = [dim for dim in range(len(shape)) if shape[dim] != 1]
    kept.sort(key=lambda dim: -stride[dim])
    # Dimensions of size 1 have no place in memory: they stay where they are.
    moved = iter(kept)
    return tuple(dim if shape[dim] == 1 else next(moved) for dim in range(len(shape)))


def span_boxes(shape: Sequence[int], span: Span, stride: Sequence[int] | None = None) -> list[Box]:
    """Return the boxes of ``span``, in its order; each is contiguous in memory.

    Args:
        shape: of the whole tensor.
        span: range of its elements in memory order.
        stride: of the whole, dense tensor; None: row-major.

    >>> span_boxes((4, 3), Span(1, 10))
    [Box(offsets=(0, 1), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 3)), Box(offsets=(3, 0), sizes=(1, 1))]
    >>> span_boxes((), Span(0, 1))
    [Box(offsets=(), sizes=())]

    Raises:
        LayoutError: the span is not inside the tensor.
    """  # noqa: E501
    total = math.prod(shape)
    if not 0 <= span.start <= span.stop <= total:
        raise LayoutError(f"Expected a range inside {total} elements, got {span}.")
    if not span.numel:
        return []
    order = tuple(range(len(shape))) if stride is None else dimension_order(shape, stride)
    found = _cut(tuple(shape[dim] for dim in order), span.start, span.stop)
    if order == tuple(range(len(shape))):
        return found
    place = [order.index(dim) for dim in range(len(shape))]
    return [
        Box(tuple(box.offsets[p] for p in place), tuple(box.sizes[p] for p in place))
        for box in found
    ]


def _cut(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start == 0 and stop == math.prod(shape):
        return [whole_box(shape)]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    inner = math.prod(shape[1:])
    first, last = start // inner, stop // inner
    if first == last:
        return _row(shape, first, start - first * inner, stop - first * inner)
    boxes: list[Box] = []
    if start > first * inner:
        boxes += _row(shape, first, start - first * inner, inner)
        first += 1
    if last > first:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if stop > last * inner:
        boxes += _row(shape, last, 0, stop - last * inner)
    return boxes


def _row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in _cut(shape[1:], start, stop)]


def find_gaps(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return what keeps ``boxes`` from tiling a tensor of ``shape``, or an empty text.

    >>> find_gaps((2, 2), [Box((0, 0), (1, 2)), Box((1, 0), (1, 1))])
    '3 of 4 elements'
    """
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"a box of {len(box.offsets)} dimensions"
        if any(a < 0 or n < 1 or a + n > size for a, n, size in zip(*box, shape, strict=True)):
            return f"a box outside of the tensor, {box.offsets} of {box.sizes}"
    total = sum(box.numel for box in boxes)
    if total != math.prod(shape):
        return f"{total} of {math.prod(shape)} elements"
    ordered = sorted(boxes)
    for n, box in enumerate(ordered):
        for other in ordered[n + 1 :]:
            if box.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if box.intersect(other) is not None:
                return f"boxes that overlap at {other.offsets}"
    return ""
