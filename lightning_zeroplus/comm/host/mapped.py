"""Full weights that are there for every rank of the host: nothing is gathered.

One block of memory holds a unit's weights for the whole host. Each rank maps it twice: *shared*,
where it writes its own span, and *private*, which is what forwards and backwards read. Unsharding
puts the private mapping under the unit's storage. What user code writes there stays with its rank
until the weights rest and are settled: then the rank copies its own span of what was written to
the shared mapping, and lets its private pages go, which would hide later updates.

Nobody writes a span that a peer may still read. Each rank counts, per unit, the uses that it has
begun and ended. A write at rest first waits until every peer has ended as many uses; the use after
it waits until every peer has begun it, and with that has done its own writes. Updates by the
optimizer come between two meetings of all ranks instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from typing_extensions import override

from lightning_zeroplus.comm.host.room import Room
from lightning_zeroplus.comm.private import swap_memory, tensor_over
from lightning_zeroplus.comm.storage import BufferPool, WeightStorage
from lightning_zeroplus.comm.transport import Operation, Tag
from lightning_zeroplus.layout.bucket import WeightLayout

__all__ = ["MappedWeights"]


class MappedWeights(WeightStorage):
    """One unit's weights, stored once for all ranks of the host."""

    needs_peers = False

    def __init__(
        self, layout: WeightLayout, dtype: torch.dtype, room: Room, *, pool: BufferPool, label: str
    ) -> None:
        self._room = room
        self._board = room.transport.board
        self._rank = room.transport.rank
        self._tag = Tag(0, Operation.TOUCH, -1, label)
        self._shared, self._private = room.shared_block(layout.nbytes)
        self._uses = room.new_counter()
        self._rests = room.new_counter()
        self._used = 0
        self._written = False
        """Whether this rank has written its span since its last use."""

        self._maybe_edited = False
        super().__init__(layout, dtype, room.transport, resident=False, pool=pool)

    @override
    def _resting_flat(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._full = self._private.bytes.untyped_storage()
        self.block_nbytes = self._full.nbytes()
        return super()._resting_flat(dtype, device)

    @override
    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = self._shared.bytes.untyped_storage()
        self.everyones = tensor_over(whole, dtype, self.layout.numel, device)
        chunk = self.layout.chunk(self._rank)
        return self.everyones[chunk.start : chunk.stop]

    # -- uses

    @property
    def uses(self) -> int:
        """How often this rank has used the weights."""
        return self._used

    def _begin(self) -> None:
        self._used += 1
        self._room.count(self._uses, self._used)
        if self._written:
            self._room.await_all(self._uses, self._used, self._tag)
            self._written = False

    def _end(self) -> None:
        self._room.count(self._rests, self._used)

    @override
    def start_unshard(self, tag: Tag) -> None:
        self._begin()

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
            self._end()

    @override
    def abandon(self) -> None:
        """Have nothing under way."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a view of these weights."""
        memory = tensor.untyped_storage()._cdata
        return memory in {
            self.shard.untyped_storage()._cdata,
            self.flat.untyped_storage()._cdata,
        }

    @contextlib.contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        """Give the full weights at rest, flat, as a use of their own."""
        if self.is_unsharded:
            yield self.flat
            return
        self.settle_shard()
        self._begin()
        try:
            yield self.everyones
        finally:
            self._end()

    # -- writes

    @override
    def settle_shard(self) -> None:
        if not self._maybe_edited or self.is_unsharded:
            return
        self._maybe_edited = False
        if self._has_edits():
            self._await_rest()
            with torch.no_grad():
                self.shard.copy_(self._own_view())
            self._private.forget_edits()

    def _has_edits(self) -> bool:
        try:
            return self._private.has_edits()
        except OSError:  # compared then, for all that it costs
            private = tensor_over(self._full, self.flat.dtype, self.layout.numel, self.flat.device)
            return not torch.equal(private.view(torch.uint8), self.everyones.view(torch.uint8))

    def _own_view(self) -> torch.Tensor:
        chunk = self.layout.chunk(self._rank)
        private = tensor_over(self._full, self.flat.dtype, self.layout.numel, self.flat.device)
        return private[chunk.start : chunk.stop]

    def _await_rest(self) -> None:
        self._room.await_all(self._rests, self._used, self._tag)
        self._written = True

    @override
    def before_write(self) -> None:
        if not self.is_unsharded:
            self.settle_shard()
            self._await_rest()

    @override
    def before_update(self) -> None:
        """Have nothing to wait for: all ranks have met."""

    def met(self, uses: int) -> None:
        """All ranks have met with their weights at rest, after ``uses`` at most. *Local.*"""
        self._written = False
        if uses != self._used:
            self._used = uses
            self._room.count(self._uses, uses)
            self._room.count(self._rests, uses)

    @override
    def drop_edits(self) -> bool:
        self._private.forget_edits()
        return True

    @override
    def let_go(self) -> None:
        empty = torch.empty(0, dtype=self.flat.dtype)
        self.everyones = empty
        self._full = empty.untyped_storage()
        del self._shared, self._private

    @override
    def live_nbytes(self) -> int:
        return self.shard.nbytes
