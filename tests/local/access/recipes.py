"""Published training recipes that reach deep into parameters and gradients."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss
from torch.nn.utils import prune

from tests.local.access.models import Block, Net
from tests.local.access.scene import CLASSES, STEPS, Scene, case, train


@case("sharpness-aware minimisation")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    optimizer = scene.sgd(model.parameters())
    for step in range(STEPS):
        x, y = scene.batch(step)
        with scene.around_step():
            mse_loss(model(x), y).backward()
            with torch.no_grad():
                slopes = {p: p.grad for p in model.parameters() if p.grad is not None}
                norm = torch.stack([g.norm() for g in slopes.values()]).norm()
                climbs = {p: 0.05 * g / (norm + 1e-12) for p, g in slopes.items()}
                for p, climb in climbs.items():
                    p.add_(climb)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p, climb in climbs.items():
                    p.sub_(climb)
            optimizer.step()
            optimizer.zero_grad()
    scene.finish(model)


@case("meta-learning with one inner step", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        # The inner loss is one row each, so that ranks' means add up to the global one.
        def outer(row: Tensor, target: Tensor) -> Tensor:
            params = dict(model.named_parameters())
            inner = functional_call(model, params, (row[None],)).square().mean()
            slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            fast = {
                name: p - 0.1 * slope
                for (name, p), slope in zip(params.items(), slopes, strict=True)
            }
            return mse_loss(functional_call(model, fast, (row[None],))[0], target)

        rows = zip(x, y, strict=True)
        return torch.stack([outer(row, target) for row, target in rows]).mean()

    train(scene, model, loss)


@case("forces by autograd.grad inside forward")
def _(scene: Scene) -> None:
    class Potential(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.requires_grad_()
                energy = super().forward(x).square().sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    model = scene.model(Potential)
    train(scene, model, lambda x, y: mse_loss(model(x)[:, :CLASSES], y))


@case("norms of per-row gradients by vmap of grad")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def log(step: int) -> None:
        params = dict(model.named_parameters())

        def loss(weights: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
            return mse_loss(functional_call(model, weights, (row[None],))[0], target)

        slopes = vmap(grad(loss), in_dims=(None, 0, 0))(params, *scene.batch(step))
        for name, rows in slopes.items():
            scene.keep_mean(f"{step} {name}", rows.flatten(1).norm(dim=1).mean())

    train(scene, model, after_step=log)


@case("pruned weights")
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        for block in model.blocks:
            prune.l1_unstructured(block.up, "weight", amount=0.3)
        return model

    train(scene, scene.model(make))


@case("weight_norm by hooks")
def _(scene: Scene) -> None:
    def make() -> Net:
        model = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the parametrization replaces it
            for block in model.blocks:
                nn.utils.weight_norm(block.up)
        return model

    train(scene, scene.model(make))


@case("bfloat16 autocast over several forwards", tolerance=2e-2)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                teacher = model(x + 1)
            out = model(x) + 0.1 * model(-x)
        return mse_loss(out.float(), y + 0.1 * teacher.float())

    train(scene, model, loss)


@case("conflicting gradients projected by hand")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    optimizer = scene.sgd(model.parameters())
    for step in range(STEPS):
        x, y = scene.batch(step)
        with scene.around_step():
            tasks: list[dict[nn.Parameter, Tensor]] = []
            for target in (y, -y):
                optimizer.zero_grad()
                mse_loss(model(x), target).backward()
                tasks.append({p: p.grad.clone() for p in model.parameters() if p.grad is not None})
            with torch.no_grad():
                for p in model.parameters():
                    first, second = tasks[0][p], tasks[1][p]
                    dot = (first * second).sum()
                    p.grad = first + second - dot.clamp(max=0) * second / second.square().sum()
            optimizer.step()
    scene.finish(model)


@case("noise added to gradients, and gradients scaled by weights")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def edit() -> None:
        noise = torch.Generator().manual_seed(5)
        for p in model.parameters():
            if p.grad is None:
                raise AssertionError("no gradient")
            p.grad.add_(torch.randn(p.shape, generator=noise), alpha=0.01)
            p.grad.addcmul_(p.grad, p.detach(), value=0.1)
            p.grad = p.grad * 0.9

    train(scene, model, before_step=edit)


@case("slow weights that follow every second step")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    slow = [p.detach().clone() for p in model.parameters()]

    def follow(step: int) -> None:
        if step % 2:
            with torch.no_grad():
                for p, kept in zip(model.parameters(), slow, strict=True):
                    kept += 0.5 * (p - kept)
                    p.copy_(kept)

    train(scene, model, after_step=follow)


@case("layers dropped at random, alike on all ranks")
def _(scene: Scene) -> None:
    class Dropping(Net):
        def __init__(self) -> None:
            super().__init__(Block, 4)
            self.drawn = torch.Generator().manual_seed(1)

        def encode(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                if torch.rand((), generator=self.drawn) > 0.4:
                    x = block(x)
            return x * self.scale

    train(scene, scene.model(Dropping))
