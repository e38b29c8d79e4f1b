"""The demo's table: what a rank keeps, measured, next to the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["COLUMNS", "STRATEGIES", "format_table"]

STRATEGIES = ("ddp", "stage_1", "stage_2", "stage_3")
COLUMNS = ("weights", "gradients", "optimizer_state")

_NAMES = {"ddp": "DDP", "stage_1": "stage 1", "stage_2": "stage 2", "stage_3": "stage 3"}
# Bytes per fp32 parameter with AdamW, and whether the ranks share them out. Gradients are those
# kept between the microbatches of a window, where stage 1 has not reduced them yet.
_WIDTHS = (4, 4, 8)
_SHARDED = {
    "ddp": (False, False, False),
    "stage_1": (False, False, True),
    "stage_2": (False, True, True),
    "stage_3": (True, True, True),
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
        expected = [
            width * parameters / (world if sharded else 1)
            for width, sharded in zip(_WIDTHS, _SHARDED[strategy], strict=True)
        ]
        formulas = [
            f"{width}P/{world}" if sharded else f"{width}P"
            for width, sharded in zip(_WIDTHS, _SHARDED[strategy], strict=True)
        ]
        cells = [
            f"{have / 1e6:.2f} ({formula} = {want / 1e6:.2f})"
            for have, want, formula in zip(found, expected, formulas, strict=True)
        ]
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
    return "\n".join([title, "", *lines, "", note])
