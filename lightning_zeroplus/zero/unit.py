"""One unit: its weights, the bucket of its gradients, its accumulator and master, and their views.

A unit knows nothing of other units, of modules or of optimizers. Collectives are started and
finished separately so that callers can overlap them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_zeroplus.comm.bucket import BucketMemory, GradBucket
from lightning_zeroplus.comm.storage import BufferPool, WeightStorage
from lightning_zeroplus.comm.transport import Tag, Work
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.layout.bucket import GradLayout, ParamSpec, WeightLayout, header_numel
from lightning_zeroplus.layout.span import Span
from lightning_zeroplus.zero.context import Context
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.plan import UnitPlan
from lightning_zeroplus.zero.sums import BLOCK_NUMEL, add_sum, sum_into

if TYPE_CHECKING:
    pass

__all__ = ["Unit"]


class Unit:
    """Parameters of one dtype that are unsharded and reduced together.

    Args:
        plan: what it holds.
        number: its position among all units, equal on all ranks.
    """

    def __init__(
        self,
        plan: UnitPlan,
        number: int,
        context: Context,
        *,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.name = plan.name
        self.plan = plan
        self.number = number
        self.scattered = plan.scattered
        self.context = context
        self.device = context.device
        self.dtype = dtype
        self.master_dtype = master_dtype
        self.reduce_dtype = reduce_dtype
        self.transport = context.transport
        self.entries = [Entry(model, self, n) for n, model in enumerate(plan.params)]
        specs = tuple(
            ParamSpec(e.fqn, e.numel, tuple(e.model.shape), e.model.stride) for e in self.entries
        )
        self.layout = WeightLayout(specs, dtype.itemsize, context.world_size)
        self.trained: tuple[int, ...] = ()
        self.trained_entries: list[Entry] = []
        self.grad_layout = GradLayout(self.layout, (), reduce_dtype.itemsize, 0)
        self.accumulator: torch.Tensor | None = None
        self.bucket: GradBucket | None = None
        self.weights: WeightStorage
        self.master: torch.Tensor
        self._grad_views: dict[int, torch.Tensor] = {}
        self.user_classes: list[type] = [type(e.param) for e in self.entries]
        self._addresses: list[tuple[Entry, torch.Tensor, int]] | None = None
        self._awake: list[Entry] = []
        self._was_awake = False
        """Whether user code could edit the full weights that are there now."""
        self.backward_use = 0
        """The pass in which backward has used weights that stay until it ends; 0: they may go."""

        self.last_node: object = None
        """Autograd node that used the weights last."""

    # -- set-up

    def allocate(self, *, resident: bool, pool: BufferPool, block_nbytes: int | None) -> None:
        """Make the weight storage and, where the master dtype differs, the master."""
        self.weights = self.context.memory.weights(
            self.layout,
            self.dtype,
            resident=resident,
            pool=pool,
            block_nbytes=block_nbytes,
            label=self.name,
        )
        self.master = self.weights.shard
        if self.dtype != self.master_dtype:
            with torch.inference_mode(False):
                self.master = torch.zeros(
                    self.layout.shard_numel, dtype=self.master_dtype, device=self.device
                )
        for entry in self.entries:
            here = self.shard_range(entry.index)
            entry.shard = self.master[here.start : here.stop]

    def shard_range(self, index: int) -> slice:
        """Return where the own span of a parameter lies in this rank's chunk."""
        rank = self.transport.rank
        owned = self.layout.owned(index, rank)
        start = self.layout.offsets[index] + owned.start - self.layout.chunk(rank).start
        if not owned.numel:
            return slice(0, 0)
        return slice(start, start + owned.numel)

    @property
    def has_own_master(self) -> bool:
        """Whether the master is another tensor than the weight shard."""
        return self.master is not self.weights.shard

    def view_of(self, entry: Entry) -> torch.Tensor:
        """Return the full weight as a view of the flat tensor."""
        return torch.as_strided(
            self.weights.flat,
            entry.model.shape,
            entry.model.stride,
            self.layout.offsets[entry.index],
        )

    @torch.no_grad()
    def take_values(self, entry: Entry, read: Callable[[Span, torch.Tensor], None]) -> None:
        """Set the weight, where it is replicated, and the own master of a parameter. *Local.*

        Args:
            entry: of this unit.
            read: writes a range of the new full tensor, in memory order, into a 1-D tensor.
        """
        self.weights.before_write()
        owned = self.layout.owned(entry.index, self.transport.rank)
        own = self.weights.shard[self.shard_range(entry.index)]
        if self.weights.resident:
            flat = torch.as_strided(
                self.weights.flat, (entry.numel,), (1,), self.layout.offsets[entry.index]
            )
            read(Span(0, entry.numel), flat)
        elif not self.has_own_master:
            read(owned, own)
        if self.has_own_master and owned.numel:
            assert entry.shard is not None
            read(owned, entry.shard)
            own.copy_(entry.shard)

    # -- between uses

    def wake(self, entries: Sequence[Entry] | None = None) -> None:
        """Full weights are there and in use: parameters take their own class. *Local.*

        None: all of the unit's; else those that the module which is running owns.
        """
        self._was_awake = True
        for entry in self.entries if entries is None else entries:
            if not entry.is_awake:
                entry.is_awake = True
                entry.param.__class__ = self.user_classes[entry.index]
                self._awake.append(entry)

    def doze(self) -> None:
        """Full weights may stay, but every access is noticed again. *Local.*"""
        for entry in self._awake:
            assert entry.resting_class is not None
            entry.is_awake = False
            entry.param.__class__ = entry.resting_class
        self._awake.clear()

    def entries_under(self, root: nn.Module) -> list[Entry]:
        """Return those of which ``root``, or a module in it, holds the parameter. *Local.*"""
        inside = set(root.modules())
        return [e for e in self.entries if not inside.isdisjoint(e.model.owners)]

    def note_versions(self) -> None:
        """Remember the versions of unedited full weights. *Local.*"""
        self._was_awake = bool(self._awake)
        if not self.weights.needs_peers:  # edits are found by pages
            return
        with torch._C.DisableTorchFunctionSubclass():
            for entry in self.entries:
                entry.version = entry.param._version

    def rest(self) -> None:
        """Keep edits of the full weights, then let them go. *Local.*

        Raises:
            PhaseError: a parameter was pointed at other memory while it was gathered.
        """
        if self._was_awake:
            with torch._C.DisableTorchFunctionSubclass():
                edited = self._find_edits()
            if self.weights.needs_peers:  # else found in `settle_shard`, when they rest
                self._keep_edits(edited)
        self.doze()
        self.weights.reshard()

    @torch.no_grad()
    def _keep_edits(self, edited: bool) -> None:
        own = self.weights.own_part()
        if edited or not torch.equal(own, self.weights.shard):
            self.weights.before_write()
            self.weights.shard.copy_(own)

    def _find_edits(self) -> bool:
        edited = False
        base = self.weights.flat.data_ptr()
        size = self.dtype.itemsize
        for entry in self.entries:
            edited = edited or entry.param._version != entry.version
            at = base + self.layout.offsets[entry.index] * size
            if entry.numel and entry.param.data_ptr() != at:
                raise PhaseError(
                    f"Expected {entry.fqn!r} to stay in its unit's memory while gathered, got "
                    f"another tensor (rank {self.context.rank}). Use copy_ instead of assigning "
                    f".data, and convert the model before training starts."
                )
        return edited

    @torch.no_grad()
    def take_back_replaced(self) -> None:
        """Copy data that the user assigned to a resident parameter into its view. *Local.*

        Raises:
            PhaseError: data of another shape, dtype or device.
        """
        if self._addresses is None:
            base = self.weights.flat.data_ptr()
            self._addresses = [
                (e, e.param, base + self.layout.offsets[e.index] * self.dtype.itemsize)
                for e in self.entries
                if e.numel
            ]
        for entry, data, at in self._addresses:
            if data.data_ptr() == at:
                continue
            if data.shape != entry.model.shape or data.dtype != self.dtype:
                raise PhaseError(
                    f"Expected {entry.fqn!r} to stay {tuple(entry.model.shape)} {self.dtype}, got "
                    f"{tuple(data.shape)} {data.dtype}. Convert the model before it is sharded."
                )
            view = self.view_of(entry)
            view.copy_(data.detach())
            entry.param.data = view

    @torch.no_grad()
    def undo_edits(self) -> None:
        """Have nothing to keep when the weights rest. *Local.*"""
        if not self.weights.drop_edits():
            self.weights.own_part().copy_(self.weights.shard)
        self.note_versions()

    def abandon(self) -> object:
        """Let parameters rest for good; return what operations under way still write into."""
        if not self.weights.resident:
            self.doze()
            if not self.weights.is_gathering:
                self.weights.reshard()
        flying = self.bucket is not None and self.bucket.in_flight
        gathering = self.weights.is_gathering
        return (self.bucket if flying else None, self.weights if gathering else None)

    def free(self) -> None:
        """Let all memory go but the shapes, and masters, that optimizer state needs. *Local.*"""
        self.bucket = None
        self.accumulator = None
        self._grad_views = {}
        if not self.has_own_master:
            for entry in self.entries:
                if entry.shard is not None:
                    entry.shard = torch.empty_like(entry.shard, device="meta")
            self.master = self.weights.shard = torch.empty(0, dtype=self.dtype)
        else:
            self.weights.shard = torch.empty(0, dtype=self.dtype)
        if self.weights.resident:
            self.weights.flat = torch.empty(0, dtype=self.dtype)
        self.weights.let_go()

    # -- gradients

    def train(self, indices: Sequence[int], memory: BucketMemory) -> None:
        """Lay out gradients for the parameters ``indices``; what was accumulated is kept."""
        old_views = self._grad_views
        self.trained = tuple(indices)
        self.trained_entries = [self.entries[i] for i in indices]
        self.grad_layout = self.lay_out_gradients(self.trained)
        self.bucket = self.context.memory.bucket(self.grad_layout, self.reduce_dtype, memory)
        self._grad_views = {}
        if self.accumulator is not None:
            self.accumulator = None
            for index, view in old_views.items():
                if self.entries[index].valid:
                    self.grad_view(index).copy_(view)

    def lay_out_gradients(self, indices: tuple[int, ...]) -> GradLayout:
        """Return the bucket layout for the parameters ``indices``."""
        size = self.reduce_dtype.itemsize
        head = header_numel(len(indices), self.context.world_size, size)
        return GradLayout(self.layout, indices, size, head, self.context.rank)

    def grad_view(self, index: int) -> torch.Tensor:
        """Return the accumulated gradient of the own span of a parameter, 1-D."""
        view = self._grad_views.get(index)
        if view is None:
            if self.accumulator is None:
                self._allocate_accumulator()
            view = self._grad_views[index]
        return view

    def _allocate_accumulator(self) -> None:
        rank = self.transport.rank
        with torch.inference_mode(False), torch.no_grad():
            total = self.grad_layout.body_numel(rank)
            acc = torch.zeros(total, dtype=self.master_dtype, device=self.device)
        self.accumulator = acc
        for index in self.trained:
            span = self.grad_layout.accumulator_span(index, rank)
            self._grad_views[index] = acc[span.start : span.stop]

    def accumulate(self, terms: Sequence[torch.Tensor], used: Sequence[bool]) -> None:
        """Add the sum of ``terms`` (rank order) to the accumulator, or overwrite what is stale."""
        if self.accumulator is None:
            self._allocate_accumulator()
        assert self.accumulator is not None
        entries = self.trained_entries
        valid = [e.valid for e in entries]
        if not any(valid):
            sum_into(self.accumulator, terms)
            return
        scratch = self.context.scratch(BLOCK_NUMEL, self.master_dtype)
        touched = [e for e, was_used in zip(entries, used, strict=True) if was_used]
        if all(valid) or all(e.valid for e in touched):
            add_sum(self.accumulator, terms, scratch)
            return
        for entry in touched:
            span = self.grad_layout.accumulator_span(entry.index, self.transport.rank)
            pieces = [term[span.start : span.stop] for term in terms]
            if entry.valid:
                add_sum(self.grad_view(entry.index), pieces, scratch)
            else:
                sum_into(self.grad_view(entry.index), pieces)

    # -- after the optimizer

    @torch.no_grad()
    def publish_master(self) -> None:
        """Cast the master into the weight shard where they differ. *Local.*"""
        if self.has_own_master:
            self.weights.shard.copy_(self.master)

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Bring edits of narrow weights into the master, element by element. *Local.*"""
        if not self.has_own_master:
            return
        shard = self.weights.shard
        edited = shard.ne(self.master.to(self.dtype))
        if bool(edited.any()):
            self.master.copy_(torch.where(edited, shard.to(self.master_dtype), self.master))

    def start_refresh(self, tag: Tag) -> Work | None:
        """Start sending updated weights where they are replicated."""
        return self.weights.start_refresh(tag)
