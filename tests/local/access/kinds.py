"""Parameters of unusual shape, memory order or type."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from tests.local.access.models import WIDTH, Block, Net
from tests.local.access.scene import CLASSES, FEATURES, Scene, case, train


@case("convolutions in channels_last")
def _(scene: Scene) -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 5, 3, padding=1)
            self.blocks = nn.ModuleList([nn.Conv2d(5, 5, 3, padding=1) for _ in range(2)])
            self.out = nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.contiguous(memory_format=torch.channels_last))
            for block in self.blocks:
                x = torch.tanh(block(x))
            return self.out(x.mean((2, 3)))

    model = scene.model(lambda: Image().to(memory_format=torch.channels_last))
    if not model.first.weight.is_contiguous(memory_format=torch.channels_last):
        raise AssertionError("the memory order is lost")

    @torch.no_grad()
    def edit(step: int) -> None:
        model.first.weight.add_(torch.linspace(0, 0.01, 135).view(5, 3, 3, 3))

    train(scene, model, batch=lambda s: scene.batch(s, 3, 6, 6), after_step=edit)


@case("transposed weights")
def _(scene: Scene) -> None:
    class Transposed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight = nn.Parameter(self.up.weight.detach().t().contiguous().t())

    train(scene, scene.model(lambda: Net(Transposed)))


@case("complex weights")
def _(scene: Scene) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(FEATURES, WIDTH)
            self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.inp(x).to(torch.complex64) @ self.turn).abs())

    train(scene, scene.model(Complex))


class _Odd(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain) / 4 + self.one + self.empty.sum()


@case("0-d, one-element and empty parameters")
def _(scene: Scene) -> None:
    train(scene, scene.model(lambda: Net(_Odd)))


@case("0-d and empty parameters in the loss and in metrics", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(lambda: Net(_Odd))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y) + 0.1 * model.blocks[0].gain * model.blocks[1].gain

    @torch.no_grad()
    def log(step: int) -> None:
        scene.keep(f"gain {step}", model.blocks[0].gain.item())
        scene.keep(f"norm of nothing {step}", model.blocks[0].empty.norm())
        scene.keep(f"sum of nothing {step}", model.blocks[0].empty.sum())

    train(scene, model, loss, after_step=log)


@case("several types in one model")
def _(scene: Scene) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(FEATURES, WIDTH)
            self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
            self.steps = nn.Parameter(torch.arange(5), requires_grad=False)
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.wide(self.inp(x).double()) * self.gain + self.steps.sum()
            return self.out(x.float() / 10)

    train(scene, scene.model(Mixed))


@case("bfloat16 weights with fp32 masters", tolerance=0.05)
def _(scene: Scene) -> None:
    model = scene.model(lambda: Net().to(torch.bfloat16))
    train(scene, model, lambda x, y: mse_loss(model(x.bfloat16()).float(), y))


@case("the user's own class of parameters", refused=True)
def _(scene: Scene) -> None:
    class Tagged(nn.Parameter):
        tag = "mine"

        def double(self) -> Tensor:
            return self * 2

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight = Tagged(self.up.weight.detach())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(linear(x, self.up.weight.double(), self.up.bias)))

    model = scene.model(lambda: Net(Own))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        weight = model.blocks[0].up.weight
        if not isinstance(weight, Tagged) or weight.tag != "mine":
            raise AssertionError("the parameter lost its class")
        return mse_loss(model(x), y) + 0.01 * weight.double().square().sum()

    train(scene, model, loss)
