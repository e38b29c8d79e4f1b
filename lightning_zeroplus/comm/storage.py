"""The memory of one unit's weights, and the pool that all blocks come from.

`WeightStorage` hides whether full weights are always there or rest on the arena between uses.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zeroplus.comm.private import Arena, resize_fallback, swap_memory, tensor_over
from lightning_zeroplus.comm.transport import Tag, Transport, Work
from lightning_zeroplus.errors import CollectiveError
from lightning_zeroplus.layout.bucket import ALIGNMENT_NBYTES, WeightLayout

__all__ = ["BufferPool", "PooledBlock", "WeightStorage"]


class PooledBlock:
    """A memory block and what its users cached about it; both go together."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.nbytes = storage.nbytes()
        self.views: dict[int, Any] = {}


class BufferPool:
    """Reused memory blocks by exact size; at most ``keep`` idle ones per size. *Local.*"""

    def __init__(self, device: torch.device, keep: int) -> None:
        self.device = device
        self._keep = keep
        self._idle: dict[int, list[PooledBlock]] = {}
        self._taken_nbytes = 0
        self.most_taken_nbytes = 0
        """Most bytes in use at one time since the start."""

    def take(self, nbytes: int, like_before: PooledBlock | None = None) -> PooledBlock:
        """Return a block of ``nbytes`` with undefined contents, if possible the one of before."""
        self._taken_nbytes += nbytes
        self.most_taken_nbytes = max(self.most_taken_nbytes, self._taken_nbytes)
        idle = self._idle.get(nbytes)
        if not idle:
            return self._make(nbytes)
        if like_before in idle:  # whose views are made
            idle.remove(like_before)
            return like_before
        return self._pick(idle)

    def _pick(self, idle: list[PooledBlock]) -> PooledBlock:
        return idle.pop()  # the warmest

    def _make(self, nbytes: int) -> PooledBlock:
        with torch.inference_mode(False), torch.no_grad():
            block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return PooledBlock(block.untyped_storage())

    def _drop(self, block: PooledBlock) -> None:
        """Have nothing to do: the memory goes with the block."""

    def give(self, block: PooledBlock) -> None:
        """Return a block; a surplus one is freed."""
        self._taken_nbytes -= block.nbytes
        idle = self._idle.setdefault(block.nbytes, [])
        if len(idle) < self._keep:
            idle.append(block)
        else:
            self._drop(block)

    def drop_idle(self) -> None:
        """Free all idle blocks when nobody needs what is in them."""
        for blocks in self._idle.values():
            for block in blocks:
                self._drop(block)
        self._idle.clear()

    def clear(self) -> None:
        """Free all idle blocks, at the end: what peers still read stays mapped there."""
        self._idle.clear()

    def nbytes(self) -> int:
        """Return the bytes of idle blocks."""
        return sum(size * len(blocks) for size, blocks in self._idle.items())


