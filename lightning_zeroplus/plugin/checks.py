"""What cannot be right under this strategy, refused by name before anything is sharded."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.errors import ConfigError, name_offenders

__all__ = [
    "refuse_callbacks",
    "refuse_devices",
    "refuse_optimizers",
    "refuse_precision",
    "refuse_sync_batchnorm",
]

_DEVICE_TYPES = ("cpu", "cuda", "xpu")
_FOREIGN_PRECISION = (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)


def refuse_devices(devices: list[torch.device]) -> None:
    """Pass if all ``devices`` of this node are of one known type and there.

    Raises:
        ConfigError: some are not.
    """
    unknown = [str(d) for d in devices if d.type not in _DEVICE_TYPES]
    if unknown:
        raise ConfigError(
            f"Expected devices of type {', '.join(_DEVICE_TYPES)}, got {name_offenders(unknown)}. "
            f"Set the accelerator to one of these."
        )
    if len({d.type for d in devices}) > 1:
        raise ConfigError(
            f"Expected devices of one type, got {name_offenders(str(d) for d in devices)}. "
            f"Give every rank the same kind of device."
        )
    absent = [str(d) for d in devices if d.type != "cpu" and not _is_there(d)]
    if absent:
        raise ConfigError(
            f"Expected devices that this machine has, got {name_offenders(absent)}. "
            f"Lower devices, or leave parallel_devices out."
        )


def refuse_precision(plugin: Precision) -> None:
    """Pass unless ``plugin`` replaces or owns weights in a way that sharding would break.

    Raises:
        ConfigError: it does.
    """
    if isinstance(plugin, _FOREIGN_PRECISION):
        raise ConfigError(
            f"Expected a precision of 64-true, 32-true, 16-true, bf16-true, 16-mixed or "
            f"bf16-mixed, got {type(plugin).__qualname__}, which brings weights of its own kind. "
            f"Choose one of these."
        )


def refuse_sync_batchnorm(module: nn.Module, device: torch.device) -> None:
    """Pass unless ``module`` has a SyncBatchNorm that cannot train on ``device``.

    Raises:
        ConfigError: it has; torch runs it on accelerators only.
    """
    found = [name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if found and device.type == "cpu":
        raise ConfigError(
            f"Expected layers that train on the CPU, got SyncBatchNorm ({name_offenders(found)}). "
            f"Set sync_batchnorm=False, or use layers such as GroupNorm."
        )


def refuse_callbacks(trainer: Trainer) -> None:
    """Pass unless a callback would exchange the parameters that are sharded.

    Raises:
        ConfigError: one would.
    """
    found = [type(c).__qualname__ for c in _callbacks(trainer) if isinstance(c, ModelPruning)]
    if found:
        raise ConfigError(
            f"Expected callbacks that leave the set of parameters as it is, got "
            f"{name_offenders(found)}, which masks weights through parameters of other names. "
            f"Prune before or after the fit, or with strategy='ddp'."
        )


def refuse_optimizers(optimizers: list[Optimizer]) -> None:
    """Pass if all ``optimizers`` are torch's, not merely alike.

    Raises:
        ConfigError: some only look like one.
    """
    objects: list[object] = [*optimizers]
    found = [type(o).__qualname__ for o in objects if not isinstance(o, Optimizer)]
    if found:
        raise ConfigError(
            f"Expected torch.optim.Optimizer objects, got {name_offenders(found)}. "
            f"Derive the class from torch.optim.Optimizer."
        )


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set elsewhere
    return callbacks


def _is_there(device: torch.device) -> bool:
    module = torch.get_device_module(device.type)
    return bool(module.is_available()) and (device.index or 0) < module.device_count()
