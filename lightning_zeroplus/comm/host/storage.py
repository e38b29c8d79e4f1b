"""Weights and gradient buckets of one unit in memory that the host's ranks share."""

from __future__ import annotations

import weakref

import torch
from typing_extensions import override

from lightning_zeroplus.comm.bucket import BucketMemory, BucketViews, GradBucket, Reduced
from lightning_zeroplus.comm.host.board import Channel, Posted
from lightning_zeroplus.comm.host.memory import Mapping, Place
from lightning_zeroplus.comm.host.room import Room
from lightning_zeroplus.comm.private import tensor_over
from lightning_zeroplus.comm.storage import BufferPool, PooledBlock, WeightStorage
from lightning_zeroplus.comm.transport import Tag, Work
from lightning_zeroplus.layout.bucket import GradLayout, WeightLayout

__all__ = ["HostBucket", "HostPool", "HostWeights"]

_WORD_BITS = 63


class HostBlock(PooledBlock):
    """A block that peers read; it may be written again when they have."""

    def __init__(self, mapping: Mapping, place: Place, nbytes: int) -> None:
        super().__init__(mapping.bytes.untyped_storage())
        self.nbytes = nbytes
        self.mapping = mapping
        self.place = place
        self.read_by: Posted | None = None

    def await_readers(self) -> None:
        """Return when no peer needs what is in it."""
        posted, self.read_by = self.read_by, None
        if posted is not None:
            posted.board.await_taken(posted)


class HostPool(BufferPool):
    """Blocks in a file of this rank; a block comes back when peers have read it."""

    def __init__(self, room: Room, keep: int) -> None:
        super().__init__(torch.device("cpu"), keep)
        self.room = room
        self._blocks: weakref.WeakSet[HostBlock] = weakref.WeakSet()

    @override
    def take(self, nbytes: int, like_before: PooledBlock | None = None) -> HostBlock:
        block = super().take(nbytes, like_before)
        assert isinstance(block, HostBlock)
        block.await_readers()
        return block

    @override
    def _pick(self, idle: list[PooledBlock]) -> PooledBlock:
        return idle.pop(0)  # that peers are done with first

    @override
    def _make(self, nbytes: int) -> HostBlock:
        block = HostBlock(*self.room.file.block(nbytes), nbytes)
        self._blocks.add(block)
        return block

    def await_readers(self) -> None:
        """Return when no peer needs what is in any block."""
        for block in list(self._blocks):
            block.await_readers()

    @override
    def _drop(self, block: PooledBlock) -> None:
        assert isinstance(block, HostBlock)
        block.await_readers()
        block.mapping.drop_pages()


