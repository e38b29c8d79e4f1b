"""Packing of one unit: the flat weight tensor and the gradient bucket that mirrors its spans.

Weights: every parameter starts on a 128-byte boundary and ranks split the flat tensor into equal
chunks on 128-byte boundaries, so that a full weight is a view and a gather needs no copy::

    flat   |--- w ---|pad|- b -|pad|--------- w2 ---------|pad|
    ranks  |------- rank 0 -------|------- rank 1 -------|

128 bytes, because torch's fused optimizers give other bits when a tensor is cut at an arbitrary
element (their vector loop and its tail round differently); at cuts of whole vectors they do not.

Gradients: a bucket holds only the parameters that need gradients, regrouped by owner, so that what
is sent to a rank is contiguous and ends in room for a header. The rank's own chunk comes first: it
is not sent, and what is sent is one contiguous piece. On rank 0::

    bucket |- w[0] -|- b -|- w2[0] -|head|- w2[1] -|head|
           |------- own chunk -----------|- for rank 1 -|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_zeroplus.errors import LayoutError
from lightning_zeroplus.layout.span import Span, round_up

__all__ = ["ALIGNMENT_NBYTES", "GradLayout", "GradPart", "ParamSpec", "WeightLayout"]

ALIGNMENT_NBYTES = 128


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What packing must know of one parameter."""

    fqn: str
    numel: int
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    """Shape and strides of the dense tensor; layout arithmetic itself needs neither."""


