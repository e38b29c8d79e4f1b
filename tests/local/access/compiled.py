"""`torch.compile` of a model and of its blocks."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.local.access.models import Net
from tests.local.access.scene import Scene, case, train


@case("the whole model compiled, aot_eager")
def _(scene: Scene) -> None:
    _compiled(scene, "aot_eager")


@case("the whole model compiled, eager")
def _(scene: Scene) -> None:
    _compiled(scene, "eager")


def _compiled(scene: Scene, backend: str) -> None:
    torch._dynamo.reset()
    model = scene.model(Net)
    compiled = torch.compile(model, backend=backend)
    train(scene, model, lambda x, y: mse_loss(compiled(x), y))


@case("every block compiled")
def _(scene: Scene) -> None:
    torch._dynamo.reset()
    model = scene.model(Net)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    train(scene, model)


@case("blocks wrapped by torch.compile before sharding")
def _(scene: Scene) -> None:
    torch._dynamo.reset()

    def make() -> Net:
        model = Net()
        for n, block in enumerate(model.blocks):
            model.blocks[n] = torch.compile(block, backend="aot_eager")
        return model

    train(scene, scene.model(make))
