"""The bucket in which one unit's gradients land, and how they reach their owners."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch

from lightning_zeroplus.comm.private import tensor_over
from lightning_zeroplus.comm.storage import BufferPool, PooledBlock
from lightning_zeroplus.comm.transport import Tag, Transport, Work
from lightning_zeroplus.errors import CollectiveError
from lightning_zeroplus.layout.bucket import ALIGNMENT_NBYTES, GradLayout

__all__ = ["BucketMemory", "GradBucket", "Reduced", "in_memory_order", "write_piece"]

_SERIALS = itertools.count()


class Reduced:
    """What came of one reduction: this rank's terms by sender, and who had a gradient at all."""

    def __init__(self, terms: list[torch.Tensor], used: list[bool]) -> None:
        self.terms = terms
        self.used = used


class BucketViews:
    """A bucket's views of one block: parts by parameter, headers by receiver."""

    def __init__(self, block: PooledBlock, bucket: GradBucket) -> None:
        layout = bucket.layout
        self.flat = tensor_over(block.storage, bucket.dtype, layout.numel, bucket.device)
        self.parts = {
            index: [self.flat[p.offset : p.offset + p.span.numel] for p in parts]
            for index, parts in layout.parts_of.items()
        }
        self.whole = {
            index: torch.as_strided(self.flat, shape, stride, layout.parts_of[index][0].offset)
            for index, (shape, stride) in bucket.geometry.items()
            if len(layout.parts_of.get(index, ())) == 1
        }
        raw = tensor_over(block.storage, torch.uint8, layout.nbytes, bucket.device)
        head = layout.header_numel * layout.itemsize
        stops = [layout.chunk(r).stop * layout.itemsize for r in range(bucket.world_size)]
        self.heads = [raw[stop - head : stop] for stop in stops]


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """How a bucket comes by its memory."""

    block_nbytes: int
    """Size of blocks to send; equal over units, so that they share them."""

    arrival_nbytes: int
    """Size of blocks in which others' parts arrive."""

    permanent: bool
    """Kept between reductions (gradients stay Partial for a window), or taken from the pool at the
    first landing and given back when reduced."""


