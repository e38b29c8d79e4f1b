"""Wider and narrower weights, and autocast, against plain PyTorch with stated bounds."""

from __future__ import annotations

import pytest
import torch

from lightning_zeroplus.comm import run_virtual_ranks
from tests.parity.reference import Case, narrow_training, plain_training
from tests.parity.sharded import sharded_training

# Narrow weights follow fp32 masters, so a weight is its master to half a unit in the last place
# (2^-8 of it in bf16, 2^-11 in fp16; half as much again for a master that fell to the other side).
ROUNDING = {"bf16": 1.5 * 2**-8, "fp16": 1.5 * 2**-11}
# Narrow gradients repeat themselves to a unit in the last place only (kernels choose their order of
# additions by the alignment of memory); that much of the 0.3 that weights move may differ.
WOBBLE = {"bf16": 2**-8, "fp16": 2**-11}
# Against a run that is fp32 throughout, after 8 steps that move weights by 0.05 to 0.4.
DRIFT = {"bf16": 1e-2, "fp16": 1.5e-3}


def _run(case: Case, stage: int):
    return run_virtual_ranks(case.world, lambda t: sharded_training(t, case, stage))


def _assert_near(ranks, expected: dict[str, torch.Tensor], *, rtol: float, atol: float) -> None:
    for result in ranks:
        found = {name: weight.double() for name, weight in result.parameters.items()}
        wide = {name: weight.double() for name, weight in expected.items()}
        torch.testing.assert_close(found, wide, rtol=rtol, atol=atol)


@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp64_weights_are_trained_in_fp64(stage, accumulate, clip):
    case = Case(model="tied", accumulate=accumulate, clip=clip, precision="fp64")
    ranks = _run(case, stage)
    assert all(w.dtype == torch.float64 for w in ranks[0].parameters.values())
    _assert_near(ranks, plain_training(case).parameters, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("accumulate", "clip"),
    [
        (1, "norm"),
        (1, "value"),
        (3, "none"),
        pytest.param(1, "none", marks=pytest.mark.full),
        pytest.param(3, "norm", marks=pytest.mark.full),
        pytest.param(3, "value", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "groups"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_narrow_weights_are_the_rounded_masters_of_plain_pytorch(
    stage, precision, optimizer, accumulate, clip
):
    case = Case(
        model="tied", optimizer=optimizer, accumulate=accumulate, clip=clip, precision=precision
    )
    bounds = {"rtol": ROUNDING[precision], "atol": WOBBLE[precision]}
    _assert_near(_run(case, stage), narrow_training(case).parameters, **bounds)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_narrow_training_stays_near_fp32_training(stage, precision, optimizer):
    case = Case(model="tied", optimizer=optimizer, accumulate=3, precision=precision)
    wide = Case(model="tied", optimizer=optimizer, accumulate=3)
    ranks = _run(case, stage)
    bounds = {"rtol": ROUNDING[precision], "atol": DRIFT[precision]}
    _assert_near(ranks, plain_training(wide).parameters, **bounds)


@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", ["odd", "tied"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_autocast_over_fp32_weights_is_that_of_plain_pytorch(stage, model, accumulate, clip):
    case = Case(model=model, accumulate=accumulate, clip=clip, precision="bf16-autocast")
    _assert_near(_run(case, stage), narrow_training(case).parameters, rtol=1e-5, atol=5e-4)
