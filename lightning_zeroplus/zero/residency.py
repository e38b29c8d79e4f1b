"""Which units of Flat weights are unsharded now, which comes next, and when they rest again.

At most ``1 + prefetch`` units that are gathered are unsharded at a time beyond those that a running
forward, a touch or a live higher-order graph pins; mapped ones cost nothing and stay. All decisions
follow from the order of uses, so they are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_zeroplus.comm.memory import settle_shards
from lightning_zeroplus.comm.transport import Operation, Tag
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.zero.context import Context
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.ranges import of_unit
from lightning_zeroplus.zero.unit import Unit

__all__ = ["Residency"]


class Residency:
    """Unshards and reshards the units of one engine whose weights are Flat."""

    def __init__(self, units: Sequence[Unit], context: Context, prefetch: int) -> None:
        self._units = [u for u in units if not u.weights.resident]
        self._context = context
        self._prefetch = prefetch
        self._depth: dict[int, int] = {}
        self._held: set[int] = set()
        self._nodes: dict[int, object] = {}
        self._recent: list[Unit] = []
        """Unsharded (or coming) and not scattered, least recently used first."""
        self._next_after: dict[tuple[Operation, int, int], int] = {}
        self._last: tuple[Operation, int, int] = (Operation.IDLE, -1, -1)
        self.passes = 1
        """Counts backwards and forwards without one. Mapped weights stay for all of a pass."""

        self.in_backward: Unit | None = None
        """The unit that backward needed last, if it is there and nothing else was needed since."""
        self._by_number = {u.number: u for u in self._units}
        context.unshard_for_touch = self.touch
        context.settle_weights = self.settle
        context.is_in_forward = self._is_in_forward

    # -- uses

    def enter(self, unit: Unit, entries: Sequence[Entry]) -> None:
        """A module of ``unit`` that owns ``entries`` starts its forward."""
        self._depth[unit.number] = self._depth.get(unit.number, 0) + 1
        try:
            self.need(unit, Operation.FORWARD, entries)
        except BaseException:
            self._depth[unit.number] -= 1
            raise

    def leave(self, unit: Unit) -> None:
        """A module of ``unit`` has ended its forward, or raised."""
        self._depth[unit.number] -= 1
        if self._depth[unit.number] == 0 and unit.number not in self._held:
            unit.doze()

    def _is_in_forward(self, unit: Unit) -> bool:
        return self._depth.get(unit.number, 0) > 0 and unit.weights.is_unsharded

    def hold(self, unit: Unit) -> None:
        """Keep ``unit`` unsharded until the window ends."""
        self._held.add(unit.number)

    def touch(self, unit: Unit, name: str) -> None:
        """Unshard for an access under autograd; stays until the window ends."""
        self.hold(unit)
        self.need(unit, Operation.TOUCH)

    def settle(self, unit: Unit, *, writes: bool = False) -> None:
        """Before an access to the shard: cached full weights that nothing uses go.

        *Local*, but for writes: these wait until no peer reads, and a gather under way is dropped.
        """
        if (unit.weights.is_unsharded or (writes and unit.weights.is_gathering)) and not (
            self._pinned(unit)
        ):
            self._rest(unit)
        if writes:
            unit.weights.before_write()

    def settle_all(self) -> None:
        """Have in every shard what was written to full weights that rest now."""
        settle_shards([unit.weights for unit in self._units])

    def need(
        self, unit: Unit, operation: Operation, entries: Sequence[Entry] | None = None
    ) -> None:
        """Have the full weights of ``unit`` there; collective unless they are.

        ``entries`` are those that are used; None: all.
        """
        unit.last_node = torch._C._current_autograd_node()
        weights = unit.weights
        self.in_backward = None
        if not weights.needs_peers:
            if not weights.is_unsharded:
                self._expose(unit, operation)
        elif weights.is_unsharded:
            if self._recent and self._recent[-1] is not unit and unit in self._recent:
                self._recent.remove(unit)
                self._recent.append(unit)
            if self._last[2] != unit.number:
                self._note(unit, operation)
        else:
            self._gather(unit, operation)
        if operation is Operation.BACKWARD:
            self.in_backward = unit
            unit.backward_use = 0 if weights.needs_peers else self.passes
        else:
            unit.wake(entries)

    @of_unit("unshard")
    def _expose(self, unit: Unit, operation: Operation) -> None:
        unit.weights.start_unshard(Tag(0, operation, unit.number))
        unit.weights.finish_unshard()
        unit.note_versions()

    @of_unit("unshard")
    def _gather(self, unit: Unit, operation: Operation) -> None:
        with torch._C.DisableTorchFunctionSubclass(), _plain_mode():
            if not unit.weights.is_gathering:
                self._make_room(unit)
                self._start(unit, operation)
            unit.weights.finish_unshard()
            unit.note_versions()
            self._note(unit, operation)
            self._look_ahead(unit, operation)

    def _start(self, unit: Unit, operation: Operation) -> None:
        if self._context.evaluating:
            self._announce(unit, operation)
        unit.weights.start_unshard(self._context.weights_tag(operation, unit.number))
        if not unit.scattered:
            if unit in self._recent:
                self._recent.remove(unit)
            self._recent.append(unit)

    def _note(self, unit: Unit, operation: Operation) -> None:
        _, before, current = self._last
        self._next_after[(self._last[0], before, current)] = unit.number
        self._last = (operation, current, unit.number)

    # -- room

    def _pinned(self, unit: Unit) -> bool:
        return (
            self._depth.get(unit.number, 0) > 0
            or unit.number in self._held
            or (unit.last_node is not None and unit.last_node is torch._C._current_autograd_node())
        )

    def _make_room(self, coming: Unit) -> None:
        """Let the least recently used units rest until one more block is free."""
        loose = [u for u in self._recent if not self._pinned(u) and u is not coming]
        surplus = len(loose) - self._prefetch
        for unit in loose[: max(0, surplus)]:
            self._rest(unit)

    def _look_ahead(self, unit: Unit, operation: Operation) -> None:
        if self._prefetch < 1 or self._context.evaluating or operation is Operation.TOUCH:
            return
        number = self._next_after.get(self._last)
        ahead = self._by_number.get(number) if number is not None else None
        if ahead is None or ahead.weights.is_unsharded or ahead.weights.is_gathering:
            return
        loose = [u for u in self._recent if not self._pinned(u) and u is not unit]
        for other in loose[: max(0, len(loose) - self._prefetch + 1)]:
            self._rest(other)
        self._start(ahead, Operation.PREFETCH)

    def _rest(self, unit: Unit) -> None:
        if unit is self.in_backward:
            self.in_backward = None
        if unit in self._recent:
            self._recent.remove(unit)
        if unit.weights.is_gathering:
            unit.weights.abandon()
        elif unit.weights.is_unsharded:
            unit.rest()

    def release(self, unit: Unit, *, keep_edits: bool) -> None:
        """End a hold; without ``keep_edits`` what changed in the full weights is dropped."""
        self._held.discard(unit.number)
        if not keep_edits and unit.weights.is_unsharded:
            unit.undo_edits()
        if not self._pinned(unit):
            self._rest(unit)
            unit.weights.settle_shard()

    # -- ends

    def end_pass(self) -> None:
        """After a backward, or a forward without one: what nothing pins rests. *Local.*"""
        self.in_backward = None
        self.passes += 1
        self._rest_all(keep_pinned=True)
        self._last = (Operation.IDLE, -1, -1)

    def end_window(self) -> None:
        """Before an update: everything rests, edits of gathered weights are kept. *Local.*"""
        self._held.clear()
        self._rest_all(keep_pinned=False)
        self.settle_all()
        self._last = (Operation.IDLE, -1, -1)

    def _rest_all(self, *, keep_pinned: bool) -> None:
        for unit in self._units:
            busy = self._depth.get(unit.number, 0) > 0
            if busy and not keep_pinned:
                raise PhaseError(
                    f"Expected the optimizer to step outside of forward, got a step inside the "
                    f"forward of {unit.name}. Step after the module has returned."
                )
            if not (keep_pinned and (busy or unit.number in self._held)):
                unit.last_node = None
                self._rest(unit)

    def reset(self) -> None:
        """After an exception: forget depths and holds. *Local.*"""
        self._depth.clear()
        self._held.clear()
        self.in_backward = None

    # -- serving peers whose loop goes on

    def _announce(self, unit: Unit, operation: Operation) -> None:
        tag = self._context.weights_tag(operation, unit.number)
        self._check_wanted(self._context.transport.announce(tag), unit.number)

    def _check_wanted(self, tags: Sequence[Tag], mine: int) -> int:
        wanted = {t.unit for t in tags if t.operation != Operation.IDLE}
        if len(wanted) > 1:
            names = ", ".join(sorted(self._context.label(n) for n in wanted))
            raise PhaseError(
                f"Expected ranks to need the same unit in evaluation, got {names} "
                f"(rank {self._context.rank}). Run the same modules for every batch."
            )
        return wanted.pop() if wanted else mine

    def serve(self) -> None:
        """Join peers' gathers until every rank serves; collective."""
        if self._context.world_size == 1:
            return
        self._rest_all(keep_pinned=True)
        while True:
            tag = self._context.weights_tag(Operation.IDLE, -1)
            number = self._check_wanted(self._context.transport.announce(tag), -1)
            if number < 0:
                return
            unit = self._by_number[number]
            unit.weights.start_unshard(self._context.weights_tag(Operation.FORWARD, unit.number))
            unit.weights.abandon()


def _plain_mode() -> AbstractContextManager[Any]:
    return torch._C._DisableFuncTorch()