class GradBucket:
    """Where one unit's gradients land before their sum goes to the owners."""

    def __init__(
        self,
        layout: GradLayout,
        dtype: torch.dtype,
        transport: Transport,
        pool: BufferPool,
        memory: BucketMemory,
    ) -> None:
        self.layout = layout
        self.geometry = {
            n: (spec.shape, spec.stride) for n, spec in enumerate(layout.weights.params)
        }
        self.dtype = dtype
        self.device = pool.device
        self.world_size = transport.world_size
        self._transport = transport
        self._pool = pool
        self._permanent = memory.permanent
        self._block_nbytes = max(memory.block_nbytes, layout.nbytes, ALIGNMENT_NBYTES)
        mean = 1.0 / self.world_size
        self._factors = {mean: _as_factor(mean, dtype)}
        self._arrival_nbytes = max(memory.arrival_nbytes, layout.arriving_nbytes)
        self._serial = next(_SERIALS)
        self._block: PooledBlock | None = None
        self._usual: PooledBlock | None = None
        self._open_views: BucketViews | None = None
        """Views of the block that is open for landing."""
        self._sent: PooledBlock | None = None
        self._arrived: PooledBlock | None = None
        self._work: Work | None = None
        self._tag: Tag | None = None
        self._sent_landed: set[int] = set()
        self.landed: set[int] = set()
        """Parameters whose gradients have landed since the last reduction started."""

    def was_sent(self, index: int) -> bool:
        """Return whether the last reduction carried a gradient of ``index`` from this rank."""
        return index in self._sent_landed

    @property
    def in_flight(self) -> bool:
        """Whether a reduction is under way."""
        return self._work is not None

    def is_reduced(self) -> bool:
        """Return whether `finish_reduce` would not wait."""
        return self._work is not None and self._work.is_completed()

    def await_reduced(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether `finish_reduce` would not wait."""
        deadline = time.monotonic() + seconds
        while not self.is_reduced():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0001)
        return True

    def _open(self) -> PooledBlock:
        if self._block is None:
            self._block = self._usual = self._pool.take(self._block_nbytes, self._usual)
        return self._block

    def _views(self) -> BucketViews:
        block = self._open()
        views = block.views.get(self._serial)
        if views is None:
            views = block.views[self._serial] = BucketViews(block, self)
        self._open_views = views
        return views

    def land(self, index: int, grad: torch.Tensor, scale: float, *, add: bool) -> None:
        """Write (or add) ``scale`` times a full gradient of parameter ``index``. *Local.*"""
        views = self._open_views or self._views()
        factor = self._factors.get(scale)
        if factor is None:
            factor = self._factors[scale] = _as_factor(scale, self.dtype)
        whole = views.whole.get(index)
        if whole is not None:
            write_piece(whole, grad, factor, add)
        else:
            shape, stride = self.geometry[index]
            flat = in_memory_order(grad, shape, stride)
            parts = self.layout.parts_of[index]
            for part, view in zip(parts, views.parts[index], strict=True):
                write_piece(view, flat[part.span.start : part.span.stop], factor, add)
        self.landed.add(index)

    def start_reduce(self, tag: Tag) -> None:
        """Start sending each rank its part; parameters that did not land count as zeros."""
        views = self._open_views or self._views()
        if len(self.landed) < len(self.layout.trained):
            for index in self.layout.trained:
                if index not in self.landed:
                    for view in views.parts[index]:
                        view.zero_()
        self._tag = tag
        self._sent = self._block
        self._sent_landed = self.landed
        self._send(views, tag)
        self._open_views = None
        if not self._permanent:
            self._block = None
        self.landed = set()

    def _bits(self) -> int:
        """Return which of the trained parameters have landed, the first in the lowest bit."""
        if len(self.landed) == len(self.layout.trained):
            return (1 << len(self.layout.trained)) - 1
        return sum(1 << n for n, index in enumerate(self.layout.trained) if index in self.landed)

    def _used(self, bits: int) -> list[bool]:
        """Return the same as one bool per trained parameter."""
        return [bool(bits >> n & 1) for n in range(len(self.layout.trained))]

    def _send(self, views: BucketViews, tag: Tag) -> None:
        self._write_header(views, tag)
        self._arrived = self._pool.take(self._arrival_nbytes)
        own = self.layout.chunk_numels[self._transport.rank]
        self._work = self._transport.all_to_all(
            self._arrival(self._arrived),
            views.flat[own:],
            [0 if r == self._transport.rank else own for r in range(self.world_size)],
            self.layout.sent_numels,
            tag,
        )

    def _arrival(self, block: PooledBlock) -> torch.Tensor:
        own = self.layout.chunk_numels[self._transport.rank]
        total = own * (self.world_size - 1)
        return tensor_over(block.storage, self.dtype, total, self.device)

    def _write_header(self, views: BucketViews, tag: Tag) -> None:
        if not self.layout.header_numel:
            return
        bits = self._bits()
        count = -(-len(self.layout.trained) // 8)
        raw = b"".join(
            int(word).to_bytes(8, "little", signed=True)
            for word in (tag.sequence, int(tag.operation), tag.unit)
        ) + bits.to_bytes(count, "little")
        header = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        for head in views.heads:
            head[: len(raw)].copy_(header)

    def finish_reduce(self) -> Reduced:
        """Wait, compare headers, and return the terms; call `release` when they are summed.

        Raises:
            CollectiveError: another rank reduced another unit.
        """
        if not self.in_flight:
            raise CollectiveError("Expected a reduction under way, got none.")
        return self._receive()

    def _receive(self) -> Reduced:
        work, self._work = self._work, None
        assert work is not None
        assert self._arrived is not None
        work.wait()
        rank = self._transport.rank
        own = self.layout.chunk_numels[rank]
        body = self.layout.body_numel(rank)
        assert self._sent is not None
        mine = self._sent.views[self._serial].flat[:own]
        rows = list(self._arrival(self._arrived).view(self.world_size - 1, own))
        rows.insert(rank, mine)
        terms = [row[:body] for row in rows]
        if not self.layout.header_numel:
            return Reduced(terms, self._own_used())
        return Reduced(terms, self._read_headers([row[body:].view(torch.uint8) for row in rows]))

    def _own_used(self) -> list[bool]:
        return [index in self._sent_landed for index in self.layout.trained]

    def _read_headers(self, heads: list[torch.Tensor]) -> list[bool]:
        count = len(self.layout.trained)
        need = 24 + -(-count // 8)
        union = 0
        mine = self._tag
        for rank, head in enumerate(heads):
            raw = bytes(head[:need].tolist())
            words = [
                int.from_bytes(raw[8 * n : 8 * n + 8], "little", signed=True) for n in range(3)
            ]
            if mine is None or (words[0], words[2]) != (mine.sequence, mine.unit):
                raise CollectiveError(
                    f"Expected all ranks to reduce together, got {mine} (rank "
                    f"{self._transport.rank}) and #{words[0]} of unit {words[2]} (rank {rank}). "
                    f"Run the same number of backwards on every rank."
                )
            union |= int.from_bytes(raw[24:need], "little")
        return self._used(union)

    def release(self) -> None:
        """Give the memory of the finished reduction back. *Local.*"""
        if self._arrived is not None:
            self._pool.give(self._arrived)
            self._arrived = None
        if self._sent is not None and not self._permanent:
            self._pool.give(self._sent)
        self._sent = None

    def live_nbytes(self) -> int:
        """Return the bytes of memory held now."""
        blocks = (self._block, self._sent, self._arrived)
        return sum({id(b): b.nbytes for b in blocks if b is not None}.values())


def _as_factor(scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``scale`` as a 0-d tensor: torch takes twice as long to take in a Python number."""
    # Not narrower than fp32, in which torch multiplies narrow gradients by a number.
    with torch.inference_mode(False):
        return torch.tensor(scale, dtype=torch.promote_types(dtype.to_real(), torch.float32))


def write_piece(view: torch.Tensor, grad: torch.Tensor, factor: torch.Tensor, add: bool) -> None:
    """Write (or add) ``factor``, 0-d, times ``grad`` to a view of a bucket. *Local.*"""
    if add:
        view.add_(grad, alpha=factor.item())
    elif grad.dtype is view.dtype:
        torch.mul(grad, factor, out=view)
    else:
        view.copy_(grad).mul_(factor)


def in_memory_order(
    tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return ``tensor`` as 1-D in the order of a dense tensor of these strides; a view if it is."""
    if tensor.stride() != stride and tensor.numel() > 0:
        dense = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
