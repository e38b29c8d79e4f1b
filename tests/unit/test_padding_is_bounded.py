"""Padding stays under 128 bytes for each parameter and each rank."""

from __future__ import annotations

from hypothesis import given

from lightning_zeroplus.layout import GradLayout, ParamSpec, WeightLayout
from tests.unit.shapes import ALIGNMENT_NBYTES, grad_layouts, weight_layouts


@given(weight_layouts())
def test_weights_are_padded_under_128_bytes_for_each_parameter_and_rank(
    layout: WeightLayout,
) -> None:
    payload = sum(spec.numel for spec in layout.params) * layout.itemsize
    pieces = len(layout.params) + layout.world_size - 1
    padding = layout.nbytes - payload
    assert 0 <= padding <= pieces * ALIGNMENT_NBYTES
    if any(spec.numel for spec in layout.params):
        assert padding < (pieces + 1) * ALIGNMENT_NBYTES


@given(weight_layouts())
def test_no_rank_is_longer_than_an_even_share_by_more_than_the_alignment(
    layout: WeightLayout,
) -> None:
    end = max((layout.extent(n).stop for n in range(len(layout.params))), default=0)
    assert (layout.shard_numel - layout.alignment) * layout.world_size < max(end, 1)


@given(grad_layouts())
def test_buckets_are_padded_under_128_bytes_for_each_part(ranks: tuple[GradLayout, ...]) -> None:
    for layout in ranks:
        numels = sum(layout.weights.params[index].numel for index in layout.trained)
        headers = layout.header_numel * layout.weights.world_size
        padding = layout.nbytes - (numels + headers) * layout.itemsize
        assert 0 <= padding <= len(layout.parts) * (ALIGNMENT_NBYTES - layout.itemsize)
        assert len(layout.parts) <= len(layout.trained) + layout.weights.world_size - 1


def test_large_odd_rows_cost_no_common_multiple() -> None:
    specs = (ParamSpec("a", 8 * 4099), ParamSpec("b", 8 * 4097))
    layout = WeightLayout(specs, itemsize=4, world_size=8)
    assert layout.numel - 8 * (4099 + 4097) < 32 * 10
