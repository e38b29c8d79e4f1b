"""Small models and one training step, for virtual ranks that share an interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.zero import Engine, shard

__all__ = [
    "STAGES",
    "Net",
    "Run",
    "assert_weights",
    "batch",
    "loss_of",
    "on_ranks",
    "plain_step",
    "same_training",
    "sharded",
    "step",
    "whole",
]

T = TypeVar("T")
STAGES = (1, 2, 3)


class Net(nn.Module):
    """Odd sizes, cut badly on two and three ranks; weights depend on the seed only."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 37)
        self.second = nn.Linear(37, 3)
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("count", torch.tensor(float(seed)))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def batch(rank: int, number: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return one rank's inputs and targets."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator)


def loss_of(module: nn.Module, rank: int, number: int = 0) -> Tensor:
    """Return the mean loss of one rank's batch."""
    x, y = batch(rank, number)
    return F.mse_loss(module(x), y)


def plain_step(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, world: int, number: int = 0
) -> None:
    """Add the gradient of the global batch, and step."""
    for rank in range(world):
        (loss_of(module, rank, number) / world).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def step(
    engine: Engine, optimizer: torch.optim.Optimizer | None, rank: int, number: int = 0
) -> None:
    """Make one backward of this rank's batch, and step."""
    with engine.forward_pass():
        loss = loss_of(engine.module, rank, number)
    with engine.backward_pass():
        loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def sharded(module: nn.Module, transport: Transport, stage: int, **settings: Any) -> Engine:
    """Shard into several units even of a model as small as these, unless told otherwise."""
    transport.least_unit_nbytes = settings.pop("least_unit_nbytes", 0)  # type: ignore[misc]
    settings = {"bucket_nbytes": 512, **settings}
    return shard(module, EngineConfig(stage=stage, **settings), transport)  # type: ignore[arg-type]


def on_ranks(world: int, body: Callable[[Transport], T], timeout_s: float = 20.0) -> list[T]:
    """Return what `body` answers on each virtual rank."""
    return run_virtual_ranks(world, body, timeout_s=timeout_s)


def whole(engine: Engine) -> dict[str, Tensor]:
    """Return full weights by name."""
    with engine.full_parameters():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


class Run:
    """One training: on a plain module over the global batch, or on this rank's part of it."""

    def __init__(self, module: nn.Module, world: int, engine: Engine | None = None) -> None:
        self.module = module
        self.engine = engine
        self.world = world
        self.rank = -1 if engine is None else engine.context.rank

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the engine know of an optimizer."""
        if self.engine is not None:
            self.engine.attach(optimizer)

    def backward(self, number: int = 0) -> None:
        """Add the gradient of one global batch."""
        if self.engine is None:
            plain_step(self.module, None, self.world, number)
        else:
            step(self.engine, None, self.rank, number)

    def update(self, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
        """Make one backward, one step and a clean slate."""
        self.backward(number)
        optimizer.step()
        optimizer.zero_grad()


def same_training(
    script: Callable[[Run], T], stage: int, world: int = 2, **settings: Any
) -> tuple[T, list[T]]:
    """Run a script on a plain module and on virtual ranks; the weights must come out equal.

    Return what the script answered: plain, and on each rank.
    """
    plain = Net()
    answer = script(Run(plain, world))

    def body(transport: Transport) -> tuple[T, dict[str, Tensor]]:
        module = Net()
        engine = sharded(module, transport, stage, **settings)
        found = script(Run(module, world, engine))
        return found, whole(engine)

    ranks = on_ranks(world, body)
    for _, weights in ranks:
        assert_weights(weights, plain)
    return answer, [found for found, _ in ranks]


def assert_weights(found: dict[str, Tensor], expected: nn.Module | Iterable[Any]) -> None:
    """The weights are those of a plain module, within the bounds of the design."""
    right = dict(expected.named_parameters()) if isinstance(expected, nn.Module) else dict(expected)
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)
