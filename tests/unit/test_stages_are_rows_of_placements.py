"""The table of stages is that of the design."""

from __future__ import annotations

from typing import get_args

from lightning_zeroplus.config import Stage
from lightning_zeroplus.layout import STAGES, Placement

REPLICATE, PARTIAL, FLAT = Placement.REPLICATE, Placement.PARTIAL, Placement.FLAT


def test_each_stage_has_the_placements_of_the_design() -> None:
    table = {n: (row.weight, row.blocked_gradient, row.master) for n, row in STAGES.items()}
    assert table == {
        1: (REPLICATE, PARTIAL, FLAT),
        2: (REPLICATE, FLAT, FLAT),
        3: (FLAT, FLAT, FLAT),
    }


def test_every_stage_that_may_be_asked_for_has_a_row() -> None:
    assert set(STAGES) == set(get_args(Stage))
