"""Weights read outside the forward of the module that owns them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.local.access.models import Net
from tests.local.access.scene import Scene, case, train


@case("plain training")
def _(scene: Scene) -> None:
    train(scene, scene.model(Net))


@case("weights in the loss, before forward", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        return mse_loss(model(x), y) + 0.01 * penalty

    train(scene, model, loss)


@case("weights in the loss, after forward", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = mse_loss(model(x), y)
        return value + 0.01 * model.out.weight.abs().sum() + 0.1 * model.blocks[1].up.weight.norm()

    train(scene, model, loss)


@case("bare reference to another module's weight", refused=True)
def _(scene: Scene) -> None:
    class Bare(Net):
        def forward(self, x: Tensor) -> Tensor:
            return linear(self.encode(x), self.out.weight, self.out.bias)

    train(scene, scene.model(Bare))


@case("a method other than forward", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)
    train(scene, model, lambda x, y: mse_loss(model.out(model.encode(x)), y))


@case("functional_call with its own parameters")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(functional_call(model, dict(model.named_parameters()), (x,)), y)

    train(scene, model, loss)


@case("functional_call with scaled parameters", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        scaled = {name: 0.9 * p for name, p in model.named_parameters()}
        return mse_loss(functional_call(model, scaled, (x,)), y)

    train(scene, model, loss)


@case("functional_call with another model's parameters")
def _(scene: Scene) -> None:
    model, teacher = scene.model(Net), scene.build(Net)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.5)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        lesson = functional_call(model, dict(teacher.named_parameters()), (x,))
        return mse_loss(model(x), y + lesson.detach())

    train(scene, model, loss)


@case("parameters_to_vector in the loss", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y) + 0.01 * parameters_to_vector(model.parameters()).norm()

    train(scene, model, loss)


@case("parameters to a vector and back under no_grad", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def shrink(_: int) -> None:
        with torch.no_grad():
            vector = parameters_to_vector(model.parameters())
            vector_to_parameters(vector * 0.95, model.parameters())

    train(scene, model, after_step=shrink)


# -- metrics


@case("norm of the weights as a metric")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    @torch.no_grad()
    def log(step: int) -> None:
        for name, p in model.named_parameters():
            scene.keep(f"{step} {name}", p.norm())
        total = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
        scene.keep(f"{step} total", total)
        scene.keep(f"{step} foreach", torch.stack(torch._foreach_norm(list(model.parameters()))))

    train(scene, model, after_step=log)


@case("sum and mean of the weights as metrics", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    @torch.no_grad()
    def log(step: int) -> None:
        for name, p in model.named_parameters():
            scene.keep(f"{step} sum {name}", p.sum())
            scene.keep(f"{step} mean {name}", p.mean())
            scene.keep(f"{step} rows {name}", p.sum(0))

    train(scene, model, after_step=log)


@case("largest weight as a metric", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    @torch.no_grad()
    def log(step: int) -> None:
        for name, p in model.named_parameters():
            scene.keep(f"{step} {name}", p.max())
            scene.keep(f"{step} {name} float", p.abs().max().item())

    train(scene, model, after_step=log)


# -- averages and copies


@case("AveragedModel made before sharding", refused=True)
def _(scene: Scene) -> None:
    model = scene.build(Net)
    average = AveragedModel(model)
    scene.shard(model)
    train(scene, model, after_step=lambda _: average.update_parameters(model))
    for name, p in average.module.named_parameters():
        scene.keep(f"average {name}", p)


@case("AveragedModel made after sharding", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(scene, model, after_step=lambda _: average.update_parameters(model))
    for name, p in average.module.named_parameters():
        scene.keep(f"average {name}", p)


@case("average kept by hand")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(step: int) -> None:
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
            average[name].lerp_(p, 0.05)
        if step == 3:
            for name, value in average.items():
                scene.keep(f"average {name}", value)

    train(scene, model, after_step=update)


@case("average swapped in and out")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def evaluate(step: int) -> None:
        backup = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            average[name].lerp_(p.data, 0.3)
            p.data.copy_(average[name])
        scene.keep_mean(f"{step} output", model(scene.batch(step)[0]).square().mean())
        for name, p in model.named_parameters():
            p.copy_(backup[name])

    train(scene, model, after_step=evaluate)


@case("target network by deepcopy", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y) + 0.1 * mse_loss(model(x), target(x))

    @torch.no_grad()
    def update(_: int) -> None:
        for old, new in zip(target.parameters(), model.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)

    train(scene, model, loss, after_step=update)
    for name, p in target.named_parameters():
        scene.keep(f"target {name}", p)


@case("deepcopy of one block, trained on after a step", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)
    copies: list[nn.Module] = []

    def copy_once(step: int) -> None:
        if step == 1:
            copies.append(copy.deepcopy(model.blocks[1]))

    train(scene, model, after_step=copy_once)
    (block,) = copies
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    block(torch.ones(2, 10)).square().mean().backward()
    optimizer.step()
    for name, p in block.named_parameters():
        scene.keep(f"copy {name}", p)


@case("state_dict copied and loaded back")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    saved: dict[str, Tensor] = {}

    def rewind(step: int) -> None:
        if step == 1:
            saved.update(copy.deepcopy(model.state_dict()))
        if step == 2:
            model.load_state_dict(saved)

    train(scene, model, after_step=rewind)


@case("a full state_dict loaded between steps")
def _(scene: Scene) -> None:
    other = scene.build(Net)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    model = scene.model(Net)

    def load(step: int) -> None:
        if step == 1:
            model.load_state_dict(other.state_dict())

    train(scene, model, after_step=load)
