"""Where an engine's weights and gradient buckets lie: in memory of its own, or of the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zeroplus.comm.bucket import BucketMemory, GradBucket
from lightning_zeroplus.comm.host.mapped import MappedWeights
from lightning_zeroplus.comm.host.room import Room
from lightning_zeroplus.comm.host.storage import HostBucket, HostPool, HostWeights
from lightning_zeroplus.comm.host.transport import HostTransport
from lightning_zeroplus.comm.private import resize_fallback
from lightning_zeroplus.comm.storage import BufferPool, WeightStorage
from lightning_zeroplus.comm.transport import Transport
from lightning_zeroplus.layout.bucket import GradLayout, WeightLayout

__all__ = ["Memory", "memory_of", "settle_shards"]

_KEPT = 64
"""Idle blocks of a size: all that reductions ever need at once, so that none is made again."""


class Memory:
    """Makes the weight storage and buckets of one engine, over copies between ranks. *Local.*"""

    is_shared = False
    """Whether ranks read each other's memory."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self.gradients = BufferPool(device, keep=_KEPT)
        """Blocks that buckets are made of."""

    def weights(
        self,
        layout: WeightLayout,
        dtype: torch.dtype,
        *,
        resident: bool,
        pool: BufferPool,
        block_nbytes: int | None,
        label: str = "",
    ) -> WeightStorage:
        """Return memory for one unit's weights; ``pool`` gives blocks for full ones. Collective."""
        return WeightStorage(
            layout,
            dtype,
            self._transport,
            resident=resident,
            pool=pool,
            block_nbytes=block_nbytes,
        )

    def bucket(self, layout: GradLayout, dtype: torch.dtype, memory: BucketMemory) -> GradBucket:
        """Return a bucket for one unit's gradients."""
        return GradBucket(layout, dtype, self._transport, self.gradients, memory)

    def close(self, *, alone: bool) -> None:
        """Free idle blocks, and what is mapped of peers; ``alone``: these may be gone."""
        self.gradients.clear()


class _HostMemory(Memory):
    """The same over memory that the host's ranks share."""

    is_shared = True

    def __init__(self, transport: HostTransport) -> None:
        super().__init__(transport, torch.device("cpu"))
        self._room = Room(transport)
        self._blocks = self.gradients = HostPool(self._room, keep=_KEPT)

    def weights(
        self,
        layout: WeightLayout,
        dtype: torch.dtype,
        *,
        resident: bool,
        pool: BufferPool,
        block_nbytes: int | None,
        label: str = "",
    ) -> WeightStorage:
        if not resident and self._room.has_counters and not resize_fallback():
            return MappedWeights(layout, dtype, self._room, pool=pool, label=label)
        return HostWeights(
            layout,
            dtype,
            self._room,
            resident=resident,
            pool=pool,
            block_nbytes=block_nbytes,
        )

    def bucket(self, layout: GradLayout, dtype: torch.dtype, memory: BucketMemory) -> GradBucket:
        return HostBucket(layout, dtype, self._blocks, memory)

    def close(self, *, alone: bool) -> None:
        if not alone:
            self._blocks.await_readers()
        super().close(alone=alone)
        self._room.close(alone=alone)


def settle_shards(weights: Sequence[WeightStorage]) -> None:
    """Have in every shard what was written to full weights that rest now."""
    MappedWeights.settle_shards([w for w in weights if isinstance(w, MappedWeights)])
    for other in weights:
        if not isinstance(other, MappedWeights):
            other.settle_shard()


def memory_of(transport: Transport, device: torch.device) -> Memory:
    """Return where an engine on ``device`` keeps what its ranks exchange. *Local.*

    Raises:
        OSError: shared memory was agreed on, and there is none left.
    """
    if isinstance(transport, HostTransport) and device.type == "cpu":
        return _HostMemory(transport)
    return Memory(transport, device)
