"""Consecutive items form groups up to a bound."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroplus.layout.bucket import pack_by_size

_SIZES = st.lists(st.integers(0, 30), max_size=20)
_BOUNDS = st.integers(1, 40)


@given(_SIZES, _BOUNDS)
def test_every_item_is_in_one_group_in_order(sizes: list[int], bound: int) -> None:
    groups = pack_by_size(sizes, bound)
    assert [n for group in groups for n in group] == list(range(len(sizes)))
    assert all(groups)


@given(_SIZES, _BOUNDS)
def test_a_group_is_within_the_bound_or_one_item(sizes: list[int], bound: int) -> None:
    for group in pack_by_size(sizes, bound):
        assert len(group) == 1 or sum(sizes[n] for n in group) <= bound


@given(_SIZES, _BOUNDS)
def test_a_group_ends_only_where_the_next_item_does_not_fit(sizes: list[int], bound: int) -> None:
    groups = pack_by_size(sizes, bound)
    for group, after in pairwise(groups):
        assert sum(sizes[n] for n in group) + sizes[after[0]] > bound
