"""What this rank holds of weights and optimizer state, as it is saved: spans, nothing gathered."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.layout.span import Span
from lightning_zeroplus.zero.entry import Entry, memory_order
from lightning_zeroplus.zero.span_tensor import SpanTensor

if TYPE_CHECKING:
    from lightning_zeroplus.zero.state_access import StateAccess as Engine

__all__ = [
    "OwnSpan",
    "first_owner",
    "own_optimizer_state",
    "own_part",
    "own_weights",
    "shown_weight",
]


class OwnSpan(NamedTuple):
    """This rank's part of a tensor that has a parameter's geometry."""

    local: torch.Tensor
    """1-D ``[span.numel]``."""

    shape: tuple[int, ...]
    span: Span
    """Range of the tensor's elements in memory order."""

    stride: tuple[int, ...]


def _own(entry: Entry, local: torch.Tensor) -> OwnSpan:
    unit = entry.unit
    owned = unit.layout.owned(entry.index, unit.context.rank)
    return OwnSpan(local, tuple(entry.model.shape), owned, entry.model.stride)


def own_part(tensor: SpanTensor) -> OwnSpan:
    """Return what this rank holds of a span tensor. *Local.*"""
    return _own(tensor._entry, tensor.to_local())


def first_owner(entry: Entry) -> int:
    """Return the first rank that has elements of a parameter; 0 if there are none. *Local.*"""
    layout, ranks = entry.unit.layout, range(entry.unit.context.world_size)
    return next((rank for rank in ranks if layout.owned(entry.index, rank).numel), 0)


@torch.no_grad()
def own_weights(engine: Engine) -> dict[int, OwnSpan]:
    """Return this rank's spans of all weights by the parameter's id. *Local.*

    They are the master weights where those are others; edits of narrow weights are in them. After
    the engine was closed the spans are those of the full weights that it left.
    """
    if not engine.closed:
        engine.residency.end_window()
        for unit in engine.units:
            if unit.weights.resident:
                unit.take_back_replaced()
            unit.adopt_edits()
    found = {}
    for unit in engine.units:
        for entry in unit.entries:
            if engine.closed:
                found[id(entry.param)] = _own(entry, _left_behind(entry))
            elif entry.shard is not None and unit.has_own_master:
                found[id(entry.param)] = _own(entry, entry.shard)
            else:
                local = unit.weights.shard[unit.shard_range(entry.index)]
                found[id(entry.param)] = _own(entry, local)
    return found


def shown_weight(engine: Engine, entry: Entry) -> torch.Tensor:
    """Return a weight as hooks that look at a checkpoint may read it. *Local.*"""
    unit = entry.unit
    if engine.closed or unit.weights.resident:
        return entry.param.detach()
    local = unit.weights.shard[unit.shard_range(entry.index)]
    return SpanTensor(entry, local, unit.dtype)


def _left_behind(entry: Entry) -> torch.Tensor:
    """Return the own span of a full weight, with the master's digits where it still has them."""
    unit = entry.unit
    owned = unit.layout.owned(entry.index, unit.context.rank)
    weight = memory_order(entry.param.detach(), entry.model)[owned.start : owned.stop]
    if not unit.has_own_master or entry.shard is None or entry.shard.device.type == "meta":
        return weight
    master = entry.shard.to(weight.device)
    return torch.where(weight == master.to(weight.dtype), master, weight.to(master.dtype))


def own_optimizer_state(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """Return ``optimizer``'s state dict by name, its elementwise state as `SpanTensor`.

    Other values, such as step counts, are there on the first rank that has a span of the parameter.

    Raises:
        CheckpointError: the ranks' groups differ, or state is of a kind that cannot be saved.
    """
    entries = {}
    groups = []
    for group in optimizer.param_groups:
        found = [engine.find(param) for param in group["params"]]
        entries.update({e.fqn: e for e in found if e is not None})
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [e.fqn for e in found if e is not None]})
    _refuse_differing_groups(engine, [group["params"] for group in groups])
    state = {fqn: _values_of(optimizer, entry) for fqn, entry in entries.items()}
    return {"state": state, "param_groups": groups}


def _refuse_differing_groups(engine: Engine, names: list[list[str]]) -> None:
    digest = hashlib.sha256(json.dumps([sorted(group) for group in names]).encode()).digest()
    tag = engine.context.gradients_tag(Operation.FULL, -1, "optimizer groups")
    rows = engine.context.transport.exchange_bytes(digest, tag)
    other = [str(rank) for rank, row in enumerate(rows) if row != digest]
    if other:
        raise CheckpointError(
            f"Expected the same parameters in the optimizer on every rank, got others on ranks "
            f"{', '.join(other)}. Fill its groups alike on all ranks."
        )


def _values_of(optimizer: Optimizer, entry: Entry) -> dict[str, Any]:
    values: dict[str, Any] = {}
    first = entry.unit.context.rank == first_owner(entry)
    for key, value in optimizer.state.get(entry.param, {}).items():
        if isinstance(value, torch.Tensor):
            elementwise = entry.shard is not None and value.shape == entry.shard.shape
            if elementwise and value.dim() == 1:
                values[key] = SpanTensor(entry, value, value.dtype)
            elif first:
                values[key] = value
        elif value is None or isinstance(value, bool | int | float | str):
            if first:
                values[key] = value
        else:
            raise CheckpointError(
                f"Expected optimizer state of tensors and plain values, got "
                f"{type(value).__name__} for {key!r} of {entry.fqn!r}."
            )
    return values
