"""Step time against the number of units, of ranks and of parameters, as a table and a plot.

    python benchmarks/scaling.py --png scaling.png

Equal layers (a linear map with its bias), a unit each, fused AdamW. Every point trains DDP, the
plain model in every rank on its own, and the stages in turn in one group of processes. Times are
medians of processor time per step and rank. *Engine* is what a step takes longer than the plain
model's forward and backward, per unit, at a width where tensors are so small that what is left is
Python: the slope over the numbers of units, which leaves out what every step does once.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VARIANTS = ("plain", "ddp", "stage1", "stage2", "stage3")
UNITS = (8, 64, 256)
RANKS = (1, 2, 4)
WIDTHS = (64, 128, 256, 512)
TINY = 8
FIXED_UNITS, FIXED_WIDTH, FIXED_RANKS = 64, 128, 2


class Layer(nn.Linear):
    """One unit: 2 parameters, and its weight is what autograd saves of them."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where one measurement was made, and what it found."""

    sweep: str
    units: int
    width: int
    world: int
    cpu_s: dict[str, float]
    """Median processor seconds of a step by variant; the slowest rank's."""

    passes_s: dict[str, float]
    """The same without the update."""

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return self.units * (self.width + 1) * self.width


def on_rank(units: int, width: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return median processor seconds of a step, and of its passes alone, by variant."""
    from lightning_zeroplus import comm, zero
    from lightning_zeroplus.config import EngineConfig

    transport = comm.make_transport("auto", timeout=timedelta(minutes=5))
    batch = torch.randn(4, width)
    setups: dict[str, Any] = {}
    for name in VARIANTS:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(width, width) for _ in range(units)))
        engine, run = None, model
        if name == "ddp":
            run = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif name != "plain":
            config = EngineConfig(stage=int(name[-1]), units=("Layer",))
            engine = zero.shard(model, config, transport)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        if engine is not None:
            engine.attach(optimizer)
        setups[name] = (run, engine, optimizer)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    gc.collect()
    gc.freeze()
    for turn in range(rounds + 3):
        for name, setup in setups.items():
            dist.barrier()
            sample = _step(*setup, batch)
            if turn >= 3:
                found[name].append(sample)
    for _, engine, _ in setups.values():
        if engine is not None:
            engine.close()
    return {
        name: (median(s[0] for s in samples), median(s[1] for s in samples))
        for name, samples in found.items()
    }


def _step(run: nn.Module, engine: Any, optimizer: Any, batch: Tensor) -> tuple[float, float]:
    start = time.process_time()
    if engine is None:
        run(batch).sum().backward()
    else:
        with engine.forward_pass():
            loss = run(batch).sum()
        with engine.backward_pass():
            loss.backward()
    passed = time.process_time()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start, passed - start


def _measure(sweep: str, units: int, width: int, world: int, rounds: int) -> Point:
    rows = run_ranks(world, on_rank, units, width, rounds)
    slowest = {name: [max(row[name][n] for row in rows) for n in range(2)] for name in VARIANTS}
    return Point(
        sweep=sweep,
        units=units,
        width=width,
        world=world,
        cpu_s={name: values[0] for name, values in slowest.items()},
        passes_s={name: values[1] for name, values in slowest.items()},
    )


def engine_us(points: list[Point], variant: str) -> float:
    """Return microseconds per unit that ``variant`` adds to forward and backward: the slope."""
    rows = sorted((p.units, p.passes_s[variant] - p.passes_s["plain"]) for p in points)
    (few, short), (many, long) = rows[0], rows[-1]
    return (long - short) / (many - few) * 1e6


def _table(points: list[Point]) -> str:
    lines = [
        "| sweep | units | width | parameters | ranks | " + " | ".join(VARIANTS) + " |",
        "| --- " * (5 + len(VARIANTS)) + "|",
    ]
    for p in points:
        times = " | ".join(f"{p.cpu_s[name] * 1e3:.2f}" for name in VARIANTS)
        lines.append(
            f"| {p.sweep} | {p.units} | {p.width} | {p.parameters} | {p.world} | {times} |"
        )
    return "\n".join(lines)


def _plot(points: list[Point], png: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    sweeps = ("units", "ranks", "parameters")
    figure, axes = plt.subplots(1, len(sweeps), figsize=(13, 4), layout="constrained")
    for axis, sweep in zip(axes, sweeps, strict=True):
        of = sorted((p for p in points if p.sweep == sweep), key=lambda p: _abscissa(p))
        for name in VARIANTS:
            style = "--" if name in ("plain", "ddp") else "-"
            at, cpu_ms = [_abscissa(p) for p in of], [p.cpu_s[name] * 1e3 for p in of]
            axis.plot(at, cpu_ms, style, marker="o", markersize=3, label=name)
        axis.set(xlabel=sweep, ylabel="processor ms per step and rank", xlim=0, ylim=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(png, dpi=120)


def _abscissa(point: Point) -> int:
    return {"units": point.units, "ranks": point.world, "parameters": point.parameters}[point.sweep]


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write the plot; return 1 if the engine's time is above its target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--engine-only", action="store_true", help="skip the three sweeps")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the plot there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the points there as well")
    options = parser.parse_args(arguments)
    rounds = options.rounds
    tiny = [_measure("engine", n, TINY, FIXED_RANKS, 2 * rounds) for n in UNITS]
    points = []
    if not options.engine_only:
        points += [_measure("units", n, FIXED_WIDTH, FIXED_RANKS, rounds) for n in UNITS]
        points += [_measure("ranks", FIXED_UNITS, FIXED_WIDTH, n, rounds) for n in RANKS]
        points += [_measure("parameters", FIXED_UNITS, n, FIXED_RANKS, rounds) for n in WIDTHS]
    print(f"**Processor ms per step and rank** (torch {torch.__version__})\n")
    print(_table([*tiny, *points]))
    engine = {name: engine_us(tiny, name) for name in VARIANTS[1:]}
    print("\nEngine, microseconds per unit of 2 parameters and step, update not counted: ")
    print(", ".join(f"{name} {value:.1f}" for name, value in engine.items()))
    if options.png and points:
        _plot(points, options.png)
    if options.json:
        options.json.write_text(json.dumps([asdict(p) for p in [*tiny, *points]], indent=1) + "\n")
    return int(engine["stage3"] > 30 + 2)


if __name__ == "__main__":
    sys.exit(main())
