from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist_pool import RankPool
from tests.plugin.scenes import LightningModule, close, fit

pytestmark = pytest.mark.dist


class Gan(LightningModule):
    """Two optimizers in turn, several backwards per step, one optimizer accumulating."""

    def __init__(self, raw_backward: bool = False, toggle: bool = True, clip: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.raw_backward, self.toggle, self.clip = raw_backward, toggle, clip
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))
        self.critic = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1))
        self.losses: list[float] = []

    def back(self, loss: Tensor, **kwargs: Any) -> None:
        if self.raw_backward:
            loss.backward(**kwargs)
        else:
            self.manual_backward(loss, **kwargs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, real = batch
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        if self.toggle:
            self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        loss = -self.critic(self.generator(x)).mean()
        self.back(loss)
        self.losses.append(float(loss.detach()))
        if self.clip:
            self.clip_gradients(of_generator, 0.1, "norm")
        of_generator.step()
        if self.toggle:
            self.untoggle_optimizer(of_generator)
        accumulating = batch_idx % 2 == 0
        with of_critic.toggle_model(sync_grad=not accumulating):
            fake = self.generator(x).detach()
            both = self.critic(torch.cat([fake, real]))
            self.back(both[: len(x)].mean(), retain_graph=True)
            self.back(-both[len(x) :].mean())
        if not accumulating:
            of_critic.step()
            of_critic.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.generator.parameters(), lr=0.01, eps=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9),
        ]


class Alone(Gan):
    """The same outside of DDP's wrapper, which supports little of this.

    Every rank sees all data, so its own gradients are the mean.
    """

    def on_fit_start(self) -> None:
        self.trainer.strategy.model = self


CASES: dict[str, dict[str, Any]] = {
    "manual_backward": {},
    "loss.backward": {"raw_backward": True},
    "nothing toggled": {"toggle": False},
    "clipped": {"clip": True},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_gan_equals_ddp(pair: RankPool, case: str, stage: int) -> None:
    options = {"use_distributed_sampler": False, "max_epochs": 2}
    wanted = pair.run(fit, "ddp", options, Alone, CASES[case])[0]
    got = pair.run(fit, {"stage": stage}, options, Gan, CASES[case])
    for rank in got:
        close(rank["weights"], wanted["weights"])
    assert got[0]["steps"] == wanted["steps"]
