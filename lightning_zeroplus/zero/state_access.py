"""What of an engine is about whole tensors: full views, state in and out, memory."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.comm.private import Arena
from lightning_zeroplus.comm.storage import BufferPool
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.errors import PhaseError, name_offenders
from lightning_zeroplus.layout.budget import Budget, UnitSizes, budget_of
from lightning_zeroplus.layout.placement import STAGES
from lightning_zeroplus.zero import state
from lightning_zeroplus.zero.context import Context
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.load_state import load_full_optimizer_state_dict
from lightning_zeroplus.zero.local_state import (
    OwnSpan,
    own_optimizer_state,
    own_weights,
    shown_weight,
)
from lightning_zeroplus.zero.memory import MemoryReport, measure
from lightning_zeroplus.zero.reduce import Reducer
from lightning_zeroplus.zero.residency import Residency
from lightning_zeroplus.zero.span_tensor import gather_full
from lightning_zeroplus.zero.step import BoundOptimizer
from lightning_zeroplus.zero.unit import Unit

__all__ = ["StateAccess"]


class StateAccess(ABC):
    """Base of `Engine`. Every method is collective unless it says *local*."""

    module: nn.Module
    config: EngineConfig
    units: list[Unit]
    context: Context
    reducer: Reducer
    residency: Residency
    by_name: dict[str, Entry]
    closed: bool
    _places: list[tuple[dict[str, Any], str, nn.Parameter, str]] | None = None
    _bound: dict[int, BoundOptimizer]
    _pool: BufferPool
    _weight_pool: BufferPool

    @abstractmethod
    def find(self, param: torch.Tensor) -> Entry | None:
        """Return the entry of a parameter of this module. *Local.*"""

    @abstractmethod
    def _required(self, param: torch.Tensor) -> Entry:
        """Return the entry of a parameter, or refuse it."""

    @abstractmethod
    def _open(self) -> None:
        """Refuse a closed engine."""

    def refuse_replaced(self) -> None:
        """Check that modules still hold the parameters that were sharded. *Local.*

        Not before any forward: ``functional_call`` puts others there for its duration.

        Raises:
            PhaseError: a module holds another parameter object now.
        """
        if self._places is None:
            self._places = [
                (owner._parameters, name.rpartition(".")[2], entry.param, name)
                for entry in dict.fromkeys(self.by_name.values())
                for name, owner in zip(entry.model.names, entry.model.owners, strict=True)
            ]
        replaced = [
            name for held, local, param, name in self._places if held.get(local, param) is not param
        ]
        if replaced:
            raise PhaseError(
                f"Expected the parameters that were sharded, got other objects for "
                f"{name_offenders(replaced)}. Copy new values into them, load "
                f"without assign=True, or shard again."
            )

    @abstractmethod
    def finalize(self) -> None:
        """Have every pending gradient reduced."""

    def full_gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the reduced gradient of ``param`` in full, or None if the window has none."""
        self.finalize()
        entry = self._required(param)
        local = self.reducer.read(entry)
        return None if local is None else gather_full(entry, local, "full_gradient")

    @contextlib.contextmanager
    def full_parameters(
        self,
        module_or_params: nn.Module | Iterable[torch.Tensor] | None = None,
        writeback: bool = False,
    ) -> Iterator[None]:
        """Have full weights inside; edits survive with ``writeback``, else they are undone."""
        self._open()
        if isinstance(module_or_params, nn.Module):
            module_or_params = list(module_or_params.parameters())
        if module_or_params is None:
            units = self.units
        else:
            found = (self._required(p).unit for p in module_or_params)
            units = list(dict.fromkeys(found))
        with state.unsharded(units, self.residency, writeback=writeback):
            yield

    # -- state

    def iterate_full_state(self, keep_on: int = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield every parameter by every name, then buffers; on the CPU of rank ``keep_on``."""
        self._open()
        self.refuse_replaced()
        yield from state.iterate_full_state(self, keep_on)

    def load_full_state(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Take this rank's spans from full tensors; return missing and unexpected names.

        Raises:
            CheckpointError: names or shapes that do not fit, all listed.
        """
        self._open()
        return state.load_full_state(self, state_dict, strict=strict)

    def full_optimizer_state(
        self, optimizer: Optimizer, param: torch.Tensor, key: str
    ) -> torch.Tensor:
        """Return one state tensor of ``param`` in full."""
        return state.full_optimizer_state(self, optimizer, self._required(param), key)

    def set_full_optimizer_state(
        self, optimizer: Optimizer, param: torch.Tensor, key: str, value: torch.Tensor
    ) -> None:
        """Set this rank's span of one state tensor from a full one. *Local.*"""
        state.set_full_optimizer_state(optimizer, self._required(param), key, value)

    def full_optimizer_state_dict(
        self, optimizer: Optimizer, keep_on: int = 0
    ) -> dict[str, object]:
        """Return torch's own state dict with full tensors on rank ``keep_on``, ``{}`` elsewhere."""
        return state.full_optimizer_state_dict(self, optimizer, keep_on)

    def own_weights(self) -> dict[int, OwnSpan]:
        """Return this rank's spans of the weights to save, by the parameter's id. *Local.*"""
        return own_weights(self)

    def shown_weight(self, param: torch.Tensor) -> torch.Tensor:
        """Return the weight as a full tensor where it is one, else as a span tensor. *Local.*"""
        return shown_weight(self, self._required(param))

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of ``optimizer`` by name, with this rank's spans.

        Raises:
            CheckpointError: the ranks' groups differ.
        """
        return own_optimizer_state(self, optimizer)

    def load_full_optimizer_state_dict(
        self, optimizer: Optimizer, state_dict: Mapping[str, object]
    ) -> None:
        """Take this rank's spans of a full optimizer state dict. *Local.*"""
        load_full_optimizer_state_dict(self, optimizer, state_dict)

    def memory_budget(self, states: int = 2) -> Budget:
        """Return what this rank should hold, from layouts alone. *Local.*

        Args:
            states: elementwise state tensors per parameter; 2 for Adam.
        """
        sizes = [
            UnitSizes(u.layout, u.grad_layout, u.master_dtype.itemsize, u.scattered)
            for u in self.units
        ]
        row = STAGES[self.config.stage]
        device = self.context.device
        return budget_of(
            sizes,
            row,
            self.context.rank,
            prefetch=self.config.prefetch,
            states=states,
            one_host=self.context.memory.is_shared,
            arena_price=lambda nbytes: Arena.price(nbytes, device),
        )

    def memory_report(self) -> MemoryReport:
        """Return the bytes this rank holds by role, from live tensors. *Local.*"""
        return measure(self.units, [b.optimizer for b in self._bound.values()], self._pools())

    def _pools(self) -> list[BufferPool]:
        return [self._pool, self._weight_pool]
