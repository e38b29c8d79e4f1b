"""All stages equal plain PyTorch on the global batch, in real processes over Gloo."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity.reference import Case, plain_training
from tests.parity.sharded import assert_parity, pairwise, rank_sharded_training

pytestmark = pytest.mark.dist

FACTORS = {
    "stage": [1, 2, 3],
    "model": ["odd", "tied", "routed"],
    "optimizer": ["sgd", "adamw", "groups"],
    "window": [(1, False), (3, False), (3, True)],
    "clip": ["none", "norm", "value"],
}
COVER = list(pairwise(FACTORS))


def _case(row: dict[str, object], world: int) -> Case:
    accumulate, short_last = row["window"]
    return Case(
        model=row["model"],
        optimizer=row["optimizer"],
        accumulate=accumulate,
        short_last=short_last,
        clip=row["clip"],
        world=world,
    )


def _name(row: dict[str, object]) -> str:
    return f"stage{row['stage']}-{_case(row, 0)}".removesuffix("-world0-fp32")


def _check(pool, row: dict[str, object]) -> None:
    case = _case(row, pool.world)
    assert_parity(pool.run(rank_sharded_training, case, row["stage"]), plain_training(case))


@pytest.mark.parametrize("row", COVER, ids=_name)
def test_every_pair_of_settings_matches_at_two_ranks(pool2, row):
    _check(pool2, row)


@pytest.mark.parametrize("row", COVER[:6], ids=_name)
def test_a_few_settings_match_at_three_ranks(pool3, row):
    _check(pool3, row)


@pytest.mark.full
@pytest.mark.parametrize("pool", ["pool2", "pool3"])
@pytest.mark.parametrize(
    "row",
    [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())],
    ids=_name,
)
def test_all_settings_match(request, pool, row):
    _check(request.getfixturevalue(pool), row)
