"""From a module to units: plan, allocate, take rank 0's weights, point parameters at views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from lightning_zeroplus.comm.storage import BufferPool
from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.errors import ConfigError, name_offenders
from lightning_zeroplus.layout.placement import STAGES, Placement
from lightning_zeroplus.zero.context import Context
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.model import ModelParam
from lightning_zeroplus.zero.plan import UnitPlan, plan_by_module, plan_by_size
from lightning_zeroplus.zero.resting import rest_register, resting_class
from lightning_zeroplus.zero.unit import Unit

__all__ = ["broadcast_buffers", "fill_unit", "make_units"]

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def _wider(dtype: torch.dtype) -> torch.dtype:
    """Return the wider of fp32 and ``dtype``; integers stay, complex ones by their real part."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float32)
    return dtype


def _chosen(name: str | None, weight: torch.dtype, otherwise: torch.dtype) -> torch.dtype:
    if name is None or not (weight.is_floating_point or weight.is_complex):
        return otherwise
    dtype = _DTYPES[name]
    return dtype.to_complex() if weight.is_complex else dtype


def make_units(
    module: nn.Module, params: Sequence[ModelParam], config: EngineConfig, context: Context
) -> list[Unit]:
    """Return units without memory, numbered alike on all ranks.

    Raises:
        ConfigError: unit names that match nothing, or dtypes that would lose precision.
    """
    transport = context.transport
    if STAGES[config.stage].weight is Placement.REPLICATE:
        bound = config.bucket_nbytes or transport.preferred_bucket_nbytes
        plans = plan_by_size(params, bound)
    else:
        plans = plan_by_module(module, params, config, transport.least_unit_nbytes)
    units = [_unit(plan, n, config, context) for n, plan in enumerate(plans)]
    narrow = [
        f"{u.name} ({u.dtype} weights, {u.master_dtype} masters, {u.reduce_dtype} sums)"
        for u in units
        if u.master_dtype.itemsize < min(u.dtype.itemsize, 4)
        or torch.promote_types(u.dtype, u.master_dtype) != u.master_dtype
    ]
    if narrow:
        raise ConfigError(
            f"Expected master_dtype at least as wide as the weights, got {name_offenders(narrow)}. "
            f"Leave master_dtype unset or choose a wider one."
        )
    if not hasattr(torch.Tensor, "grad_dtype") and any(u.dtype != u.master_dtype for u in units):
        raise ConfigError(
            f"Expected a torch build with Tensor.grad_dtype for masters wider than the weights, "
            f"got {torch.__version__}. Use torch 2.13 or newer, or 32-true or mixed precision."
        )
    context.labels = [u.name for u in units]
    transport.labels = context.labels
    return units


def _unit(plan: UnitPlan, number: int, config: EngineConfig, context: Context) -> Unit:
    dtype = plan.params[0].param.dtype
    master = _chosen(config.master_dtype, dtype, _wider(dtype))
    reduce = _chosen(config.reduce_dtype, dtype, master)
    return Unit(plan, number, context, dtype=dtype, master_dtype=master, reduce_dtype=reduce)


def allocate_units(units: Sequence[Unit], config: EngineConfig, pool: BufferPool) -> None:
    """Give every unit its weight memory; Flat units share blocks of one size."""
    resident = STAGES[config.stage].weight is Placement.REPLICATE
    pooled = [u.layout.nbytes for u in units if not u.scattered]
    common = max(pooled, default=0)
    for unit in units:
        nbytes = None if resident or unit.scattered else common
        unit.allocate(resident=resident, pool=pool, block_nbytes=nbytes)


@torch.no_grad()
def fill_unit(unit: Unit, originals: Mapping[str, torch.Tensor]) -> None:
    """Take rank 0's weights into the unit and point its parameters at their views; collective."""
    flat = unit.weights.flat
    if not unit.weights.resident:
        flat = torch.zeros(unit.layout.numel, dtype=unit.dtype, device=unit.device)
    for entry in unit.entries:
        _place(flat, unit, entry, entry.param.data)
    _broadcast(flat, unit)
    if not unit.weights.resident:
        chunk = unit.layout.chunk(unit.context.rank)
        unit.weights.before_write()
        unit.weights.shard.copy_(flat[chunk.start : chunk.stop])
    if unit.has_own_master:
        unit.master.copy_(unit.weights.shard)
        _fill_masters(unit, originals)
    for entry in unit.entries:
        _point(entry)
    unit.weights.settle()


def _place(flat: torch.Tensor, unit: Unit, entry: Entry, value: torch.Tensor) -> None:
    start = unit.layout.offsets[entry.index]
    torch.as_strided(flat, entry.model.shape, entry.model.stride, start).copy_(value)


def _broadcast(flat: torch.Tensor, unit: Unit) -> None:
    if unit.context.world_size > 1:
        tag = unit.context.gradients_tag(Operation.SETUP, unit.number)
        unit.context.transport.broadcast(flat, 0, tag)


def _fill_masters(unit: Unit, originals: Mapping[str, torch.Tensor]) -> None:
    for entry in unit.entries:
        wide = originals.get(entry.fqn)
        if wide is None or wide.is_meta:
            continue
        flat = torch.empty(entry.numel, dtype=unit.master_dtype, device=unit.device)
        torch.as_strided(flat, entry.model.shape, entry.model.stride, 0).copy_(wide)
        _broadcast(flat, unit)
        owned = unit.layout.owned(entry.index, unit.context.rank)
        if owned.numel and entry.shard is not None:
            entry.shard.copy_(flat[owned.start : owned.stop])


def _point(entry: Entry) -> None:
    unit = entry.unit
    entry.param.data = unit.view_of(entry)
    if entry.param.dtype != unit.master_dtype and entry.param.dtype.is_floating_point:
        entry.param.grad = None
        entry.param.grad_dtype = unit.master_dtype
    if not unit.weights.resident:
        entry.resting_class = resting_class(type(entry.param))
        rest_register(entry)
        entry.param.__class__ = entry.resting_class


@torch.no_grad()
def broadcast_buffers(buffers: Iterable[torch.Tensor], context: Context) -> None:
    """Overwrite buffers with rank 0's, one broadcast per dtype; collective."""
    if context.world_size == 1:
        return
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.numel() and buffer.layout is torch.strided:
            kinds.setdefault(buffer.dtype, []).append(buffer)
    for dtype, members in kinds.items():
        flat = torch.cat([m.detach().reshape(-1) for m in members])
        tag = context.gradients_tag(Operation.SETUP, -1, f"{dtype} buffers")
        context.transport.broadcast(flat, 0, tag)
        if context.rank != 0:
            for member, piece in zip(
                members, torch.split(flat, [m.numel() for m in members]), strict=True
            ):
                member.copy_(piece.view(member.shape))
