from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelPruning
from torch import Tensor, nn

from tests.dist_pool import RankPool
from tests.plugin.scenes import LightningModule, Net, data, make_trainer

pytestmark = pytest.mark.dist


class Foreign(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


class WithLbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class WithAdafactor(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Lookalike:
    """Has what Lightning's protocol asks of an optimizer, and no more."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]
        self.defaults: dict[str, Any] = {}
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass

    def step(self, closure: Any = None) -> Any:
        return closure() if closure else None

    def zero_grad(self) -> None:
        pass


class WithLookalike(Net):
    def configure_optimizers(self) -> Any:
        return Lookalike(self.parameters())


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 7, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(torch.zeros(len(x), dtype=torch.long))


class Empty(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros(1, requires_grad=True).sum()

    def configure_optimizers(self) -> None:
        return None


class Still(Net):
    def configure_optimizers(self) -> None:
        return None


class Different(Net):
    """Each rank makes another model."""

    def configure_model(self) -> None:
        if not hasattr(self, "odd"):
            self.odd = nn.Linear(3 + self.global_rank, 2)


def attempt(
    rank: int, world: int, settings: dict[str, Any], model: Any, options: dict[str, Any]
) -> str:
    try:
        trainer = make_trainer(settings, world, **options)
        trainer.fit(model(), data(16))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def pruning() -> list[Callback]:
    return [ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])]


REFUSED: dict[str, Any] = {
    "a parameter outside the module": (Foreign, {}, r"ConfigError: .*belong to the module.*\(3,\)"),
    "lbfgs": (WithLbfgs, {}, "ConfigError: .*LBFGS"),
    "adafactor": (WithAdafactor, {}, "ConfigError: .*Adafactor"),
    "an optimizer that is none": (WithLookalike, {}, "ConfigError: .*got Lookalike"),
    "sync_batchnorm on the cpu": (Net, {"sync_batchnorm": True}, r"ConfigError: .*\(norm\)"),
    "pruning": (Net, {"callbacks": pruning}, "ConfigError: .*got ModelPruning.*strategy='ddp'"),
    "no parameters": (Empty, {}, "ConfigError: .*Expected a module with parameters"),
    "models that differ": (Different, {}, "ConfigError: .*odd"),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_on_every_rank(pair: RankPool, case: str, stage: int) -> None:
    model, options, pattern = REFUSED[case]
    for message in pair.run(attempt, {"stage": stage}, model, options):
        assert re.search(pattern, message), message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sparse_gradients_are_refused_or_right(pair: RankPool, stage: int) -> None:
    for message in pair.run(attempt, {"stage": stage}, Sparse, {}):
        assert message == "ended" or message.startswith("ConfigError: "), message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_module_without_an_optimizer_runs(pair: RankPool, stage: int) -> None:
    assert pair.run(attempt, {"stage": stage}, Still, {"max_steps": 2}) == ["ended"] * 2


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"stage": 3, "units": ["Missing"]}, "ConfigError: .*Missing"),
        ({"stage": 3, "units": ["tests.plugin.scenes.Missing"]}, "ConfigError: .*Missing"),
        ({"stage": 2, "master_dtype": "bf16"}, "ConfigError: .*master_dtype"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_are_refused(
    pair: RankPool, settings: dict[str, Any], pattern: str
) -> None:
    for message in pair.run(attempt, settings, Net, {}):
        assert re.search(pattern, message), message


@pytest.mark.parametrize("units", [["Block"], ["tests.plugin.scenes.Block"]], ids=str)
def test_units_may_be_named(pair: RankPool, units: list[str]) -> None:
    assert pair.run(attempt, {"stage": 3, "units": units}, Net, {}) == ["ended"] * 2


def twice_after_refusal(rank: int, world: int, stage: int) -> str:
    """A refused set-up leaves the module usable, and the next run works."""
    module = WithLbfgs()
    before = [p.detach().clone() for p in module.parameters()]
    trainer = make_trainer({"stage": stage}, world)
    try:
        trainer.fit(module, data(16))
    except ValueError as error:
        message = str(error)
    module.__class__ = Net
    if stage < 3:
        assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    make_trainer({"stage": stage}, world).fit(Net(), data(16))
    return message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_next_run_works_after_a_refusal(pair: RankPool, stage: int) -> None:
    assert all("LBFGS" in message for message in pair.run(twice_after_refusal, stage))


def test_one_rank_says_that_nothing_is_sharded(solo: RankPool) -> None:
    (lines,) = solo.run(log_of_one_rank)
    assert sum("shards nothing" in line for line in lines) == 1


def log_of_one_rank(rank: int, world: int) -> list[str]:
    lines: list[str] = []
    with mock.patch("lightning_zeroplus.plugin.sharding.rank_zero_info", lines.append):
        module = Net()
        trainer = make_trainer({"stage": 3}, world)
        trainer.fit(module, data(16))
        trainer.test(module, data(16), verbose=False)
    return lines
