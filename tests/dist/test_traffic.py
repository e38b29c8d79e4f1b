"""A rank sends what the ring law says, and no more than padding and headers beyond."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_zeroplus.comm import c10d_transport
from lightning_zeroplus.config import EngineConfig, FloatDtype
from lightning_zeroplus.zero import shard

pytestmark = pytest.mark.dist

WIDTHS = [250, 251, 257, 255, 250, 249, 250]
ALIGNMENT_NBYTES = 128


@dataclass(frozen=True)
class Precision:
    """What goes over the wire: weights as they are, gradients in the type they are reduced in."""

    weights: torch.dtype
    gradients: torch.dtype
    reduce_dtype: FloatDtype | None

    def __str__(self) -> str:
        return f"{self.weights}-{self.gradients}".replace("torch.", "")


PRECISIONS = [
    pytest.param(precision, id=str(precision))
    for precision in (
        Precision(torch.float32, torch.float32, None),
        Precision(torch.bfloat16, torch.float32, None),
        Precision(torch.bfloat16, torch.bfloat16, "bf16"),
    )
]


def _model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS))).to(dtype)


def _sent_per_step(
    rank: int, _world: int, stage: int, accumulate: int, precision: Precision
) -> list[int]:
    """Return the payload bytes that each of 4 steps after the second sent."""
    module = _model(precision.weights)
    transport = c10d_transport(timeout=timedelta(seconds=30))
    config = EngineConfig(
        stage=stage, units=("Linear",), bucket_nbytes=1 << 17, reduce_dtype=precision.reduce_dtype
    )
    engine = shard(module, config, transport)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine.attach(optimizer)
    generator = torch.Generator().manual_seed(rank)
    sent = []
    for _ in range(6):
        before = transport.sent_nbytes
        for number in range(accumulate):
            batch = torch.randn(4, WIDTHS[0], generator=generator).to(precision.weights)
            with nullcontext() if number == accumulate - 1 else engine.block_backward_sync():
                with engine.forward_pass():
                    loss = module(batch).square().mean()
                with engine.backward_pass():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(transport.sent_nbytes - before)
    engine.close()
    transport.close()
    return sent[2:]


def _ring_law(world: int, precision: Precision, *, gathers: int, reductions: int) -> float:
    """Return the bytes that a rank sends for transfers of the whole model."""
    numel = sum(p.numel() for p in _model(torch.float32).parameters())
    nbytes = gathers * precision.weights.itemsize + reductions * precision.gradients.itemsize
    return (world - 1) / world * numel * nbytes


def _allowance(world: int, transfers: int) -> int:
    """Return the bytes of padding and headers of as many transfers.

    A transfer pads each parameter once for each rank at most, and heads each part or tags each
    gather with one alignment at most. A step makes two small exchanges.
    """
    parameters = len(list(_model(torch.float32).parameters()))
    return (world - 1) * (transfers * ALIGNMENT_NBYTES * 2 * parameters + 2 * 8 * 32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("pool", ["pool2", "pool3"])
def test_stage_1_reduces_and_gathers_the_model_once_a_step(request, pool, accumulate, precision):
    ranks = request.getfixturevalue(pool)
    law = _ring_law(ranks.world, precision, gathers=1, reductions=1)
    limit = law + _allowance(ranks.world, 2)
    for sent in ranks.run(_sent_per_step, 1, accumulate, precision):
        assert all(law <= step <= limit for step in sent), (law, sent, limit)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("pool", ["pool2", "pool3"])
def test_stage_2_reduces_the_model_once_more_for_each_extra_microbatch(
    request, pool, accumulate, precision
):
    ranks = request.getfixturevalue(pool)
    law = _ring_law(ranks.world, precision, gathers=1, reductions=accumulate)
    limit = law + _allowance(ranks.world, 1 + accumulate)
    for sent in ranks.run(_sent_per_step, 2, accumulate, precision):
        assert all(law <= step <= limit for step in sent), (law, sent, limit)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("pool", ["pool2", "pool3"])
def test_stage_3_gathers_twice_and_reduces_once_a_microbatch_at_most(
    request, pool, accumulate, precision
):
    ranks = request.getfixturevalue(pool)
    # Units that are used last in forward are still there in backward.
    least = _ring_law(ranks.world, precision, gathers=accumulate, reductions=accumulate)
    most = _ring_law(ranks.world, precision, gathers=2 * accumulate, reductions=accumulate)
    limit = most + _allowance(ranks.world, 3 * accumulate)
    for sent in ranks.run(_sent_per_step, 3, accumulate, precision):
        assert all(least <= step <= limit for step in sent), (least, sent, limit)
