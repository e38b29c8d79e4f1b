"""The demo tells failure from success, and its table compares like with like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zeroplus.cli import demo
from lightning_zeroplus.cli.__main__ import main
from lightning_zeroplus.cli.demo_table import STRATEGIES, format_table


def ranks(weights: int, gradients: int, optimizer_state: int) -> list[dict[str, int]]:
    smaller = {
        "parameters": 1_000_000,
        "weights": weights - 8,
        "gradients": gradients,
        "optimizer_state": optimizer_state,
        "unsharded_peak": 500_000,
    }
    return [smaller, {**smaller, "weights": weights}]


MEASURED = {
    "ddp": ranks(4_000_000, 4_000_000, 8_000_000),
    "stage_1": ranks(4_000_000, 6_000_000, 4_000_000),
    "stage_2": ranks(4_000_000, 2_000_000, 4_000_000),
    "stage_3": ranks(2_000_000, 2_000_000, 4_000_000),
}


def test_the_table_sets_what_was_measured_beside_the_formula() -> None:
    lines = format_table(MEASURED, world=2).splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells == [
        ["DDP", "4.00 (4P = 4.00)", "4.00 (4P = 4.00)", "8.00 (8P = 8.00)", "16.00"],
        ["stage 1", "4.00 (4P = 4.00)", "6.00 (4P + 4P/2 = 6.00)", "4.00 (8P/2 = 4.00)", "14.00"],
        ["stage 2", "4.00 (4P = 4.00)", "2.00 (4P/2 = 2.00)", "4.00 (8P/2 = 4.00)", "10.00"],
        ["stage 3", "2.00 (4P/2 = 2.00)", "2.00 (4P/2 = 2.00)", "4.00 (8P/2 = 4.00)", "8.00"],
    ]
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    assert "up to 0.50 MB of weights unsharded" in lines[-1]


def test_where_nothing_is_gathered_the_table_says_so() -> None:
    mapped = [{**row, "unsharded_peak": 0} for row in MEASURED["stage_3"]]
    last = format_table({**MEASURED, "stage_3": mapped}, world=2).splitlines()[-1]
    assert "read each other's parts" in last


def fake_phases(monkeypatch: pytest.MonkeyPatch, folder: Path, **changed: float) -> None:
    trained = {"val_loss": 2.0, "step": 350}
    resumed = {
        "loaded_val_loss": 2.0,
        "val_loss": 1.9,
        "first_step": 350,
        "step": 360,
        "text": "def f",
        **changed,
    }
    trained["val_loss"] = changed.get("trained_val_loss", 2.0)
    results = {"train.json": trained, "resume.json": resumed}
    for name in STRATEGIES:
        for rank, content in enumerate(MEASURED[name]):
            results[f"memory-{name}-rank{rank}.json"] = content

    def write(*_: object, **__: object) -> None:
        for name, content in results.items():
            (folder / name).write_text(json.dumps(content))

    monkeypatch.setattr(demo, "_run_phase", write)


def test_a_good_run_prints_text_and_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_phases(monkeypatch, tmp_path)
    assert main(["demo", "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "def f" in printed
    assert "| stage 3 " in printed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trained_val_loss": 2.7, "loaded_val_loss": 2.7}, "a validation loss of 2.700"),
        ({"loaded_val_loss": 2.1}, "a loss of 2.10000 after loading a model that had 2.00000"),
        ({"loaded_val_loss": float("nan")}, "a loss of nan after loading"),
        ({"first_step": 0}, "a resume at step 0, not 350"),
    ],
)
def test_a_wrong_result_ends_the_demo_with_status_1(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, float],
    message: str,
) -> None:
    fake_phases(monkeypatch, tmp_path, **changed)
    assert main(["demo", "--folder", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_a_failing_phase_ends_the_demo_with_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--folder", str(tmp_path)]) == 1
    assert "Phase `train` ended with status 1" in capsys.readouterr().err


def test_no_process_at_all_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--folder", str(tmp_path), "--devices", "0"]) == 1
    assert "Expected steps and devices of 1 or more" in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    assert "zeroplus demo --steps" in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_demo_runs_from_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_zeroplus.cli", "demo", "--steps", "4"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| stage 3 " in done.stdout
    assert (tmp_path / "zeroplus-demo" / "gpt.ckpt").is_dir()
