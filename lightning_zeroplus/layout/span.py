"""Element ranges and the small integer arithmetic around them."""

from __future__ import annotations

from typing import NamedTuple

from lightning_zeroplus.errors import LayoutError

__all__ = ["Span", "round_up"]


class Span(NamedTuple):
    """Half-open element range ``[start, stop)``.

    >>> Span(2, 9).intersect(Span(5, 20))
    Span(start=5, stop=9)
    >>> Span(2, 5).intersect(Span(7, 9)).numel
    0
    >>> Span(7, 9).relative_to(5)
    Span(start=2, stop=4)
    """

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in the range, never negative."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Span) -> Span:
        """Return the common range; an empty one starts where it would lie in ``self``."""
        start = max(self.start, other.start)
        stop = min(self.stop, other.stop)
        if stop <= start:
            at = min(max(self.start, other.start), self.stop)
            return Span(at, at)
        return Span(start, stop)

    def relative_to(self, origin: int) -> Span:
        """Return the same range counted from ``origin``."""
        return Span(self.start - origin, self.stop - origin)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``value``.

    >>> round_up(0, 32), round_up(1, 32), round_up(32, 32)
    (0, 32, 32)

    Raises:
        LayoutError: ``multiple`` is below 1 or ``value`` below 0.
    """
    if multiple < 1 or value < 0:
        raise LayoutError(f"Expected value >= 0 and multiple >= 1, got {value} and {multiple}.")
    return -(-value // multiple) * multiple
