"""Kinds of modules: shared, recurrent, parametrized, compiled, of any output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss
from torch.nn.utils import parametrizations, parametrize

from tests.local.access.models import WIDTH, Block, Net
from tests.local.access.scene import CLASSES, FEATURES, Scene, case, train


@case("tied weights of two leaf modules")
def _(scene: Scene) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(2)])
            self.head = nn.Linear(WIDTH, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.table(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)[..., :CLASSES].mean(1)

    train(scene, scene.model(Tied), batch=lambda s: scene.batch(s, 5, classes=11))


@case("tied weights across blocks")
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        return model

    train(scene, scene.model(make))


@case("a whole block shared")
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        model.blocks[2] = model.blocks[0]
        return model

    train(scene, scene.model(make))


@case("a module called three times in one forward")
def _(scene: Scene) -> None:
    class Thrice(Net):
        def encode(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](x)) * self.scale

    train(scene, scene.model(Thrice))


@case("blocks called in an order that changes")
def _(scene: Scene) -> None:
    class Turning(Net):
        calls = 0

        def encode(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            self.calls += 1
            for n in range(3):
                x = self.blocks[(n * self.calls) % 3](x)
            return x * self.scale

    train(scene, scene.model(Turning))


@case("a block that is never used")
def _(scene: Scene) -> None:
    class Sparing(Net):
        def encode(self, x: Tensor) -> Tensor:
            return self.blocks[2](self.blocks[0](self.inp(x))) * self.scale

    train(scene, scene.model(Sparing))


@case("a block used in every second step")
def _(scene: Scene) -> None:
    class Skipping(Net):
        calls = 0

        def encode(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.inp(x))
            self.calls += 1
            return (self.blocks[1](x) if self.calls % 2 else x) * self.scale

    train(scene, scene.model(Skipping))


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body = kind(FEATURES, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(14, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0][:, -1])


@case("GRU")
def _(scene: Scene) -> None:
    model = scene.model(lambda: _Recurrent(nn.GRU))
    train(scene, model, batch=lambda s: scene.batch(s, 4, FEATURES))


@case("LSTM")
def _(scene: Scene) -> None:
    model = scene.model(lambda: _Recurrent(nn.LSTM))
    train(scene, model, batch=lambda s: scene.batch(s, 4, FEATURES))


@case("GRUCell in a loop")
def _(scene: Scene) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(FEATURES, 7)
            self.out = nn.Linear(7, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(x.shape[0], 7)
            for n in range(x.shape[1]):
                state = self.cell(x[:, n], state)
            return self.out(state)

    train(scene, scene.model(Loop), batch=lambda s: scene.batch(s, 4, FEATURES))


@case("blocks that return a dataclass")
def _(scene: Scene) -> None:
    @dataclass
    class Answer:
        hidden: Tensor
        penalty: Tensor

    class Answering(Block):
        def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
            hidden = super().forward(x)
            return Answer(hidden, hidden.square().mean())

    class Asking(Net):
        def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
            x = self.inp(x)
            penalty = x.new_zeros(())
            for block in self.blocks:
                answer = block(x)
                x, penalty = answer.hidden, penalty + answer.penalty
            return Answer(self.out(x * self.scale), penalty)

    model = scene.model(lambda: Asking(Answering))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        answer = model(x)
        return mse_loss(answer.hidden, y) + 0.01 * answer.penalty

    train(scene, model, loss)


@case("blocks that leave a second output on themselves")
def _(scene: Scene) -> None:
    class Leaving(Block):
        left: Tensor

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x))
            self.left = self.down(hidden).square().mean()
            return x + hidden[:, :WIDTH]

    model = scene.model(lambda: Net(Leaving))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = mse_loss(model(x), y)
        return value + 0.1 * sum(block.left for block in model.blocks)

    train(scene, model, loss)


@case("forwards without arguments and with keywords only")
def _(scene: Scene) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.linspace(-1, 1, WIDTH))

        def forward(self) -> Tensor:
            return self.rows.tanh()

    class Keyword(Block):
        def forward(self, *, hidden: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden)

    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__(Keyword)
            self.table = Table()

        def encode(self, x: Tensor) -> Tensor:
            x = self.inp(x) + self.table()
            for block in self.blocks:
                x = block(hidden=x)
            return x * self.scale

    train(scene, scene.model(Shifted))


@case("weight_norm by parametrization")
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        for block in model.blocks:
            parametrizations.weight_norm(block.up)
        return model

    train(scene, scene.model(make))


@case("weight_norm read in the loss", refused=True)
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        parametrizations.weight_norm(model.blocks[1].up)
        return model

    model = scene.model(make)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y) + 0.01 * model.blocks[1].up.weight.square().sum()

    train(scene, model, loss)


@case("parametrized weights cached over two forwards")
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        for block in model.blocks:
            parametrizations.weight_norm(block.up)
        return model

    model = scene.model(make)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            return mse_loss(model(x), y) + mse_loss(model(-x), y)

    train(scene, model, loss)


@case("spectral_norm by parametrization")
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        for block in model.blocks:
            parametrizations.spectral_norm(block.up)
        return model

    train(scene, scene.model(make))


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.weights = nn.ParameterList([torch.eye(WIDTH) * (n + 1) / 2 for n in range(2)])
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH), "gain": torch.ones(WIDTH)})
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for weight in self.weights:
            x = torch.tanh(linear(x, weight)) + x
        return self.out(x * self.named["gain"] + self.named["shift"])


@case("ParameterList and ParameterDict read by their owner", refused=True)
def _(scene: Scene) -> None:
    train(scene, scene.model(_Listed))


@case("ParameterList inside a block")
def _(scene: Scene) -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.eye(WIDTH) / (n + 2) for n in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.tanh(linear(x, weight))
            return x

    train(scene, scene.model(lambda: Net(Listing)))


@case("MultiheadAttention, which reads its child's weight", refused=True)
def _(scene: Scene) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
            self.out = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.mix(x, x, x, need_weights=False)[0].mean(1))

    train(scene, scene.model(Attending), batch=lambda s: scene.batch(s, 4, FEATURES))


@case("TransformerEncoder", tolerance=2e-5)
def _(scene: Scene) -> None:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(FEATURES, 2, 13, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2)
            self.out = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(x).mean(1))

    model = scene.model(Encoding)

    @torch.no_grad()
    def fast_path(step: int) -> None:
        model.eval()
        x, _ = scene.batch(step, 4, FEATURES)
        scene.keep_mean(f"output {step}", model(x).square().mean())
        model.train()

    train(scene, model, batch=lambda s: scene.batch(s, 4, FEATURES), after_step=fast_path)


@case("embedding with sparse gradients")
def _(scene: Scene) -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, FEATURES, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.table(x).mean(1))

    model = scene.model(Sparse)
    optimizer = scene.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    train(scene, model, optimizer=optimizer, batch=lambda s: scene.batch(s, 5, classes=11))
