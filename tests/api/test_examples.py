"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def run(folder: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_minimal_example_learns(tmp_path: Path) -> None:
    printed = run(tmp_path, "minimal.py")
    accuracy = float(printed.rpartition("accuracy ")[2].split()[0])
    assert accuracy > 0.8


def test_the_yaml_example_trains_with_overrides(tmp_path: Path) -> None:
    few = ["--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1"]
    overridden = "--trainer.strategy.init_args.stage=2"
    run(tmp_path, "train_cli.py", "fit", "-c", str(EXAMPLES / "gpt.yaml"), *few, overridden)


def test_a_printed_config_prints_itself_again(tmp_path: Path) -> None:
    first = run(tmp_path, "train_cli.py", "fit", "-c", str(EXAMPLES / "gpt.yaml"), "--print_config")
    strategy = yaml.safe_load(first)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_zeroplus.ZeroPlusStrategy"
    assert (strategy["init_args"]["stage"], strategy["init_args"]["units"]) == (3, ["Block"])
    (tmp_path / "printed.yaml").write_text(first)
    again = run(tmp_path, "train_cli.py", "fit", "-c", "printed.yaml", "--print_config")
    assert yaml.safe_load(again) == yaml.safe_load(first)
