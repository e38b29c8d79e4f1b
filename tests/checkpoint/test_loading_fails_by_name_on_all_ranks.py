from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, make_trainer

pytestmark = pytest.mark.dist


def resume(rank: int, world: int, stage: int, path: Path, tied: bool = True) -> str:
    try:
        make_trainer({"stage": stage}, world, max_epochs=2).fit(
            Net(tied=tied), data(8), ckpt_path=path
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def save(rank: int, world: int, path: Path) -> None:
    trainer = make_trainer({"stage": 2}, world)
    trainer.fit(Net(), data(8))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_file(pair: RankPool, tmp_path: Path, stage: int) -> None:
    for message in pair.run(resume, stage, tmp_path / "no.ckpt"):
        assert message.startswith("FileNotFoundError: Checkpoint file not found")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_that_ends_early(pair: RankPool, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(save, path)
    path.write_bytes(path.read_bytes()[:-100])
    for message in pair.run(resume, stage, path):
        assert message.startswith("CheckpointError: Expected a complete checkpoint file")


def test_a_file_that_only_one_rank_can_read(pair: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(save, path)
    first, second = pair.run(resume_blind, path)
    assert first.startswith("CheckpointError: Expected every rank to read a checkpoint")
    assert second.startswith("FileNotFoundError")


def resume_blind(rank: int, world: int, path: Path) -> str:
    from lightning_zeroplus.plugin import checkpoint_io

    if rank == 0:
        return resume(rank, world, 3, path)
    original = checkpoint_io.read_full

    def blind(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("no such file here")

    checkpoint_io.read_full = blind
    try:
        return resume(rank, world, 3, path)
    finally:
        checkpoint_io.read_full = original


@pytest.mark.parametrize("stage", [1, 3])
def test_another_model(pair: RankPool, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(save, path)
    state = torch.load(path)
    state["state_dict"]["first.weight"] = torch.zeros(3, 3)
    state["state_dict"]["other"] = torch.zeros(1)
    torch.save(state, path)
    for message in pair.run(resume, stage, path):
        assert "first.weight" in message
        assert "other" in message


def fail_to_write(rank: int, world: int, stage: int, path: Path) -> str:
    trainer = make_trainer({"stage": stage}, world)
    trainer.fit(Net(), data(8))
    path.mkdir(exist_ok=True)
    trainer.strategy.barrier()
    try:
        trainer.save_checkpoint(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_that_fails_on_rank_0(pair: RankPool, tmp_path: Path, stage: int) -> None:
    first, second = pair.run(fail_to_write, stage, tmp_path / "x.ckpt")
    assert first.startswith("CheckpointError: Expected to write a checkpoint, got IsADirectory")
    assert second.startswith("CheckpointError: Expected rank 0 to write a checkpoint, got Checkpo")
