from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_zeroplus.errors import ConfigError
from tests.plugin.scenes import ZeroPlusStrategy, make_trainer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, r"stage=4 \(one of 1, 2, 3\)"),
        ({"stage": "3"}, r"stage='3' \(one of 1, 2, 3\)"),
        ({"master_dtype": "float32"}, r"master_dtype='float32'"),
        ({"bucket_nbytes": 0}, "bucket_nbytes=0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"unused_gradients": "ignore"}, "unused_gradients='ignore'"),
        ({"unshard_on_access": "maybe"}, "unshard_on_access='maybe'"),
        ({"save_format": "both"}, "Expected save_format 'universal' or 'full', got 'both'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZeroPlusStrategy(**settings)


def test_arguments_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TypeError, match="find_unused_parameters"):
        ZeroPlusStrategy(find_unused_parameters=True)  # type: ignore[call-arg]


def test_the_users_list_is_not_kept() -> None:
    units = ["Block"]
    strategy = ZeroPlusStrategy(units=units)
    units.append("Other")
    assert strategy._config.units == ("Block",)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([torch.device("meta")], "Expected devices of type cpu, cuda, xpu, got meta"),
        ([torch.device("cpu"), torch.device("cuda", 0)], "Expected devices of one type"),
        ([torch.device("cuda", 100)], "Expected devices that this machine has, got cuda:100"),
    ],
    ids=str,
)
def test_devices_that_cannot_be_used_are_named(devices: list[torch.device], message: str) -> None:
    strategy = ZeroPlusStrategy(parallel_devices=devices)
    with pytest.raises(ConfigError, match=message):
        strategy.setup_environment()


def test_without_a_run_there_is_no_engine_and_the_error_says_when_there_is() -> None:
    with pytest.raises(RuntimeError, match="Expected a run under way, got none"):
        ZeroPlusStrategy().grad_norm()


def test_full_parameters_without_a_run_are_what_they_are() -> None:
    with ZeroPlusStrategy(stage=3).full_parameters():
        pass


def test_a_precision_plugin_or_io_may_come_from_the_trainer() -> None:
    """Lightning refuses what is set in both places, so the strategy sets nothing by itself."""
    from lightning.pytorch.plugins import TorchCheckpointIO
    from lightning.pytorch.plugins.environments import LightningEnvironment

    io = TorchCheckpointIO()
    trainer = make_trainer({}, 1, plugins=lambda: [io, LightningEnvironment()], precision="64-true")
    assert trainer.strategy.checkpoint_io is io
    assert type(trainer.precision_plugin).__name__ == "DoublePrecision"
