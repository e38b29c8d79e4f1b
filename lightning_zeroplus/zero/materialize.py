"""Meta parameters become real one unit at a time, as their modules would initialise them."""

from __future__ import annotations

import torch
from torch import nn

from lightning_zeroplus.errors import ConfigError, name_offenders
from lightning_zeroplus.zero.unit import Unit

__all__ = ["materialize"]


def materialize(module: nn.Module, unit: Unit) -> None:
    """Replace the meta parameters of ``unit``, and the meta buffers beside them, by real ones.

    Every owner runs its ``reset_parameters``; rank 0's values win afterwards.

    Raises:
        ConfigError: an owner has no ``reset_parameters``.
    """
    waiting = [e for e in unit.entries if e.param.is_meta]
    if not waiting:
        return
    owners = list(dict.fromkeys(e.model.owners[0] for e in waiting))
    helpless = [type(o).__name__ for o in owners if not _resets(o)]
    if helpless:
        raise ConfigError(
            f"Expected modules on the meta device to have reset_parameters(), got none on "
            f"{name_offenders(dict.fromkeys(helpless))}. Add it, or build the model on a device."
        )
    for owner in owners:
        _to_empty(owner, unit.device)
        with torch.no_grad():
            reset = owner.reset_parameters
            assert callable(reset)
            reset()
    for entry in waiting:
        _, _, local = entry.model.names[0].rpartition(".")
        entry.param = entry.model.param = getattr(entry.model.owners[0], local)
        unit.user_classes[entry.index] = type(entry.param)
        _tie(entry.model.names, entry.model.owners, entry.param)


def _resets(owner: nn.Module) -> bool:
    return callable(getattr(owner, "reset_parameters", None))


def _to_empty(owner: nn.Module, device: torch.device) -> None:
    """Give the owner's own meta tensors memory; submodules are left alone."""
    for name, param in list(owner.named_parameters(recurse=False)):
        if param.is_meta:
            real = torch.empty_like(param, device=device)
            owner.register_parameter(name, _like(param, real))
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if buffer.is_meta:
            owner._buffers[name] = torch.empty_like(buffer, device=device)


def _like(param: nn.Parameter, real: torch.Tensor) -> nn.Parameter:
    made = type(param)(real, param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def _tie(names: list[str], owners: list[nn.Module], param: nn.Parameter) -> None:
    for name, owner in zip(names[1:], owners[1:], strict=True):
        owner.register_parameter(name.rpartition(".")[2], param)
