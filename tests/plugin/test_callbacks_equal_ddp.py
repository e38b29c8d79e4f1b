from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, fit

pytestmark = pytest.mark.dist


class Backboned(Net):
    @property
    def backbone(self) -> torch.nn.Module:
        return self.blocks

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, eps=1e-2)


class NotesSteps(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.losses.append(float(trainer.global_step))


def ema() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.8)]


def swa() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)]


def changing_accumulation() -> list[Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 4, 2: 2}), NotesSteps()]


def thawing() -> list[Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)]


def finding() -> list[Callback]:
    return [LearningRateFinder(min_lr=1e-4, max_lr=1e-1, num_training_steps=10)]


CASES: dict[str, Any] = {
    "ema": (ema, Net, {"max_epochs": 2}),
    "swa": (swa, Net, {"max_epochs": 4}),
    "accumulation changes": (changing_accumulation, Net, {"max_epochs": 3}),
    # DDP does not synchronise what was frozen when it wrapped the module, so ranks see equal data.
    "thawing": (thawing, Backboned, {"max_epochs": 3, "use_distributed_sampler": False}),
    "learning rate finder": (finding, Net, {"max_epochs": 1}),
}


@pytest.fixture(scope="module")
def ddp(pair: RankPool) -> dict[str, Any]:
    made = {}
    for name, (callbacks, model, options) in CASES.items():
        arguments = {"schedule": name != "swa"} if model is Net else {"schedule": False}
        made[name] = pair.run(fit, "ddp", {**options, "callbacks": callbacks}, model, arguments)
    return made


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_run_equals_ddps(pair: RankPool, ddp: dict[str, Any], name: str, stage: int) -> None:
    callbacks, model, options = CASES[name]
    arguments = {"schedule": name != "swa"} if model is Net else {"schedule": False}
    options = {**options, "callbacks": callbacks}
    got = pair.run(fit, {"stage": stage}, options, model, arguments)
    for mine, theirs in zip(got, ddp[name], strict=True):
        close(mine["weights"], theirs["weights"])
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-5)
