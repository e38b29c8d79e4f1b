"""Graphs that are not one forward and one backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import linear, mse_loss
from torch.utils.checkpoint import checkpoint

from tests.local.access.models import Block, Net
from tests.local.access.scene import STEPS, Scene, case, expecting, train


@case("gradient of the input by torch.func.grad")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        slope = grad(lambda inner: model(inner).square().sum())(x)
        return mse_loss(model(x), y) + 0.01 * slope.square().mean()

    train(scene, model, loss)


@case("gradients of a dict of parameters by torch.func.grad")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def log(step: int) -> None:
        x, y = scene.batch(step)
        params = dict(model.named_parameters())
        found = grad(lambda w: mse_loss(functional_call(model, w, (x,)), y))(params)
        for name, value in found.items():
            scene.keep_mean(f"{step} {name}", value)

    train(scene, model, after_step=log)


@case("vmap over rows")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    train(scene, model, lambda x, y: mse_loss(vmap(model)(x), y))


# Levels of forward-mode differentiation are numbered per process.
@case("directional derivative by torch.func.jvp", in_threads=False)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out, change = jvp(model, (x,), (torch.ones_like(x),))
        return mse_loss(out, y) + 0.01 * change.square().mean()

    train(scene, model, loss)


def _checkpointing(reentrant: bool) -> type[Net]:
    class Checkpointed(Net):
        def encode(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x * self.scale

    return Checkpointed


@case("checkpointed blocks, not reentrant")
def _(scene: Scene) -> None:
    train(scene, scene.model(_checkpointing(reentrant=False)))


@case("checkpointed blocks, reentrant")
def _(scene: Scene) -> None:
    train(scene, scene.model(_checkpointing(reentrant=True)))


@case("checkpoint of bare references", refused=True)
def _(scene: Scene) -> None:
    class Bare(Net):
        def forward(self, x: Tensor) -> Tensor:
            def head(inner: Tensor) -> Tensor:
                return linear(torch.tanh(inner), self.out.weight, self.out.bias)

            return checkpoint(head, self.encode(x), use_reentrant=False)

    train(scene, scene.model(Bare))


@case("checkpoint of bare references, reentrant", refused=True)
def _(scene: Scene) -> None:
    class Bare(Net):
        def forward(self, x: Tensor) -> Tensor:
            def head(inner: Tensor) -> Tensor:
                return linear(torch.tanh(inner), self.out.weight, self.out.bias)

            return checkpoint(head, self.encode(x), use_reentrant=True)

    train(scene, scene.model(Bare))


@case("checkpoint of the whole model")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    train(scene, model, lambda x, y: mse_loss(checkpoint(model, x, use_reentrant=False), y))


@case("nested checkpoints")
def _(scene: Scene) -> None:
    model = scene.model(_checkpointing(reentrant=False))
    train(scene, model, lambda x, y: mse_loss(checkpoint(model, x, use_reentrant=False), y))


@case("double backward through all parameters")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = mse_loss(model(x), y)
        slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        # Linear in the slopes, so that ranks' means add up to the global one.
        return value + 0.1 * torch.stack([s.mean() for s in slopes]).sum()

    train(scene, model, loss)


@case("gradient penalty on the input")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    train(scene, model, loss)


@case("autograd.grad of the parameters")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def log(step: int) -> None:
        x, y = scene.batch(step)
        params = dict(model.named_parameters())
        slopes = torch.autograd.grad(mse_loss(model(x), y), list(params.values()))
        for name, slope in zip(params, slopes, strict=True):
            scene.keep_mean(f"{step} {name}", slope)

    train(scene, model, after_step=log)


@case("backward into some of the parameters")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    some = [*model.blocks[1].parameters(), model.out.weight]
    optimizer = scene.sgd(model.parameters())
    for step in range(STEPS):
        x, y = scene.batch(step)
        with scene.around_step():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward(inputs=some)
            optimizer.step()
    scene.finish(model)


@case("two backwards through a retained graph")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = mse_loss(model(x), y)
        value.backward(retain_graph=True)
        return value * 0.5

    train(scene, model, loss)


@case("two losses backwarded in the order of their forwards")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    optimizer = scene.sgd(model.parameters())
    for step in range(STEPS):
        with scene.around_step():
            optimizer.zero_grad()
            (x, y), (u, v) = scene.batch(step), scene.batch(step + 100)
            first, second = mse_loss(model(x), y), mse_loss(model(u), v)
            first.backward()
            second.backward()
            optimizer.step()
    scene.finish(model)


@case("a loss backwarded after another forward and backward")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        first = mse_loss(model(x), y)
        mse_loss(model(-x), y).backward()
        return first

    train(scene, model, loss)


@case("forwards and backwards in turn, one step for all")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    optimizer = scene.sgd(model.parameters())
    for step in range(STEPS):
        with scene.around_step():
            optimizer.zero_grad()
            for part in range(3):
                x, y = scene.batch(step * 10 + part)
                with scene.around_loss():
                    value = mse_loss(model(x), y) / 3
                value.backward()
            optimizer.step()
    scene.finish(model)


@case("a forward that raises, then going on")
def _(scene: Scene) -> None:
    class Moody(Block):
        raises = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x))
            if self.raises:
                raise ArithmeticError("asked to")
            return x + self.down(hidden)

    model = scene.model(lambda: Net(Moody))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        model.blocks[1].raises = True
        with expecting(ArithmeticError):
            model(x)
        model.blocks[1].raises = False
        return mse_loss(model(x), y)

    train(scene, model, loss)


@case("a backward that raises, then going on")
def _(scene: Scene) -> None:
    def refuse(slope: Tensor) -> Tensor:
        raise ArithmeticError("asked to")

    class Touchy(Block):
        raises = False

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.raises:
                out.register_hook(refuse)
            return out

    model = scene.model(lambda: Net(Touchy))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        model.blocks[1].raises = True
        value = mse_loss(model(x), y)
        with expecting(ArithmeticError):
            value.backward()
        model.blocks[1].raises = False
        for p in model.parameters():
            p.grad = None
        return mse_loss(model(x), y)

    train(scene, model, loss)


@case("inference_mode before and between steps")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def look(step: int) -> None:
        with torch.inference_mode():
            scene.keep_mean(f"output {step}", model(scene.batch(step)[0]).square().mean())

    look(-1)
    train(scene, model, after_step=look)


@case("no_grad forward inside the loss")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = model(x + 1)
        return mse_loss(model(x), y + 0.1 * teacher)

    train(scene, model, loss)
