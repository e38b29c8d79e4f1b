"""Ranks that share memory train as plain PyTorch does, with the bits of DDP and of Gloo."""

from __future__ import annotations

import pytest

from lightning_zeroplus.comm import run_virtual_ranks
from lightning_zeroplus.comm.host import over_host
from tests.parity.reference import Case, plain_training
from tests.parity.sharded import (
    assert_equal_bits,
    assert_parity,
    rank_ddp_training,
    rank_host_training,
    rank_sharded_training,
    sharded_training,
)
from tests.parity.test_real_processes_match_plain_pytorch import COVER, _case, _name

MODELS = ["dense", "odd", "tied"]
OPTIMIZERS = ["fused_sgd", "fused_adamw"]


def _host(pool, case: Case, stage: int):
    ranks = pool.run(rank_host_training, case, stage)
    for other in ranks[1:]:
        assert_equal_bits(other, ranks[0])
    return ranks[0]


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_accumulation_the_bits_are_those_of_ddp(pool2, stage, model, optimizer):
    case = Case(model=model, optimizer=optimizer, world=2)
    assert_equal_bits(_host(pool2, case, stage), pool2.run(rank_ddp_training, case)[0])


@pytest.mark.dist
@pytest.mark.parametrize("pool", ["pool2", "pool3"])
@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_bits_are_those_of_the_process_group(request, pool, stage, clip):
    ranks = request.getfixturevalue(pool)
    case = Case(model="odd", optimizer="fused_adamw", accumulate=3, clip=clip, world=ranks.world)
    expected = ranks.run(rank_sharded_training, case, stage)[0]
    assert_equal_bits(_host(ranks, case, stage), expected)


@pytest.mark.dist
@pytest.mark.parametrize("row", COVER, ids=_name)
def test_every_pair_of_settings_matches_at_two_ranks(pool2, row):
    case = _case(row, 2)
    assert_parity(pool2.run(rank_host_training, case, row["stage"]), plain_training(case))


@pytest.mark.parametrize("row", COVER[:6], ids=_name)
def test_a_few_settings_match_on_virtual_ranks(row):
    case = _case(row, 3)

    def body(transport):
        over, reason = over_host(transport)
        assert over is not None, reason
        return sharded_training(over, case, row["stage"])

    assert_parity(run_virtual_ranks(3, body), plain_training(case))
