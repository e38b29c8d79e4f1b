"""What a module's hooks read during a fit, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import summarize

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, make_trainer

pytestmark = pytest.mark.dist


class Looks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float]] = {}
        self.example_input_array = torch.ones(2, 7)

    def note(self, name: str, value: Any) -> None:
        self.seen.setdefault(name, []).append(float(value))

    def on_after_backward(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if grads and not self.trainer.fit_loop._should_accumulate():
            self.note("after backward", torch.nn.utils.get_total_norm(grads))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.note("grad_norm utility", norms["grad_2.0_norm_total"])
        self.note("one of it", norms["grad_2.0_norm/first.weight"])
        self.note("sum of one", self.first.weight.grad.sum())

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("weight", self.first.weight.sum())
        self.note("norm", self.last.weight.norm())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            x = torch.linspace(-1, 1, 28).view(4, 7).sin()
            self.note("forward in a hook", self(x).sum())

    def on_train_epoch_end(self) -> None:
        parameters = summarize(self).total_parameters
        self.note("parameters", parameters)
        self.note("state dict", sum(float(v.double().sum()) for v in self.state_dict().values()))


def summary() -> list[Callback]:
    return [ModelSummary(max_depth=-1)]


def look(rank: int, world: int, strategy: Any, accumulate: int) -> dict[str, list[float]]:
    module = Looks()
    trainer = make_trainer(
        strategy,
        world,
        callbacks=summary,
        accumulate_grad_batches=accumulate,
        enable_model_summary=True,
    )
    trainer.fit(module, data())
    return module.seen


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_values_equal(pair: RankPool, stage: int, accumulate: int) -> None:
    wanted = pair.run(look, "ddp", accumulate)
    got = pair.run(look, {"stage": stage}, accumulate)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-6), name


class Asks(Net):
    """Uses what the strategy offers beyond Lightning's own."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.seen: dict[str, Any] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        weight = self.first.weight
        self.seen["gradient"] = strategy.full_gradient(weight)
        self.seen["norm"] = float(strategy.grad_norm())
        self.seen["norm of one"] = float(strategy.grad_norm([weight]))

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        with strategy.full_parameters():
            self.seen["weight"] = self.first.weight.detach().clone()
        with strategy.full_parameters(self.last, writeback=True), torch.no_grad():
            self.last.bias.clamp_(-0.05, 0.05)
        state = strategy.full_optimizer_state(self.first.weight, "momentum_buffer")
        self.seen["momentum"] = state
        strategy.set_full_optimizer_state(self.first.bias, "momentum_buffer", torch.zeros(11))
        self.seen["report"] = strategy.memory_report()


class Reads(Asks):
    """The same in plain PyTorch."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.first.weight
        self.seen["gradient"] = weight.grad.clone()
        every = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen["norm"] = float(torch.nn.utils.get_total_norm(every))
        self.seen["norm of one"] = float(weight.grad.norm())

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen["weight"] = self.first.weight.detach().clone()
        with torch.no_grad():
            self.last.bias.clamp_(-0.05, 0.05)
        state = self.trainer.optimizers[0].state
        self.seen["momentum"] = state[self.first.weight]["momentum_buffer"].clone()
        state[self.first.bias]["momentum_buffer"].zero_()
        self.seen["report"] = None


def ask(rank: int, world: int, strategy: Any, model: Any) -> Any:
    module = model()
    make_trainer(strategy, world).fit(module, data())
    assert bool(module.seen.pop("report")) == (model is Asks)
    return module.seen, module.last.bias.detach()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_full_values_are_those_of_plain_pytorch(pair: RankPool, stage: int) -> None:
    wanted = pair.run(ask, "ddp", Reads)
    got = pair.run(ask, {"stage": stage}, Asks)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
