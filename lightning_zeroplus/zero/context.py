"""What all parts of one engine share: the transport, the order of operations, the policies."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from lightning_zeroplus.comm.memory import memory_of
from lightning_zeroplus.comm.transport import Operation, Tag, Transport

__all__ = ["Context"]


class SettleWeights(Protocol):
    """Lets cached full weights of a unit go before its shard is used."""

    def __call__(self, unit: Any, *, writes: bool = False) -> None:
        """``writes``: the shard will be written."""


class Context:
    """One engine's transport and counters. Sequences are per channel and equal on all ranks."""

    def __init__(
        self, transport: Transport, device: torch.device, *, gathers_on_access: bool
    ) -> None:
        self.transport = transport
        self.memory = memory_of(transport, device)
        self.device = device
        self.gathers_on_access = gathers_on_access
        self.labels: list[str] = []
        self.evaluating = False
        """Gathers are announced first, so that ranks whose loop has ended can serve them."""
        self.is_gone = False
        """The run failed: what needs other ranks is lost."""
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._weights = 0
        self._gradients = 0
        self.settle: Callable[[], None] = lambda: None
        """Makes pending gradients right before they are read; set by the reducer."""

        self.unshard_for_touch: Callable[[Any, str], None] = _no_residency
        """Unshards a unit for an access under autograd; set by the residency."""

        self.is_in_forward: Callable[[Any], bool] = _never
        """Whether a module of a unit runs now, so that its full weights are there."""

        self.settle_weights: SettleWeights = _no_cache
        """Lets cached full weights of a unit go before its shard is used."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Ranks that share the model."""
        return self.transport.world_size

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of this engine for a moment, ``[numel]``, undefined. *Local.*"""
        found = self._scratch.get(dtype)
        if found is None or found.numel() < numel:
            with torch.inference_mode(False), torch.no_grad():
                found = torch.empty(numel, dtype=dtype, device=self.device)
            self._scratch[dtype] = found
        return found

    def label(self, unit: int) -> str:
        """Return the name of a unit for messages."""
        return self.labels[unit] if 0 <= unit < len(self.labels) else ""

    def weights_tag(self, operation: Operation, unit: int, exactly: str = "") -> Tag:
        """Return the next tag of the weights channel; ``exactly`` must be equal on all ranks."""
        self._weights += 1
        detail = zlib.crc32(exactly.encode()) if exactly else 0
        return Tag(self._weights, operation, unit, exactly or self.label(unit), detail)

    def gradients_tag(self, operation: Operation, unit: int = -1, label: str = "") -> Tag:
        """Return the next tag of the gradients channel."""
        self._gradients += 1
        return Tag(self._gradients, operation, unit, label or self.label(unit))

    @torch.no_grad()
    def gather_values(self, values: Sequence[float], unit: int, exactly: str) -> list[list[float]]:
        """Return every rank's few numbers; collective on the weights channel."""
        tag = self.weights_tag(Operation.TOUCH, unit, exactly)
        mine = torch.tensor(list(values), dtype=torch.float64)
        rows = torch.empty(mine.numel() * self.world_size, dtype=torch.float64)
        self.transport.all_gather(rows, mine, tag).wait()
        table: list[list[float]] = rows.view(self.world_size, -1).tolist()
        return table


def _never(unit: object) -> bool:
    """Stand-in where all weights are resident."""
    return False


def _no_cache(unit: object, *, writes: bool = False) -> None:
    """Stand-in where all weights are resident."""


def _no_residency(unit: object, name: str) -> None:
    """Stand-in where all weights are resident."""