@dataclass(frozen=True)
class WeightLayout:
    """Where each parameter of a unit lies in its flat tensor of ``world_size`` equal chunks.

    >>> layout = WeightLayout((ParamSpec("w", 40), ParamSpec("b", 3)), itemsize=4, world_size=2)
    >>> layout.offsets, layout.shard_numel, layout.numel
    ((0, 64), 64, 128)
    >>> layout.owned(0, rank=0), layout.owned(1, rank=1)
    (Span(start=0, stop=40), Span(start=0, stop=3))

    Raises:
        LayoutError: a size that no layout has.
    """

    params: tuple[ParamSpec, ...]
    itemsize: int
    world_size: int
    offsets: tuple[int, ...] = field(init=False)
    shard_numel: int = field(init=False)

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.itemsize < 1:
            raise LayoutError(
                f"Expected world_size and itemsize of at least 1, "
                f"got {self.world_size} and {self.itemsize}."
            )
        if any(spec.numel < 0 for spec in self.params):
            raise LayoutError(f"Expected sizes of at least 0, got {self.params}.")
        align = self.alignment
        offsets: list[int] = []
        end = 0
        for spec in self.params:
            offsets.append(end)
            end = round_up(end + spec.numel, align)
        chunk = round_up(-(-end // self.world_size), align)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "shard_numel", chunk)

    @property
    def alignment(self) -> int:
        """Elements between allowed starts and cuts."""
        return max(1, ALIGNMENT_NBYTES // self.itemsize)

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, padding included."""
        return self.shard_numel * self.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor, padding included."""
        return self.numel * self.itemsize

    def chunk(self, rank: int) -> Span:
        """Return the range of the flat tensor that ``rank`` owns."""
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def extent(self, index: int) -> Span:
        """Return the range of the flat tensor that parameter ``index`` fills."""
        start = self.offsets[index]
        return Span(start, start + self.params[index].numel)

    def owned(self, index: int, rank: int) -> Span:
        """Return the range of parameter ``index``, from its own start, that ``rank`` owns."""
        start = self.offsets[index]
        return self.extent(index).intersect(self.chunk(rank)).relative_to(start)


@dataclass(frozen=True, slots=True)
class GradPart:
    """One rank's part of one parameter inside a gradient bucket."""

    index: int
    """Position of the parameter in the unit."""

    rank: int
    """Owner."""

    span: Span
    """Range of the parameter, from its own start."""

    offset: int
    """First element in the bucket."""


@dataclass(frozen=True)
class GradLayout:
    """Where gradients of the parameters ``trained`` of a unit land on ``rank``, by owner.

    ``header_numel`` elements follow each owner's chunk. Chunks differ in size.

    >>> weights = WeightLayout((ParamSpec("w", 40), ParamSpec("b", 3)), itemsize=4, world_size=2)
    >>> layout = GradLayout(weights, (0, 1), itemsize=4, header_numel=32, rank=1)
    >>> [(p.index, p.rank, p.span, p.offset) for p in layout.parts]
    [(1, 1, Span(start=0, stop=3), 0), (0, 0, Span(start=0, stop=40), 64)]
    >>> layout.chunk_numels, layout.chunk(0), layout.sent_numels
    ((96, 64), Span(start=64, stop=160), (96, 0))
    """

    weights: WeightLayout
    trained: tuple[int, ...]
    itemsize: int
    header_numel: int
    rank: int = 0
    parts: tuple[GradPart, ...] = field(init=False)
    chunk_numels: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        align = max(1, ALIGNMENT_NBYTES // self.itemsize)
        parts: list[GradPart] = []
        chunks = [0] * self.weights.world_size
        end = 0
        for rank in self.owners:
            start = end
            for index in self.trained:
                span = self.weights.owned(index, rank)
                if span.numel:
                    parts.append(GradPart(index, rank, span, end))
                    end = round_up(end + span.numel, align)
            end += self.header_numel
            chunks[rank] = end - start
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "chunk_numels", tuple(chunks))

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding and headers included."""
        return sum(self.chunk_numels)

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket, padding and headers included."""
        return self.numel * self.itemsize

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks in the order of their chunks: this one first."""
        others = (r for r in range(self.weights.world_size) if r != self.rank)
        return (self.rank, *others)

    @property
    def sent_numels(self) -> tuple[int, ...]:
        """Elements sent to each rank."""
        return tuple(0 if r == self.rank else n for r, n in enumerate(self.chunk_numels))

    @property
    def arriving_nbytes(self) -> int:
        """Bytes that arrive here from all others in one reduction, at most on any rank."""
        return (self.weights.world_size - 1) * max(self.chunk_numels) * self.itemsize

    def chunk(self, rank: int) -> Span:
        """Return the range of the bucket that goes to ``rank``, header included."""
        before = self.owners[: self.owners.index(rank)]
        start = sum(self.chunk_numels[r] for r in before)
        return Span(start, start + self.chunk_numels[rank])

    def body_numel(self, rank: int) -> int:
        """Return the elements of a rank's chunk without its header: the accumulator's size."""
        return self.chunk_numels[rank] - self.header_numel

    @cached_property
    def parts_of(self) -> dict[int, tuple[GradPart, ...]]:
        """Parts by parameter index, in span order; empty parameters map to ``()``."""
        found: dict[int, list[GradPart]] = {index: [] for index in self.trained}
        for part in sorted(self.parts, key=lambda p: p.rank):
            found[part.index].append(part)
        return {index: tuple(parts) for index, parts in found.items()}

    def accumulator_span(self, index: int, rank: int) -> Span:
        """Return where parameter ``index`` lies in the accumulator of ``rank``."""
        start = self.chunk(rank).start
        for part in self.parts_of.get(index, ()):
            if part.rank == rank:
                return Span(part.offset - start, part.offset - start + part.span.numel)
        return Span(0, 0)


def header_numel(param_count: int, world_size: int, itemsize: int) -> int:
    """Return the elements of a header: 24 bytes and a bit per parameter, 128-byte aligned.

    >>> header_numel(12, 2, 4)
    32
    """
    if world_size == 1:
        return 0
    return round_up(24 + -(-param_count // 8), ALIGNMENT_NBYTES) // itemsize


def pack_by_size(sizes_nbytes: Sequence[int], bound_nbytes: int) -> list[list[int]]:
    """Group consecutive items so that each group holds at most ``bound_nbytes``, or one item.

    >>> pack_by_size([5, 5, 5, 20, 1], 10)
    [[0, 1], [2], [3], [4]]
    """
    groups: list[list[int]] = []
    filled = 0
    for index, nbytes in enumerate(sizes_nbytes):
        if not groups or filled + nbytes > bound_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += nbytes
    return groups