class WeightStorage:
    """The flat weights of one unit on this rank.

    ``flat`` ``[layout.numel]`` never changes as a tensor; ``shard`` ``[layout.shard_numel]`` is
    this rank's chunk, a view of ``flat`` when ``resident``, else memory of its own that is valid
    at all times.
    """

    def __init__(
        self,
        layout: WeightLayout,
        dtype: torch.dtype,
        transport: Transport,
        *,
        resident: bool,
        pool: BufferPool,
        block_nbytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.resident = resident
        self._transport = transport
        self._pool = pool
        self._block: PooledBlock | None = None
        self._gather: Work | None = None
        chunk = layout.chunk(transport.rank)
        self.block_nbytes = max(block_nbytes or layout.nbytes, ALIGNMENT_NBYTES)
        device = pool.device
        with torch.inference_mode(False), torch.no_grad():
            if resident:
                self.flat = self._zeros(layout.numel, dtype, device)
                self.shard = self.flat[chunk.start : chunk.stop]
            else:
                self.resizes = resize_fallback()
                self.flat = self._resting_flat(dtype, device)
                self.shard = self._zeros(layout.shard_numel, dtype, device)
        self.is_unsharded = resident

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def _start_gather(self, gathered: torch.Tensor, tag: Tag) -> Work:
        return self._transport.all_gather(gathered, self.shard, tag)

    needs_peers = True
    """Whether unsharding is collective."""

    def before_write(self) -> None:
        """Wait until no peer reads this rank's memory any more: it may be written."""

    def before_update(self) -> None:
        """Do the same when all ranks have met, with their weights at rest."""
        self.before_write()

    def own_shard(self) -> torch.Tensor:
        """Return this rank's chunk as of the last write to it, full weights at rest included."""
        return self.shard

    def let_go(self) -> None:
        """Free what parameters no longer point at."""

    def settle_shard(self) -> None:
        """Have in the shard what was written to full weights that rest now."""

    def drop_edits(self) -> bool:
        """Undo what was written to the full weights, if this can; return whether it did."""
        return False

    def _resting_flat(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.resizes:
            flat = torch.empty(self.layout.numel, dtype=dtype, device=device)
            self.block_nbytes = flat.untyped_storage().nbytes()
            return flat
        storage = Arena.resting_storage(self.block_nbytes, device)
        return tensor_over(storage, dtype, self.layout.numel, device)

    def settle(self) -> None:
        """Let go of what was needed while parameters were pointed at their views. *Local.*"""
        if not self.resident and self.resizes:
            self.flat.untyped_storage().resize_(0)

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is under way."""
        return self._gather is not None

    @torch.no_grad()
    def start_unshard(self, tag: Tag) -> None:
        """Start gathering all shards into a block; `finish_unshard` exposes it. Collective."""
        block = self._pool.take(self.block_nbytes)
        gathered = tensor_over(block.storage, self.flat.dtype, self.layout.numel, self.flat.device)
        self._block = block
        self._gather = self._start_gather(gathered, tag)

    @torch.no_grad()
    def finish_unshard(self) -> None:
        """Wait for the gather and put its memory under ``flat``."""
        if self._gather is None or self._block is None:
            raise CollectiveError("Expected a gather under way, got none.")
        try:
            self._gather.wait()
        finally:
            self._gather = None
        self.expose()

    def expose(self) -> None:
        """Put the taken block under ``flat``."""
        if self._block is None:
            raise CollectiveError("Expected a block to expose, got none.")
        storage = self.flat.untyped_storage()
        if self.resizes:
            storage.resize_(self.block_nbytes)
            source = self._block.storage
            self.flat.copy_(
                tensor_over(source, self.flat.dtype, self.layout.numel, self.flat.device)
            )
        else:
            swap_memory(storage, self._block.storage)
        self.is_unsharded = True

    def reshard(self) -> None:
        """Take the gathered memory away; ``flat`` rests again. *Local.*"""
        if self._block is None:
            return
        storage = self.flat.untyped_storage()
        if self.resizes:
            storage.resize_(0)
        else:
            swap_memory(storage, self._block.storage)
        self._pool.give(self._block)
        self._block = None
        self.is_unsharded = False

    def abandon(self) -> None:
        """Drop a gather under way without exposing it."""
        gather, self._gather = self._gather, None
        if gather is not None:
            gather.wait()
        if self._block is not None and not self.is_unsharded:
            self._pool.give(self._block)
            self._block = None

    def own_part(self) -> torch.Tensor:
        """Return this rank's chunk of the full weights; they are there."""
        chunk = self.layout.chunk(self._transport.rank)
        return self.flat[chunk.start : chunk.stop]

    @torch.no_grad()
    def start_refresh(self, tag: Tag) -> Work | None:
        """Start sending updated shards to all ranks where full weights are resident. Collective."""
        if not self.resident or self._transport.world_size == 1:
            return None
        return self._start_gather(self.flat, tag)

    def live_nbytes(self) -> int:
        """Return the bytes of memory this unit's weights hold now."""
        itemsize = self.flat.element_size()
        if self.resident:
            return self.layout.numel * itemsize
        return self.shard.numel() * itemsize + (self.block_nbytes if self._block else 0)
