"""Small modules with blocks, so that every part is a unit of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.local.access.scene import CLASSES, FEATURES

__all__ = ["WIDTH", "Block", "Net"]

WIDTH = 10


class Block(nn.Module):
    """A residual pair of linear maps; odd sizes, so that ranks own uneven parts."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Linear in, blocks, scaled linear out."""

    def __init__(self, block: type[nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.out = nn.Linear(WIDTH, CLASSES)

    def encode(self, x: Tensor) -> Tensor:
        """Everything but the head."""
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(x))
