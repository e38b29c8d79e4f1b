"""Checkpoints to convert, small but with everything in them, and a comparison that lists all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole

__all__ = ["contents", "differences", "make", "peak_growth_mb"]


def make() -> dict[str, Any]:
    """Lightning's dictionary by name: odd shapes, a tied weight, a frozen one, buffers."""
    source = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    weights: dict[str, Tensor] = {
        "embed.weight": random(5, 3),
        "conv.weight": random(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conv.bias": random(2).bfloat16(),
        "scale": random(),
        "frozen": random(7),
        "empty": torch.empty(0, 3),
        "norm.mean": random(2),
        "norm.seen": torch.tensor(4),
        "other.seen": torch.tensor(4),
        "mask": torch.tensor([True, False]),
        "spectrum": torch.view_as_complex(random(3, 2)),
    }
    weights["head.weight"] = weights["embed.weight"]
    trained = ["embed.weight", "conv.weight", "conv.bias", "scale"]
    state = {
        name: {
            "step": torch.tensor(6.0),
            "exp_avg": random(*weights[name].shape),
            "exp_avg_sq": random(*weights[name].shape).abs(),
        }
        for name in trained[:3]
    }
    return {
        "epoch": 2,
        "global_step": 6,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": weights,
        "optimizer_states": [
            {
                "state": state,
                "param_groups": [
                    {"lr": 0.1, "betas": (0.9, 0.95), "params": trained[1:3]},
                    {"lr": 0.02, "betas": (0.9, 0.95), "params": ["embed.weight", "scale"]},
                ],
            }
        ],
        "lr_schedulers": [{"last_epoch": 6}],
        "callbacks": {"EMA": {"shadow": [random(90, 60), random(2)], "decay": 0.99}},
        "model": {"note": random(80, 80)},
        "hyper_parameters": {"width": 3},
    }


def contents(path: str | Path) -> dict[str, Any]:
    """Return what is at ``path``, in memory, without what is ours."""
    found = read_whole(read_checkpoint(path))
    found.pop("zeroplus", None)
    return found  # type: ignore[no-any-return]


def differences(got: Any, wanted: Any, at: str = "") -> list[str]:
    """Return where two trees differ: in keys, kinds, dtypes, shapes or bits of tensors."""
    return list(_differences(got, wanted, at))


def _differences(got: Any, wanted: Any, at: str) -> Iterator[str]:
    if isinstance(wanted, Tensor):
        if not isinstance(got, Tensor) or (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            yield f"{at}: {got!r} instead of {wanted!r}"
        elif not torch.equal(got, wanted):
            yield f"{at}: other values"
    elif isinstance(wanted, dict):
        if not isinstance(got, dict) or set(got) != set(wanted):
            keys = sorted(map(str, set(got) ^ set(wanted))) if isinstance(got, dict) else got
            yield f"{at}: {keys}"
            return
        for key, value in wanted.items():
            yield from _differences(got[key], value, f"{at}.{key}")
    elif isinstance(wanted, list | tuple):
        if type(got) is not type(wanted) or len(got) != len(wanted):
            yield f"{at}: {got!r} instead of {wanted!r}"
            return
        for n, value in enumerate(wanted):
            yield from _differences(got[n], value, f"{at}[{n}]")
    elif got != wanted:
        yield f"{at}: {got!r} instead of {wanted!r}"


_MEASURE = """
import sys
from lightning_zeroplus.checkpoint import *
import torch

def peak_mb():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

source, target, warm = sys.argv[1:]
def act(source, target):
    {act}
torch.save({{"state_dict": {{"a": torch.zeros(10)}}}}, warm)
act(warm, warm + "-written")
open("/proc/self/clear_refs", "w").write("5")
before = peak_mb()
act(source, target)
print(peak_mb() - before)
"""


def peak_growth_mb(act: str, source: Path, target: Path) -> float:
    """Return by how much the peak of a process's memory grew while it ran ``act``."""
    program = _MEASURE.format(act=act)
    arguments = [str(source), str(target), str(target.with_name("warm.pt"))]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)
