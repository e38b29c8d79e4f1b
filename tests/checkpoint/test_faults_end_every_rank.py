"""A fault of one rank's disk or of a folder ends every rank soon, and the previous one resumes."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_zeroplus.checkpoint.datafile import DataFile
from lightning_zeroplus.checkpoint.folder import LocalFolder
from tests.checkpoint.reading import read
from tests.checkpoint.test_damaged_folders_are_named import DAMAGES
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, make_trainer, seed_everything

pytestmark = pytest.mark.dist

LIMIT_S = 20.0


def save(rank: int, world: int, *paths: Path) -> None:
    seed_everything(5, verbose=False)
    trainer = make_trainer({"stage": 3}, world)
    trainer.fit(Net(), data(16))
    for path in paths:
        trainer.save_checkpoint(path)


def resume(rank: int, world: int, stage: int, path: Path) -> tuple[str, float, int]:
    trainer = make_trainer({"stage": stage}, world, max_epochs=2)
    start = time.monotonic()
    try:
        trainer.fit(Net(seed=3), data(16), ckpt_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start, trainer.global_step
    return "ended", time.monotonic() - start, trainer.global_step


CASES = [
    "data truncated",
    "data missing",
    "manifest missing",
    "data flipped",
    "metadata flipped",
    "manifest flipped",
    "nothing left",
    "half copied",
]


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_folder_ends_every_rank_and_the_one_before_resumes(
    pair: RankPool, tmp_path: Path, name: str
) -> None:
    good, bad = tmp_path / "good.ckpt", tmp_path / "bad.ckpt"
    pair.run(save, good, bad)
    damage, cause = DAMAGES[name]
    damage(bad)
    stage = 1 + CASES.index(name) % 3
    for message, seconds, steps in pair.run(resume, stage, bad):
        assert message.startswith("CheckpointError: ")
        assert "bad.ckpt" in message
        assert seconds < LIMIT_S
        assert steps == 0
        assert re.search(cause, message), message
    for message, _, steps in pair.run(resume, stage, good):
        assert message == "ended"
        assert steps == 4


WRITE = DataFile.write


def full_disk(self: DataFile, part: Any) -> int:
    """Write under a limit of 3000 bytes for a file.

    It is there for this call only: the process group's own store is a file that grows as well.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        return WRITE(self, part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_with_a_fault(
    rank: int, world: int, victim: int, fault: str, path: Path
) -> tuple[str, float, str]:
    """Save, save with a fault on one rank, save again."""
    seed_everything(5, verbose=False)
    trainer = make_trainer({"stage": 2}, world)
    trainer.fit(Net(), data(16))
    trainer.save_checkpoint(path)
    opened = LocalFolder.open

    def denied(self: LocalFolder, token: str, name: str) -> Any:
        raise OSError(30, "Read-only file system")

    if rank == victim and fault == "full disk":
        DataFile.write = full_disk  # type: ignore[method-assign]
    elif rank == victim:
        LocalFolder.open = denied  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        trainer.save_checkpoint(path)
        message = "ended"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        DataFile.write = WRITE  # type: ignore[method-assign]
        LocalFolder.open = opened  # type: ignore[method-assign]
    seconds = time.monotonic() - start
    trainer.strategy.barrier()
    listing = ",".join(sorted(os.listdir(path.parent)))
    trainer.strategy.barrier()
    trainer.save_checkpoint(path.with_name("y.ckpt"))
    return message, seconds, listing


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [("full disk", "OSError: [Errno 27] File too large"), ("read-only", "Read-only file system")],
)
def test_a_rank_that_cannot_write_ends_every_rank_and_changes_nothing(
    pair: RankPool, tmp_path: Path, fault: str, cause: str, victim: int
) -> None:
    path = tmp_path / "x.ckpt"
    for message, seconds, listing in pair.run(save_with_a_fault, victim, fault, path):
        assert message.startswith("CheckpointError: Expected to write a checkpoint, got ")
        assert cause in message
        assert f"(rank {victim})" in message
        assert str(path) in message
        assert seconds < LIMIT_S
        assert listing == "x.ckpt", "no draft is left"
    for name in ("x.ckpt", "y.ckpt"):
        assert read(tmp_path / name)["global_step"] == 2
    assert [row[::2] for row in pair.run(resume, 3, path)] == [("ended", 4)] * 2


def save_in_a_fit(rank: int, world: int, path: Path) -> tuple[str, float, int]:
    """The fault comes in the middle of training, on rank 1, and nobody catches the error."""
    from lightning.pytorch.callbacks import Callback

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if args[-1] == 1:
                trainer.save_checkpoint(path)
                if rank == 1:
                    DataFile.write = full_disk  # type: ignore[method-assign]
                trainer.save_checkpoint(path)

    trainer = make_trainer({"stage": 3}, world, callbacks=lambda: [Saves()])
    start = time.monotonic()
    try:
        trainer.fit(Net(), data(32))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start, trainer.global_step
    finally:
        DataFile.write = WRITE  # type: ignore[method-assign]
    return "ended", 0.0, trainer.global_step


def test_a_full_disk_in_the_middle_of_a_fit_ends_it_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with RankPool(2) as pool:
        for message, seconds, steps in pool.run(save_in_a_fit, path):
            assert message.startswith("CheckpointError: ")
            assert re.search(r"File too large.*\(rank 1\)", message), message
            assert seconds < LIMIT_S
            assert steps == 2
        assert os.listdir(tmp_path) == ["x.ckpt"]
        assert [row[0] for row in pool.run(resume, 2, path)] == ["ended"] * 2
