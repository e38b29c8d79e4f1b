"""What loops, hooks and callbacks do to parameters and gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.local.access.models import WIDTH, Block, Net
from tests.local.access.scene import CLASSES, FEATURES, STEPS, Scene, case, train


@case("tensor hooks set before sharding")
def _(scene: Scene) -> None:
    model = scene.build(Net)
    for p in model.parameters():
        p.register_hook(lambda slope: slope * 2)
    scene.shard(model)
    train(scene, model)


@case("tensor hooks set after sharding")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    for p in model.parameters():
        p.register_hook(lambda slope: slope * 2)
    train(scene, model)


def _halve(p: Tensor) -> None:
    if p.grad is None:
        raise AssertionError("the gradient is gone before the user's hook")
    p.grad.mul_(0.5)


@case("post-accumulate hooks set before sharding")
def _(scene: Scene) -> None:
    model = scene.build(Net)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    scene.shard(model)
    train(scene, model)


@case("post-accumulate hooks set after sharding")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    train(scene, model)


@case("forward hooks that read the module's weights")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def add(module: nn.Linear, args: object, out: Tensor) -> Tensor:
        return out + 0.1 * module.weight.mean() + 0.01 * module.bias.sum()

    for block in model.blocks:
        block.down.register_forward_hook(add)
    model.inp.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    train(scene, model)


@case("backward hooks of modules")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
        block.register_full_backward_pre_hook(lambda module, out: (out[0] * 3.0,))
    train(scene, model)


@case("weights clamped inside forward")
def _(scene: Scene) -> None:
    class Clamped(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    train(scene, scene.model(lambda: Net(Clamped)))


@case("weights clamped through .data inside forward")
def _(scene: Scene) -> None:
    class Clamped(Block):
        def forward(self, x: Tensor) -> Tensor:
            for p in self.parameters():
                p.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    train(scene, scene.model(lambda: Net(Clamped)))


@case("weights renormalised inside forward")
def _(scene: Scene) -> None:
    class Renormed(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.renorm_(2, 0, 0.5)
                self.down.weight.div_(self.down.weight.norm(dim=1, keepdim=True))
            return super().forward(x)

    train(scene, scene.model(lambda: Net(Renormed)))


@case("an embedding with max_norm")
def _(scene: Scene) -> None:
    class Bounded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, FEATURES, max_norm=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.table(x).mean(1))

    # Rows are renormalised where they are looked up, so every rank looks up all of them.
    def batch(step: int) -> tuple[Tensor, Tensor]:
        _, y = scene.batch(step)
        return torch.arange(11).expand(len(y), 11), y

    train(scene, scene.model(Bounded), batch=batch)


@case("weights clamped after every step")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    @torch.no_grad()
    def clamp(step: int) -> None:
        for p in model.parameters():
            (p if step % 2 else p.data).clamp_(-0.2, 0.2)

    train(scene, model, after_step=clamp)


@case("weight decay by hand")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    @torch.no_grad()
    def decay(step: int) -> None:
        for p in model.parameters():
            p.mul_(0.99)
            p -= 0.01 * p
            p.data.add_(p.data, alpha=-0.01)
        torch._foreach_mul_(list(model.parameters()), 0.99)

    train(scene, model, after_step=decay)


@case("a step by hand without optimizer")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    for step in range(STEPS):
        x, y = scene.batch(step)
        model.zero_grad()
        mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is None:
                    raise AssertionError("no gradient")
                p -= 0.1 * p.grad
    scene.finish(model)


@case("parts frozen, thawed and frozen again")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    model.blocks[1].requires_grad_(False)
    model.out.bias.requires_grad_(False)

    def turn(step: int) -> None:
        model.blocks[1].requires_grad_(step % 2 == 0)
        model.out.bias.requires_grad_(step == 1)
        model.blocks[0].up.requires_grad_(step != 1)

    train(scene, model, after_step=turn)


@case("frozen before sharding, thawed and added to the optimizer later")
def _(scene: Scene) -> None:
    model = scene.build(Net)
    model.blocks.requires_grad_(False)
    scene.shard(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = scene.sgd(params)

    def thaw(step: int) -> None:
        if step == 1:
            model.blocks.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.05})

    train(scene, model, optimizer=optimizer, after_step=thaw)


@case("clip_grad_norm_ of torch")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    norms: list[Tensor] = []
    clip = lambda: norms.append(clip_grad_norm_(model.parameters(), 0.1))  # noqa: E731
    train(scene, model, before_step=clip)
    for step, norm in enumerate(norms):
        scene.keep(f"norm {step}", norm)


@case("clip_grad_value_ of torch")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    train(scene, model, before_step=lambda: clip_grad_value_(model.parameters(), 0.01))


@case("gradients read, scaled and masked by hand")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def edit() -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is None:
                    raise AssertionError("no gradient")
                scene.keep(f"slope {name}", p.grad)
                scene.keep(f"largest {name}", p.grad.abs().max())
                p.grad.mul_(0.5)
                p.grad[p.grad > 0.1] = 0.1
            model.inp.bias.grad = None
            model.out.bias.grad = torch.ones_like(model.out.bias)

    train(scene, model, before_step=edit)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.critic = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


@case("two adversaries, two optimizers, toggled")
def _(scene: Scene) -> None:
    pair = scene.model(_Pair)
    makers, critics = scene.sgd(pair.maker.parameters()), scene.sgd(pair.critic.parameters())
    for step in range(STEPS):
        x, y = scene.batch(step)
        with scene.around_step():
            pair.critic.requires_grad_(False)
            loss = pair.critic(pair.maker(x)).square().mean()
            makers.zero_grad()
            loss.backward()
            makers.step()
            pair.critic.requires_grad_(True)
            pair.maker.requires_grad_(False)
            fake = pair.maker(x).detach()
            loss = (pair.critic(fake) - 1).square().mean() + pair.critic(y).square().mean()
            critics.zero_grad()
            loss.backward()
            clip_grad_norm_(pair.critic.parameters(), 0.5)
            critics.step()
            pair.maker.requires_grad_(True)
    scene.finish(pair)


@case("two adversaries without toggling")
def _(scene: Scene) -> None:
    pair = scene.model(_Pair)
    makers, critics = scene.sgd(pair.maker.parameters()), scene.sgd(pair.critic.parameters())
    for step in range(STEPS):
        x, y = scene.batch(step)
        with scene.around_step():
            fake = pair.maker(x)
            critics.zero_grad()
            ((pair.critic(fake.detach()) - 1).square().mean() + pair.critic(y).mean()).backward()
            critics.step()
            makers.zero_grad()
            pair.critic(fake).square().mean().backward()
            makers.step()
    scene.finish(pair)


@case("one optimizer steps while the other's gradients wait")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    body = [p for name, p in model.named_parameters() if not name.startswith("out")]
    slow, fast = scene.sgd(body), scene.sgd(model.out.parameters())
    for step in range(STEPS):
        with scene.around_step():
            x, y = scene.batch(step)
            mse_loss(model(x), y).backward()
            fast.step()
            fast.zero_grad()
            if step % 2:
                slow.step()
                slow.zero_grad()
    scene.finish(model)


@case("a closure given to the optimizer")
def _(scene: Scene) -> None:
    model = scene.model(Net)
    optimizer = scene.sgd(model.parameters())
    for step in range(STEPS):
        x, y = scene.batch(step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        with scene.around_step():
            optimizer.step(closure)
    scene.finish(model)


@case("weights initialised again between steps")
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def restart(step: int) -> None:
        if step == 1:
            nn.init.zeros_(model.out.weight)
            nn.init.constant_(model.out.bias, 0.25)
            nn.init.ones_(model.blocks[1].down.bias)

    train(scene, model, after_step=restart)


@case("weights initialised again with orthogonal and eye", refused=True)
def _(scene: Scene) -> None:
    model = scene.model(Net)

    def restart(step: int) -> None:
        if step == 1:
            nn.init.eye_(model.out.weight)
            nn.init.dirac_(model.blocks[1].up.weight.unsqueeze(-1))

    train(scene, model, after_step=restart)
