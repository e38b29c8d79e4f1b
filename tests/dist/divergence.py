"""Ranks that do not act together, each for one rank pool of two; answers are texts and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lightning_zeroplus.comm import c10d_transport
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.errors import CollectiveError
from lightning_zeroplus.zero import Engine, shard

__all__ = [
    "READS",
    "TIMEOUT_S",
    "rank_makes_one_backward_more",
    "rank_meets_a_finished_peer",
    "rank_reads_another_weight",
    "rank_reads_while_the_peer_is_in_a_barrier",
    "rank_reads_while_the_peer_sleeps",
    "rank_reads_while_the_peer_trains",
    "rank_runs_another_block",
]

TIMEOUT_S = 5.0
Answer = tuple[str, float]


def _engine() -> tuple[nn.Sequential, Engine]:
    torch.manual_seed(0)
    # Blocks of one size: without an agreement their gathers would fit each other.
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    model[1].twin = nn.Parameter(torch.ones(16, 16))
    transport = c10d_transport(timeout=timedelta(seconds=TIMEOUT_S))
    transport.least_unit_nbytes = 0
    return model, shard(model, EngineConfig(stage=3), transport)


def _error_of(act: Callable[[], object]) -> Answer:
    """Return the text of the `CollectiveError` that `act` ends in, and how long it took."""
    started = time.monotonic()
    try:
        answer = act()
    except CollectiveError as error:
        return str(error), time.monotonic() - started
    return f"no error, but {answer}", time.monotonic() - started


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 16)).square().mean().backward()


_READS: dict[str, Callable[[nn.Sequential, int], torch.Tensor]] = {
    "largest element": lambda model, rank: model[rank + 1].weight.max(),
    "norm": lambda model, rank: model[rank + 1].weight.norm(),
    "sum": lambda model, rank: model[rank + 1].weight.sum(),
    "two weights of one unit": lambda model, rank: (model[1].weight, model[1].twin)[rank].max(),
    "norms of one unit": lambda model, rank: (model[1].weight, model[1].twin)[rank].norm(),
    "norm and sum": lambda model, rank: (torch.norm, torch.sum)[rank](model[1].weight),
}
READS = tuple(_READS)


def rank_reads_another_weight(rank: int, world: int, name: str, under_autograd: bool) -> Answer:
    """Ranks read different weights, or different things of one."""
    model, _ = _engine()
    _step(model)
    with torch.set_grad_enabled(under_autograd):
        return _error_of(lambda: _READS[name](model, rank).item())


def rank_runs_another_block(rank: int, world: int) -> Answer:
    """Each rank runs its own block."""
    model, _ = _engine()
    return _error_of(lambda: model[rank + 1](torch.ones(2, 16)).sum().item())


def rank_reads_while_the_peer_trains(rank: int, world: int) -> Answer:
    """Rank 0 logs a weight alone, then both go on with the next step."""
    model, engine = _engine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    _step(model)
    optimizer.step()

    def go_on() -> object:
        if rank == 0:
            with torch.no_grad():
                model[2].weight.max().item()
        _step(model)
        return "the step was made"

    return _error_of(go_on)


def rank_reads_while_the_peer_is_in_a_barrier(rank: int, world: int) -> Answer:
    """Rank 0 reads alone while rank 1 waits for it in a barrier of the user's own."""
    model, _ = _engine()
    _step(model)

    def act() -> object:
        if rank == 0:
            with torch.no_grad():
                model[2].weight.max().item()
        else:
            dist.barrier()
        return "the barrier was passed"

    if rank == 0:
        answer = _error_of(act)
        dist.barrier()  # lets the peer go
        return answer
    started = time.monotonic()
    return str(act()), time.monotonic() - started


def rank_reads_while_the_peer_sleeps(rank: int, world: int, seconds: float) -> Answer:
    """Rank 0 reads at once, rank 1 after a while; both are served."""
    model, _ = _engine()
    if rank == 1:
        time.sleep(seconds)
    with torch.no_grad():
        return _error_of(lambda: model[2].weight.max().item())


def rank_meets_a_finished_peer(rank: int, world: int) -> Answer:
    """Rank 1 ends its engine's transport; rank 0 goes on."""
    model, engine = _engine()
    _step(model)
    if rank == 1:
        engine.context.transport.close()
        return "finished", 0.0
    return _error_of(lambda: _step(model))


def rank_makes_one_backward_more(rank: int, world: int) -> Answer:
    """Rank 0 makes one microbatch more than rank 1, then both step."""
    model, engine = _engine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    for _ in range(3):
        _step(model)
        optimizer.step()

    def act() -> object:
        for _ in range(2 - rank):
            _step(model)
        optimizer.step()
        return "the step was made"

    return _error_of(act)
