"""Meta parameters become real one unit at a time, as their modules would initialise them."""

from __future__ import annotations

import torch
from torch import nn

from lightning_zeroplus.errors import ConfigError, name_offenders
from lightning_zeroplus.zero.unit import Unit

__all__ = ["materialize", "materialize_buffers", "refuse_helpless"]


def materialize(module: nn.Module, unit: Unit) -> None:
    """Replace the meta parameters of ``unit``, and the meta buffers beside them, by real ones.

    Every owner runs its ``reset_parameters``; rank 0's values win afterwards.

    """
    waiting = [e for e in unit.entries if e.param.is_meta]
    if not waiting:
        return
    owners = list(dict.fromkeys(e.model.owners[0] for e in waiting))
    for owner in owners:
        _initialise(owner, unit.device)
    for entry in waiting:
        _, _, local = entry.model.names[0].rpartition(".")
        entry.param = entry.model.param = getattr(entry.model.owners[0], local)
        unit.user_classes[entry.index] = type(entry.param)
        _tie(entry.model.names, entry.model.owners, entry.param)


def refuse_helpless(module: nn.Module) -> None:
    """Check, before anything is allocated, that everything on meta can be initialised. *Local.*

    Raises:
        ConfigError: a module with meta tensors has no ``reset_parameters``.
    """
    helpless = [
        f"{type(owner).__name__} ({name or 'the model itself'})"
        for name, owner in module.named_modules()
        if _has_meta(owner) and not _resets(owner)
    ]
    if helpless:
        raise ConfigError(
            f"Expected modules on the meta device to have reset_parameters(), got none on "
            f"{name_offenders(helpless)}. Add it, or build the model on a device."
        )


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Initialise modules that have meta buffers left and no parameters beside them. *Local.*"""
    for owner in module.modules():
        if _has_meta(owner):
            _initialise(owner, device)


def _has_meta(owner: nn.Module) -> bool:
    tensors = (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
    return any(t.is_meta for t in tensors)


def _initialise(owner: nn.Module, device: torch.device) -> None:
    _to_empty(owner, device)
    reset = owner.reset_parameters
    assert callable(reset)
    with torch.no_grad():
        reset()


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
