"""Full weights that are there for every rank of the host: nothing is gathered.

One block of memory holds a unit's weights for the whole host. Each rank maps it twice: *shared*,
where it writes its own span, and *private*, which is what forwards and backwards read. Unsharding
puts the private mapping under the unit's storage. What user code writes there stays with its rank
until the weights rest and are settled: then the rank copies its own span of what was written to
the shared mapping, and lets its private pages go, which would hide later updates.

Reading needs nobody and is not counted: ranks may read differently often. Nobody writes a span that
a peer may still read, though. Writes at rest come in *epochs*: a rank enters one, and writes when
every peer has entered it as well, after its last read; before a rank reads again it waits until
every peer has left the epoch, with its own writes done. All ranks write together, as in any
replicated training. A rank that waits where all ranks meet (before and after an update, at the end
of an evaluation) reads nothing, and counts as having entered and left every epoch until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from typing_extensions import override

from lightning_zeroplus.comm.host.memory import find_edits
from lightning_zeroplus.comm.host.room import Room
from lightning_zeroplus.comm.private import swap_memory, tensor_over
from lightning_zeroplus.comm.storage import BufferPool, WeightStorage
from lightning_zeroplus.comm.transport import Operation, Tag
from lightning_zeroplus.layout.bucket import WeightLayout

__all__ = ["MappedWeights"]

_EPOCHS = 1 << 32
"""Epochs between two meetings; counters are the number of meetings times this, and the epoch."""


class MappedWeights(WeightStorage):
    """One unit's weights, stored once for all ranks of the host."""

    needs_peers = False

    def __init__(
        self, layout: WeightLayout, dtype: torch.dtype, room: Room, *, pool: BufferPool, label: str
    ) -> None:
        self._room = room
        self._rank = room.transport.rank
        self._tag = Tag(0, Operation.TOUCH, -1, f"a write to {label}")
        self._shared, self._private = room.shared_block(layout.nbytes)
        self._entered = room.new_counter()
        self._left = room.new_counter()
        self._epoch = 0
        self._writes = False
        """Whether this rank is inside of an epoch."""

        self._maybe_edited = False
        self.lone_reads = 0
        """Reads outside of a forward or backward: ranks should make equally many."""

        super().__init__(layout, dtype, room.transport, resident=False, pool=pool)

    @override
    def _resting_flat(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._full = self._private.bytes.untyped_storage()
        self.block_nbytes = self._full.nbytes()
        return super()._resting_flat(dtype, device)

    @override
    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = self._shared.bytes.untyped_storage()
        self._everyones = tensor_over(whole, dtype, self.layout.numel, device)
        self._readers = tensor_over(self._full, dtype, self.layout.numel, device)
        chunk = self.layout.chunk(self._rank)
        return self._everyones[chunk.start : chunk.stop]

    # -- reads

    @override
    def start_unshard(self, tag: Tag) -> None:
        self._leave_epoch()
        if tag.operation is Operation.TOUCH:
            self.lone_reads += 1

    @override
    def finish_unshard(self) -> None:
        self.expose()

    @override
    def expose(self) -> None:
        swap_memory(self.flat.untyped_storage(), self._full)
        self.is_unsharded = self._maybe_edited = True

    @override
    def reshard(self) -> None:
        if self.is_unsharded:
            swap_memory(self.flat.untyped_storage(), self._full)
            self.is_unsharded = False

    @override
    def abandon(self) -> None:
        """Have nothing under way."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a view of these weights."""
        memory = tensor.untyped_storage()._cdata
        ours = (self.shard, self.flat, self._readers)
        return any(memory == t.untyped_storage()._cdata for t in ours)

    @contextlib.contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        """Give the full weights, flat, as this rank sees them."""
        if self.is_unsharded:
            yield self.flat
            return
        self._leave_epoch()
        self.lone_reads += 1
        yield self._readers

    @override
    def own_shard(self) -> torch.Tensor:
        if self.may_have_edits:
            if self._has_edits():
                chunk = self.layout.chunk(self._rank)
                return self._readers[chunk.start : chunk.stop]
            self._maybe_edited = False
        return self.shard

    # -- writes

    def _enter_epoch(self) -> None:
        # A new one for every write: between two, peers may read or not.
        self._room.count(self._left, self._epoch)
        self._writes = True
        self._epoch += 1
        self._room.count(self._entered, self._epoch)
        self._room.await_all(self._entered, self._epoch, self._tag)

    def _leave_epoch(self) -> None:
        if self._writes:
            self._writes = False
            self._room.count(self._left, self._epoch)
            self._room.await_all(self._left, self._epoch, self._tag)

    @override
    def settle_shard(self) -> None:
        self.settle_shards([self])

    @property
    def may_have_edits(self) -> bool:
        """Whether somebody may have written to the full weights, which rest now."""
        return self._maybe_edited and not self.is_unsharded

    def _keep_edits(self) -> None:
        self._enter_epoch()
        chunk = self.layout.chunk(self._rank)
        with torch.no_grad():
            self.shard.copy_(self._readers[chunk.start : chunk.stop])
        self._private.forget_edits()

    @classmethod
    def settle_shards(cls, mapped: Sequence[MappedWeights]) -> None:
        """Do the same for many at the price of a few."""
        due = [weights for weights in mapped if weights.may_have_edits]
        if not due:
            return
        try:
            edited = find_edits([weights._private for weights in due])
        except OSError:
            edited = [weights._has_edits() for weights in due]
        for weights, has_edits in zip(due, edited, strict=True):
            weights._maybe_edited = False
            if has_edits:
                weights._keep_edits()

    def _has_edits(self) -> bool:
        try:
            return find_edits([self._private])[0]
        except OSError:  # compared then, for all that it costs
            mine, all_ = self._readers, self._everyones
            return not torch.equal(mine.view(torch.uint8), all_.view(torch.uint8))

    @override
    def before_write(self) -> None:
        if not self.is_unsharded:
            self.settle_shard()
            self._enter_epoch()

    @override
    def before_update(self) -> None:
        """Have nothing to wait for: all ranks have met."""

    @override
    def drop_edits(self) -> bool:
        self._private.forget_edits()
        return True

    # -- meetings

    def stand_by(self, meetings: int) -> None:
        """Say that this rank neither reads nor writes until all have met. *Local.*

        The exchange in which they meet tells peers that wait.
        """
        self._writes = False
        until = (meetings + 1) * _EPOCHS - 1
        self._room.count(self._entered, until, tell=False)
        self._room.count(self._left, until, tell=False)

    def met(self, meetings: int) -> None:
        """All ranks have met, ``meetings`` times by now. *Local.*"""
        # Peers see the earlier, lower counters until this rank enters an epoch of its own.
        self._epoch = meetings * _EPOCHS
        self.lone_reads = 0

    @override
    def let_go(self) -> None:
        empty = torch.empty(0, dtype=self.flat.dtype)
        self._everyones = self._readers = empty
        self._full = empty.untyped_storage()
        del self._shared, self._private

    @override
    def live_nbytes(self) -> int:
        return self.shard.nbytes
