"""Where the engine hangs on the module and on autograd. Hooks hold no state and no arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_zeroplus.comm.bucket import GradBucket, write_piece
from lightning_zeroplus.comm.private import hide_frame_from_compiler, hide_from_compiler
from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.reduce import Reducer
from lightning_zeroplus.zero.residency import Residency
from lightning_zeroplus.zero.unit import Unit

__all__ = ["BackwardEnd", "ForwardHooks", "Nothing", "SavedWeights", "hook_gradients"]

_autograd = torch._C._autograd

Use = tuple[Unit, Sequence[Entry]]
"""A unit, and those of its entries that one module owns."""


class _Ending:
    """Queued on one backward; dies uncalled if that backward raises."""

    def __init__(self, end: BackwardEnd) -> None:
        self._end: BackwardEnd | None = end

    def __call__(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.flush()

    def __del__(self) -> None:
        if self._end is not None:
            self._end.abort()


class BackwardEnd:
    """Runs what is due once at the end of the outermost backward."""

    def __init__(self, on_abort: Sequence[Callable[[], None]]) -> None:
        self._task = -1
        self._due: list[Callable[[], None]] = []
        self._on_abort = on_abort
        self.bracketed = False

    def on_event(self, then: Callable[[], None]) -> None:
        """Have ``then`` run once when the backward that is running now ends."""
        if then not in self._due:
            self._due.append(then)
        task = torch._C._current_graph_task_id()
        if self.bracketed or task in (self._task, -1):
            return
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(_Ending(self))

    def flush(self) -> None:
        """Run and forget what is due."""
        self._task = -1
        due, self._due = self._due, []
        for then in due:
            then()

    def abort(self) -> None:
        """Forget what is due: the backward raised."""
        if self._due:
            self._task = -1
            self._due = []
            for then in self._on_abort:
                then()


class _Handles:
    """Handles of hooks that go together."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def remove(self) -> None:
        """Unhook all."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def hook_gradients(entry: Entry, reducer: Reducer, end: BackwardEnd) -> _Handles:
    """Hang on the AccumulateGrad node of a trainable parameter; return what unhooks.

    The node's own hooks run after every hook that the user put on the parameter, but for those
    that are called when it has accumulated.
    """
    ended = reducer.end_backward
    taken = (None,)
    hung = _Handles()
    handles = hung.handles

    # Once per parameter and microbatch: frames are skipped one by one, which costs nothing, where
    # a wrapper that turns the compiler off would cost as much as the landing itself.
    def land(grads: Sequence[torch.Tensor | None]) -> tuple[None] | None:
        grad = grads[0]
        if grad is None:
            return None
        if not end.bracketed:
            end.on_event(ended)
        if reducer.land(entry, grad):
            return taken
        if entry.lands_late and len(handles) < 2:
            handles.append(node.register_hook(hide_frame_from_compiler(land_late)))
        return None

    def land_late(_: object, __: object) -> None:
        if entry.lands_late:
            reducer.land_late(entry)

    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(entry.param).node
    entry.node = node
    for frame in (
        Reducer.land,
        Reducer.land_late,
        Reducer._take,
        Reducer.count,
        GradBucket.land,
        write_piece,
    ):
        hide_frame_from_compiler(frame)
    handles.append(node.register_prehook(hide_frame_from_compiler(land)))
    return hung


class SavedWeights:
    """Saved-tensor hooks: what autograd saves of a unit's weights is found again at its unpack."""

    def __init__(self, units: Sequence[Unit], residency: Residency, end: BackwardEnd) -> None:
        self._by_storage = {u.weights.flat.untyped_storage()._cdata: u for u in units}
        self._residency = residency
        self._end = end
        self._pushed: list[bool] = []
        self._unpack = hide_from_compiler(self._unpack_weight)
        self._alone = self._pair(None)

    def push(self) -> None:
        """Put the hooks on top, unless they are there or functorch refuses them."""
        if not self._by_storage or torch._C._functorch.peek_interpreter_stack() is not None:
            self._pushed.append(False)
            return
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is not None and getattr(top[0], "owner", None) is self:
            self._pushed.append(False)
            return
        pack, unpack = self._alone if top is None else self._pair(top)
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._pushed.append(True)

    def pop(self) -> None:
        """Undo the last `push`."""
        if self._pushed and self._pushed.pop():
            _autograd._pop_saved_tensors_default_hooks()

    def _pair(self, outer: Any) -> tuple[Any, Any]:
        by_storage = self._by_storage
        residency = self._residency
        node = torch._C._current_autograd_node

        def pack(tensor: torch.Tensor) -> Any:
            try:
                unit = by_storage.get(tensor.untyped_storage()._cdata)
            except (RuntimeError, NotImplementedError, PhaseError):
                unit = None
            if unit is None:
                return tensor if outer is None else _Outer(outer[0](tensor))
            leaf = tensor if tensor.is_leaf and tensor.requires_grad else None
            return _Packed(unit, tensor.detach(), tensor._version, leaf)

        def unpack(packed: Any) -> torch.Tensor:
            if type(packed) is torch.Tensor:  # most are
                return packed
            if isinstance(packed, _Packed):
                unit, alias = packed.unit, packed.alias
                if (
                    (
                        unit is residency.in_backward
                        or (unit.backward_use == residency.passes and unit.weights.is_unsharded)
                    )
                    and alias._version == packed.version
                    and not torch.is_grad_enabled()
                ):  # used before in this pass, and still there: nothing new
                    unit.last_node = node()
                    return alias if packed.leaf is None else packed.leaf
                return self._unpack(packed)  # type: ignore[no-any-return]
            if isinstance(packed, _Outer):
                return outer[1](packed.value)  # type: ignore[no-any-return]
            return packed  # type: ignore[no-any-return]

        pack.owner = self  # type: ignore[attr-defined]
        return hide_frame_from_compiler(pack), hide_frame_from_compiler(unpack)

    def _unpack_weight(self, packed: _Packed) -> torch.Tensor:
        unit = packed.unit
        if packed.alias._version != packed.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a weight of unit {unit.name} is at version "
                f"{packed.alias._version}; expected version {packed.version} instead."
            )
        self._end.on_event(self._residency.end_pass)
        if torch.is_grad_enabled():
            self._residency.hold(unit)
        self._residency.need(unit, Operation.BACKWARD)
        return packed.alias if packed.leaf is None else packed.leaf


