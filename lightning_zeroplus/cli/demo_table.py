"""The demo's table: what a rank keeps, measured, next to the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["COLUMNS", "STRATEGIES", "format_table"]

STRATEGIES = ("ddp", "stage_1", "stage_2", "stage_3")
COLUMNS = ("weights", "gradients", "optimizer_state")

_NAMES = {"ddp": "DDP", "stage_1": "stage 1", "stage_2": "stage 2", "stage_3": "stage 3"}
# Bytes per fp32 parameter with AdamW: (kept by every rank, shared out over the ranks). Gradients
# are those kept between microbatches; stage 1 has yet to reduce them into its shard then.
_FORMULAS = {
    "ddp": ((4, 0), (4, 0), (8, 0)),
    "stage_1": ((4, 0), (4, 4), (0, 8)),
    "stage_2": ((4, 0), (0, 4), (0, 8)),
    "stage_3": ((0, 4), (0, 4), (0, 8)),
}


def format_table(measured: Mapping[str, Sequence[Mapping[str, int]]], *, world: int) -> str:
    """Return the table for `measured[strategy][rank]`, bytes per role and `parameters`.

    Of several ranks the one that keeps the most is shown, per column.
    """
    parameters = measured["ddp"][0]["parameters"]
    header = ["", *(column.replace("_", " ") for column in COLUMNS), "sum"]
    rows = [header]
    for strategy in STRATEGIES:
        ranks = measured[strategy]
        found = [max(rank[column] for rank in ranks) for column in COLUMNS]
        cells = []
        for have, (whole, shared) in zip(found, _FORMULAS[strategy], strict=True):
            want = (whole + shared / world) * parameters
            parts = [f"{whole}P"] * bool(whole) + [f"{shared}P/{world}"] * bool(shared)
            cells.append(f"{have / 1e6:.2f} ({' + '.join(parts)} = {want / 1e6:.2f})")
        rows.append([_NAMES[strategy], *cells, f"{sum(found) / 1e6:.2f}"])
    widths = [max(len(row[n]) for row in rows) for n in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    peak = max(rank["unsharded_peak"] for rank in measured["stage_3"])
    title = (
        f"MB per rank, measured (formula); P = {parameters:,} fp32 parameters, AdamW, "
        f"{world} processes, gradients as kept between microbatches:"
    )
    note = f"Stage 3 also had up to {peak / 1e6:.2f} MB of weights unsharded at a time."
    if not peak:
        note = "At stage 3 the processes read each other's parts of the weights where they lie."
    return "\n".join([title, "", *lines, "", note])
