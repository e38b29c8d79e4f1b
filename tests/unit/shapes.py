"""Strategies for layouts: sizes that cut badly, few ranks and many."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_zeroplus.layout import GradLayout, ParamSpec, WeightLayout
from lightning_zeroplus.layout.bucket import header_numel

__all__ = ["ALIGNMENT_NBYTES", "grad_layouts", "weight_layouts"]

ALIGNMENT_NBYTES = 128

_NUMELS = st.one_of(
    st.integers(0, 3), st.integers(0, 400), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129])
)
_ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
_WORLDS = st.integers(1, 9)


@st.composite
def weight_layouts(draw: st.DrawFn) -> WeightLayout:
    """Units of no to eight parameters, empty ones among them, on up to nine ranks."""
    numels = draw(st.lists(_NUMELS, max_size=8))
    specs = tuple(ParamSpec(f"p{n}", numel) for n, numel in enumerate(numels))
    return WeightLayout(specs, itemsize=draw(_ITEMSIZES), world_size=draw(_WORLDS))


@st.composite
def grad_layouts(draw: st.DrawFn) -> tuple[GradLayout, ...]:
    """The same unit's gradient layout on every rank; some parameters are frozen."""
    weights = draw(weight_layouts())
    trained = tuple(n for n in range(len(weights.params)) if draw(st.booleans()))
    itemsize = draw(_ITEMSIZES)
    header = header_numel(len(trained), weights.world_size, itemsize)
    ranks = range(weights.world_size)
    return tuple(GradLayout(weights, trained, itemsize, header, rank) for rank in ranks)
