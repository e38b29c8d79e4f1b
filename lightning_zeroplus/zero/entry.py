"""One parameter inside its unit: where its shard and its gradient are, and its class now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_zeroplus.comm.bucket import in_memory_order
from lightning_zeroplus.zero.model import ModelParam

if TYPE_CHECKING:
    from lightning_zeroplus.zero.grad_span import GradSpan
    from lightning_zeroplus.zero.unit import Unit

__all__ = ["Entry", "memory_order"]


class Entry:
    """One parameter inside its unit."""

    __slots__ = (
        "__weakref__",
        "counted_in",
        "fqn",
        "index",
        "is_awake",
        "lands_late",
        "model",
        "node",
        "param",
        "resting_class",
        "shard",
        "slot",
        "stashed",
        "unit",
        "valid",
        "version",
    )

    def __init__(self, model: ModelParam, unit: Unit, index: int) -> None:
        self.model = model
        self.fqn = model.fqn
        self.param: nn.Parameter = model.param
        self.unit = unit
        self.index = index
        self.slot: GradSpan | None = None
        self.stashed: torch.Tensor | None = None
        """What the slot held while the user's hooks see a gradient there."""
        self.lands_late = False
        """Whether the gradient is taken from the slot, after the user's hooks."""
        self.counted_in = -1
        """The backward in which it landed last."""
        self.is_awake = False
        """Whether the parameter of a Flat weight has the user's class now."""
        self.valid = False
        """Whether the accumulator holds this window's gradient."""
        self.shard: torch.Tensor | None = None
        """1-D master weights of the own span; what the optimizer steps on."""
        self.node: object = None
        self.version = 0
        self.resting_class: type | None = None

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.model.numel

    @property
    def local_name(self) -> str:
        """Name of the parameter in its owner."""
        return self.fqn.rpartition(".")[2]


def memory_order(tensor: torch.Tensor, like: ModelParam) -> torch.Tensor:
    """Return ``tensor`` (of the parameter's shape) as 1-D in the parameter's memory order."""
    return in_memory_order(tensor, like.shape, like.stride)
