"""Parameters start, and are cut, on 128-byte boundaries counted from their own start.

Fused optimizers give other bits where a tensor is cut elsewhere.
"""

from __future__ import annotations

from hypothesis import given

from lightning_zeroplus.layout import GradLayout, WeightLayout
from tests.unit.shapes import ALIGNMENT_NBYTES, grad_layouts, weight_layouts


@given(weight_layouts())
def test_every_parameter_starts_on_a_boundary_of_the_flat_tensor(layout: WeightLayout) -> None:
    assert all(offset * layout.itemsize % ALIGNMENT_NBYTES == 0 for offset in layout.offsets)


@given(weight_layouts())
def test_every_cut_is_on_a_boundary_from_the_parameters_start(layout: WeightLayout) -> None:
    for index, spec in enumerate(layout.params):
        for rank in range(layout.world_size):
            owned = layout.owned(index, rank)
            if not owned.numel:
                continue
            assert owned.start * layout.itemsize % ALIGNMENT_NBYTES == 0
            if owned.stop != spec.numel:
                assert owned.stop * layout.itemsize % ALIGNMENT_NBYTES == 0


@given(weight_layouts())
def test_every_span_starts_on_a_boundary_of_its_shard(layout: WeightLayout) -> None:
    for index in range(len(layout.params)):
        for rank in range(layout.world_size):
            owned = layout.owned(index, rank)
            start = layout.offsets[index] + owned.start - layout.chunk(rank).start
            if owned.numel:
                assert start * layout.itemsize % ALIGNMENT_NBYTES == 0


@given(grad_layouts())
def test_every_part_and_chunk_of_a_bucket_starts_on_a_boundary(
    ranks: tuple[GradLayout, ...],
) -> None:
    for layout in ranks:
        for part in layout.parts:
            assert part.offset * layout.itemsize % ALIGNMENT_NBYTES == 0
        for rank in range(layout.weights.world_size):
            assert layout.chunk(rank).start * layout.itemsize % ALIGNMENT_NBYTES == 0


@given(grad_layouts())
def test_every_accumulated_span_starts_on_a_boundary(ranks: tuple[GradLayout, ...]) -> None:
    for rank, layout in enumerate(ranks):
        for index in layout.trained:
            span = layout.accumulator_span(index, rank)
            assert span.start * layout.itemsize % ALIGNMENT_NBYTES == 0
