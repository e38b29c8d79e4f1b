"""Peak and steady memory of one variant, in rank processes of its own."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from models import GPT, SHAPES, Shape, build, token_batches
from torch import Tensor, nn
from variants import make_variant, train_step

__all__ = ["MALLOC_SETTINGS", "Memory", "measure_on_rank"]

# glibc keeps freed blocks below its mmap threshold, which it raises up to 32 MB by itself; a fixed
# one hands them back, so that the peak is what the variant needs at once.
MALLOC_SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "mmap 256 KB": {"MALLOC_MMAP_THRESHOLD_": "262144"},
}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank above what an equal process held before the variant was made."""

    setup_rss_nbytes: int
    peak_rss_nbytes: int
    peak_pss_nbytes: int
    steady_pss_nbytes: int
    loss: float


def measure_on_rank(model: str, accumulate: int, name: str, steps: int) -> Memory:
    """Train `steps` steps; PSS is sampled at every block, around backward and around the update."""
    shape = SHAPES[model]
    batches = token_batches(shape, dist.get_rank(), accumulate)
    _load_code()
    _trim()
    base_rss, base_pss = _rss(), _pss()
    _restart_peak_rss()
    setup = make_variant(name, shape)
    after_setup = _peak_rss()
    peak = _PeakPss()
    peak.attach(setup.model, setup.optimizer)
    loss = torch.zeros(())
    for step in range(steps):
        if step == 1:  # the first step makes the optimizer state and the buckets
            _restart_peak_rss()
            peak.restart()
        loss = train_step(setup, batches)
        peak.sample()
    peak_rss = _peak_rss()
    _trim()
    dist.barrier()
    steady = _pss()
    dist.barrier()
    dist.all_reduce(loss)
    return Memory(
        setup_rss_nbytes=after_setup - base_rss,
        peak_rss_nbytes=peak_rss - base_rss,
        peak_pss_nbytes=peak.nbytes - base_pss,
        steady_pss_nbytes=steady - base_pss,
        loss=float(loss) / dist.get_world_size(),
    )


class _PeakPss:
    """Largest PSS seen at its sampling points; it may miss what lies between them."""

    def __init__(self) -> None:
        self.nbytes = 0

    def restart(self) -> None:
        self.nbytes = 0

    def sample(self, *_: object) -> None:
        self.nbytes = max(self.nbytes, _pss())

    def attach(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        for module in (*model.blocks, model.norm, model.head):
            module.register_forward_hook(self._after_forward)
        optimizer.register_step_pre_hook(self.sample)
        optimizer.register_step_post_hook(self.sample)

    def _after_forward(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self.sample()
        if output.requires_grad:
            output.register_hook(self.sample)


def _load_code() -> None:
    """Run what every variant runs on a tiny model, so that the base has the code mapped."""
    shape = Shape(layers=1, width=32, heads=2, vocabulary=64, length=8, batch=2)
    model = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(token_batches(shape, 0, 1)[0]).backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(16))


def _pss() -> int:
    return int(psutil.Process().memory_full_info().pss)


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return _rss()


def _restart_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _trim() -> None:
    gc.collect()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
