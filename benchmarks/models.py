"""The two models of the published figures: small GPTs that differ in width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "SHAPES", "Block", "Shape", "build", "token_batches"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one model and of the microbatch one rank trains on."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int


SHAPES = {
    # 2.45 M parameters in 150 tensors: what costs is the number of operations.
    "small": Shape(layers=12, width=128, heads=4, vocabulary=256, length=64, batch=4),
    # 45.8 M parameters in 78 tensors: what costs is memory traffic.
    "wide": Shape(layers=6, width=768, heads=12, vocabulary=2048, length=128, batch=2),
}


class Block(nn.Module):
    """Pre-norm transformer block, 12 parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Decoder; `forward(tokens [batch, length + 1])` returns the mean next-token loss, 0-d."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(shape: Shape, seed: int = 0) -> GPT:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(seed)
    return GPT(shape)


def token_batches(shape: Shape, rank: int, count: int) -> list[Tensor]:
    """Return `count` fixed microbatches `[batch, length + 1]` of int64, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    size = (shape.batch, shape.length + 1)
    return [torch.randint(shape.vocabulary, size, generator=generator) for _ in range(count)]