class _Packed:
    __slots__ = ("alias", "leaf", "unit", "version")

    def __init__(
        self, unit: Unit, alias: torch.Tensor, version: int, leaf: torch.Tensor | None
    ) -> None:
        self.unit = unit
        self.alias = alias
        self.version = version
        self.leaf = leaf


class _Outer:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Nothing:
    """What a copied module gets instead of hooks into this engine."""

    def __call__(self, *args: object) -> None:
        """Do nothing."""


class _Enter:
    def __init__(self, hooks: ForwardHooks, uses: Sequence[Use]) -> None:
        self._hooks = hooks
        self._uses = uses
        self._run = hide_from_compiler(self._go)

    def _go(self) -> None:
        self._hooks.enter(self._uses)

    def __call__(self, module: nn.Module, args: object, output: object = None) -> None:
        self._run()

    def __deepcopy__(self, memo: dict[int, Any]) -> Nothing:
        return Nothing()

    def __reduce__(self) -> Any:
        return Nothing, ()


class _Leave(_Enter):
    def _go(self) -> None:
        self._hooks.leave(self._uses)


class ForwardHooks:
    """Unshards the units of a module around its forward."""

    def __init__(self, residency: Residency, saved: SavedWeights) -> None:
        self._residency = residency
        self._saved = saved
        self._entered: list[int] = []
        self._handles: list[Any] = []

    def install(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Hook one module; ``units`` are unsharded in the given order."""
        uses = [(unit, unit.entries_under(module)) for unit in units]
        self._handles.append(module.register_forward_pre_hook(_Enter(self, uses)))
        self._handles.append(module.register_forward_hook(_Leave(self, uses), always_call=True))

    def enter(self, uses: Sequence[Use]) -> None:
        """A hooked module starts."""
        self._entered.append(0)
        for unit, entries in uses:
            self._residency.enter(unit, entries)
            self._entered[-1] += 1
        if torch._C._functorch.peek_interpreter_stack() is not None:
            for unit, _ in uses:
                self._residency.hold(unit)
        self._saved.push()

    def leave(self, uses: Sequence[Use]) -> None:
        """A hooked module has ended or raised."""
        if not self._entered:
            return
        count = self._entered.pop()
        if count == len(uses):
            self._saved.pop()
        for unit, _ in uses[:count]:
            self._residency.leave(unit)

    def remove(self) -> None:
        """Unhook everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
