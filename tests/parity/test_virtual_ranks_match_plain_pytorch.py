"""All stages equal plain PyTorch on the global batch, at every world size, on virtual ranks."""

from __future__ import annotations

import pytest

from lightning_zeroplus.comm import run_virtual_ranks
from tests.parity.reference import Case, plain_training
from tests.parity.sharded import assert_parity, sharded_training


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("clip", ["none", "norm", "value"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "groups"])
@pytest.mark.parametrize("model", ["odd", "tied"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_after_8_steps_are_those_of_plain_pytorch(
    stage, model, optimizer, accumulate, clip, world
):
    case = Case(model=model, optimizer=optimizer, accumulate=accumulate, clip=clip, world=world)
    ranks = run_virtual_ranks(world, lambda transport: sharded_training(transport, case, stage))
    assert_parity(ranks, plain_training(case))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("clip", ["none", "norm", "value"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_short_last_window_steps_with_what_it_has(stage, clip, world):
    case = Case(model="odd", accumulate=3, short_last=True, clip=clip, world=world)
    ranks = run_virtual_ranks(world, lambda transport: sharded_training(transport, case, stage))
    assert_parity(ranks, plain_training(case))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_used_on_some_ranks_or_in_some_steps_only_are_those_of_plain_pytorch(
    stage, optimizer, accumulate, clip, world
):
    case = Case(model="routed", optimizer=optimizer, accumulate=accumulate, clip=clip, world=world)
    ranks = run_virtual_ranks(world, lambda transport: sharded_training(transport, case, stage))
    assert_parity(ranks, plain_training(case))