class HostBucket(GradBucket):
    """Gradients land where their owners read them."""

    def __init__(
        self,
        layout: GradLayout,
        dtype: torch.dtype,
        pool: HostPool,
        memory: BucketMemory,
    ) -> None:
        transport = pool.room.transport
        super().__init__(layout, dtype, transport, pool, memory)
        self._host = transport
        self._room = pool.room
        self._posted: Posted | None = None
        mine = transport.rank
        weights, trained, size = layout.weights, layout.trained, layout.itemsize
        self._chunks = []
        """Bytes of this rank's part in each rank's bucket: start, stop of the body, stop."""
        for rank in range(transport.world_size):
            theirs = GradLayout(weights, trained, size, layout.header_numel, rank)
            chunk = theirs.chunk(mine)
            stop = chunk.start + theirs.body_numel(mine)
            self._chunks.append((chunk.start * size, stop * size, chunk.stop * size))
        self._views_of: dict[tuple[int, Place], tuple[torch.Tensor, torch.Tensor]] = {}
        self._sent_nbytes = sum(layout.sent_numels) * size
        self._fits_a_word = len(trained) < _WORD_BITS
        """Whether the board says which parameters have gradients; else the blocks do."""

    @property
    @override
    def in_flight(self) -> bool:
        return self._posted is not None

    @override
    def is_reduced(self) -> bool:
        return self._posted is not None and self._posted.is_ready()

    @override
    def await_reduced(self, seconds: float) -> bool:
        posted = self._posted
        if posted is not None and not self._room.gathers:
            posted.places()  # nobody needs this rank meanwhile: no reason to run ahead
        return posted is not None and posted.await_ready(seconds)

    @override
    def _open(self) -> PooledBlock:
        block = super()._open()
        assert isinstance(block, HostBlock)
        block.await_readers()
        return block

    @override
    def _send(self, views: BucketViews, tag: Tag) -> None:
        block = self._sent
        assert isinstance(block, HostBlock)
        bits = 0
        if self._fits_a_word:
            bits = self._bits()
        else:
            self._write_header(views, tag)
        posted = self._host.post(Channel.GRADIENTS, tag, block.place, bits)
        self._posted = block.read_by = posted
        self._room.outstanding.add(posted)
        self._host.sent_nbytes += self._sent_nbytes

    @override
    def _receive(self) -> Reduced:
        posted = self._posted
        assert posted is not None
        found = [self._part(rank, place) for rank, place in enumerate(posted.places())]
        terms = [body for body, _ in found]
        if self._fits_a_word:
            return Reduced(terms, self._used(posted.board.read_bits(posted)))
        return Reduced(terms, self._read_headers([head for _, head in found]))

    def _part(self, rank: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        views = self._views_of.get((rank, place))
        if views is None:
            if rank == self._transport.rank:
                assert isinstance(self._sent, HostBlock)
                raw = self._sent.mapping.bytes
            else:
                raw = self._room.bytes_of(rank, place)
            start, body, stop = self._chunks[rank]
            views = raw[start:body].view(self.dtype), raw[body:stop]
            self._views_of[rank, place] = views
        return views

    @override
    def release(self) -> None:
        posted, self._posted = self._posted, None
        if posted is not None:
            self._room.outstanding.discard(posted)
            posted.board.take(posted)
        super().release()


class HostWeights(WeightStorage):
    """Full weights, or a shard, in a file that peers copy from."""

    def __init__(
        self,
        layout: WeightLayout,
        dtype: torch.dtype,
        room: Room,
        *,
        resident: bool,
        pool: BufferPool,
        block_nbytes: int | None = None,
    ) -> None:
        self._room = room
        room.gathers = room.gathers or not resident
        self._host = room.transport
        self._place = Place(0, -1, 0, 0)
        self._places: list[Place] = []
        self._last: Posted | None = None
        """The operation in which peers read this rank's memory last."""

        super().__init__(
            layout, dtype, self._host, resident=resident, pool=pool, block_nbytes=block_nbytes
        )

    @override
    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        mapping, self._place = self._room.file.block(numel * dtype.itemsize)
        return tensor_over(mapping.bytes.untyped_storage(), dtype, numel, device)

    @override
    def _start_gather(self, gathered: torch.Tensor, tag: Tag) -> Work:
        posted = self._last = self._host.post(Channel.WEIGHTS, tag, self._place)
        self._host.sent_nbytes += (self._host.world_size - 1) * self.shard.nbytes
        return _Read(self, gathered, posted)

    def copy_parts(self, out: torch.Tensor, posted: Posted) -> None:
        """Copy every rank's chunk to its place in ``out``; all have posted."""
        self._places = posted.places()
        for rank in range(self._host.world_size):
            chunk = self.layout.chunk(rank)
            if rank != self._host.rank:
                out[chunk.start : chunk.stop].copy_(self.part_of(rank))
            elif not self.resident:
                out[chunk.start : chunk.stop].copy_(self.shard)

    def part_of(self, rank: int) -> torch.Tensor:
        """Return a peer's chunk where it lies, as of the last gather. *Local.*"""
        dtype = self.flat.dtype
        start = self.layout.chunk(rank).start * dtype.itemsize if self.resident else 0
        stop = start + self.layout.shard_numel * dtype.itemsize
        return self._room.bytes_of(rank, self._places[rank])[start:stop].view(dtype)

    @override
    def before_write(self) -> None:
        posted, self._last = self._last, None
        if posted is not None:
            posted.board.await_taken(posted)

    @override
    def own_shard(self) -> torch.Tensor:
        self.before_write()  # who asks for it may write it, too
        return self.shard


class _Read:
    """A gather of which this rank may read the parts whenever all are posted."""

    def __init__(self, weights: HostWeights, out: torch.Tensor, posted: Posted) -> None:
        self._weights = weights
        self._out = out
        self._posted = posted
        self._done = False
        weights._host.add_reader(self._read_if_ready)

    def is_completed(self) -> bool:
        return self._done or self._posted.is_ready()

    def _read_if_ready(self) -> None:
        if not self._done and self._posted.is_ready():
            self._finish()

    def wait(self) -> None:
        if not self._done:
            self._finish()

    def _finish(self) -> None:
        self._done = True
        try:
            with torch.no_grad():
                self._weights.copy_parts(self._out, self._posted)
        finally:
            self._weights._host.remove_reader(self._read_if_ready)
            self._posted.board.take(self._posted)
