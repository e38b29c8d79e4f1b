"""Boxes of a span are its elements, in order, each a run, and there are no more than needed."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroplus.errors import LayoutError
from lightning_zeroplus.layout.box import Box, dimension_order, find_gaps, span_boxes, whole_box
from lightning_zeroplus.layout.span import Span

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def flat_indices(shape: tuple[int, ...], stride: tuple[int, ...], box: Box) -> list[int]:
    """Return memory indices of a box's elements, slowest dimension in memory first."""
    order = dimension_order(shape, stride)
    found = [0]
    for dim in order:
        start, size = box.offsets[dim], box.sizes[dim]
        found = [base + n * stride[dim] for base in found for n in range(start, start + size)]
    return found


def strides_of(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


@st.composite
def spans(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Span]:
    shape = draw(shapes)
    order = tuple(draw(st.permutations(range(len(shape)))))
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, strides_of(shape, order), Span(start, draw(st.integers(start, total)))


@given(spans())
def test_boxes_are_the_elements_of_the_span_in_order(
    case: tuple[tuple[int, ...], tuple[int, ...], Span],
) -> None:
    shape, stride, span = case
    found = [i for box in span_boxes(shape, span, stride) for i in flat_indices(shape, stride, box)]
    assert found == list(range(span.start, span.stop))


@given(spans())
def test_there_are_at_most_two_boxes_a_dimension_less_one(
    case: tuple[tuple[int, ...], tuple[int, ...], Span],
) -> None:
    shape, stride, span = case
    assert len(span_boxes(shape, span, stride)) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_spans_that_cover_a_tensor_leave_no_gaps(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    total = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    edges = [0, *cuts, total]
    boxes = [
        box
        for start, stop in itertools.pairwise(edges)
        for box in span_boxes(shape, Span(start, stop))
    ]
    assert find_gaps(shape, boxes) == ""
    assert find_gaps(shape, boxes[1:]) != ""


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        ([Box((0,), (4,))], "a box of 1 dimensions"),
        ([Box((0, 0), (2, 3))], "a box outside of the tensor, (0, 0) of (2, 3)"),
        ([Box((-1, 0), (2, 2))], "a box outside of the tensor, (-1, 0) of (2, 2)"),
        ([Box((0, 0), (2, 1)), Box((0, 0), (1, 2))], "boxes that overlap at (0, 0)"),
        ([Box((0, 0), (1, 2))], "2 of 4 elements"),
    ],
)
def test_what_is_no_tiling_is_named(boxes: list[Box], text: str) -> None:
    assert find_gaps((2, 2), boxes) == text


def test_an_empty_tensor_needs_no_box() -> None:
    assert span_boxes((0, 3), Span(0, 0)) == []
    assert find_gaps((0, 3), []) == ""
    assert whole_box((0, 3)).numel == 0


def test_a_span_outside_is_refused() -> None:
    with pytest.raises(LayoutError, match="inside 6 elements"):
        span_boxes((2, 3), Span(0, 7))
