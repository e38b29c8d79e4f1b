"""When gradients leave: landing, launching in a fixed order, and what is left at the end.

All ranks launch reductions in one order, whatever order their gradients come in, so that a
parameter which is unused on one rank never mixes two units. A round covers every unit that trains;
headers carry which parameters had a gradient on which rank. What a blocked backward left Partial,
or what landed again after its unit had left, goes with the next round; before gradients are read
the ranks agree, in one small exchange, whether such a round is due.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence

import torch

from lightning_zeroplus.comm.bucket import BucketMemory
from lightning_zeroplus.comm.private import hide_from_compiler
from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.layout.budget import in_flight
from lightning_zeroplus.zero.context import Context
from lightning_zeroplus.zero.entry import Entry, memory_order
from lightning_zeroplus.zero.grad_span import (
    AS_PLAIN,
    GradSpan,
    get_grad,
    read_slot,
    write_slot,
)
from lightning_zeroplus.zero.ranges import of_unit
from lightning_zeroplus.zero.span_tensor import SpanTensor
from lightning_zeroplus.zero.unit import Unit

__all__ = ["Reducer"]

_PATIENCE_S = 1.0


class Reducer:
    """Owns the order of reductions of one engine."""

    def __init__(self, units: Sequence[Unit], context: Context, *, defers: bool) -> None:
        self._context = context
        self._defers = defers
        # Backward comes by the earliest registered parameters last.
        self._order = sorted(units, key=lambda u: -u.plan.first)
        self._units = list(units)
        self._scale = 1.0 / context.world_size
        self._position = 0
        self._flying: deque[Unit] = deque()
        self._in_flight = 1
        self._missing: dict[int, int] = {}
        self._backward = 0
        self._aborted = False
        self._completed: list[int] = []
        self._order_is_fixed = len(units) < 2 or context.world_size == 1
        self._dirty = False
        self._launch = hide_from_compiler(self._launch_ready)
        self.blocked = False
        context.settle = self.finalize

    # -- layout of what trains

    def arm(self) -> None:
        """Give every parameter that needs gradients, now or earlier, room in its unit's bucket."""
        due = [u for u in self._units if self._wanted(u) != u.trained]
        if not due:
            return
        self.settle_flying()
        layouts = [u.lay_out_gradients(self._wanted(u)) for u in self._units]
        pooled = [n.nbytes for u, n in zip(self._units, layouts, strict=True) if not u.scattered]
        block = max(pooled, default=0)
        arrival = max(layout.arriving_nbytes for layout in layouts)
        self._in_flight = in_flight(block)
        self._context.memory.gradients.drop_idle()
        for unit in due:
            own = self._defers or unit.scattered
            memory = BucketMemory(0 if own else block, arrival, permanent=self._defers)
            unit.train(self._wanted(unit), memory)
            for index in unit.trained:
                entry = unit.entries[index]
                if entry.slot is None:
                    entry.slot = GradSpan.of(entry)

    @staticmethod
    def _wanted(unit: Unit) -> tuple[int, ...]:
        known = set(unit.trained)
        return tuple(e.index for e in unit.entries if e.index in known or e.param.requires_grad)

    # -- during backward

    def land(self, entry: Entry, grad: torch.Tensor) -> bool:
        """Move a gradient that autograd is about to accumulate into the bucket.

        Returns whether it is there. If not, autograd shall put it into the slot: the unit has no
        bucket, or the user has hooks that must see it there first, and then comes `land_late`.
        """
        if self._aborted:
            self._recover()
        param = entry.param
        with AS_PLAIN():
            held = get_grad(param)
            hooked = param._post_accumulate_grad_hooks
        if entry.unit.bucket is None:
            return False
        if hooked:
            entry.stashed, entry.lands_late = held, True
            write_slot(param, None)
            return False
        self._take(entry, grad, held)
        return True

    def land_late(self, entry: Entry) -> None:
        """Move the gradient that autograd and the user's hooks have left in the slot."""
        entry.lands_late = False
        held, entry.stashed = entry.stashed, None
        grad = read_slot(entry.param)
        write_slot(entry.param, held)
        if grad is not None:
            self._take(entry, grad, held)

    def _take(self, entry: Entry, grad: torch.Tensor, held: torch.Tensor | None) -> None:
        if grad.requires_grad:
            raise PhaseError(
                f"Expected a backward without create_graph, got one ({entry.fqn}). "
                f"Use torch.autograd.grad(..., create_graph=True) for higher derivatives."
            )
        unit = entry.unit
        bucket = unit.bucket
        assert bucket is not None
        if self._defers and bucket.in_flight:
            self.settle_flying()
            held = read_slot(entry.param)
        if held is None:
            entry.valid = False
        elif held is not entry.slot:
            self._adopt(entry, held)
            bucket.landed.discard(entry.index)  # what landed before it is no longer wanted
            held = entry.slot
        if grad.is_sparse:
            grad = grad.to_dense()
        add = held is not None and entry.index in bucket.landed
        bucket.land(entry.index, grad, self._scale, add=add)
        if held is None:
            write_slot(entry.param, entry.slot)
        if entry.counted_in != self._backward:
            entry.counted_in = self._backward
            self.count(unit)

    def count(self, unit: Unit) -> None:
        """Note that one more parameter of ``unit`` has landed in this backward."""
        missing = self._missing.get(unit.number)
        if missing is None:
            with AS_PLAIN():
                missing = sum([e.param.requires_grad for e in unit.trained_entries])
        self._missing[unit.number] = missing - 1
        if missing == 1:
            self._completed.append(unit.number)
            if not (self.blocked and self._defers):
                self._launch()

    def _recover(self) -> None:
        self._aborted = False
        self.settle_flying()

    def _launch_ready(self) -> None:
        order, missing = self._order, self._missing
        while self._position < len(order):
            unit = order[self._position]
            if missing.get(unit.number) == 0:
                self._start(unit)
            elif self._takes_part(unit):
                return
            self._position += 1

    @staticmethod
    def _takes_part(unit: Unit) -> bool:
        if unit.bucket is None or not unit.trained:
            return False
        if unit.bucket.landed:
            return True
        with AS_PLAIN():
            return any(e.param.requires_grad for e in unit.trained_entries)

    @of_unit("reduce")
    def _start(self, unit: Unit) -> None:
        bucket = unit.bucket
        assert bucket is not None
        while self._flying and self._is_reduced(self._flying[0]):
            self._finish(self._flying.popleft())
        if len(self._flying) >= self._in_flight:
            self._wait_a_little(self._flying[0])
        # A slot that was emptied or filled since means that the user dropped what landed.
        with AS_PLAIN():
            dropped = [
                e.index
                for e in unit.trained_entries
                if e.stashed is None and get_grad(e.param) is not e.slot
            ]
        bucket.landed.difference_update(dropped)
        bucket.start_reduce(self._context.gradients_tag(Operation.REDUCE, unit.number))
        self._flying.append(unit)

    @staticmethod
    def _is_reduced(unit: Unit) -> bool:
        return unit.bucket is not None and unit.bucket.is_reduced()

    def _wait_a_little(self, unit: Unit) -> None:
        # Bounded: a peer may need a gather of ours before it can launch this reduction.
        assert unit.bucket is not None
        if unit.bucket.await_reduced(_PATIENCE_S):
            self._finish(self._flying.popleft())

    @of_unit("accumulate")
    def _finish(self, unit: Unit) -> None:
        bucket = unit.bucket
        assert bucket is not None
        reduced = bucket.finish_reduce()
        entries = unit.trained_entries
        with AS_PLAIN():
            slots = [get_grad(e.param) if e.stashed is None else e.stashed for e in entries]
        for entry, slot in zip(entries, slots, strict=True):
            if slot is entry.slot:
                continue
            if slot is not None:
                self._adopt(entry, slot)
                continue
            entry.valid = False
            if bucket.was_sent(entry.index):
                # Emptied by the user since it landed, after a backward that raised.
                reduced.used[unit.trained.index(entry.index)] = False
        unit.accumulate(reduced.terms, reduced.used)
        bucket.release()
        for entry, slot, used in zip(entries, slots, reduced.used, strict=True):
            if used:
                entry.valid = True
                if slot is not entry.slot and entry.stashed is None:
                    write_slot(entry.param, entry.slot)

    def settle_flying(self) -> None:
        """Finish every reduction under way, in order."""
        while self._flying:
            self._finish(self._flying.popleft())

    # -- the end of a backward, and reading

    def end_backward(self) -> None:
        """Launch what is left of the round and wait for all of it; collective unless blocked."""
        self._new_backward()
        self._dirty = True
        if self.blocked and self._defers:
            self._completed.clear()
            return
        self._round()

    def _new_backward(self) -> None:
        self._missing.clear()
        self._backward += 1

    def _round(self) -> None:
        while self._position < len(self._order):
            unit = self._order[self._position]
            if self._takes_part(unit):
                self._start(unit)
            self._position += 1
        self._position = 0
        self.settle_flying()

    def abort_backward(self) -> None:
        """Forget how far a backward that raised had come; what landed stays. *Local.*"""
        self._new_backward()
        self._completed.clear()
        self._position = 0
        self._aborted = True
        for unit in self._units:
            for entry in unit.entries:
                entry.lands_late = False
                if entry.stashed is not None:
                    write_slot(entry.param, entry.stashed)
                    entry.stashed = None

    def _leftover(self) -> bool:
        return any(u.bucket is not None and u.bucket.landed for u in self._units)

    def finalize(self) -> None:
        """Make accumulators and slots right on every rank; collective, and free when they are."""
        self.settle_flying()
        if not self._dirty:
            return
        self._dirty = False
        leftover = self._leftover()
        if self._context.world_size > 1:
            order = 0 if self._order_is_fixed else self._order_digest()
            tag = self._context.gradients_tag(Operation.FINALIZE)
            rows = self._context.transport.exchange([float(leftover), float(order)], tag)
            leftover = any(row[0] for row in rows)
            if not self._order_is_fixed and order and len({row[1] for row in rows}) == 1:
                self._adopt_order()
        self._completed.clear()
        if leftover:
            self._round()

    def _order_digest(self) -> int:
        taking = [u.number for u in self._units if self._takes_part(u)]
        done = self._completed[: len(taking)]
        if sorted(done) != sorted(taking):
            return 0
        return zlib.crc32(",".join(map(str, done)).encode()) or 1

    def _adopt_order(self) -> None:
        first = {number: n for n, number in reversed(list(enumerate(self._completed)))}
        self._order.sort(key=lambda u: first.get(u.number, len(self._units)))
        self._order_is_fixed = True

    @torch.no_grad()
    def _adopt(self, entry: Entry, grad: torch.Tensor) -> None:
        """Take a gradient that the user put into the slot as the accumulated one."""
        if entry.slot is None:
            return
        if isinstance(grad, SpanTensor) and grad.is_span_of(entry):
            mine = grad.to_local()
        else:
            owned = entry.slot.span
            mine = memory_order(grad.detach(), entry.model)[owned.start : owned.stop]
        entry.unit.grad_view(entry.index).copy_(mine)
        entry.valid = True
        write_slot(entry.param, entry.slot)

    def read(self, entry: Entry) -> torch.Tensor | None:
        """Return the own span of a finalized gradient, or None if the window has none. *Local.*"""
        slot = read_slot(entry.param)
        if slot is None:
            entry.valid = False
            return None
        if slot is not entry.slot:
            if entry.index not in entry.unit.trained:
                return None
            self._adopt(entry, slot)
        return entry.unit.grad_view(entry.index)

    def read_all(self, entries: Sequence[Entry]) -> list[torch.Tensor | None]:
        """Return `read` of each. *Local.*"""
        with AS_PLAIN():
            slots = [get_grad(e.param) for e in entries]
        return [
            entry.unit.grad_view(entry.index)
            if slot is not None and slot is entry.slot
            else self.read(entry)
            for entry, slot in zip(entries, slots, strict=True)
        ]
