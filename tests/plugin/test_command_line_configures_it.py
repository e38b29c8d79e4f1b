from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_zeroplus import ZeroPlusStrategy
from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO
from tests.plugin.scenes import Net

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: lightning_zeroplus.ZeroPlusStrategy
    init_args:
      stage: 3
      units: [Block]
      bucket_nbytes: 1000000
      master_dtype: fp32
      timeout: 0:10:00
      checkpoint_io:
        class_path: lightning_zeroplus.ZeroPlusCheckpointIO
"""


def strategy_of(*arguments: str, run: bool = False) -> Any:
    with mock.patch.object(sys, "argv", ["prog", *arguments]):
        cli = LightningCLI(Net, run=run, save_config_callback=None)
    return cli.trainer.strategy


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_yaml_sets_every_kind_of_argument(config: Path) -> None:
    strategy = strategy_of(f"--config={config}")
    assert type(strategy) is ZeroPlusStrategy
    assert strategy._config.stage == 3
    assert strategy._config.units == ("Block",)
    assert strategy._config.bucket_nbytes == 1_000_000
    assert strategy._config.master_dtype == "fp32"
    assert strategy._timeout == timedelta(minutes=10)
    assert type(strategy.checkpoint_io) is ZeroPlusCheckpointIO


def test_dotted_arguments_override_single_values(config: Path) -> None:
    strategy = strategy_of(
        f"--config={config}", "--trainer.strategy.stage=1", "--trainer.strategy.prefetch=2"
    )
    assert strategy._config.stage == 1
    assert strategy._config.prefetch == 2
    assert strategy._config.units == ("Block",)


def test_the_class_path_alone_works_on_the_command_line() -> None:
    strategy = strategy_of(
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.strategy=lightning_zeroplus.ZeroPlusStrategy",
        "--trainer.strategy.stage=3",
    )
    assert strategy._config.stage == 3


def test_a_registered_name_works_on_the_command_line() -> None:
    strategy = strategy_of(
        "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=zeroplus_stage_3"
    )
    assert strategy._config.stage == 3


def test_print_config_round_trips(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        strategy_of(f"--config={config}", "--trainer.strategy.stage=2", "--print_config")
    printed = capsys.readouterr().out
    strategy = yaml.safe_load(printed)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_zeroplus.ZeroPlusStrategy"
    assert strategy["init_args"]["stage"] == 2
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    with pytest.raises(SystemExit):
        strategy_of(f"--config={again}", "--print_config")
    assert capsys.readouterr().out == printed
    assert strategy_of(f"--config={again}")._config.stage == 2


def test_help_lists_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        strategy_of("--trainer.strategy.help=lightning_zeroplus.ZeroPlusStrategy")
    text = capsys.readouterr().out
    for name in ("stage", "units", "unused_gradients", "exclude_frozen_parameters", "timeout"):
        assert f"--trainer.strategy.{name}" in text
    assert "shards optimizer state, 2 gradients too, 3 weights too" in " ".join(text.split())
    assert "{1,2,3}" in text


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--trainer.strategy.stage=4", "stage"),
        ("--trainer.strategy.unused_gradients=drop", "unused_gradients"),
        ("--trainer.strategy.bogus=1", "bogus"),
    ],
)
def test_wrong_values_are_named(
    config: Path, argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        strategy_of(f"--config={config}", argument)
    assert message in capsys.readouterr().err
