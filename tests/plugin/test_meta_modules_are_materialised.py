from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.reading import FORMATS
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, fit, make_trainer, seed_everything, weights_of

pytestmark = pytest.mark.dist


class Lazy(Net):
    """Makes its layers in `configure_model`, once."""

    def __init__(self) -> None:
        super().__init__()
        del self.first

    def configure_model(self) -> None:
        if "first" not in self._modules:
            self.first = nn.Linear(7, 11)


def lazily(rank: int, world: int, strategy: Any, precision: Any) -> Any:
    seed_everything(5, verbose=False)
    module = Lazy()
    trainer = make_trainer(strategy, world, precision=precision)
    trainer.fit(module, data(), data(seed=1))
    trainer.test(module, data(seed=1), verbose=False)
    return weights_of(module)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_configure_model_equals_ddp(pair: RankPool, stage: int) -> None:
    wanted = pair.run(lazily, "ddp", "32-true")[0]
    close(pair.run(lazily, {"stage": stage}, "32-true")[0], wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_configure_model_under_a_true_precision(pair: RankPool, stage: int) -> None:
    weights = pair.run(lazily, {"stage": stage}, "bf16-true")[0]
    assert weights["first.weight"].dtype == torch.bfloat16


def empty(rank: int, world: int, stage: int, path: Path | None) -> Any:
    trainer = make_trainer({"stage": stage}, world)
    with trainer.init_module(empty_init=True):
        module = Net()
    kinds = {p.device.type for p in module.parameters()}
    trainer.fit(module, data(), ckpt_path=path)
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    return kinds, module.losses, weights_of(module)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_empty_init_makes_meta_tensors_that_train(pair: RankPool, stage: int) -> None:
    (kinds, losses, weights), (_, _, others) = pair.run(empty, stage, None)
    assert kinds == {"meta"}
    assert losses[-1] < 10
    for name, value in weights.items():
        if "running" not in name:
            assert torch.equal(value, others[name])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_empty_modules_take_their_checkpoint(
    pair: RankPool, tmp_path: Path, form: str, stage: int
) -> None:
    path = tmp_path / "x.ckpt"
    settings = {"stage": stage, "save_format": form}
    saved = pair.run(fit, settings, {"max_epochs": 1}, Net, {}, None, path)
    got = pair.run(evaluate_empty, stage, path)
    for rank in got:
        close(rank, saved[0]["weights"])


def evaluate_empty(rank: int, world: int, stage: int, path: Path) -> Any:
    trainer = make_trainer({"stage": stage}, world)
    with trainer.init_module(empty_init=True):
        module = Net()
    trainer.validate(module, data(), path, verbose=False)
    return weights_of(module)


def not_empty(rank: int, world: int, stage: int) -> Any:
    trainer = make_trainer({"stage": stage}, world)
    with trainer.init_module():
        module = Net(seed=1)
    return weights_of(module)


def test_init_module_without_empty_init_makes_real_values(solo: RankPool) -> None:
    close(solo.run(not_empty, 3)[0], weights_of(Net(seed=1)))
