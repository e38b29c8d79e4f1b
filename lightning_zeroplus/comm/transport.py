"""The seam between the engine and whatever carries its bytes.

A transport moves bytes between the ranks that share one model. It has two channels, each with an
order of its own: *weights* (gathers, in the order in which the graph needs them) and *gradients*
(reductions and small exchanges, in an order that is fixed whatever the graph does). They are kept
apart because a rank on which a parameter got no gradient launches its reductions later than its
peers, between other gathers.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from lightning_zeroplus.errors import CollectiveError

__all__ = ["Operation", "Tag", "Transport", "Work", "check_tags"]


class Operation(enum.IntEnum):
    """What a tag announces."""

    FORWARD = 1
    BACKWARD = 2
    PREFETCH = 3
    TOUCH = 4
    FULL = 5
    REDUCE = 6
    REFRESH = 7
    FINALIZE = 8
    STEP = 9
    NORM = 10
    IDLE = 11
    SETUP = 12


class Tag(NamedTuple):
    """Announces one engine operation, so that ranks which diverge are named instead of mixed."""

    sequence: int
    operation: Operation
    unit: int
    label: str = ""
    """Name for messages; a peer's is filled in from what both know."""

    detail: int = 0
    """Digest of what exactly is read, where that must be equal; 0 for whole units."""

    def agrees_with(self, other: Tag) -> bool:
        """Return whether both announce the same step of the same unit.

        Why a unit is gathered may differ between ranks (a touch here, a prefetch there).
        """
        return (self.sequence, self.unit, self.detail) == (
            other.sequence,
            other.unit,
            other.detail,
        )

    def __str__(self) -> str:
        name = self.label or (f"unit {self.unit}" if self.unit >= 0 else "")
        return f"#{self.sequence} {self.operation.name.lower()}{name and f' of {name}'}"


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the result may be used on the current stream.

        Raises:
            CollectiveError: a peer diverged, died, finished or stayed silent.
        """

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""


class Transport(ABC):
    """Bytes between ranks; every method is collective unless it says otherwise."""

    rank: int
    world_size: int
    sent_nbytes: int
    """Payload bytes that this rank has sent to others since it was made, by the ring law."""

    preferred_bucket_nbytes: int
    """Unit size for replicated weights."""

    least_unit_nbytes: int
    """Smaller blocks are merged up to this size at stage 3."""

    labels: list[str]
    """Names of units by number, for messages about peers."""

    @abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        """Start filling ``out`` ``[world * n]`` from each rank's ``shard`` ``[n]``, in rank order.

        ``shard`` may be this rank's part of ``out``. Tags are compared before `Work.wait` returns.
        """

    @abstractmethod
    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_numels: Sequence[int],
        source_numels: Sequence[int],
        tag: Tag,
    ) -> Work:
        """Start sending the r-th part of ``source`` to rank r; parts of ``out`` are by sender.

        Runs on the gradient channel. The caller compares headers that it put into the parts.
        """

    @abstractmethod
    def exchange(self, payload: Sequence[float], tag: Tag) -> list[list[float]]:
        """Return every rank's ``payload`` (float64, equal lengths), in rank order."""

    @abstractmethod
    def exchange_bytes(self, payload: bytes, tag: Tag) -> list[bytes]:
        """Return every rank's ``payload`` of any length, in rank order."""

    @abstractmethod
    def announce(self, tag: Tag) -> list[Tag]:
        """Return every rank's tag without comparing them (weights channel)."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        """Overwrite ``tensor`` (contiguous) with that of rank ``source``."""

    @abstractmethod
    def collect(self, shard: torch.Tensor, destination: int, tag: Tag) -> list[torch.Tensor] | None:
        """Return every rank's ``shard`` (1-D, any lengths, equal dtype) on ``destination``."""

    @abstractmethod
    def note(self, tag: Tag) -> None:
        """*Local.* Remember what this rank does, for peers that wait for it."""

    @abstractmethod
    def wait_for(self, tag: Tag, attempt: Callable[[float], bool], peer: int) -> None:
        """*Local.* Repeat ``attempt(seconds)``, which waits for ``peer``, until it returns True.

        Raises:
            CollectiveError: the peer finished or failed, or the time-out passed.
        """

    @abstractmethod
    def fail(self, message: str) -> None:
        """*Local.* Tell peers that this rank has failed, so that their waits end."""

    @abstractmethod
    def close(self) -> None:
        """*Local.* Say that this rank has finished and let go of threads and groups."""


def check_tags(tags: Sequence[Tag], mine: Tag, rank: int, labels: Sequence[str]) -> None:
    """Compare what each rank announced with what this one did.

    Raises:
        CollectiveError: they differ; the message names this rank's and the first other one.
    """
    for peer, tag in enumerate(tags):
        if not tag.agrees_with(mine):
            other = tag._replace(label=_label(labels, tag.unit))
            raise CollectiveError(
                f"Expected all ranks to act together, got rank {rank} at {mine} and rank {peer} "
                f"at {other}. Run the same modules and touch the same parameters on every rank, "
                f"or wrap the access in full_parameters(...) on every rank."
            )


def _label(labels: Sequence[str], unit: int) -> str:
    return labels[unit] if 0 <= unit < len(labels) else f"unit {unit}"
