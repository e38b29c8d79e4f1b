"""The training runs of `reference.py`, carried out by the engine or by torch's DDP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import combinations, product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.zero import shard
from tests.parity.reference import (
    DTYPES,
    MAX_NORM,
    MAX_VALUE,
    Case,
    Result,
    forward_context,
    local_batch,
    make_optimizer,
    windows,
)
from tests.parity.zoo import BLOCKS, build
from tests.rank_transport import rank_transport

__all__ = [
    "ATOL",
    "RTOL",
    "assert_equal_bits",
    "assert_parity",
    "ddp_training",
    "differing",
    "pairwise",
    "rank_ddp_training",
    "rank_sharded_training",
    "sharded_training",
]

RTOL, ATOL = 1e-5, 1e-6


def sharded_training(
    transport: Transport, case: Case, stage: int, *, small_units: bool = True
) -> Result:
    """Train this rank's part of the batches; the parameters returned are whole on every rank."""
    module = build(case.model)
    originals = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.to(DTYPES[case.precision])
    config = EngineConfig(stage=stage)
    if small_units:
        config = EngineConfig(stage=stage, bucket_nbytes=1024, units=BLOCKS[case.model])
    engine = shard(module, config, transport, originals=originals)
    optimizer = make_optimizer(case.optimizer, module)
    engine.attach(optimizer)
    parameters = list(module.parameters())
    norms, losses = [], []
    for window in windows(case):
        for number in window:
            batch = local_batch(case, transport.rank, number)
            last = number == window[-1]
            with nullcontext() if last else engine.block_backward_sync():
                with engine.forward_pass(), forward_context(case):
                    loss = module.loss(*batch)
                with engine.backward_pass():
                    (loss / case.accumulate).backward()
            losses.append(float(loss.detach()))
        if case.clip == "norm":
            norms.append(float(engine.clip_grad_norm_(parameters, MAX_NORM)))
        elif case.clip == "value":
            engine.clip_grad_value_(parameters, MAX_VALUE)
        optimizer.step()
        optimizer.zero_grad()
    with engine.full_parameters():
        whole = {name: p.detach().clone() for name, p in module.named_parameters()}
    engine.close()
    return Result(parameters=whole, norms=norms, losses=losses)


def ddp_training(case: Case) -> Result:
    """Train under torch's DDP over the default process group."""
    module = build(case.model)
    # Gradients of the odd model's unused parameter never come.
    wrapped = DistributedDataParallel(
        _Loss(module), gradient_as_bucket_view=True, find_unused_parameters=case.model == "odd"
    )
    optimizer = make_optimizer(case.optimizer, module)
    losses = []
    for window in windows(case):
        for number in window:
            batch = local_batch(case, dist.get_rank(), number)
            with nullcontext() if number == window[-1] else wrapped.no_sync():
                loss = wrapped(*batch)
                (loss / case.accumulate).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Result(parameters=whole, norms=[], losses=losses)


class _Loss(torch.nn.Module):
    """DDP wraps a forward, the models are asked for their loss."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Tensor:
        return self.module.loss(*batch)


def rank_sharded_training(
    _rank: int, _world: int, case: Case, stage: int, small_units: bool = True
) -> Result:
    """Body of a rank process."""
    return sharded_training(rank_transport(30), case, stage, small_units=small_units)


def rank_host_training(
    _rank: int, _world: int, case: Case, stage: int, small_units: bool = True
) -> Result:
    """Body of a rank process whose ranks share memory."""
    transport = rank_transport(30, "shared_memory")
    return sharded_training(transport, case, stage, small_units=small_units)


def rank_ddp_training(_rank: int, _world: int, case: Case) -> Result:
    """Body of a rank process."""
    return ddp_training(case)


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters outside the bounds, with how far outside they are."""
    assert found.keys() == expected.keys()
    wrong = []
    for name, right in expected.items():
        error = (found[name].double() - right.double()).abs()
        excess = error - (ATOL + RTOL * right.double().abs())
        if found[name].shape != right.shape or not bool((excess <= 0).all()):
            wrong.append(f"{name} (off by {float(error.max()):.2e})")
    return wrong


def assert_parity(ranks: list[Result], expected: Result) -> None:
    """Every rank's parameters, norms and mean losses are those of the plain run."""
    for rank, result in enumerate(ranks):
        wrong = differing(result.parameters, expected.parameters)
        assert not wrong, f"rank {rank}: {', '.join(wrong)}"
        torch.testing.assert_close(result.norms, expected.norms, rtol=RTOL, atol=ATOL)
    mean = [sum(step) / len(ranks) for step in zip(*(r.losses for r in ranks), strict=True)]
    torch.testing.assert_close(mean, expected.losses, rtol=RTOL, atol=ATOL)


def assert_equal_bits(found: Result, expected: Result) -> None:
    """Parameters are the same to the last bit."""
    unequal = [
        name
        for name, right in expected.parameters.items()
        if not torch.equal(found.parameters[name].view(torch.int32), right.view(torch.int32))
    ]
    assert not unequal


def pairwise(factors: Mapping[str, list[object]]) -> Iterator[dict[str, object]]:
    """Yield few combinations in which every pair of values of two factors occurs."""
    names = list(factors)
    rows = [dict(zip(names, row, strict=True)) for row in product(*factors.values())]

    def pairs(row: dict[str, object]) -> set[tuple[object, ...]]:
        return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}

    missing = set().union(*map(pairs, rows))
    uses: Counter[object] = Counter()
    while missing:
        # Of rows that add the same number of pairs, the one whose values were used least.
        best = max(rows, key=lambda r: (len(pairs(r) & missing), -sum(uses[i] for i in r.items())))
        missing -= pairs(best)
        uses.update(best.items())
        yield best
