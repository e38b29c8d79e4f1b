"""Small models whose sizes cut badly, for comparisons with plain PyTorch.

Uses nothing of the package under test. Weights come from a generator of their own, so that ranks
in threads of one process, which share the global one, build the same model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BLOCKS", "MODELS", "build", "microbatch"]


class Odd(nn.Module):
    """Odd widths and every odd parameter: 0-d, 1-element, zero-element, never used, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.middle = nn.Linear(13, 11, bias=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.shift = nn.Parameter(torch.empty(1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.empty(5, 3))
        self.frozen = nn.Parameter(torch.empty(11), requires_grad=False)
        self.outer = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.inner(x)))
        x = self.middle(x) * self.scale + self.shift + self.empty.sum()
        return self.outer(F.gelu(x * self.frozen))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)


class TiedBlock(nn.Module):
    """A repeated block of odd width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 17)
        self.down = nn.Linear(17, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tied(nn.Module):
    """Embedding tied to the head, repeated blocks, the last of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, 9)
        self.blocks = nn.ModuleList(TiedBlock(9) for _ in range(3))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, 19, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in (*self.blocks, self.blocks[-1]):
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Routed(nn.Module):
    """Two experts chosen by the data: in some microbatches a rank, or all, uses one only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        hidden = torch.tanh(self.gate(x))
        out = hidden.new_zeros(x.shape)
        for index, module in enumerate(self.experts):
            rows = (expert == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, module(hidden[rows]))
        return out

    def loss(self, x: Tensor, expert: Tensor) -> Tensor:
        return F.mse_loss(self(x, expert), x.flip(1))


class Dense(nn.Module):
    """Odd sizes, every parameter used in every microbatch: what plain DDP accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 61)
        self.norm = nn.LayerNorm(61)
        self.blocks = nn.ModuleList(nn.Linear(61, 61) for _ in range(3))
        self.outer = nn.Linear(61, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outer(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)


MODELS: dict[str, type[nn.Module]] = {"odd": Odd, "tied": Tied, "routed": Routed, "dense": Dense}

# Classes that make several units even of models as small as these.
BLOCKS: dict[str, tuple[str, ...] | None] = {
    "odd": ("Linear", "LayerNorm"),
    "tied": ("TiedBlock",),
    # A unit of its own could not be gathered for an expert that other ranks do not run.
    "routed": None,
    "dense": ("Linear",),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """Return the model with weights that depend on the seed only."""
    module = MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for fqn, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            center = 1.0 if fqn.endswith(("norm.weight", "scale", "frozen")) else 0.0
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(center + spread * noise)
    return module


def microbatch(name: str, rank: int, number: int, size: int) -> tuple[Tensor, ...]:
    """Return the arguments of the model's `loss` for one rank, `[size, ...]` each."""
    generator = torch.Generator().manual_seed(7919 * number + 31 * rank + 1)
    match name:
        case "odd" | "dense":
            return (
                torch.randn(size, 7, generator=generator),
                torch.randn(size, 3, generator=generator),
            )
        case "tied":
            return (torch.randint(19, (size, 6), generator=generator),)
        case "routed":
            # Number 0: all use expert 0. Then ranks take turns at being one-sided.
            both = torch.arange(size) % 2
            one_sided = number == 0 or number % 3 == rank % 3
            expert = both * 0 + (number % 2 if number else 0) if one_sided else both
            return torch.randn(size, 5, generator=generator), expert
    raise ValueError(name)
