"""The budget of a rank is the sum of what its layouts say, and falls with stage and world size."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zeroplus.layout import (
    STAGES,
    Budget,
    GradLayout,
    ParamSpec,
    UnitSizes,
    WeightLayout,
    budget_of,
)
from lightning_zeroplus.layout.bucket import header_numel


def unit_of(
    numels: list[int],
    *,
    world: int,
    rank: int,
    itemsize: int = 4,
    trained: tuple[int, ...] | None = None,
    scattered: bool = False,
) -> UnitSizes:
    """Return a unit whose gradients and masters are fp32."""
    specs = tuple(ParamSpec(f"p{n}", numel) for n, numel in enumerate(numels))
    weights = WeightLayout(specs, itemsize, world)
    trained = tuple(range(len(numels))) if trained is None else trained
    header = header_numel(len(trained), world, 4)
    return UnitSizes(weights, GradLayout(weights, trained, 4, header, rank), 4, scattered)


def budget(numels: list[int], stage: int, *, world: int, blocks: int, rank: int = 0) -> Budget:
    units = [unit_of(numels, world=world, rank=rank) for _ in range(blocks)]
    return budget_of(units, STAGES[stage], rank)


# `w` of 40 elements fills 64, `b` of 3 fills 32; two ranks own 64 elements each.
# Buckets: 64 + 32 elements and a header of 32 each, so 96 for rank 0 and 64 for rank 1.
@pytest.mark.parametrize(
    ("stage", "rank", "expected"),
    [
        (1, 0, (512, 0, 0, 0, 256, 640 + 384, 160, 320)),
        (1, 1, (512, 0, 0, 0, 128, 640 + 384, 160, 24)),
        (2, 0, (512, 0, 0, 0, 256, 640 + 384, 160, 320)),
        (3, 0, (256, 512, 512, 0, 256, 640 + 384, 160, 320)),
        (3, 1, (256, 512, 512, 0, 128, 640 + 384, 160, 24)),
    ],
)
def test_one_unit_of_two_parameters_is_as_counted_by_hand(
    stage: int, rank: int, expected: tuple[int, ...]
) -> None:
    found = budget_of([unit_of([40, 3], world=2, rank=rank)], STAGES[stage], rank)
    assert tuple(asdict(found).values()) == expected


def test_narrow_weights_have_masters_of_their_own() -> None:
    unit = unit_of([40, 3], world=2, rank=0, itemsize=2)
    found = budget_of([unit], STAGES[3], 0)
    assert unit.has_own_master
    # 64 elements of 2 bytes in the shard, of 4 in the master.
    assert (found.weights, found.masters, found.accumulators) == (128, 256, 256)


def test_frozen_parameters_have_weights_only() -> None:
    unit = unit_of([40, 3], world=2, rank=0, trained=())
    found = budget_of([unit], STAGES[2], 0)
    assert found.weights == 512
    assert (found.accumulators, found.buckets, found.landing, found.optimizer_state) == (0,) * 4


def test_a_world_of_one_has_no_arrivals() -> None:
    found = budget_of([unit_of([40, 3], world=1, rank=0)], STAGES[1], 0)
    assert (found.weights, found.buckets, found.optimizer_state) == (384, 384, 2 * 43 * 4)


def test_states_are_counted_by_elements_without_padding() -> None:
    unit = unit_of([40, 3], world=2, rank=0)
    found = [budget_of([unit], STAGES[1], 0, states=n).optimizer_state for n in range(3)]
    assert found == [0, 160, 320]


def test_rest_and_peak_are_sums_of_the_roles() -> None:
    found = budget([100, 7], 3, world=2, blocks=3)
    roles = asdict(found)
    assert found.peak == sum(roles.values())
    assert found.at_rest == found.peak - found.unsharded - found.buckets - found.landing


@pytest.mark.parametrize(("prefetch", "blocks"), [(0, 1), (1, 2), (2, 3), (9, 4)])
def test_one_block_and_those_prefetched_are_unsharded_at_a_time(prefetch: int, blocks: int) -> None:
    units = [unit_of([1024], world=2, rank=0) for _ in range(4)]
    found = budget_of(units, STAGES[3], 0, prefetch=prefetch)
    assert found.unsharded == blocks * 4096


def test_a_scattered_unit_stays_beside_the_others() -> None:
    units = [unit_of([1024], world=2, rank=0) for _ in range(4)]
    units.append(unit_of([256], world=2, rank=0, scattered=True))
    assert budget_of(units, STAGES[3], 0).unsharded == 2 * 4096 + 1024


def test_no_units_cost_nothing() -> None:
    assert budget_of([], STAGES[3], 0).peak == 0


_NUMELS = st.lists(st.integers(1, 5000), min_size=1, max_size=4)
_WORLDS = st.integers(1, 4)


@given(_NUMELS, _WORLDS)
def test_a_higher_stage_holds_no_more_of_any_role_between_steps(
    numels: list[int], world: int
) -> None:
    budgets = [budget(numels, stage, world=world, blocks=5) for stage in (1, 2, 3)]
    for low, high in pairwise(budgets):
        assert high.weights <= low.weights
        assert high.accumulators <= low.accumulators
        assert high.optimizer_state <= low.optimizer_state
        assert high.buckets <= low.buckets


@given(_NUMELS, st.integers(2, 8))
def test_of_many_equal_blocks_a_higher_stage_has_a_lower_peak(
    numels: list[int], world: int
) -> None:
    # Stage 3 pays the arena and two unsharded blocks, so it needs enough blocks to win.
    peaks = [budget(numels, stage, world=world, blocks=12).peak for stage in (1, 2, 3)]
    assert peaks[0] >= peaks[1] >= peaks[2]


@pytest.mark.parametrize("stage", [1, 2, 3])
@given(numels=_NUMELS, world=_WORLDS)
def test_twice_the_ranks_hold_no_more_of_what_is_sharded(
    stage: int, numels: list[int], world: int
) -> None:
    few = budget(numels, stage, world=world, blocks=3)
    many = budget(numels, stage, world=2 * world, blocks=3)
    assert many.accumulators <= few.accumulators
    if stage == 3:
        assert many.weights <= few.weights


@given(_NUMELS, st.integers(1, 6))
def test_state_of_all_ranks_together_is_that_of_one(numels: list[int], world: int) -> None:
    alone = budget(numels, 2, world=1, blocks=2).optimizer_state
    shares = [
        budget(numels, 2, world=world, blocks=2, rank=r).optimizer_state for r in range(world)
    ]
    assert sum(shares) == alone == 2 * 2 * 4 * sum(numels)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_large_scattered_unit_does_not_make_the_engine_reduce_fewer_small_ones_at_a_time(
    stage: int,
) -> None:
    small = [unit_of([1_000_000], world=2, rank=0) for _ in range(8)]  # 4 at a time
    table = unit_of([1 << 23], world=2, rank=0, scattered=True)
    found = budget_of([*small, table], STAGES[stage], 0).buckets
    nbytes, arriving = small[0].gradients.nbytes, table.gradients.arriving_nbytes
    slots = {1: 8, 2: 1 + 4 + 1, 3: 1 + 4}[stage]
    assert found == slots * nbytes + table.gradients.nbytes + 4 * arriving
