"""The spans of all ranks tile every parameter exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given

from lightning_zeroplus.errors import LayoutError
from lightning_zeroplus.layout import ParamSpec, Span, WeightLayout
from tests.unit.shapes import weight_layouts


@given(weight_layouts())
def test_each_element_of_each_parameter_has_exactly_one_owner(layout: WeightLayout) -> None:
    for index, spec in enumerate(layout.params):
        owned = [layout.owned(index, rank) for rank in range(layout.world_size)]
        elements = [n for span in owned for n in range(span.start, span.stop)]
        assert elements == list(range(spec.numel))


@given(weight_layouts())
def test_an_owned_span_lies_in_the_owners_chunk(layout: WeightLayout) -> None:
    for index in range(len(layout.params)):
        for rank in range(layout.world_size):
            owned = layout.owned(index, rank)
            assert owned.start >= 0
            if owned.numel:
                start = layout.offsets[index] + owned.start
                chunk = layout.chunk(rank)
                assert chunk.start <= start
                assert start + owned.numel <= chunk.stop


@given(weight_layouts())
def test_parameters_lie_apart_in_order_inside_the_flat_tensor(layout: WeightLayout) -> None:
    end = 0
    for index in range(len(layout.params)):
        extent = layout.extent(index)
        assert extent.start >= end
        assert extent.numel == layout.params[index].numel
        end = extent.stop
    assert end <= layout.numel


@given(weight_layouts())
def test_chunks_are_equal_and_tile_the_flat_tensor(layout: WeightLayout) -> None:
    chunks = [layout.chunk(rank) for rank in range(layout.world_size)]
    assert {chunk.numel for chunk in chunks} == {layout.shard_numel}
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == layout.numel
    assert layout.nbytes == layout.numel * layout.itemsize


def test_an_empty_parameter_has_no_owner() -> None:
    layout = WeightLayout((ParamSpec("a", 0), ParamSpec("b", 5)), itemsize=4, world_size=3)
    assert layout.offsets == (0, 0)
    assert [layout.owned(0, rank).numel for rank in range(3)] == [0, 0, 0]


def test_one_element_belongs_to_one_rank() -> None:
    layout = WeightLayout((ParamSpec("a", 1),), itemsize=4, world_size=4)
    assert [layout.owned(0, rank).numel for rank in range(4)] == [1, 0, 0, 0]


def test_with_fewer_elements_than_ranks_the_first_rank_owns_all() -> None:
    layout = WeightLayout((ParamSpec("a", 3),), itemsize=8, world_size=5)
    assert layout.owned(0, 0) == Span(0, 3)
    assert layout.shard_numel * layout.itemsize == 128


@pytest.mark.parametrize(("itemsize", "world_size"), [(4, 33), (4, 130), (16, 9), (1, 1000)])
def test_with_more_ranks_than_elements_of_a_cut_nothing_is_lost(
    itemsize: int, world_size: int
) -> None:
    layout = WeightLayout((ParamSpec("a", 1), ParamSpec("b", 2)), itemsize, world_size)
    for index, spec in enumerate(layout.params):
        owned = [layout.owned(index, rank).numel for rank in range(world_size)]
        assert sum(owned) == spec.numel


def test_a_unit_without_parameters_has_no_elements() -> None:
    layout = WeightLayout((), itemsize=4, world_size=3)
    assert (layout.numel, layout.shard_numel, layout.offsets) == (0, 0, ())


@pytest.mark.parametrize(
    ("numel", "itemsize", "world_size"), [(1, 0, 1), (1, 4, 0), (1, -4, 2), (-1, 4, 2)]
)
def test_sizes_that_no_layout_has_are_refused(numel: int, itemsize: int, world_size: int) -> None:
    with pytest.raises(LayoutError, match=r"Expected .* of at least"):
        WeightLayout((ParamSpec("a", numel),), itemsize, world_size)
