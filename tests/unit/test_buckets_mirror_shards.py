"""A gradient bucket holds the trained parameters once, by owner, as their shards lie."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from lightning_zeroplus.layout import GradLayout, ParamSpec, Span, WeightLayout
from lightning_zeroplus.layout.bucket import header_numel
from tests.unit.shapes import grad_layouts


@given(grad_layouts())
def test_parts_tile_each_trained_parameter_exactly_once(ranks: tuple[GradLayout, ...]) -> None:
    for layout in ranks:
        assert {part.index for part in layout.parts} <= set(layout.trained)
        assert list(layout.parts_of) == list(layout.trained)
        for index in layout.trained:
            parts = layout.parts_of[index]
            elements = [n for part in parts for n in range(part.span.start, part.span.stop)]
            assert elements == list(range(layout.weights.params[index].numel))


@given(grad_layouts())
def test_a_part_is_what_its_owner_owns(ranks: tuple[GradLayout, ...]) -> None:
    for layout in ranks:
        for part in layout.parts:
            assert part.span == layout.weights.owned(part.index, part.rank)


@given(grad_layouts())
def test_parts_and_headers_lie_apart(ranks: tuple[GradLayout, ...]) -> None:
    for layout in ranks:
        taken = [Span(part.offset, part.offset + part.span.numel) for part in layout.parts]
        for rank in range(layout.weights.world_size):
            stop = layout.chunk(rank).stop
            taken.append(Span(stop - layout.header_numel, stop))
        taken = sorted(span for span in taken if span.numel)
        for before, after in pairwise(taken):
            assert before.stop <= after.start
        assert all(span.start >= 0 and span.stop <= layout.numel for span in taken)


@given(grad_layouts())
def test_a_part_lies_in_the_chunk_of_its_owner(ranks: tuple[GradLayout, ...]) -> None:
    for layout in ranks:
        for part in layout.parts:
            chunk = layout.chunk(part.rank)
            assert chunk.start <= part.offset
            assert part.offset + part.span.numel <= chunk.stop - layout.header_numel


@given(grad_layouts())
def test_the_own_chunk_comes_first_and_what_is_sent_is_one_piece(
    ranks: tuple[GradLayout, ...],
) -> None:
    for rank, layout in enumerate(ranks):
        others = [r for r in range(layout.weights.world_size) if r != rank]
        assert layout.chunk(rank) == Span(0, layout.chunk_numels[rank])
        starts = [layout.chunk(r).start for r in others]
        assert starts == sorted(starts)
        assert layout.sent_numels[rank] == 0
        assert sum(layout.sent_numels) == layout.numel - layout.chunk_numels[rank]


@given(grad_layouts())
def test_what_a_rank_sends_is_what_its_receiver_expects(ranks: tuple[GradLayout, ...]) -> None:
    for sender, sending in enumerate(ranks):
        for receiver, receiving in enumerate(ranks):
            if sender != receiver:
                assert sending.sent_numels[receiver] == receiving.chunk_numels[receiver]


@given(grad_layouts())
def test_all_ranks_arrange_a_chunk_alike(ranks: tuple[GradLayout, ...]) -> None:
    for owner in range(len(ranks)):
        arranged = {
            tuple(
                (part.index, part.span, part.offset - layout.chunk(owner).start)
                for part in layout.parts
                if part.rank == owner
            )
            for layout in ranks
        }
        assert len(arranged) == 1


@given(grad_layouts())
def test_accumulator_spans_are_the_owned_spans_on_every_rank(
    ranks: tuple[GradLayout, ...],
) -> None:
    for rank, layout in enumerate(ranks):
        body = layout.body_numel(rank)
        for index in layout.trained:
            span = layout.accumulator_span(index, rank)
            assert span.numel == layout.weights.owned(index, rank).numel
            assert 0 <= span.start <= span.stop <= body
            assert {other.accumulator_span(index, rank) for other in ranks} == {span}


@given(grad_layouts())
def test_no_rank_receives_more_than_the_stated_bytes(ranks: tuple[GradLayout, ...]) -> None:
    for receiver in range(len(ranks)):
        arriving = sum(layout.sent_numels[receiver] * layout.itemsize for layout in ranks)
        assert all(arriving <= layout.arriving_nbytes for layout in ranks)


def test_a_frozen_parameter_has_no_room() -> None:
    weights = WeightLayout((ParamSpec("a", 64), ParamSpec("b", 3)), itemsize=4, world_size=2)
    layout = GradLayout(weights, (1,), itemsize=4, header_numel=0)
    assert [part.index for part in layout.parts] == [1]
    assert layout.accumulator_span(0, 0) == Span(0, 0)


@pytest.mark.parametrize(
    ("params", "world", "itemsize", "numel"),
    [
        (12, 1, 4, 0),
        (0, 2, 4, 32),
        (12, 2, 4, 32),
        (12, 3, 2, 64),
        (832, 2, 4, 32),
        (833, 2, 4, 64),
        (1, 2, 16, 8),
    ],
)
def test_a_header_holds_24_bytes_and_a_bit_for_each_parameter(
    params: int, world: int, itemsize: int, numel: int
) -> None:
    assert header_numel(params, world, itemsize) == numel
