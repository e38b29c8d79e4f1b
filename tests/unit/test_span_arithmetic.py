"""Ranges intersect and shift as sets of elements do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroplus.errors import LayoutError
from lightning_zeroplus.layout import Span
from lightning_zeroplus.layout.span import round_up

_SPANS = st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda s: Span(s[0], s[0] + s[1]))


def elements(span: Span) -> set[int]:
    return set(range(span.start, span.stop))


@given(_SPANS, _SPANS)
def test_an_intersection_holds_the_common_elements(a: Span, b: Span) -> None:
    common = a.intersect(b)
    assert elements(common) == elements(a) & elements(b)
    assert common.numel == len(elements(a) & elements(b))


@given(_SPANS, _SPANS)
def test_an_empty_intersection_lies_inside_the_first_range(a: Span, b: Span) -> None:
    common = a.intersect(b)
    assert a.start <= common.start <= common.stop <= a.stop


@given(_SPANS, st.integers(0, 50))
def test_a_shift_keeps_the_size(span: Span, origin: int) -> None:
    shifted = span.relative_to(origin)
    assert shifted.numel == span.numel
    assert elements(shifted) == {n - origin for n in elements(span)}


def test_a_range_that_ends_before_it_starts_has_no_elements() -> None:
    assert Span(5, 2).numel == 0


@given(st.integers(0, 1000), st.integers(1, 64))
def test_rounding_up_gives_the_least_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@pytest.mark.parametrize(("value", "multiple"), [(-1, 2), (1, 0), (1, -3)])
def test_rounding_what_has_no_answer_is_refused(value: int, multiple: int) -> None:
    with pytest.raises(LayoutError, match=f"got {value} and {multiple}"):
        round_up(value, multiple)
