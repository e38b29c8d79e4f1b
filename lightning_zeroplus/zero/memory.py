"""What one rank holds, by role, read off live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from lightning_zeroplus.comm.private import Arena
from lightning_zeroplus.comm.storage import BufferPool
from lightning_zeroplus.zero.unit import Unit

__all__ = ["MemoryReport", "measure"]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on this rank, now."""

    weights: int
    """Model weights: full where replicated, else shards and unsharded blocks."""

    gradients: int
    """Accumulators and buckets that hold or carry gradients."""

    optimizer_state: int
    """State tensors of all attached optimizers."""

    master_weights: int
    """Masters that are other tensors than the weights."""

    idle_blocks: int
    """Pooled memory between two uses, and the arena that resting weights point at."""

    unsharded_peak: int
    """Most bytes of unsharded blocks at one time since the start."""

    @property
    def total(self) -> int:
        """Bytes of all roles together."""
        return (
            self.weights
            + self.gradients
            + self.optimizer_state
            + self.master_weights
            + self.idle_blocks
        )


def measure(
    units: Sequence[Unit], optimizers: Sequence[Optimizer], pools: Sequence[BufferPool]
) -> MemoryReport:
    """Return the bytes that the engine holds now. *Local.*"""
    weights = sum(u.weights.live_nbytes() for u in units)
    masters = sum(_nbytes(u.master) for u in units if u.has_own_master)
    gradients = sum(_nbytes(u.accumulator) for u in units if u.accumulator is not None)
    gradients += sum(u.bucket.live_nbytes() for u in units if u.bucket is not None)
    idle = sum(pool.nbytes() for pool in pools)
    flat = [u for u in units if not u.weights.resident]
    if flat:
        idle += Arena.nbytes(flat[0].device)
    return MemoryReport(
        weights=weights,
        gradients=gradients,
        optimizer_state=sum(_state_nbytes(o) for o in optimizers),
        master_weights=masters,
        idle_blocks=idle,
        unsharded_peak=pools[-1].most_taken_nbytes if pools else 0,
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state_nbytes(optimizer: Optimizer) -> int:
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel():
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
