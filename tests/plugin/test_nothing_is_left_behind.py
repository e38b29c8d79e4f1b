from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, ZeroPlusStrategy, data, make_trainer

pytestmark = pytest.mark.dist


def leave(rank: int, world: int, stage: int) -> list[str]:
    """Return what is still alive once trainer, strategy and module are let go of."""
    module = Net()
    strategy = ZeroPlusStrategy(stage=stage)
    trainer = make_trainer(strategy, world)
    trainer.fit(module, data(), data(8))
    refs = {
        "trainer": weakref.ref(trainer),
        "strategy": weakref.ref(strategy),
        "module": weakref.ref(module),
        "engine": weakref.ref(strategy._optimizer_engine),
        "optimizer": weakref.ref(trainer.optimizers[0]),
        "weight": weakref.ref(module.first.weight),
    }
    del module, strategy, trainer
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_is_collected_after_a_fit(pair: RankPool, stage: int) -> None:
    assert pair.run(leave, stage) == [[], []]


def used_after(rank: int, world: int, stage: int) -> Any:
    module = Net()
    trainer = make_trainer({"stage": stage}, world)
    trainer.fit(module, data())
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())
    assert not module._forward_pre_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    plugin = trainer.precision_plugin
    assert vars(plugin) == {}
    if rank == 0:  # alone: nothing here may need the peers
        copy = pickle.loads(pickle.dumps(module.state_dict()))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.loss(next(iter(data()))).backward()
        assert isinstance(module.first.weight.grad, torch.Tensor)
        optimizer.step()
        assert not torch.equal(copy["first.weight"], module.first.weight)
        module.double()
        module.load_state_dict(copy)
    return [tuple(p.shape) for p in module.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_module_works_alone_after_a_fit(pair: RankPool, stage: int) -> None:
    shapes = [tuple(p.shape) for p in Net().parameters()]
    assert pair.run(used_after, stage) == [shapes, shapes]


def flat_memory(rank: int, world: int, stage: int) -> list[int]:
    counts: list[int] = []

    class Counts(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_step in (20, 60):
                gc.collect()
                counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))

    module = Counts()
    make_trainer({"stage": stage}, world, max_epochs=10).fit(module, data())
    return counts


@pytest.mark.parametrize("stage", [1, 3])
def test_live_tensors_do_not_grow(pair: RankPool, stage: int) -> None:
    for early, late in pair.run(flat_memory, stage):
        assert late <= early + 2


def raise_midway(rank: int, world: int, stage: int, where: str) -> Any:
    class Raises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if where == "forward" and batch_idx == 2:
                raise KeyError("planted")
            return loss

        def on_before_backward(self, loss: torch.Tensor) -> None:
            if where == "backward" and self.global_step == 2:
                raise KeyError("planted")

        def configure_optimizers(self) -> Any:
            if where == "setup":
                raise KeyError("planted")
            return super().configure_optimizers()

    module = Raises()
    with pytest.raises(KeyError, match="planted"):
        make_trainer({"stage": stage}, world).fit(module, data())
    # The same process goes on with another run.
    again = Net()
    trainer = make_trainer({"stage": stage}, world)
    trainer.fit(again, data())
    if stage == 3:
        try:
            module.first.weight.sum()
        except RuntimeError as error:
            return str(error)
        return "readable"
    return float(module.first.weight.sum())


@pytest.mark.parametrize("where", ["setup", "forward", "backward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_exception_on_all_ranks_ends_the_run_and_nothing_more(
    pair: RankPool, stage: int, where: str
) -> None:
    for got in pair.run(raise_midway, stage, where):
        if stage < 3:
            assert isinstance(got, float)
        else:
            assert "weight" in got
