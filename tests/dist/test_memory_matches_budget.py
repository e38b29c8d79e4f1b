"""What a rank holds, sampled at the hooks, is what the layouts say before the run."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.comm import c10d_transport
from lightning_zeroplus.comm.storage import PooledBlock
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.layout import Budget
from lightning_zeroplus.zero import shard
from lightning_zeroplus.zero.span_tensor import SpanTensor

pytestmark = pytest.mark.dist

WIDTH = 768
BLOCKS = 11
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Net(nn.Module):
    """52 M parameters in blocks, and a table and a head that are used far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.table(tokens)))


@dataclass(frozen=True)
class Sampled:
    parameters: int
    budget: Budget
    at_rest: int
    peak: int


def _live_nbytes(module: nn.Module) -> int:
    """Bytes of unique live storages: tensors, pooled blocks and gradients still in their slots."""
    found: dict[int, int] = {}

    def count(storage: torch.UntypedStorage) -> None:
        try:
            found[storage.data_ptr()] = storage.nbytes()
        except RuntimeError:
            return  # rests on the arena, which is counted as what it is

    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            kind = type(item)
            if kind is PooledBlock:
                count(item.storage)
            elif issubclass(kind, Tensor) and not issubclass(kind, SpanTensor):
                count(Tensor.untyped_storage(item))
        for param in module.parameters():
            grad = Tensor.grad.__get__(param)
            if grad is not None and not isinstance(grad, SpanTensor):
                count(grad.untyped_storage())
    return sum(found.values())


def _sample(rank: int, _world: int, stage: int) -> Sampled:
    gc.collect()
    base = _live_nbytes(nn.Module())
    torch.manual_seed(0)
    module = Net()
    parameters = sum(p.numel() for p in module.parameters())
    transport = c10d_transport(timeout=timedelta(seconds=60))
    engine = shard(module, EngineConfig(stage=stage, units=("Block",)), transport)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine.attach(optimizer)
    samples: list[int] = []

    def look(*_: object) -> None:
        if warm:
            samples.append(_live_nbytes(module) - base)

    warm = False
    hooks = [block.register_forward_hook(look) for block in module.blocks]
    # A tensor keeps its hooks out of the collector's sight: module and all would stay for ever.
    hooks += [p.register_post_accumulate_grad_hook(look) for p in module.parameters()]
    tokens = torch.randint(0, 64, (2,), generator=torch.Generator().manual_seed(rank))
    for step in range(STEPS):
        warm = step == STEPS - 1
        with engine.forward_pass():
            loss = module(tokens).square().mean()
        with engine.backward_pass():
            loss.backward()
        look()
        optimizer.step()
        optimizer.zero_grad()
        look()
    for hook in hooks:
        hook.remove()
    del loss
    budget = engine.memory_budget(states=2)
    held = engine.memory_report()
    engine.close()
    transport.close()
    at_rest = held.total - held.idle_blocks + budget.arena - held.gradients + budget.accumulators
    return Sampled(parameters, budget, at_rest, max(samples))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_live_storages_equal_the_budget_within_three_percent(pool2, stage):
    for sampled in pool2.run(_sample, stage, timeout=100):
        assert sampled.parameters > 50e6
        assert sampled.peak == pytest.approx(sampled.budget.peak, rel=0.03)
        assert sampled.at_rest == pytest.approx(sampled.budget.at_rest, rel=0.03)


def test_each_stage_holds_less_than_the_one_before(pool2):
    peaks = [pool2.run(_sample, stage, timeout=100)[0].peak for stage in (1, 2, 3)]
    assert peaks[0] > peaks[1] > peaks[2]
    p = 4 * 52e6
    assert peaks[0] > p * 2.9  # weights, gradients, and half of two optimizer states
    assert peaks[2] < p * 2.6  # halves of four, a few units and their buckets
