"""What sharding changes about precision plugins: their device, clipping, and loss scaling.

The plugin stays the user's object and class, so its state keeps its name in checkpoints and moves
between this strategy and DDP. Three things cannot be right on one rank's gradients alone: clipping,
the search for overflows, and master weights of a module that the plugin casts to a narrow type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.layout.names import plain_name
from lightning_zeroplus.zero import Engine

__all__ = ["GradientRoute", "fit_to_device", "wide_weights"]


def fit_to_device(plugin: Precision, device_type: str) -> Precision:
    """Return ``plugin`` so that its autocast and loss scale are for ``device_type``.

    Lightning guesses "cuda" when the accelerator was passed as an object or is not its own.

    Raises:
        ConfigError: a plugin of the user's own class has a loss scale for another device.
    """
    if not isinstance(plugin, MixedPrecision):
        return plugin
    scaler = plugin.scaler
    scaler_fits = scaler is None or _device_of(scaler) == device_type
    if plugin.device == device_type and scaler_fits:
        return plugin
    if type(plugin) is MixedPrecision:
        if scaler is not None and not scaler_fits:
            scaler = _move_scaler(scaler, device_type)
        kind: Literal["16-mixed", "bf16-mixed"] = (
            "16-mixed" if plugin.precision == "16-mixed" else "bf16-mixed"
        )
        return MixedPrecision(kind, device_type, scaler)
    if scaler is not None and not scaler_fits:
        raise ConfigError(
            f"Expected a loss scale on {device_type}, got one on {_device_of(scaler)} "
            f"({type(plugin).__qualname__}). Pass scaler=torch.amp.GradScaler({device_type!r})."
        )
    plugin.device = device_type
    return plugin


def wide_weights(module: nn.Module, convert: Callable[[nn.Module], object]) -> dict[str, Tensor]:
    """Run ``convert`` on ``module`` and return what it narrowed: the weights as they were, by FQN.

    Weights on the meta device have no values and are left out.
    """
    before = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    convert(module)
    after = dict(module.named_parameters())
    return {
        plain_name(name): old
        for name, old in before.items()
        if name in after and torch.promote_types(old.dtype, after[name].dtype) != after[name].dtype
    }


class GradientRoute:
    """Sends a plugin's clipping and overflow search through the engine while a fit runs.

    Methods that the user's class overrides are left alone: they act on `p.grad`, whose norm,
    scaling and masking count over all ranks.

    Raises:
        ConfigError: the plugin's loss scale is of a class that searches gradients in its own way.
    """

    def __init__(self, plugin: Precision, engine: Engine) -> None:
        self._engine = engine
        self._routed: list[tuple[object, str]] = []
        for name, ours in (
            ("clip_grad_by_norm", self._clip_by_norm),
            ("clip_grad_by_value", self._clip_by_value),
        ):
            if getattr(type(plugin), name) is getattr(Precision, name):
                self._route(plugin, name, ours)
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            _refuse_foreign_scaler(scaler)
            self._route(scaler, "_unscale_grads_", self._unscale)

    def close(self) -> None:
        """Give the plugin its own methods back."""
        for target, name in self._routed:
            vars(target).pop(name, None)
        self._routed.clear()

    def _route(self, target: object, name: str, ours: Callable[..., Any]) -> None:
        setattr(target, name, ours)
        self._routed.append((target, name))

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._engine.clip_grad_norm_(_parameters(optimizer), float(clip_val))

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self._engine.clip_grad_value_(_parameters(optimizer), float(clip_val))

    def _unscale(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Stand in for `GradScaler._unscale_grads_`; all ranks find the same."""
        overflow = self._engine.unscale_gradients_(_parameters(optimizer), float(inv_scale))
        found_inf.fill_(float(overflow))
        return {found_inf.device: found_inf}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _refuse_foreign_scaler(scaler: torch.amp.GradScaler) -> None:
    for name in ("unscale_", "_unscale_grads_", "step"):
        ours = getattr(torch.amp.GradScaler, name, None)
        if ours is None or getattr(type(scaler), name, None) is not ours:
            raise ConfigError(
                f"Expected a torch.amp.GradScaler, got {type(scaler).__qualname__}, whose {name} "
                f"looks at one rank's gradients. Pass scaler=torch.amp.GradScaler(device)."
            )


def _device_of(scaler: torch.amp.GradScaler) -> str:
    return str(getattr(scaler, "_device", "cuda"))


def _move_scaler(scaler: torch.amp.GradScaler, device_type: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(
        device_type,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
