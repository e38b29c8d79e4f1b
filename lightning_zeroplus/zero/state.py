"""Full weights and full optimizer state, in and out, one parameter or unit at a time."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.errors import CheckpointError, ConfigError, name_offenders
from lightning_zeroplus.layout.names import plain_name
from lightning_zeroplus.zero.entry import Entry, memory_order
from lightning_zeroplus.zero.grad_span import write_slot
from lightning_zeroplus.zero.load_state import MASTER_KEY, read_span
from lightning_zeroplus.zero.local_state import first_owner
from lightning_zeroplus.zero.residency import Residency
from lightning_zeroplus.zero.span_tensor import gather_full
from lightning_zeroplus.zero.unit import Unit

if TYPE_CHECKING:
    from lightning_zeroplus.zero.state_access import StateAccess as Engine

__all__ = [
    "full_optimizer_state",
    "full_optimizer_state_dict",
    "iterate_full_state",
    "leave_module",
    "load_full_state",
    "set_full_optimizer_state",
    "unsharded",
]

# -- weights


@contextlib.contextmanager
def unsharded(units: Sequence[Unit], residency: Residency, *, writeback: bool) -> Iterator[None]:
    """Unshard ``units`` for the duration; without ``writeback`` what changes inside is undone."""
    flat = [u for u in units if not u.weights.resident]
    before = [] if writeback else [(u, u.weights.flat.clone()) for u in units if u.weights.resident]
    for unit in flat:
        if not unit.weights.needs_peers:  # what was written in a forward is not to be undone below
            residency.settle(unit)
            unit.weights.settle_shard()
        residency.hold(unit)
        residency.need(unit, Operation.FULL)
    try:
        yield
    finally:
        with torch.no_grad():
            for unit, copy in before:
                unit.weights.flat.copy_(copy)
        for unit in flat:
            residency.release(unit, keep_edits=writeback)
        if writeback:
            for unit in units:
                unit.adopt_edits()


@torch.no_grad()
def collect_full(entry: Entry, local: torch.Tensor, keep_on: int, what: str) -> torch.Tensor | None:
    """Return the full tensor of which ranks hold ``local``, on the CPU of rank ``keep_on``."""
    unit = entry.unit
    context = unit.context
    tag = context.gradients_tag(Operation.FULL, unit.number, f"{entry.fqn} ({what})")
    parts = context.transport.collect(local, keep_on, tag)
    if parts is None:
        return None
    full = torch.empty_strided(entry.model.shape, entry.model.stride, dtype=local.dtype)
    flat = full.as_strided((entry.numel,), (1,))
    for rank, part in enumerate(parts):
        span = unit.layout.owned(entry.index, rank)
        if span.numel:
            flat[span.start : span.stop] = part.cpu()
    return full


def iterate_full_state(engine: Engine, keep_on: int) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield ``(name, full tensor or None)`` of parameters under every name, then of buffers."""
    here = engine.context.rank == keep_on
    engine.residency.end_window()
    for unit in engine.units:
        for entry in unit.entries:
            if unit.weights.resident:
                full = entry.param.detach().cpu().clone() if here else None
            else:
                local = unit.weights.shard[unit.shard_range(entry.index)]
                full = collect_full(entry, local, keep_on, "weight")
            for name in entry.model.names:
                yield name, full
    for name, buffer in _persistent_buffers(engine):
        yield name, buffer.detach().cpu().clone() if here else None


