"""The parity comparison fails when the reduction is broken on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lightning_zeroplus.comm import run_virtual_ranks
from lightning_zeroplus.comm.bucket import GradBucket, Reduced
from lightning_zeroplus.zero.unit import Unit
from tests.parity.reference import Case, plain_training
from tests.parity.sharded import assert_parity, differing, sharded_training

_land = GradBucket.land
_finish_reduce = GradBucket.finish_reduce
_accumulate = Unit.accumulate


def _land_without_the_mean(
    self: GradBucket, index: int, grad: torch.Tensor, scale: float, *, add: bool
) -> None:
    _land(self, index, grad, scale * self.world_size, add=add)


def _reduce_own_gradient_only(self: GradBucket) -> Reduced:
    reduced = _finish_reduce(self)
    own = reduced.terms[self._transport.rank]
    reduced.terms = [own.clone() for _ in reduced.terms]
    return reduced


def _land_over_earlier_microbatches(
    self: GradBucket, index: int, grad: torch.Tensor, scale: float, *, add: bool
) -> None:
    _land(self, index, grad, scale, add=False)


def _accumulate_last_microbatch_only(
    self: Unit, terms: Sequence[torch.Tensor], used: Sequence[bool]
) -> None:
    for entry in self.entries:
        entry.valid = False
    _accumulate(self, terms, used)


DEFECTS = {
    "summed instead of averaged": [(GradBucket, "land", _land_without_the_mean)],
    "not reduced": [(GradBucket, "finish_reduce", _reduce_own_gradient_only)],
    "only the last microbatch": [
        (GradBucket, "land", _land_over_earlier_microbatches),
        (Unit, "accumulate", _accumulate_last_microbatch_only),
    ],
}


def _ranks(case: Case, stage: int):
    return run_virtual_ranks(case.world, lambda t: sharded_training(t, case, stage))


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "groups"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_broken_reduction_is_found_in_the_parameters(monkeypatch, stage, optimizer, defect):
    case = Case(model="tied", optimizer=optimizer, accumulate=3, world=2)
    expected = plain_training(case)
    assert_parity(_ranks(case, stage), expected)
    for owner, name, broken in DEFECTS[defect]:
        monkeypatch.setattr(owner, name, broken)
    ranks = _ranks(case, stage)
    assert any(differing(result.parameters, expected.parameters) for result in ranks)
