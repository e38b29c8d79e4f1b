"""Rows and Markdown tables from what the ranks measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles

from memory import Memory
from timing import Samples

__all__ = [
    "MemoryRow",
    "TimeRow",
    "differing_losses",
    "memory_rows",
    "memory_table",
    "time_table",
    "timing_rows",
]

Figure = Callable[[Sequence[float]], float]

BASELINE = "ddp"
LOSS_RTOL = 5e-6  # 6 digits; a window's microbatches are summed in another order at stages 2 and 3


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """One variant; times in milliseconds, ratios to DDP in the same run."""

    variant: str
    samples: int
    wall_median_ms: float
    wall_min_ms: float
    wall_quartiles_ms: tuple[float, float]
    cpu_median_ms: float
    wall_median_ratio: float | None
    wall_min_ratio: float | None
    cpu_median_ratio: float | None
    interface_nbytes: float | None
    payload_nbytes: float | None
    loss: float


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One variant under one setting of malloc; bytes over base, the larger of the ranks."""

    variant: str
    malloc: str
    setup_rss_nbytes: int
    peak_rss_nbytes: int
    peak_pss_nbytes: int
    steady_pss_nbytes: int
    loss: float


def timing_rows(by_rank: Sequence[Mapping[str, Samples]]) -> list[TimeRow]:
    """Combine ranks: a step lasts as long as its slowest rank, CPU time is the ranks' mean."""
    wall = {
        name: [max(step) for step in zip(*(rank[name].wall_s for rank in by_rank), strict=True)]
        for name in by_rank[0]
    }
    cpu = {
        name: [mean(step) for step in zip(*(rank[name].cpu_s for rank in by_rank), strict=True)]
        for name in by_rank[0]
    }

    def ratio(samples: Mapping[str, list[float]], name: str, figure: Figure) -> float | None:
        return figure(samples[name]) / figure(samples[BASELINE]) if BASELINE in samples else None

    rows = []
    for name, samples in by_rank[0].items():
        low, _, high = quantiles(wall[name], n=4) if len(wall[name]) > 1 else [wall[name][0]] * 3
        rows.append(
            TimeRow(
                variant=name,
                samples=len(wall[name]),
                wall_median_ms=1e3 * median(wall[name]),
                wall_min_ms=1e3 * min(wall[name]),
                wall_quartiles_ms=(1e3 * low, 1e3 * high),
                cpu_median_ms=1e3 * median(cpu[name]),
                wall_median_ratio=ratio(wall, name, median),
                wall_min_ratio=ratio(wall, name, min),
                cpu_median_ratio=ratio(cpu, name, median),
                interface_nbytes=_median(samples.interface_nbytes),
                payload_nbytes=_median(samples.payload_nbytes),
                loss=samples.losses[-1],
            )
        )
    return rows


def memory_rows(measured: Mapping[tuple[str, str], Sequence[Memory]]) -> list[MemoryRow]:
    """Combine ranks: what the rank with the most needs."""
    return [
        MemoryRow(
            variant=variant,
            malloc=malloc,
            setup_rss_nbytes=max(rank.setup_rss_nbytes for rank in ranks),
            peak_rss_nbytes=max(rank.peak_rss_nbytes for rank in ranks),
            peak_pss_nbytes=max(rank.peak_pss_nbytes for rank in ranks),
            steady_pss_nbytes=max(rank.steady_pss_nbytes for rank in ranks),
            loss=ranks[0].loss,
        )
        for (variant, malloc), ranks in measured.items()
    ]


def time_table(rows: Sequence[TimeRow]) -> str:
    """Return a Markdown table; MB are 10^6 bytes."""
    head = (
        "variant|step ms (median)|vs DDP|min ms|vs DDP (min)|IQR ms|CPU ms/rank|vs DDP (CPU)"
        "|sent MB/step/rank (interface)|payload MB/step/rank (counted)|loss"
    )
    lines = [
        (
            row.variant,
            f"{row.wall_median_ms:.1f}",
            _number(row.wall_median_ratio),
            f"{row.wall_min_ms:.1f}",
            _number(row.wall_min_ratio),
            "{:.0f}-{:.0f}".format(*row.wall_quartiles_ms),
            f"{row.cpu_median_ms:.1f}",
            _number(row.cpu_median_ratio),
            _megabytes(row.interface_nbytes),
            _megabytes(row.payload_nbytes),
            f"{row.loss:.6f}",
        )
        for row in rows
    ]
    note = ""
    if rows:
        note = (
            f"\n{rows[0].samples} timed steps a variant, interleaved. The interface's figure counts"
            "\neverything on the loopback interface, other programs too."
        )
    return _table(head.split("|"), lines) + note


def memory_table(rows: Sequence[MemoryRow]) -> str:
    """Return a Markdown table of MB (10^6 bytes) per rank over base."""
    base = {row.malloc: row.peak_pss_nbytes for row in rows if row.variant == BASELINE}
    head = "variant|malloc|peak RSS MB|peak PSS MB|vs DDP|steady PSS MB|set-up peak RSS MB|loss"
    lines = [
        (
            row.variant,
            row.malloc,
            _megabytes(row.peak_rss_nbytes, 0),
            _megabytes(row.peak_pss_nbytes, 0),
            _number(row.peak_pss_nbytes / base[row.malloc] if row.malloc in base else None),
            _megabytes(row.steady_pss_nbytes, 0),
            _megabytes(row.setup_rss_nbytes, 0),
            f"{row.loss:.6f}",
        )
        for row in rows
    ]
    note = (
        "\nOver base, the larger rank. Peaks count from the second step on. glibc keeps blocks that"
        "\nwere freed and so shows more than is needed at once; the rows with a fixed"
        "\nMALLOC_MMAP_THRESHOLD_ have it hand them back. Base holds loaded code, the variant's own"
        "\nis counted: at the small model that is most of the figure."
    )
    return _table(head.split("|"), lines) + note


def differing_losses(losses: Mapping[str, float]) -> list[str]:
    """Return the names whose loss is not the first one's to 6 digits."""
    first = next(iter(losses.values()), 0.0)
    return [name for name, loss in losses.items() if not abs(loss - first) <= LOSS_RTOL * first]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _megabytes(nbytes: float | None, digits: int = 2) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.{digits}f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)
    )
