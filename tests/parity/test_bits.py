"""Where the order of additions is the same, so are the bits: stages, and torch's DDP."""

from __future__ import annotations

import pytest

from tests.parity.reference import Case
from tests.parity.sharded import assert_equal_bits, rank_ddp_training, rank_sharded_training

pytestmark = pytest.mark.dist

MODELS = ["dense", "odd", "tied"]
OPTIMIZERS = ["fused_sgd", "fused_adamw"]


def _sharded(pool, case: Case, stage: int, small_units: bool = True):
    ranks = pool.run(rank_sharded_training, case, stage, small_units)
    for other in ranks[1:]:
        assert_equal_bits(other, ranks[0])
    return ranks[0]


@pytest.mark.parametrize("small_units", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_accumulation_every_stage_has_the_bits_of_ddp_at_two_ranks(
    pool2, stage, model, optimizer, small_units
):
    case = Case(model=model, optimizer=optimizer, world=2)
    found = _sharded(pool2, case, stage, small_units)
    assert_equal_bits(found, pool2.run(rank_ddp_training, case)[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_with_accumulation_stage_1_has_the_bits_of_ddp_at_two_ranks(pool2, model, optimizer):
    case = Case(model=model, optimizer=optimizer, accumulate=3, world=2)
    assert_equal_bits(_sharded(pool2, case, 1), pool2.run(rank_ddp_training, case)[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pool", ["pool2", "pool3"])
def test_with_accumulation_stages_2_and_3_have_the_same_bits(request, pool, model, optimizer):
    ranks = request.getfixturevalue(pool)
    case = Case(model=model, optimizer=optimizer, accumulate=3, world=ranks.world)
    assert_equal_bits(_sharded(ranks, case, 3), _sharded(ranks, case, 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_without_accumulation_all_stages_have_the_same_bits_at_three_ranks(pool3, model, optimizer):
    case = Case(model=model, optimizer=optimizer, world=3)
    first = _sharded(pool3, case, 1)
    assert_equal_bits(_sharded(pool3, case, 2), first)
    assert_equal_bits(_sharded(pool3, case, 3), first)
