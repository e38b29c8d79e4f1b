"""What each rank does in one training step, as a picture: what overlaps, and what is waited for.

    python benchmarks/step_trace.py step.png --variant stage3

Every rank profiles the same warm step on the clock that the ranks of one host share. A rank has two
rows for each of its threads: torch's operators (the outermost ones), and below them the engine's
ranges ``ZeroPlus::<verb> <unit>``. With ``--folder`` the traces themselves are kept, for
Perfetto or chrome://tracing. The plot needs matplotlib (the extra ``bench``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from models import SHAPES, token_batches
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile
from variants import VARIANTS, make_variant, train_step

WARM_STEPS = 5
PREFIX = "ZeroPlus::"
COLOURS = {
    "unshard": "tab:blue",
    "reduce": "tab:orange",
    "accumulate": "tab:red",
    "norm": "tab:purple",
    "update": "tab:green",
    "refresh": "tab:cyan",
    "meet": "tab:brown",
}
OPERATORS, OTHER = "lightgrey", "black"


@dataclass(frozen=True, kw_only=True)
class Range:
    """One named stretch of a thread's time, in microseconds of the host's clock."""

    name: str
    thread: int
    start_us: float
    end_us: float

    @property
    def verb(self) -> str:
        """What the engine does; empty for an operator of torch."""
        return self.name.removeprefix(PREFIX).split()[0] if self.name.startswith(PREFIX) else ""


def on_rank(variant: str, model: str, accumulate: int, folder: str) -> str:
    """Train a few steps, profile one more, and return the path of its trace."""
    shape = SHAPES[model]
    setup = make_variant(variant, shape)
    rank = dist.get_rank()
    batches = token_batches(shape, rank, accumulate)
    for _ in range(WARM_STEPS):
        train_step(setup, batches)
    # The first step under a profiler pays for its start, so the second one is shown.
    with profile(activities=[ProfilerActivity.CPU]):
        train_step(setup, batches)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train_step(setup, batches)
    path = Path(folder, f"rank{rank}.json")
    profiler.export_chrome_trace(str(path))
    return str(path)


def read_trace(path: Path) -> list[Range]:
    """Return the operators and ranges of a trace, by start."""
    trace = json.loads(path.read_text())
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    ranges = [
        Range(
            name=event["name"],
            thread=event["tid"],
            start_us=base_us + event["ts"],
            end_us=base_us + event["ts"] + event["dur"],
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
    ]
    return sorted(ranges, key=lambda r: (r.start_us, -r.end_us))


def outermost(ranges: Iterable[Range]) -> list[Range]:
    """Return those of one thread that no other contains; ``ranges`` come by start."""
    found: list[Range] = []
    for item in ranges:
        if not found or item.end_us > found[-1].end_us:
            found.append(item)
    return found


def seconds_by_verb(ranges: Iterable[Range]) -> dict[str, float]:
    """Return how long a rank was in the engine's ranges, ranges within one counted there only."""
    sums: dict[str, float] = {}
    by_thread: dict[int, list[Range]] = {}
    for item in ranges:
        if item.verb:
            by_thread.setdefault(item.thread, []).append(item)
    for items in by_thread.values():
        for item in outermost(items):
            sums[item.verb] = sums.get(item.verb, 0.0) + (item.end_us - item.start_us) / 1e6
    return sums


def _plot(ranks: Sequence[list[Range]], title: str, png: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    begin_us = min(ranges[0].start_us for ranges in ranks)
    rows = [
        (rank, number, [r for r in ranges if r.thread == thread])
        for rank, ranges in enumerate(ranks)
        for number, thread in enumerate(dict.fromkeys(r.thread for r in ranges))
    ]
    figure, axis = plt.subplots(figsize=(16, 1.2 + 1.1 * len(rows)), layout="constrained")
    labels = []
    for row, (rank, number, ranges) in enumerate(rows):
        labels.append(f"rank {rank}, thread {number}")
        bars = [(OPERATORS, outermost(r for r in ranges if not r.verb), 0.0)]
        for verb in dict.fromkeys(r.verb for r in ranges if r.verb):
            mine = [r for r in ranges if r.verb == verb]
            bars.append((COLOURS.get(verb, OTHER), mine, 0.4))
        for colour, items, below in bars:
            spans = [((r.start_us - begin_us) / 1e3, (r.end_us - r.start_us) / 1e3) for r in items]
            axis.broken_barh(spans, (row + below - 0.4, 0.38), facecolors=colour)
    shown = [verb for verb in COLOURS if any(r.verb == verb for rank in ranks for r in rank)]
    axis.legend(
        handles=[
            Patch(color=OPERATORS, label="operators of torch"),
            *(Patch(color=COLOURS[verb], label=verb) for verb in shown),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25),
        ncols=len(COLOURS) + 1,
    )
    axis.set(title=title, xlabel="ms", yticks=range(len(rows)), yticklabels=labels)
    axis.invert_yaxis()
    figure.savefig(png, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Profile, print how long each rank was in which of the engine's ranges, and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("png", type=Path, help="where to write the picture")
    parser.add_argument("--model", choices=sorted(SHAPES), default="small")
    parser.add_argument("--variant", choices=VARIANTS, default="stage3")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches in a window")
    parser.add_argument("--world", type=int, default=2, help="rank processes")
    parser.add_argument("--folder", type=Path, help="keep the ranks' traces there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        run = (options.variant, options.model, options.accumulate, str(folder))
        paths = run_ranks(options.world, on_rank, *run)
        ranks = [read_trace(Path(path)) for path in paths]
    start_us = min(ranges[0].start_us for ranges in ranks)
    for rank, ranges in enumerate(ranks):
        whole_ms = (max(r.end_us for r in ranges) - start_us) / 1e3
        parts = ", ".join(f"{verb} {s * 1e3:.2f}" for verb, s in seconds_by_verb(ranges).items())
        print(f"rank {rank}: {whole_ms:.2f} ms under the profiler; {parts or 'no ranges of ours'}")
    title = f"{options.variant}, {options.model}, {options.accumulate} microbatch(es)"
    _plot(ranks, f"{title}, torch {torch.__version__}", options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
