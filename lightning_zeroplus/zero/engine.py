"""The engine: one module, sharded; the surface that strategies and users call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.comm.host.mapped import MappedWeights
from lightning_zeroplus.comm.private import hide_from_compiler
from lightning_zeroplus.comm.storage import BufferPool
from lightning_zeroplus.comm.transport import Operation, Transport
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.errors import ConfigError, PhaseError
from lightning_zeroplus.layout.placement import STAGES, Placement
from lightning_zeroplus.zero import build, state
from lightning_zeroplus.zero.context import Context
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.gradients import Gradients
from lightning_zeroplus.zero.hooks import (
    BackwardEnd,
    ForwardHooks,
    Nothing,
    SavedWeights,
    hook_gradients,
)
from lightning_zeroplus.zero.materialize import (
    materialize,
    materialize_buffers,
    refuse_helpless,
)
from lightning_zeroplus.zero.model import agree_on_model, refuse_unusable, scan_parameters
from lightning_zeroplus.zero.plan import uses_by_module
from lightning_zeroplus.zero.ranges import named_range
from lightning_zeroplus.zero.reduce import Reducer
from lightning_zeroplus.zero.residency import Residency
from lightning_zeroplus.zero.state_access import StateAccess
from lightning_zeroplus.zero.step import BoundOptimizer
from lightning_zeroplus.zero.unit import Unit

__all__ = ["Engine", "shard"]

log = logging.getLogger(__name__)

_NEVER_FREED: list[object] = []


def shard(
    module: nn.Module,
    config: EngineConfig,
    transport: Transport,
    *,
    device: torch.device | None = None,
    originals: Mapping[str, torch.Tensor] | None = None,
) -> Engine:
    """Shard ``module`` in place over the ranks of ``transport``; collective.

    Args:
        module: its parameters stay the same objects; meta ones are materialised unit by unit.
        config: equal on all ranks.
        transport: the ranks that share the model.
        device: where units live; None: where the parameters are.
        originals: wider values of parameters that were cast before, by FQN, for the masters.

    Raises:
        ConfigError: a model that cannot be sharded, or one that differs between ranks.
    """
    return Engine(module, config, transport, device or torch.device("cpu"), originals or {})


class Engine(StateAccess):
    """One sharded module. Every method is collective unless it says *local*."""

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        transport: Transport,
        device: torch.device,
        originals: Mapping[str, torch.Tensor],
    ) -> None:
        row = STAGES[config.stage]
        self.module = module
        self.config = config
        self.context = Context(
            transport, device, gathers_on_access=config.unshard_on_access == "gather"
        )
        self._buffer_dicts = [m._buffers for m in module.modules()]
        params = scan_parameters(module)
        refuse_unusable(params)
        agree_on_model(module, params, config, transport)
        refuse_helpless(module)
        self.units: list[Unit] = build.make_units(module, params, config, self.context)
        self._pool = self.context.memory.gradients
        self._weight_pool = BufferPool(device, keep=1 + config.prefetch)
        build.allocate_units(self.units, config, self._weight_pool)
        for unit in self.units:
            materialize(module, unit)
            build.fill_unit(unit, originals)
        materialize_buffers(module, device)
        build.broadcast_buffers(self._buffers(), self.context)
        self._entries = {id(e.param): e for u in self.units for e in u.entries}
        self.by_name = {name: e for e in self._entries.values() for name in e.model.names}
        self.zero_unused = config.unused_gradients == "zero"
        self.reducer = Reducer(
            self.units,
            self.context,
            defers=row.blocked_gradient is Placement.PARTIAL,
        )
        self.gradients = Gradients(self.context)
        self.residency = Residency(self.units, self.context, config.prefetch)
        aborts = (self.reducer.abort_backward, self.residency.end_pass)
        self.end = BackwardEnd(aborts)
        flat = [u for u in self.units if not u.weights.resident]
        self._mapped = [u.weights for u in flat if isinstance(u.weights, MappedWeights)]
        self._meetings = 0
        self._warned_of_lone_uses = False
        self._saved = SavedWeights(flat, self.residency, self.end)
        self._forward_hooks = ForwardHooks(self.residency, self._saved)
        self._handles: list[object] = [module.register_forward_pre_hook(_BeforeRoot(self))]
        self._install_forward_hooks(flat)
        self._bound: dict[int, BoundOptimizer] = {}
        self._in_forward = False
        self._buffers_due = True
        self.closed = False
        self.arm()

    # -- set-up

    def _install_forward_hooks(self, units: Sequence[Unit]) -> None:
        if not units:
            return
        for root, needed in uses_by_module([u.plan for u in units]).items():
            self._forward_hooks.install(root, [units[n] for n in needed])

    def _buffers(self) -> list[torch.Tensor]:
        found = {id(b): b for d in self._buffer_dicts for b in d.values() if b is not None}
        return list(found.values())

    def arm(self) -> None:
        """Notice parameters that need gradients by now. *Local.*"""
        fresh = [e for e in self._entries.values() if e.node is None and e.param.requires_grad]
        if not fresh:
            return
        self.reducer.arm()
        for entry in fresh:
            self._handles.append(hook_gradients(entry, self.reducer, self.end))

    def find(self, param: torch.Tensor) -> Entry | None:
        """Return the entry of a parameter of this module. *Local.*"""
        entry = self._entries.get(id(param))
        return entry if entry is not None and entry.param is param else None

    def _required(self, param: torch.Tensor) -> Entry:
        entry = self.find(param)
        if entry is None:
            raise ConfigError(
                f"Expected a parameter of the sharded module, got one of shape "
                f"{tuple(param.shape)} that is none. Pass the module's own parameter."
            )
        return entry

    def master_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which optimizers step. *Local.*"""
        found = {u.master_dtype for u in self.units if u.master_dtype.is_floating_point}
        return sorted(found, key=str)

    def attach(self, optimizer: Optimizer) -> None:
        """Let ``optimizer`` step on shards from now on; its ``param_groups`` stay as they are.

        Raises:
            ConfigError: parameters outside the module, or an update that cannot be sharded.
        """
        if id(optimizer) not in self._bound:
            self._bound[id(optimizer)] = BoundOptimizer(self, optimizer)

    def detach_optimizers(self) -> None:
        """Give all optimizers their own `step` back. *Local.*"""
        for bound in self._bound.values():
            bound.detach()
        self._bound.clear()

    # -- a step

    @contextlib.contextmanager
    def forward_pass(self, *, evaluation: bool = False) -> Iterator[None]:
        """Bracket one training, validation, test or prediction step."""
        self._open()
        self.context.evaluating = evaluation and not torch.is_grad_enabled()
        self.refuse_replaced()
        self.before_forward()
        self._in_forward = True
        try:
            yield
        except BaseException:
            self.residency.reset()
            raise
        finally:
            self._in_forward = False
        if not torch.is_grad_enabled():
            self.residency.end_pass()

    def before_forward(self) -> None:
        """Arm new parameters, and broadcast buffers when training."""
        if self._in_forward or torch._C._current_graph_task_id() != -1:
            return
        self.reducer.settle_flying()
        self.take_back_data()
        self.arm()
        if not torch.is_grad_enabled():
            return
        if self._buffers_due:
            build.broadcast_buffers(self._buffers(), self.context)
        # As under DDP, where a blocked forward leaves the next one without a broadcast.
        self._buffers_due = not self.reducer.blocked

    def take_back_data(self) -> None:
        """Copy what the user assigned to ``param.data`` into the unit. *Local.*"""
        for unit in self.units:
            if unit.weights.resident:
                unit.take_back_replaced()

    @contextlib.contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Bracket one backward: gradients are reduced when it ends."""
        self._open()
        if self.end.bracketed:
            yield
            return
        self.end.bracketed = True
        try:
            yield
        except BaseException:
            self.end.on_event(self.reducer.end_backward)
            self.end.abort()
            self.residency.reset()
            raise
        finally:
            self.end.bracketed = False
        self.end.on_event(self.reducer.end_backward)
        self.end.on_event(self.residency.end_pass)
        self.end.flush()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients unreduced inside, where the placements allow it. *Local.*"""
        before = self.reducer.blocked
        self.reducer.blocked = True
        try:
            yield
        finally:
            self.reducer.blocked = before

    def finalize(self) -> None:
        """Have every pending gradient reduced and ``p.grad`` right on every rank."""
        self.reducer.finalize()

    def end_window(self) -> None:
        """Before an update: all Flat weights rest, edits kept. *Local.*"""
        self.residency.end_window()

    @named_range("meet")
    def meet(self) -> None:
        """Have all ranks here, before and after an update of weights that all of them read."""
        if not self._mapped:
            return
        self._stand_by()
        reads = float(sum(weights.lone_reads for weights in self._mapped))
        tag = self.context.gradients_tag(Operation.STEP, -1, "an update")
        rows = self.context.transport.exchange([reads], tag)
        self._meetings += 1
        if any(row != rows[0] for row in rows):
            self._warn_of_lone_uses()
        for weights in self._mapped:
            weights.met(self._meetings)

    def _stand_by(self) -> None:
        for weights in self._mapped:
            weights.stand_by(self._meetings)

    def _warn_of_lone_uses(self) -> None:
        if not self._warned_of_lone_uses and self.context.rank == 0:
            log.warning(
                "Some ranks have read full weights that others have not. Ranks of one host serve "
                "that from shared memory; over a network it is an error. Read weights on every "
                "rank, or inside of full_parameters(...) on every rank."
            )
        self._warned_of_lone_uses = True

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's few numbers, in rank order."""
        tag = self.context.gradients_tag(Operation.SETUP, -1, "an exchange of numbers")
        return self.context.transport.exchange(values, tag)

    def begin_evaluation(self) -> None:
        """Give all ranks rank 0's buffers, as DDP's evaluation forwards do."""
        build.broadcast_buffers(self._buffers(), self.context)

    def end_evaluation(self) -> None:
        """Serve peers' gathers until every rank has ended its evaluation loop."""
        if any(not u.weights.resident for u in self.units):
            self.residency.settle_all()
            self._stand_by()
            self.residency.serve()
            for weights in self._mapped:  # batches may be uneven
                weights.lone_reads = 0
            self.meet()
        self.context.evaluating = False

    # -- gradients

    def grad_norm(
        self, params: Iterable[torch.Tensor] | None = None, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Return the norm over all (or the given) parameters' gradients, each once; 0-d fp32."""
        return self.gradients.norm(self._grads_of(params), float(norm_type))

    def clip_grad_norm_(
        self,
        params: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; return it before.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing is changed.
        """
        grads = self._grads_of(params)
        return self.gradients.clip_norm_(grads, max_norm, float(norm_type), error_if_nonfinite)

    def clip_grad_value_(self, params: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every gradient element to ``[-value, value]``."""
        self.gradients.clip_value_(self._grads_of(params), value)

    def unscale_gradients_(self, params: Iterable[torch.Tensor], inverse_scale: float) -> bool:
        """Multiply gradients by ``inverse_scale``; return whether any rank saw a non-finite one."""
        return self.gradients.unscale_(self._grads_of(params), inverse_scale)

    def _grads_of(self, params: Iterable[torch.Tensor] | None) -> list[torch.Tensor]:
        self.finalize()
        entries = (
            list(self._entries.values())
            if params is None
            else [self._required(p) for p in dict.fromkeys(params)]
        )
        grads = (self.reducer.read(e) for e in entries)
        return [g for g in grads if g is not None]

    # -- the end

    def _open(self) -> None:
        if self.closed:
            raise PhaseError("Expected a live engine, got a closed one. Shard the module again.")

    def close(self) -> None:
        """Put full weights into ordinary memory and let go of the module."""
        if self.closed:
            return
        self.residency.reset()
        self.end_window()
        self.reducer.settle_flying()
        state.leave_module(self)
        self._let_go()

    def abandon(self) -> None:
        """After a failure, when peers may be gone: let go without any collective. *Local.*

        Replicated weights end in ordinary memory. Flat ones cannot be gathered alone: those
        parameters stay at rest, and reading them says so.
        """
        if self.closed:
            return
        self.residency.reset()
        if self.context.world_size == 1:
            self.close()
            return
        state.leave_module(self, alone=True)
        # A transport thread may still write into blocks of operations under way.
        self.context.is_gone = True
        _NEVER_FREED.extend(unit.abandon() for unit in self.units)
        self._let_go()

    def _let_go(self) -> None:
        """Unhook everything and free all memory but what optimizer state needs."""
        for bound in self._bound.values():
            bound.detach()
        self._forward_hooks.remove()
        for handle in self._handles:
            handle.remove()  # type: ignore[attr-defined]
        self._handles.clear()
        self.context.memory.close(alone=self.context.is_gone)
        for unit in self.units:
            unit.free()
        self._weight_pool.clear()
        self.closed = True


class _BeforeRoot:
    """Pre-forward hook of the root module, for loops without `Engine.forward_pass`."""

    def __init__(self, engine: Engine) -> None:
        self._run = hide_from_compiler(engine.before_forward)

    def __call__(self, module: nn.Module, args: object) -> None:
        self._run()

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return Nothing()

    def __reduce__(self) -> tuple[Any, ...]:
        return Nothing, ()
