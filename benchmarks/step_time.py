"""Step time or memory of stages 1, 2, 3 beside DDP and FSDP2, as a table.

    python benchmarks/step_time.py --model small --accumulate 1
    python benchmarks/step_time.py --model wide --memory

Timing runs all variants in one group of rank processes, a few steps at a time in turn, so that
what else the machine does meets them alike; trust the ratios, CPU and minimum first. `--memory`
gives every variant processes of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from memory import MALLOC_SETTINGS, measure_on_rank
from models import SHAPES
from ranks import run_ranks
from report import (
    MemoryRow,
    TimeRow,
    differing_losses,
    memory_rows,
    memory_table,
    time_table,
    timing_rows,
)
from timing import TimingOptions, time_on_rank
from variants import VARIANTS

# Timed rounds, steps of each variant in a round: 20 samples at least, in a few minutes.
ROUNDS = {("small", 1): (20, 5), ("small", 4): (10, 4), ("wide", 1): (8, 3), ("wide", 4): (10, 2)}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 when the variants' losses differ."""
    options = _parser().parse_args(arguments)
    title = (
        f"{options.model}, accumulate {options.accumulate}, {options.world} ranks, 1 thread each"
    )
    rows: list[MemoryRow] | list[TimeRow]
    if options.memory:
        rows = memory = _memory(options)
        table = memory_table(memory)
    else:
        rows = times = _timing(options)
        table = time_table(times)
    print(f"**{title}** (torch {torch.__version__})\n\n{table}")
    if options.json:
        record = {
            "title": title,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    different = differing_losses({row.variant: row.loss for row in rows})
    if different:
        print(f"\nLosses differ from {rows[0].variant}'s: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="small")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches in a window")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--world", type=int, default=2, help="rank processes")
    parser.add_argument("--rounds", type=int, help="timed rounds over all variants")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--steps", type=int, help="steps of one variant in a round")
    parser.add_argument("--memory", action="store_true", help="measure memory in place of time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return parser


def _timing(options: argparse.Namespace) -> list[TimeRow]:
    rounds, steps = ROUNDS.get((options.model, options.accumulate), (6, 2))
    chosen = TimingOptions(
        model=options.model,
        accumulate=options.accumulate,
        variants=tuple(options.variants),
        rounds=options.rounds or rounds,
        warmup=options.warmup,
        steps=options.steps or steps,
    )
    return timing_rows(run_ranks(options.world, time_on_rank, chosen))


def _memory(options: argparse.Namespace) -> list[MemoryRow]:
    measured = {}
    for variant in options.variants:
        for setting, environment in MALLOC_SETTINGS.items():
            measured[variant, setting] = run_ranks(
                options.world,
                measure_on_rank,
                options.model,
                options.accumulate,
                variant,
                options.steps or 4,
                environment=environment,
            )
    return memory_rows(measured)


if __name__ == "__main__":
    sys.exit(main())
