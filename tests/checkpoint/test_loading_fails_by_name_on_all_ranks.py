from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.reading import FORMATS
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, make_trainer

pytestmark = pytest.mark.dist


class Other(Net):
    """Has a weight more, a weight less and a weight of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11, bias=False)
        self.blocks[1].norm = nn.LayerNorm((1, 11))
        self.other = nn.Linear(11, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.first(x))
        x = x + self.blocks[1].linear(x) + self.blocks[1].norm(x[:, None]).flatten(1)
        return self.last(self.norm(x)) + 0 * sum(p.sum() for p in self.parameters())


def resume(rank: int, world: int, stage: int, path: Path) -> str:
    try:
        make_trainer({"stage": stage}, world, max_epochs=2).fit(Net(), data(8), ckpt_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def save(rank: int, world: int, path: Path, form: str = "full", model: Any = Net) -> None:
    trainer = make_trainer({"stage": 2, "save_format": form}, world)
    trainer.fit(model(), data(8))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_at_the_path(pair: RankPool, tmp_path: Path, stage: int) -> None:
    for message in pair.run(resume, stage, tmp_path / "no.ckpt"):
        assert message.startswith("FileNotFoundError: Checkpoint file not found")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_that_ends_early(pair: RankPool, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(save, path)
    path.write_bytes(path.read_bytes()[:-100])
    for message in pair.run(resume, stage, path):
        assert message.startswith("CheckpointError: Expected a complete checkpoint file")


@pytest.mark.parametrize("form", FORMATS)
def test_what_only_one_rank_can_read(pair: RankPool, tmp_path: Path, form: str) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(save, path, form)
    first, second = pair.run(resume_blind, path)
    assert first.startswith("CheckpointError: Expected every rank to read a checkpoint")
    assert "no such file here" in first
    assert second.startswith("FileNotFoundError")


def resume_blind(rank: int, world: int, path: Path) -> str:
    from lightning_zeroplus.plugin import checkpoint_io

    if rank == 0:
        return resume(rank, world, 3, path)
    original = checkpoint_io.read_checkpoint

    def blind(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("no such file here")

    checkpoint_io.read_checkpoint = blind
    try:
        return resume(rank, world, 3, path)
    finally:
        checkpoint_io.read_checkpoint = original


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_another_model(pair: RankPool, tmp_path: Path, form: str, stage: int) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(save, path, form, Other)
    for message in pair.run(resume, stage, path):
        for name in ("first.bias", "blocks.1.norm.weight", "blocks.1.norm.bias", "other.weight"):
            assert name in message


def fail_to_write(rank: int, world: int, settings: dict[str, Any], path: Path) -> str:
    trainer = make_trainer(settings, world)
    trainer.fit(Net(), data(8))
    try:
        trainer.save_checkpoint(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_that_cannot_be_written(pair: RankPool, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "x.ckpt"
    path.mkdir()
    settings = {"stage": stage, "save_format": "full"}
    first, second = pair.run(fail_to_write, settings, path)
    assert first.startswith("CheckpointError: Expected to write a checkpoint, got IsADirectory")
    assert second.startswith("CheckpointError: Expected rank 0 to write a checkpoint, got Checkpo")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_folder_that_cannot_be_made(pair: RankPool, tmp_path: Path, stage: int) -> None:
    (tmp_path / "file").write_text("in the way")
    for message in pair.run(fail_to_write, {"stage": stage}, tmp_path / "file" / "x.ckpt"):
        assert message.startswith("CheckpointError: Expected to write a checkpoint, got FileExists")
        assert "(rank 0)" in message
        assert "file/x.ckpt" in message
