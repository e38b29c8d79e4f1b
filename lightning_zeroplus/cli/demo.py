"""The demo: a few launched runs, each a process tree of its own, and a table at the end.

Lightning starts the second process by running the first one's command line again, so a phase that
needs two processes must be a command of its own. Phases hand on small JSON files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning_zeroplus.cli.demo_table import STRATEGIES, format_table
from lightning_zeroplus.errors import ZeroPlusError

__all__ = ["DemoError", "run_demo"]

_PHASE_LIMIT_S = 900
_WORST_LOSS = 2.6
_SAME_LOSS = 1e-3


class DemoError(ZeroPlusError, RuntimeError):
    """A phase of the demo failed or gave a wrong result."""


def run_demo(*, folder: Path = Path("zeroplus-demo"), steps: int = 350, devices: int = 2) -> None:
    """Train, save, resume and measure a small GPT on the standard library's sources.

    Args:
        folder: where the checkpoint and the phases' results go.
        steps: optimizer steps of the training run.
        devices: CPU processes of the training run.

    Raises:
        DemoError: a phase failed, the loss is not below 2.6 nats per byte (of a run of 350 steps
            or more), or the resumed model is not the saved one.
    """
    if steps < 1 or devices < 1:
        raise DemoError(f"Expected steps and devices of 1 or more, got {steps} and {devices}.")
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    threads = max(1, (os.cpu_count() or 1) // devices)
    common = ["--folder", str(folder), "--steps", str(steps)]

    print(f"== Training at stage 3 on {devices} CPU processes", flush=True)
    _run_phase("train", [*common, "--devices", str(devices)], threads=threads)
    trained = _read(folder / "train.json")
    print(f"Validation loss {trained['val_loss']:.3f} nats per byte; guessing is 5.545.")

    print("\n== Resuming that checkpoint at stage 1 in 1 process", flush=True)
    _run_phase("resume", common, threads=threads)
    resumed = _read(folder / "resume.json")
    _check(trained, resumed, steps)
    print(
        f"Validation loss {resumed['loaded_val_loss']:.3f} right after loading, "
        f"{resumed['val_loss']:.3f} after {resumed['step'] - trained['step']} more steps. "
        f"It writes:\n\n{resumed['text']}\n"
    )

    print(f"== Measuring memory on {devices} CPU processes", flush=True)
    for strategy in STRATEGIES:
        arguments = ["--strategy", strategy, "--devices", str(devices)]
        _run_phase("measure", [*common, *arguments], threads=threads)
    measured = {
        strategy: [_read(path) for path in sorted(folder.glob(f"memory-{strategy}-rank*.json"))]
        for strategy in STRATEGIES
    }
    print(format_table(measured, world=devices))
    print(f"\nThe demo took {time.monotonic() - started:.0f} s; {folder / 'gpt.ckpt'} is kept.")


def _run_phase(name: str, arguments: list[str], *, threads: int) -> None:
    command = [sys.executable, "-m", "lightning_zeroplus.cli.demo_phases", name, *arguments]
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    try:
        status = subprocess.run(
            command, env=environment, timeout=_PHASE_LIMIT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"Phase `{name}` had not ended after {_PHASE_LIMIT_S} s.") from error
    if status != 0:
        raise DemoError(
            f"Phase `{name}` ended with status {status}; its own message stands above. "
            f"To see it alone, run: {' '.join(command)}"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DemoError(f"Expected the result {path}, got {error}.") from error
    return content


def _check(trained: dict[str, Any], resumed: dict[str, Any], steps: int) -> None:
    problems = []
    if steps >= 350 and not trained["val_loss"] < _WORST_LOSS:
        problems.append(f"a validation loss of {trained['val_loss']:.3f}, not below {_WORST_LOSS}")
    if not abs(resumed["loaded_val_loss"] - trained["val_loss"]) < _SAME_LOSS:
        problems.append(
            f"a loss of {resumed['loaded_val_loss']:.5f} after loading a model "
            f"that had {trained['val_loss']:.5f}"
        )
    if resumed["first_step"] != trained["step"]:
        problems.append(f"a resume at step {resumed['first_step']}, not {trained['step']}")
    if problems:
        raise DemoError(f"Expected the saved run to go on, got {'; '.join(problems)}.")
