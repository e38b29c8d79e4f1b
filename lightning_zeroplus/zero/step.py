"""The optimizer's step on shards: swap in, step, swap back, refresh.

The user's ``param_groups`` hold the user's parameters at all times but inside `step`, from the end
of the closure (clipping and hooks inside it see the parameters) to its return.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_zeroplus.comm.transport import Operation, Work
from lightning_zeroplus.errors import ConfigError, name_offenders
from lightning_zeroplus.zero.entry import Entry, memory_order
from lightning_zeroplus.zero.probe import probe_optimizer
from lightning_zeroplus.zero.ranges import OpenRange, of_unit
from lightning_zeroplus.zero.span_tensor import SpanTensor
from lightning_zeroplus.zero.unit import Unit

if TYPE_CHECKING:
    from lightning_zeroplus.zero.engine import Engine

__all__ = ["BoundOptimizer"]


class BoundOptimizer:
    """One of the user's optimizers, stepping on shards.

    Raises:
        ConfigError: it holds parameters outside the module, or its update cannot be sharded.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine = weakref.ref(engine)
        self.optimizer = optimizer
        self._checked: list[int] = []
        self._check_groups(engine)
        self._step: Callable[..., Any] = optimizer.step
        self._detached = False
        self._swapped: list[tuple[dict[str, Any], list[Any], list[Entry]]] = []
        self._units: list[Unit] = []
        self._stepped: list[torch.Tensor] = []
        self._user_state: defaultdict[torch.Tensor, Any] | None = None
        self._seen_state: defaultdict[torch.Tensor, Any] | None = None
        self._by_shard: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for param, values in optimizer.state.items():
            entry = engine.find(param)
            if entry is not None:
                cut_state(entry, values)
        self._closes = False
        self._depth = 0
        self._update = OpenRange("update")
        self._before, self._after = self._hook()
        self._ours = types.MethodType(self._wrapped(), optimizer)
        optimizer.step = self._ours  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the optimizer its own `step` back. *Local.*"""
        self._detached = True
        # Its keys are the shards, whose memory goes with the engine.
        self._by_shard, self._seen_state = defaultdict(dict), None
        self._before.remove()
        self._after.remove()
        # A scheduler made since may have wrapped ours, which now only passes on.
        if self.optimizer.__dict__.get("step") is self._ours:
            self.optimizer.step = self._step  # type: ignore[method-assign]

    def _check_groups(self, engine: Engine) -> None:
        """Check what the groups hold and whether they may be sharded, when they have changed."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes == self._checked:
            return
        self._refuse_foreign(engine)
        if len(sizes) != len(self._checked) and engine.context.world_size > 1:
            probe_optimizer(self.optimizer, engine.master_dtypes())
        self._checked = sizes

    def _refuse_foreign(self, engine: Engine) -> None:
        foreign = [
            f"group {g} position {n} {tuple(p.shape)}"
            for g, group in enumerate(self.optimizer.param_groups)
            for n, p in enumerate(group["params"])
            if engine.find(p) is None
        ]
        if foreign:
            raise ConfigError(
                f"Expected optimizer parameters that belong to the module, got others: "
                f"{name_offenders(foreign)}. Register them in the module."
            )

    def _wrapped(self) -> Callable[..., Any]:
        inner = self._step
        ref = weakref.ref(self)

        @functools.wraps(inner)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            bound = ref()
            if bound is None or bound._detached:
                return inner(*args, **kwargs)
            closure = args[0] if args else kwargs.pop("closure", None)
            rest = args[1:]
            if closure is not None:
                rest = (bound._closing(closure), *rest)
            return bound._run(functools.partial(inner, *rest, **kwargs), closes=closure is not None)

        return step

    def _closing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            self._update.close()
            if self._swapped:
                # A closure that is called again sees the weights of the update before.
                units, stepped = self._units, self._stepped
                self._units, self._stepped = [], []
                self._swap_back()
                self._refresh(units, stepped)
            loss = closure()
            self._swap_in()
            self._update.open()
            return loss

        return wrapped

    def _run(self, call: Callable[[], Any], *, closes: bool) -> Any:
        # The user's hooks see parameters and gradients, not shards: ours are the innermost ones.
        before: Any = self.optimizer._optimizer_step_pre_hooks
        before.move_to_end(self._before.id)
        after: Any = self.optimizer._optimizer_step_post_hooks
        after.move_to_end(self._after.id, last=False)
        self._closes = closes
        self._depth = 0
        try:
            return call()
        finally:
            self._update.close()
            self._units, self._stepped = [], []
            self._swap_back()

    def _hook(self) -> tuple[Any, Any]:
        ref = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            bound = ref()
            if bound is not None:
                bound._depth += 1
                if bound._depth == 1 and not bound._closes:
                    bound._swap_in()
                    bound._update.open()

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            bound = ref()
            if bound is None:
                return
            bound._depth -= 1
            # A subclass's step that calls its parent's runs the hooks of both.
            if bound._depth == 0:
                bound._update.close()
                bound._swap_back()
                bound._refresh(bound._units, bound._stepped)

        pre = self.optimizer.register_step_pre_hook(before)
        return pre, self.optimizer.register_step_post_hook(after)

    # -- swapping

    @torch.no_grad()
    def _swap_in(self) -> None:
        engine = self._required()
        self._check_groups(engine)
        engine.finalize()
        engine.end_window()
        engine.meet()
        engine.refuse_replaced()
        engine.take_back_data()
        by_shard = self._states_by_shard(engine)
        touched: dict[Unit, None] = {}
        for group in self.optimizer.param_groups:
            entries = [self._entry_of(engine, param) for param in group["params"]]
            shards: list[torch.Tensor] = []
            for entry, grad in zip(entries, engine.reducer.read_all(entries), strict=True):
                if grad is None:
                    grad = self._zero_grad_of(engine, entry)
                    if grad is None:
                        continue
                shard = entry.shard
                assert shard is not None
                shard.grad = grad
                touched[entry.unit] = None
                self._stepped.append(entry.param)
                if grad.shape[0]:
                    shards.append(shard)
            self._swapped.append((group, group["params"], entries))
            group["params"] = shards
        self._user_state = self.optimizer.state
        self.optimizer.state = by_shard
        # By number, because ranks may have filled their groups in different orders.
        self._units = sorted(touched, key=lambda u: u.number)
        for unit in self._units:
            unit.weights.before_update()
            unit.adopt_edits()

    def _states_by_shard(self, engine: Engine) -> defaultdict[torch.Tensor, Any]:
        """Return the state keyed by shards; the inner dicts are the user's own."""
        state = self.optimizer.state
        if self._seen_state is not state or len(self._by_shard) != len(state):
            self._by_shard = defaultdict(dict)
            for param, values in state.items():
                entry = engine.find(param)
                if entry is not None and entry.shard is not None:
                    cut_state(entry, values)
                    self._by_shard[entry.shard] = values
            self._seen_state = state
        return self._by_shard

    @staticmethod
    def _entry_of(engine: Engine, param: torch.Tensor) -> Entry:
        entry = engine.find(param)
        if entry is None:
            raise ConfigError(
                f"Expected the optimizer's parameters to stay those of the module, got "
                f"another of shape {tuple(param.shape)}. Register it in the module."
            )
        return entry

    @staticmethod
    def _zero_grad_of(engine: Engine, entry: Entry) -> torch.Tensor | None:
        """Return zeros for a parameter without gradient, if the optimizer is to see it."""
        if not engine.zero_unused or not entry.param.requires_grad:
            return None
        return entry.unit.grad_view(entry.index).zero_()

    def _swap_back(self) -> None:
        if not self._swapped:
            return
        state, self._user_state = self._user_state, None
        fresh = state is not None and len(self._by_shard) != len(state)
        while self._swapped:
            group, params, entries = self._swapped.pop()
            group["params"] = params
            for entry in entries:
                shard = entry.shard
                if shard is not None:
                    shard.grad = None
                    if state is not None and fresh and shard in self._by_shard:
                        state[entry.param] = self._by_shard[shard]
        if state is not None:
            self.optimizer.state = state

    @torch.no_grad()
    def _refresh(self, units: list[Unit], stepped: list[torch.Tensor]) -> None:
        engine = self._required()
        works = [(unit, self._start_refresh(unit, engine)) for unit in units]
        for unit, work in works:
            if work is not None:
                self._finish_refresh(unit, work)
        for unit in units:
            if unit.weights.resident:
                unit.weights.before_write()
        engine.meet()
        if stepped:
            torch.autograd.graph.increment_version(stepped)

    @of_unit("refresh")
    def _start_refresh(self, unit: Unit, engine: Engine) -> Work | None:
        unit.publish_master()
        if not unit.weights.resident or engine.context.world_size == 1:
            return None
        return unit.start_refresh(engine.context.weights_tag(Operation.REFRESH, unit.number))

    @of_unit("refresh")
    def _finish_refresh(self, unit: Unit, work: Work) -> None:
        work.wait()

    def _required(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise ConfigError("Expected a live engine behind the optimizer, got one that is gone.")
        return engine


@torch.no_grad()
def cut_state(entry: Entry, values: dict[str, Any]) -> None:
    """Replace full state tensors of a parameter by this rank's spans, as 1-D. *Local.*

    Some optimizers make state when they are made, before anything is sharded for them.
    """
    if entry.shard is None:
        return
    owned = entry.unit.layout.owned(entry.index, entry.unit.context.rank)
    for key, value in values.items():
        if isinstance(value, SpanTensor):
            values[key] = value.to_local().clone()
        elif is_full_state(key, value, entry) and value.shape != entry.shard.shape:
            values[key] = memory_order(value, entry.model)[owned.start : owned.stop].clone()


def is_full_state(key: str, value: object, entry: Entry) -> bool:
    """Return whether ``value`` is elementwise state in the parameter's full shape."""
    if not isinstance(value, torch.Tensor) or value.shape != entry.model.shape:
        return False
    return value.dim() > 0 or key != "step"