def _persistent_buffers(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in engine.module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


@torch.no_grad()
def load_full_state(
    engine: Engine, state_dict: Mapping[str, torch.Tensor], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Write this rank's spans (and full weights where replicated) from full tensors.

    Raises:
        CheckpointError: shapes that do not fit; with ``strict`` also missing or unexpected names.
    """
    given = {plain_name(name): value for name, value in state_dict.items()}
    buffers = dict(_persistent_buffers(engine))
    expected = {*engine.by_name, *buffers}
    missing = sorted(n for n in expected if n not in given)
    unexpected = sorted(n for n in given if n not in expected)
    reshaped = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(here.shape)}"
        for name, here in [*((n, e.param) for n, e in engine.by_name.items()), *buffers.items()]
        if name in given and given[name].shape != here.shape
    ]
    if reshaped or (strict and (missing or unexpected)):
        raise CheckpointError(
            _misfit(missing if strict else [], unexpected if strict else [], reshaped)
        )
    engine.residency.end_window()
    for name, entry in engine.by_name.items():
        if name in given:
            entry.unit.take_values(entry, functools.partial(read_span, given[name], entry))
    for name, buffer in buffers.items():
        if name in given:
            buffer.copy_(given[name])
    torch.autograd.graph.increment_version([e.param for e in engine.by_name.values()])
    return missing, unexpected


def _misfit(missing: list[str], unexpected: list[str], reshaped: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"missing: {name_offenders(missing)}")
    if unexpected:
        parts.append(f"unexpected: {name_offenders(unexpected)}")
    if reshaped:
        parts.append(f"reshaped: {name_offenders(reshaped)}")
    return (
        f"Expected the model's own names and shapes in the checkpoint, got {'; '.join(parts)}. "
        f"Load it into the model that wrote it, or with strict=False where names differ."
    )


@torch.no_grad()
def leave_module(engine: Engine, *, alone: bool = False) -> None:
    """Point every parameter at full weights of its own; gradients are gone. Collective.

    ``alone`` leaves out what needs a collective.
    """
    for unit in engine.units:
        if alone and not unit.weights.resident:
            continue
        for entry in unit.entries:
            write_slot(entry.param, None)
            if unit.weights.resident:
                full = torch.empty_strided(
                    entry.model.shape, entry.model.stride, dtype=unit.dtype, device=unit.device
                )
                full.copy_(entry.param.detach())
            else:
                local = unit.weights.shard[unit.shard_range(entry.index)]
                full = gather_full(entry, local, "close")
                entry.param.__class__ = unit.user_classes[entry.index]
            entry.param.data = full
            if unit.has_own_master:
                entry.param.grad_dtype = entry.param.dtype


# -- optimizer state


def _own_state(optimizer: Optimizer, entry: Entry) -> dict[str, Any]:
    return optimizer.state.get(entry.param, {})  # type: ignore[no-any-return]


def _is_span(value: object, entry: Entry) -> bool:
    if not isinstance(value, torch.Tensor) or entry.shard is None:
        return False
    return value.dim() == 1 and value.shape == entry.shard.shape


def _state_of(optimizer: Optimizer, entry: Entry, key: str) -> torch.Tensor | None:
    value = _own_state(optimizer, entry).get(key)
    return value if isinstance(value, torch.Tensor) and _is_span(value, entry) else None


def full_optimizer_state(
    engine: Engine, optimizer: Optimizer, entry: Entry, key: str
) -> torch.Tensor:
    """Return one elementwise state tensor in full on every rank."""
    local = _state_of(optimizer, entry, key)
    dtypes = _agreed_dtypes(engine, [[_dtype_name(local)]])[0][0]
    if dtypes is None:
        raise ConfigError(
            f"Expected elementwise optimizer state {key!r} of {entry.fqn!r}, got none. "
            f"It exists after the first step that updates the parameter."
        )
    if local is None:
        local = torch.zeros(0, dtype=getattr(torch, dtypes), device=entry.unit.device)
    return gather_full(entry, local, key)


def set_full_optimizer_state(
    optimizer: Optimizer, entry: Entry, key: str, value: torch.Tensor
) -> None:
    """Overwrite this rank's span of one state tensor."""
    if value.shape != entry.model.shape:
        raise ConfigError(
            f"Expected state of shape {tuple(entry.model.shape)} for {entry.fqn!r}, "
            f"got {tuple(value.shape)}."
        )
    if entry.shard is None or not entry.shard.numel():
        return
    owned = entry.unit.layout.owned(entry.index, entry.unit.context.rank)
    piece = memory_order(value, entry.model)[owned.start : owned.stop]
    local = _state_of(optimizer, entry, key)
    if local is not None:
        local.copy_(piece)
    else:
        optimizer.state[entry.param][key] = piece.clone()


def _dtype_name(value: torch.Tensor | None) -> str | None:
    return None if value is None else str(value.dtype).removeprefix("torch.")


def _agreed_dtypes(engine: Engine, table: list[list[str | None]]) -> list[list[str | None]]:
    rows = _exchange(engine, table)
    return [
        [next((row[a][b] for row in rows if row[a][b]), None) for b in range(len(line))]
        for a, line in enumerate(table)
    ]


def _exchange(engine: Engine, payload: object) -> list[Any]:
    tag = engine.context.gradients_tag(Operation.FULL, -1, "optimizer state")
    raw = engine.context.transport.exchange_bytes(json.dumps(payload).encode(), tag)
    return [json.loads(item) for item in raw]


def _describe(optimizer: Optimizer, entry: Entry) -> dict[str, Any]:
    """Return what this rank has of a parameter's state, without the elementwise tensors' values."""
    found: dict[str, Any] = {}
    for key, value in _own_state(optimizer, entry).items():
        if _is_span(value, entry):
            found[key] = ["span", _dtype_name(value)]
        elif isinstance(value, torch.Tensor):
            found[key] = ["tensor", _dtype_name(value), value.tolist()]
        elif value is None or isinstance(value, bool | int | float | str):
            found[key] = ["value", value]
        else:
            raise CheckpointError(
                f"Expected optimizer state of tensors and plain values, got "
                f"{type(value).__name__} for {key!r} of {entry.fqn!r}."
            )
    return found


@torch.no_grad()
def full_optimizer_state_dict(engine: Engine, optimizer: Optimizer, keep_on: int) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with full tensors on ``keep_on``, ``{}`` elsewhere."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [e for e in map(engine.find, params) if e is not None]
    mine = {
        "order": [e.fqn for e in entries],
        "state": {e.fqn: _describe(optimizer, e) for e in entries},
    }
    rows = _exchange(engine, mine)
    order: list[str] = rows[keep_on]["order"]
    if any(set(row["order"]) != set(order) for row in rows):
        odd = sorted(set(order).symmetric_difference(*(row["order"] for row in rows[1:])))
        raise CheckpointError(
            f"Expected the same parameters in the optimizer on every rank, got differences in "
            f"{name_offenders(odd)}. Fill its groups alike on all ranks."
        )
    state: dict[int, dict[str, Any]] = {}
    for n, fqn in enumerate(order):
        entry = engine.by_name[fqn]
        merged: dict[str, Any] = {}
        # Ranks without elements of it hold the count at which the optimizer was made.
        first = first_owner(entry)
        for row in [*reversed(rows), rows[first]]:
            merged.update(row["state"][fqn])
        full = {
            key: _restore(engine, optimizer, entry, key, kind, keep_on)
            for key, kind in sorted(merged.items())
        }
        if entry.unit.has_own_master and entry.shard is not None:
            full[MASTER_KEY] = collect_full(entry, entry.shard, keep_on, MASTER_KEY)
        if full:
            state[n] = full
    if engine.context.rank != keep_on:
        return {}
    groups, start = [], 0
    for group in optimizer.param_groups:
        stop = start + len(group["params"])
        rest = {k: v for k, v in group.items() if k != "params"}
        groups.append({**rest, "params": list(range(start, stop))})
        start = stop
    return {"state": state, "param_groups": groups}


def _restore(
    engine: Engine, optimizer: Optimizer, entry: Entry, key: str, kind: list[Any], keep_on: int
) -> Any:
    if kind[0] == "value":
        return kind[1]
    dtype = getattr(torch, kind[1])
    if kind[0] == "tensor":
        return torch.tensor(kind[2], dtype=dtype)
    local = _state_of(optimizer, entry, key)
    if local is None:
        local = torch.zeros(0, dtype=dtype, device=entry.unit.device)
    return collect_full(entry, local, keep_on, key)
