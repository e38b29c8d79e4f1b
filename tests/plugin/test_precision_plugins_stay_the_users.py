from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn

from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.plugin import checks
from lightning_zeroplus.plugin.precision import GradientRoute, fit_to_device, wide_weights


class Engine:
    """Notes what is asked of it."""

    def __init__(self, overflow: bool = False) -> None:
        self.asked: list[Any] = []
        self.overflow = overflow

    def clip_grad_norm_(self, params: Any, max_norm: float) -> None:
        self.asked.append(("norm", len(params), max_norm))

    def clip_grad_value_(self, params: Any, value: float) -> None:
        self.asked.append(("value", len(params), value))

    def unscale_gradients_(self, params: Any, inverse_scale: float) -> bool:
        self.asked.append(("unscale", len(params), inverse_scale))
        return self.overflow


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


class Mine(MixedPrecision):
    pass


def test_a_guessed_device_is_corrected() -> None:
    fixed = fit_to_device(MixedPrecision("bf16-mixed", "cuda"), "cpu")
    assert type(fixed) is MixedPrecision
    assert fixed.device == "cpu"


def test_a_loss_scale_for_another_device_is_made_again_with_its_settings() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    scaler._device = "xpu"
    fixed = fit_to_device(MixedPrecision("16-mixed", "xpu", scaler), "cpu")
    assert isinstance(fixed, MixedPrecision)
    assert fixed.scaler is not None
    assert fixed.scaler._device == "cpu"
    assert (fixed.scaler.get_scale(), fixed.scaler.get_growth_interval()) == (8.0, 7)


def test_a_plugin_of_the_users_own_class_stays_the_same_object() -> None:
    plugin = Mine("bf16-mixed", "cuda")
    assert fit_to_device(plugin, "cpu") is plugin
    assert plugin.device == "cpu"


def test_a_users_plugin_with_a_loss_scale_for_another_device_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler._device = "xpu"
    with pytest.raises(ConfigError, match=r"got one on xpu \(Mine\)"):
        fit_to_device(Mine("16-mixed", "cpu", scaler), "cpu")


@pytest.mark.parametrize("plugin", [Precision(), HalfPrecision(), DoublePrecision()])
def test_plugins_without_a_device_are_left_alone(plugin: Precision) -> None:
    assert fit_to_device(plugin, "cpu") is plugin


def test_clipping_goes_to_the_engine_while_the_route_is_open() -> None:
    engine, plugin = Engine(), Precision()
    route = GradientRoute(plugin, engine)  # type: ignore[arg-type]
    plugin.clip_gradients(optimizer(), 0.5, "norm")  # type: ignore[arg-type]
    plugin.clip_gradients(optimizer(), 0.25, "value")  # type: ignore[arg-type]
    plugin.clip_gradients(optimizer(), 0)
    assert engine.asked == [("norm", 2, 0.5), ("value", 2, 0.25)]
    route.close()
    assert vars(plugin) == {}


def test_methods_that_the_user_overrides_are_not_replaced() -> None:
    class Clips(Precision):
        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            self.clipped = clip_val

    engine, plugin = Engine(), Clips()
    GradientRoute(plugin, engine)  # type: ignore[arg-type]
    plugin.clip_gradients(optimizer(), 0.5)
    plugin.clip_gradients(optimizer(), 0.5, "value")  # type: ignore[arg-type]
    assert plugin.clipped == 0.5
    assert engine.asked == [("value", 2, 0.5)]


@pytest.mark.parametrize("overflow", [False, True])
def test_overflow_is_what_the_engine_says(overflow: bool) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    engine = Engine(overflow)
    GradientRoute(plugin, engine)  # type: ignore[arg-type]
    assert plugin.scaler is not None
    plugin.scaler.scale(torch.ones(1))
    stepped = optimizer()
    plugin.scaler.unscale_(stepped)
    plugin.scaler.step(stepped)
    plugin.scaler.update()
    assert engine.asked == [("unscale", 2, 0.25)]
    assert plugin.scaler.get_scale() == (2.0 if overflow else 4.0)


def test_a_loss_scale_that_searches_by_itself_is_refused() -> None:
    class Own(torch.amp.GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            pass

    plugin = MixedPrecision("16-mixed", "cpu", Own("cpu"))
    with pytest.raises(ConfigError, match=r"got .*Own, whose unscale_ looks at one rank"):
        GradientRoute(plugin, Engine())  # type: ignore[arg-type]


def test_only_what_was_narrowed_is_kept_wide() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, dtype=torch.bfloat16))
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    wide = wide_weights(module, HalfPrecision("bf16-true").convert_module)
    assert set(wide) == {"0.weight", "0.bias"}
    assert all(torch.equal(wide[name], values[name]) for name in wide)
    assert module[0].weight.dtype == torch.bfloat16
    assert wide_weights(module, DoublePrecision().convert_module) == {}


def test_a_precision_with_weights_of_its_own_is_refused() -> None:
    plugin = object.__new__(BitsandbytesPrecision)
    with pytest.raises(ConfigError, match="got BitsandbytesPrecision"):
        checks.refuse_precision(plugin)
