"""What the engine knows of a module: its parameters once each, their names, owners and geometry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from lightning_zeroplus.comm import Operation, Tag, Transport
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.errors import ConfigError, name_offenders
from lightning_zeroplus.layout.names import plain_name

__all__ = ["ModelParam", "agree_on_model", "scan_parameters"]


@dataclass(eq=False, slots=True)
class ModelParam:
    """One parameter of the module, however many names it has."""

    fqn: str
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    """Strides of a dense tensor in the parameter's memory order."""

    position: int = 0
    """Place in registration order."""

    names: list[str] = field(default_factory=list)
    """All names, the first being ``fqn``."""

    owners: list[nn.Module] = field(default_factory=list)
    """Modules that hold it, by name order."""

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.shape.numel()


def scan_parameters(module: nn.Module) -> list[ModelParam]:
    """Return every parameter of ``module`` once, in registration order."""
    found: dict[int, ModelParam] = {}
    for prefix, owner in module.named_modules():
        for name, param in owner.named_parameters(prefix, recurse=False):
            entry = found.get(id(param))
            if entry is None:
                entry = ModelParam(plain_name(name), param, *_geometry(param), len(found))
                found[id(param)] = entry
            entry.names.append(plain_name(name))
            entry.owners.append(owner)
    return list(found.values())


def _geometry(param: nn.Parameter) -> tuple[torch.Size, tuple[int, ...]]:
    if nn.parameter.is_lazy(param):
        return torch.Size(), ()  # refused a moment later, by name
    return param.shape, torch.empty_like(param, device="meta").stride()


def _describe(module: nn.Module, params: list[ModelParam]) -> Iterator[tuple[str, ...]]:
    for entry in params:
        param = entry.param
        kind = str(param.dtype).removeprefix("torch.")
        grad = "trainable" if param.requires_grad else "frozen"
        yield " = ".join(entry.names), str(tuple(entry.shape)), kind, grad
    for name, buffer in module.named_buffers():
        yield plain_name(name), str(tuple(buffer.shape)), str(buffer.dtype), "buffer"


def _settings(config: EngineConfig, transport: Transport) -> Iterator[tuple[str, ...]]:
    for part in fields(config):
        value = getattr(config, part.name)
        if part.name == "units" and value is not None:
            value = tuple(u if isinstance(u, str) else u.__qualname__ for u in value)
        yield f"the setting {part.name}", repr(value), "", "setting"
    sizes = (transport.preferred_bucket_nbytes, transport.least_unit_nbytes)
    yield "the transport's sizes", repr(sizes), "", "setting"


def agree_on_model(
    module: nn.Module, params: list[ModelParam], config: EngineConfig, transport: Transport
) -> None:
    """Compare settings, names, ties, shapes, types and trainability over ranks; collective.

    Raises:
        ConfigError: on all ranks, naming the first difference.
    """
    mine = [*_settings(config, transport), *_describe(module, params)]
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    tag = Tag(0, Operation.SETUP, -1, "the model")
    if len(set(transport.exchange_bytes(digest, tag))) == 1:
        return
    rows = [json.loads(raw) for raw in transport.exchange_bytes(json.dumps(mine).encode(), tag)]
    raise ConfigError(_first_difference(rows))


def _first_difference(rows: list[list[list[str]]]) -> str:
    first = rows[0]
    for rank, other in enumerate(rows[1:], start=1):
        for position in range(max(len(first), len(other))):
            here = first[position] if position < len(first) else None
            there = other[position] if position < len(other) else None
            if here != there:
                return (
                    f"Expected the same model and settings on every rank, got {_text(here)} on "
                    f"rank 0 and {_text(there)} on rank {rank}. Build it from the same settings."
                )
    return "Expected the same model on every rank, got different ones."


def _text(row: list[str] | None) -> str:
    return "nothing" if row is None else f"{' '.join(filter(None, row[:3]))} ({row[3]})"


def refuse_unusable(params: list[ModelParam]) -> None:
    """Check what no stage can carry.

    Raises:
        ConfigError: no parameters, or ones of a type that cannot be sharded.
    """
    if not params:
        raise ConfigError("Expected a module with parameters, got none. Nothing can be sharded.")
    odd = [
        f"{entry.fqn} ({type(entry.param).__name__})"
        for entry in params
        if nn.parameter.is_lazy(entry.param) or entry.param.layout is not torch.strided
    ]
    if odd:
        raise ConfigError(
            f"Expected initialised dense parameters, got {name_offenders(odd)}. "
            f"Run one forward before training so that lazy modules know their shapes."
        )
    devices = {entry.param.device for entry in params if entry.param.device.type != "meta"}
    if len(devices) > 1:
        raise ConfigError(
            f"Expected all parameters on one device, got {name_offenders(map(str, devices))}."
        )
