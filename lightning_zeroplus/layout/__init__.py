"""Layout arithmetic in pure Python: placements, spans, packing, unit formation, budgets.

Nothing here imports torch; sizes are elements unless a name ends in ``_nbytes``.
"""

from lightning_zeroplus.layout.bucket import GradLayout, GradPart, ParamSpec, WeightLayout
from lightning_zeroplus.layout.budget import Budget, UnitSizes, budget_of
from lightning_zeroplus.layout.placement import STAGES, Placement, StageRow
from lightning_zeroplus.layout.span import Span

__all__ = [
    "STAGES",
    "Budget",
    "GradLayout",
    "GradPart",
    "ParamSpec",
    "Placement",
    "Span",
    "StageRow",
    "UnitSizes",
    "WeightLayout",
    "budget_of",
]
