from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, make_trainer, weights_of

pytestmark = pytest.mark.dist


def whole_life(rank: int, world: int, strategy: Any) -> dict[str, Any]:
    """Evaluate before, between and after two fits on one module; use it in between."""
    module = Net()
    trainer = make_trainer(strategy, world, max_epochs=1)
    seen: dict[str, Any] = {}
    seen["before"] = trainer.validate(module, data(seed=1), verbose=False)
    seen["predicted before"] = torch.cat(trainer.predict(module, data(8, seed=2)))
    trainer.fit(module, data(), data(seed=1))
    seen["called"] = module.eval()(torch.ones(2, 7)).detach()
    seen["tested"] = trainer.test(module, data(seed=3), verbose=False)
    module.train()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(), data(seed=1))
    seen["again"] = trainer.validate(module, data(seed=1), verbose=False)
    seen["predicted after"] = torch.cat(trainer.predict(module, data(8, seed=2)))
    seen["weights"] = weights_of(module)
    seen["types"] = sorted({type(p).__name__ for p in module.parameters()})
    seen["trainable"] = all(p.requires_grad and not p.is_inference() for p in module.parameters())
    return seen


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_result_equals_ddp(pair: RankPool, stage: int) -> None:
    wanted = pair.run(whole_life, "ddp")
    got = pair.run(whole_life, {"stage": stage})
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.pop("types") == theirs.pop("types")
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def two_modules(rank: int, world: int, strategy: Any) -> Any:
    trainer = make_trainer(strategy, world)
    first, second = Net(seed=1), Net(seed=2)
    trainer.fit(first, data())
    trainer.validate(second, data(seed=1), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, data())
    return weights_of(first), weights_of(second)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_trainer_may_run_two_modules(pair: RankPool, stage: int) -> None:
    wanted = pair.run(two_modules, "ddp")
    torch.testing.assert_close(
        pair.run(two_modules, {"stage": stage}), wanted, rtol=1e-5, atol=1e-6
    )


def under_inference_mode(rank: int, world: int, stage: int) -> list[bool]:
    """Without gloo Lightning evaluates under inference mode; the next fit must not notice."""
    module = Net()
    trainer = make_trainer({"stage": stage}, world)
    with mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", bool):
        trainer.validate(module, data(8), verbose=False)
    trainer.fit(module, data(8), data(8))
    return [p.is_inference() for p in module.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inference_mode_leaves_no_trace(pair: RankPool, stage: int) -> None:
    for flags in pair.run(under_inference_mode, stage):
        assert not any(flags)
