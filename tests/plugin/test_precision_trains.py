from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, fit, make_trainer, weights_of

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_double_equals_ddp(pair: RankPool, stage: int) -> None:
    options = {"precision": "64-true"}
    wanted = pair.run(fit, "ddp", options)[0]["weights"]
    got = pair.run(fit, {"stage": stage}, options)[0]["weights"]
    assert got["first.weight"].dtype == torch.float64
    close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_autocast_equals_ddp(pair: RankPool, stage: int) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}
    wanted = pair.run(fit, "ddp", options)[0]
    got = pair.run(fit, {"stage": stage}, options)[0]
    assert got["weights"]["first.weight"].dtype == torch.float32
    close(got["weights"], wanted["weights"], rtol=1e-4, atol=1e-5)


class Watched(Net):
    """Overflows on rank 1 at given batches; notes the loss scale after each."""

    bad = (3,)

    def __init__(self) -> None:
        super().__init__(schedule=False)
        self.scales: list[float] = []
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx in self.bad and self.global_rank == self.trainer.world_size - 1:
            loss = loss * torch.tensor(float("inf"))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]
        self.history.append(float(self.last.bias.detach().double().square().sum()))


def half(growth_interval: int = 2) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", "cpu", scaler)


def scaled(rank: int, world: int, strategy: Any, accumulate: int) -> Any:
    torch.manual_seed(0)
    module = Watched()
    trainer = make_trainer(strategy, world, plugins=half, accumulate_grad_batches=accumulate)
    trainer.fit(module, data(64))
    return module.scales, module.history, weights_of(module)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_on_one_rank_drops_the_window_on_all(
    pair: RankPool, stage: int, accumulate: int
) -> None:
    wanted = pair.run(scaled, "ddp", accumulate)
    got = pair.run(scaled, {"stage": stage}, accumulate)
    for (scales, history, weights), theirs in zip(got, wanted, strict=True):
        assert scales == theirs[0]
        assert scales[3] == scales[2] / 2
        assert history[3] == history[2]
        assert history[5] != history[3]
        close(weights, theirs[2], rtol=2e-3, atol=1e-4)


def narrow(rank: int, world: int, strategy: Any, precision: str) -> Any:
    module = Net(optimizer="sgd", lr=1e-3)
    trainer = make_trainer(strategy, world, precision=precision, max_epochs=4)
    before = weights_of(module)
    trainer.fit(module, data())
    return before, weights_of(module), module.losses


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_narrow_weights_have_wide_masters(pair: RankPool, stage: int, precision: str) -> None:
    """Small updates vanish in narrow weights but add up in fp32 masters."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float16
    _, exact, exact_losses = pair.run(narrow, {"stage": stage}, "32-true")[0]
    before, got, losses = pair.run(narrow, {"stage": stage}, precision)[0]
    error = norm({n: got[n].float() - exact[n] for n in learned(exact)})
    moved = norm({n: exact[n] - before[n] for n in learned(exact)})
    assert got["first.weight"].dtype == dtype
    assert error < 0.12 * moved
    assert losses == pytest.approx(exact_losses, rel=0.02)


def learned(weights: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in weights if "norm" not in name]


def norm(values: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([v.flatten() for v in values.values()]).norm())


class OwnClipping(Precision):
    """A user's plugin that clips by its own hand."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        torch.nn.utils.clip_grad_norm_(params, clip_val)


class ClipsInHook(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.norm_before = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_by_the_users_own_hand_counts_all_ranks(pair: RankPool, stage: int) -> None:
    wanted = pair.run(fit, "ddp", {"gradient_clip_val": 0.05})[0]["weights"]
    own = {"gradient_clip_val": 0.05, "plugins": OwnClipping}
    close(pair.run(fit, {"stage": stage}, own)[1]["weights"], wanted)
    close(pair.run(fit, {"stage": stage}, {}, ClipsInHook)[1]["weights"], wanted)
