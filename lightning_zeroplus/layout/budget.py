"""How many bytes one rank holds at rest and at its peak, from layouts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_zeroplus.layout.bucket import ALIGNMENT_NBYTES, GradLayout, WeightLayout
from lightning_zeroplus.layout.placement import Placement, StageRow

__all__ = ["Budget", "UnitSizes", "budget_of", "in_flight"]

_IN_FLIGHT_NBYTES = 16 << 20
_MOST_IN_FLIGHT = 16


def in_flight(block_nbytes: int) -> int:
    """Return how many reductions are under way at a time, by the size of a bucket.

    One, if they are large; small ones must not make ranks wait for each other at each.

    >>> in_flight(28 << 20), in_flight(4 << 20), in_flight(100)
    (1, 4, 16)
    """
    return max(1, min(_MOST_IN_FLIGHT, _IN_FLIGHT_NBYTES // max(block_nbytes, 1)))


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """What the budget must know of one unit on one rank."""

    weights: WeightLayout
    gradients: GradLayout
    master_itemsize: int
    scattered: bool = False
    """Stays unsharded from its first use to the end of the pass; its gradients land all along."""

    @property
    def has_own_master(self) -> bool:
        """Whether masters are other tensors than the weights."""
        return self.master_itemsize != self.weights.itemsize


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes on one rank by role."""

    weights: int
    """Replicated weights, or shards."""

    unsharded: int
    """Blocks for full weights: those in use and those coming, as far as units are Flat."""

    arena: int
    """What resting weights point at; one per process."""

    masters: int
    accumulators: int
    buckets: int
    """Memory in which gradients land, travel and arrive."""

    landing: int
    """The largest gradient that autograd makes before it lands."""

    optimizer_state: int

    @property
    def at_rest(self) -> int:
        """Bytes between steps, without pooled blocks."""
        return self.weights + self.arena + self.masters + self.accumulators + self.optimizer_state

    @property
    def peak(self) -> int:
        """Most bytes at one time, in backward."""
        return self.at_rest + self.unsharded + self.buckets + self.landing


def budget_of(  # noqa: PLR0913  # each changes the sum
    units: Sequence[UnitSizes],
    row: StageRow,
    rank: int,
    *,
    prefetch: int = 1,
    states: int = 2,
    one_host: bool = False,
    arena_price: Callable[[int], int] = lambda nbytes: nbytes,
) -> Budget:
    """Return the bytes of ``rank``.

    Args:
        units: of the model.
        row: of the stage.
        rank: of which the bytes are.
        prefetch: units unsharded ahead of need.
        states: elementwise tensors per parameter in the optimizer's state, like the master.
        one_host: whether ranks read each other's memory: nothing is gathered, nothing arrives.
        arena_price: from the size of a block that rests to what the arena for it holds.

    >>> from lightning_zeroplus.layout import STAGES, ParamSpec
    >>> weights = WeightLayout((ParamSpec("w", 1024),), itemsize=4, world_size=2)
    >>> unit = UnitSizes(weights, GradLayout(weights, (0,), 4, 32, 0), master_itemsize=4)
    >>> whole, sharded = (budget_of([unit], STAGES[n], 0) for n in (1, 3))
    >>> whole.weights, sharded.weights, sharded.optimizer_state
    (4096, 2048, 4096)
    """
    resident = row.weight is Placement.REPLICATE
    trained = [u for u in units if u.gradients.trained]
    return Budget(
        weights=sum(
            u.weights.nbytes if resident else u.weights.shard_numel * u.weights.itemsize
            for u in units
        ),
        unsharded=0 if resident or one_host else _unsharded(units, prefetch),
        arena=0 if resident else arena_price(max((_block(u) for u in units), default=0)),
        masters=sum(u.weights.shard_numel * u.master_itemsize for u in units if u.has_own_master),
        accumulators=sum(u.gradients.body_numel(rank) * u.master_itemsize for u in trained),
        buckets=_buckets(trained, row, one_host=one_host),
        landing=max(
            (
                u.weights.params[n].numel * u.gradients.itemsize
                for u in trained
                for n in u.gradients.trained
            ),
            default=0,
        ),
        optimizer_state=sum(
            states * part.span.numel * u.master_itemsize
            for u in trained
            for part in u.gradients.parts
            if part.rank == rank
        ),
    )


def _block(unit: UnitSizes) -> int:
    return max(unit.weights.nbytes, ALIGNMENT_NBYTES)


def _unsharded(units: Sequence[UnitSizes], prefetch: int) -> int:
    pooled = [u for u in units if not u.scattered]
    at_once = min(len(pooled), 1 + prefetch)
    common = max((_block(u) for u in pooled), default=0)
    return at_once * common + sum(_block(u) for u in units if u.scattered)


def _buckets(trained: Sequence[UnitSizes], row: StageRow, *, one_host: bool) -> int:
    if not trained:
        return 0
    pooled = [u.gradients.nbytes for u in trained if not u.scattered]
    common = max(pooled, default=0)
    at_once = in_flight(common)
    if row.blocked_gradient is Placement.PARTIAL:
        sent = sum(u.gradients.nbytes for u in trained)
    else:
        # One lands while others travel; a scattered one lands beside them all along, and a unit
        # made by size may begin inside a module whose other parameters close the one before.
        split = row.weight is Placement.REPLICATE
        sent = min(len(pooled), 1 + at_once + split) * common
        sent += sum(u.gradients.nbytes for u in trained if u.scattered)
    arriving = 0 if one_host else max(u.gradients.arriving_nbytes for u in trained)
    return sent + min(at_once, len(trained)) * arriving
