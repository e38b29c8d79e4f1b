"""Plugins around ours keep the universal form; those that know nothing of it get one whole file."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO
from tests.checkpoint.reading import read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, make_trainer, seed_everything, weights_of

pytestmark = pytest.mark.dist


class Foreign(TorchCheckpointIO):
    """A plugin that somebody wrote for plain Lightning."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


class Looks(_WrappingCheckpointIO):
    """A wrapper that reads what it hands on, and adds a note."""

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        assert checkpoint["global_step"] == checkpoint.get("global_step") == 2
        assert "state_dict" in checkpoint
        assert checkpoint.get("nothing", 5) == 5
        assert {"epoch", "loops"} <= set(checkpoint.keys())
        checkpoint["note"] = {"by": "Looks", "of": torch.ones(3)}
        super().save_checkpoint(checkpoint, *args, **kwargs)


class Counts(ZeroPlusCheckpointIO):
    """A plugin derived from ours."""

    def __init__(self) -> None:
        self.saves = self.loads = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saves += 1
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.loads += 1
        return super().load_checkpoint(*args, **kwargs)


KINDS: dict[str, Any] = {
    "foreign": Foreign,
    "foreign, asynchronous": lambda: AsyncCheckpointIO(Foreign()),
    "wrapper": lambda: Looks(),
    "wrapper of a wrapper": lambda: AsyncCheckpointIO(Looks()),
    "asynchronous": lambda: AsyncCheckpointIO(),
    "derived": Counts,
    "wrapper of a derived one": lambda: Looks(Counts()),
}


def run(rank: int, world: int, stage: int, kind: str, path: Path) -> Any:
    seed_everything(5, verbose=False)
    io = KINDS[kind]()
    trainer = make_trainer({"stage": stage}, world, plugins=lambda: [io])
    module = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data(16))
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(path)
        trainer.strategy._wait_for_save()
        if hasattr(io, "teardown"):
            io.teardown()
        trainer.strategy.barrier()
    told = [str(w.message) for w in caught if "ZeroPlusCheckpointIO" in str(w.message)]
    resumed = Net(seed=8)
    again = make_trainer({"stage": 3}, world, plugins=lambda: [KINDS[kind]()], max_epochs=2)
    again.fit(resumed, data(16), ckpt_path=path)
    inner = io
    while isinstance(inner, _WrappingCheckpointIO):
        inner = inner.checkpoint_io
    calls = getattr(inner, "calls", None), getattr(inner, "saves", None)
    return weights_of(module), len(told), calls, again.global_step


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_gets_what_it_can_handle(
    pair: RankPool, tmp_path: Path, kind: str, stage: int
) -> None:
    path = tmp_path / "x.ckpt"
    first, second = pair.run(run, stage, kind, path)
    found = read(path)
    close(found["state_dict"], first[0])
    foreign = kind.startswith("foreign")
    assert path.is_file() == foreign
    assert first[1] == (1 if foreign else 0), "one warning, on rank 0"
    assert second[1] == 0
    if foreign:
        assert (first[2][0], second[2][0]) == (["x.ckpt"] * 2, [])
        assert torch.load(path, weights_only=True)["global_step"] == 2
    if "wrapper" in kind:
        assert found["note"]["by"] == "Looks"
        assert torch.equal(found["note"]["of"], torch.ones(3))
    if "derived" in kind:
        assert first[2][1] == second[2][1] == 2
    assert first[3] == second[3] == 4


class FailsOn(Net):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank in self.ranks:
            raise KeyError("planted")
        return super().training_step(batch, batch_idx)


def fail(rank: int, world: int, ranks: tuple[int, ...], folder: Path) -> str:
    def callbacks() -> list[Callback]:
        return [OnExceptionCheckpoint(folder, "failed")]

    seed_everything(5, verbose=False)
    settings = {"stage": 2, "timeout": timedelta(seconds=8)}
    trainer = make_trainer(settings, world, callbacks=callbacks)
    try:
        trainer.fit(FailsOn(ranks), data(), ckpt_path=None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_an_exception_on_all_ranks_is_saved_before(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        assert pool.run(fail, (0, 1), tmp_path) == ["KeyError: 'planted'"] * 2
    assert read(tmp_path / "failed.ckpt")["global_step"] == 2


@pytest.mark.full
def test_an_exception_on_one_rank_cannot_be_saved_and_ends_all(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        for message in pool.run(fail, (1,), tmp_path):
            assert message.startswith(("CollectiveError", "KeyError", "CheckpointError"))
    assert not (tmp_path / "failed.ckpt").exists()
