"""Optimizer state of any origin, cut to this rank's spans.

Groups and states are matched by parameter name where the checkpoint has names, else by order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer

from lightning_zeroplus.errors import CheckpointError, name_offenders
from lightning_zeroplus.layout.names import plain_name
from lightning_zeroplus.layout.span import Span
from lightning_zeroplus.zero.entry import Entry, memory_order
from lightning_zeroplus.zero.probe import settle_dtype
from lightning_zeroplus.zero.step import is_full_state

if TYPE_CHECKING:
    from lightning_zeroplus.zero.state_access import StateAccess as Engine

__all__ = ["MASTER_KEY", "load_full_optimizer_state_dict", "read_span"]

log = logging.getLogger(__name__)

MASTER_KEY = "zeroplus_master"
"""State entry that carries a master weight which differs from the model weight."""


@runtime_checkable
class _PartlyReadable(Protocol):
    """A full tensor that is still in a file."""

    def read_span(
        self, span: Span, stride: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the elements of ``span`` in the memory order of ``stride``."""


def read_span(full: torch.Tensor, entry: Entry, span: Span, out: torch.Tensor) -> None:
    """Write the elements of ``span`` of a full tensor into ``out``, 1-D of any dtype and device.

    Only they are read if the tensor is in a file.
    """
    if isinstance(full, _PartlyReadable):
        if out.device.type == "cpu":
            full.read_span(span, entry.model.stride, out)
        else:
            out.copy_(full.read_span(span, entry.model.stride))
    else:
        out.copy_(memory_order(full, entry.model)[span.start : span.stop])


@torch.no_grad()
def load_full_optimizer_state_dict(
    engine: Engine, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Take this rank's spans of full state tensors, and every group's hyper-parameters. *Local.*

    Raises:
        CheckpointError: parameters, groups or shapes that do not fit; all are listed.
    """
    saved_groups = state_dict["param_groups"]
    params = [[engine.find(p) for p in group["params"]] for group in optimizer.param_groups]
    named = any(isinstance(key, str) for group in saved_groups for key in group["params"])
    match = _match_names if named else _match_order
    sources, keys = match(params, saved_groups)
    state = state_dict["state"]
    if named:
        state = {plain_name(key): value for key, value in state.items()}
    if engine.context.world_size > 1:  # alone, an optimizer may keep state of any shape
        _refuse_reshaped(params, keys, state)
    for group, source in zip(optimizer.param_groups, sources, strict=True):
        kept = {key: value for key, value in source.items() if key not in {"params", "param_names"}}
        group.update(kept)
    before = dict(optimizer.state)
    optimizer.state.clear()
    for group, entries, names in zip(optimizer.param_groups, params, keys, strict=True):
        for entry, key in zip(entries, names, strict=True):
            if entry is not None and state.get(key) is not None:
                old = before.pop(entry.param, {})
                _load_one(optimizer, entry, state[key], group, old)


def _match_order(
    params: list[list[Entry | None]], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[list[Any]]]:
    lengths = [len(group["params"]) for group in saved]
    if lengths != [len(entries) for entries in params]:
        raise CheckpointError(
            f"Expected parameter groups of sizes {[len(entries) for entries in params]}, got "
            f"{lengths}. Make the optimizer as the run did that wrote the checkpoint."
        )
    return list(saved), [list(group["params"]) for group in saved]


def _match_names(
    params: list[list[Entry | None]], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[list[Any]]]:
    """Return each group's source and its parameters' names in the checkpoint."""
    group_of = {plain_name(key): n for n, group in enumerate(saved) for key in group["params"]}
    sources: list[Mapping[str, Any]] = []
    keys: list[list[Any]] = []
    problems: list[str] = []
    wanted: set[str] = set()
    for place, entries in enumerate(params):
        names = [_saved_name(entry, group_of) for entry in entries]
        wanted.update(name for name in names if name is not None)
        problems += [
            f"{entry.fqn} is missing"
            for entry, name in zip(entries, names, strict=True)
            if entry is not None and name is None
        ]
        origins = sorted({group_of[name] for name in names if name is not None})
        if len(origins) > 1:
            problems.append(f"group {place} is made of groups {origins}")
        # A group without parameters has no name to be found by.
        at = origins[0] if origins else place
        sources.append(saved[at] if at < len(saved) else {})
        keys.append(names)
    problems += [f"{name} is unexpected" for name in group_of if name not in wanted]
    if problems:
        raise CheckpointError(
            f"Expected the optimizer's own parameters and groups in the checkpoint, got others: "
            f"{name_offenders(problems)}. Make the optimizer as the run did that wrote it."
        )
    return sources, keys


def _saved_name(entry: Entry | None, group_of: Mapping[str, int]) -> str | None:
    """Return the name that the checkpoint has for a parameter; a tied one has several."""
    if entry is None:
        return None
    return next((name for name in entry.model.names if name in group_of), None)


def _refuse_reshaped(
    params: list[list[Entry | None]], keys: list[list[Any]], state: Mapping[Any, Any]
) -> None:
    reshaped = [
        f"{name} of {entry.fqn} {tuple(value.shape)} instead of {tuple(entry.model.shape)}"
        for entries, names in zip(params, keys, strict=True)
        for entry, key in zip(entries, names, strict=True)
        if entry is not None
        for name, value in state.get(key, {}).items()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != entry.model.shape
    ]
    if reshaped:
        raise CheckpointError(
            f"Expected optimizer state in the parameters' shapes, got {name_offenders(reshaped)}. "
            f"Load it into the model that it was saved from."
        )


def _load_one(
    optimizer: Optimizer,
    entry: Entry,
    saved: Mapping[str, Any],
    group: Mapping[str, Any],
    old: Mapping[str, Any],
) -> None:
    shard = entry.shard
    if shard is None:
        return
    device = entry.unit.device
    owned = entry.unit.layout.owned(entry.index, entry.unit.context.rank)
    spans = {k: v for k, v in saved.items() if is_full_state(k, v, entry) and k != MASTER_KEY}
    dtypes = settle_dtype(optimizer, group, shard.dtype, {k: v.dtype for k, v in spans.items()})
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if not isinstance(value, torch.Tensor):
            state[key] = value
        elif key == MASTER_KEY:
            read_span(value, entry, owned, shard)
        elif key in spans:
            state[key] = _memory(old.get(key), owned.numel, dtypes[key], device)
            read_span(value, entry, owned, state[key])
        elif key == "step":
            state[key] = _step(value, group, device)
        else:
            state[key] = value.to(device, copy=True)
    optimizer.state[entry.param] = state


def _memory(old: object, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return 1-D memory: that of ``old``, which nobody needs any more, if it fits."""
    if isinstance(old, torch.Tensor) and type(old) is torch.Tensor:
        fits = (old.shape, old.dtype, old.device) == ((numel,), dtype, device)
        return old if fits else torch.empty(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def _step(value: torch.Tensor, group: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return a step count of its own, where the optimizer needs it."""
    if group.get("fused") or group.get("capturable"):
        return value.to(device, torch.float32, copy=True)
    return value.to("cpu", copy=True)
