"""One training setup per variant, all with the same model, batches and fused AdamW."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from models import GPT, Shape, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["VARIANTS", "Variant", "make_variant", "train_step"]

VARIANTS = (
    "ddp",
    "fsdp2_reshard",
    "fsdp2_keep",
    "stage1",
    "stage2",
    "stage3",
    "stage1_c10d",
    "stage2_c10d",
    "stage3_c10d",
)


class Variant(Protocol):
    """What the timing loop needs of a setup."""

    model: GPT
    optimizer: torch.optim.Optimizer

    def backward(self, batch: Tensor, scale: float, *, last: bool) -> Tensor:
        """Run one microbatch; return its loss, 0-d and detached."""

    def sent_nbytes(self) -> int | None:
        """Return the payload bytes this rank has sent so far; None: not counted."""


def train_step(variant: Variant, batches: list[Tensor]) -> Tensor:
    """Run one update over the microbatches; return the mean of their losses, 0-d."""
    count = len(batches)
    losses = [
        variant.backward(batch, 1.0 / count, last=index == count - 1)
        for index, batch in enumerate(batches)
    ]
    variant.optimizer.step()
    variant.optimizer.zero_grad()
    return torch.stack(losses).mean()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class _DDP:
    def __init__(self, shape: Shape) -> None:
        self.model = build(shape)
        self._wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = _optimizer(self.model)

    def backward(self, batch: Tensor, scale: float, *, last: bool) -> Tensor:
        with nullcontext() if last else self._wrapped.no_sync():
            loss = self._wrapped(batch)
            (loss if scale == 1.0 else loss * scale).backward()
        return loss.detach()

    def sent_nbytes(self) -> int | None:
        return None


class _FSDP2:
    """Each variant at its best: gradients are reduced once a window.

    `keep` also gathers once a window.
    """

    def __init__(self, shape: Shape, *, keep: bool) -> None:
        self.model = build(shape)
        self._keep = keep
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=not keep)
        self.optimizer = _optimizer(self.model)

    def backward(self, batch: Tensor, scale: float, *, last: bool) -> Tensor:
        self.model.set_is_last_backward(last)
        self.model.set_requires_gradient_sync(last)
        if self._keep:
            self.model.set_reshard_after_backward(last)
        loss = self.model(batch)
        (loss if scale == 1.0 else loss * scale).backward()
        return loss.detach()

    def sent_nbytes(self) -> int | None:
        return None


@functools.cache
def _transport(name: str) -> Any:
    """Return one transport for all variants: its idle groups cost processor time."""
    from lightning_zeroplus import comm

    return comm.make_transport(name, timeout=timedelta(minutes=5))


class _Ours:
    def __init__(self, shape: Shape, *, stage: int, transport: str = "auto") -> None:
        from lightning_zeroplus import zero
        from lightning_zeroplus.config import EngineConfig

        self.model = build(shape)
        self._transport = _transport(transport)
        self.engine = zero.shard(self.model, EngineConfig(stage=stage), self._transport)
        self.optimizer = _optimizer(self.model)
        self.engine.attach(self.optimizer)

    def backward(self, batch: Tensor, scale: float, *, last: bool) -> Tensor:
        blocked: AbstractContextManager[object]
        blocked = nullcontext() if last else self.engine.block_backward_sync()
        with blocked:
            with self.engine.forward_pass():
                loss = self.model(batch)
            with self.engine.backward_pass():
                (loss if scale == 1.0 else loss * scale).backward()
        return loss.detach()

    def sent_nbytes(self) -> int | None:
        return getattr(self._transport, "sent_nbytes", None)


_MAKERS: dict[str, Callable[[Shape], Variant]] = {
    "ddp": _DDP,
    "fsdp2_reshard": lambda shape: _FSDP2(shape, keep=False),
    "fsdp2_keep": lambda shape: _FSDP2(shape, keep=True),
    "stage1": lambda shape: _Ours(shape, stage=1),
    "stage2": lambda shape: _Ours(shape, stage=2),
    "stage3": lambda shape: _Ours(shape, stage=3),
    "stage1_c10d": lambda shape: _Ours(shape, stage=1, transport="c10d"),
    "stage2_c10d": lambda shape: _Ours(shape, stage=2, transport="c10d"),
    "stage3_c10d": lambda shape: _Ours(shape, stage=3, transport="c10d"),
}


def make_variant(name: str, shape: Shape) -> Variant:
    """Return the named setup; every rank calls it, in the same order."""
    return _MAKERS[name](shape)
