"""Stages as data: where a unit's tensors lie between their uses.

Collectives are placement transitions: Flat to Replicate is an all-gather, Partial to Flat a
reduce-scatter.

Source: ZeRO (Rajbhandari et al., 2020), section 5; the table form follows Megatron-FSDP.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["STAGES", "Placement", "StageRow"]


class Placement(enum.Enum):
    """How one tensor lies on one mesh axis."""

    REPLICATE = "replicate"
    """Every rank holds the whole tensor, equal everywhere."""

    PARTIAL = "partial"
    """Every rank holds a whole-size term; the tensor is their sum."""

    FLAT = "flat"
    """Every rank holds its own span of the flat tensor."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """Placements of one stage.

    >>> STAGES[1].weight is Placement.REPLICATE, STAGES[3].weight is Placement.FLAT
    (True, True)
    """

    weight: Placement
    """The model weight between its uses."""

    blocked_gradient: Placement
    """The gradient between microbatches while ``block_backward_sync`` holds."""

    master: Placement = Placement.FLAT
    """Master weight and optimizer state."""


STAGES: dict[int, StageRow] = {
    1: StageRow(weight=Placement.REPLICATE, blocked_gradient=Placement.PARTIAL),
    2: StageRow(weight=Placement.REPLICATE, blocked_gradient=Placement.FLAT),
    3: StageRow(weight=Placement.FLAT, blocked_gradient=Placement.FLAT),
}
