"""kill -9 in the middle of a save: the others say who is gone, and the previous one resumes."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_zeroplus.checkpoint.datafile import DataFile
from lightning_zeroplus.checkpoint.folder import LocalFolder
from tests.checkpoint.reading import read
from tests.crash import die, run_with_a_death
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, fit, make_trainer, seed_everything

pytestmark = pytest.mark.dist


class Saves(Callback):
    """Saves under one name after the second and the fourth batch; the second time it goes wrong."""

    def __init__(self, path: Path, plant: Any) -> None:
        self.path, self.plant = path, plant

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, n: int) -> None:
        if n == 3:
            self.plant()
        if n in {1, 3}:
            trainer.save_checkpoint(self.path)


def plant(moment: str) -> None:
    """Have this process die at its next write, at its last, or where the folder gets its name."""

    def dies(*_: Any, **__: Any) -> Any:
        die()

    if moment == "write":
        original, calls = DataFile.write, []

        def write(self: DataFile, part: Any) -> int:
            calls.append(1)
            if len(calls) == 5:
                die()
            return original(self, part)

        DataFile.write = write  # type: ignore[method-assign]
    elif moment == "flush":
        DataFile.close = dies  # type: ignore[method-assign]
    else:
        LocalFolder.commit = dies  # type: ignore[method-assign]


def interrupted(
    rank: int, world: int, stage: int, path: Path, victim: int, moment: str, background: bool
) -> str:
    seed_everything(5, verbose=False)

    def spoil() -> None:
        if background:
            trainer.strategy._wait_for_save()
            time.sleep(0.5)  # the ranks know of each other by then
        if rank == victim:
            plant(moment)

    options: dict[str, Any] = {"callbacks": lambda: [Saves(path, spoil)]}
    if background:
        options["plugins"] = lambda: [AsyncCheckpointIO()]
    trainer = make_trainer({"stage": stage, "timeout": timedelta(seconds=60)}, world, **options)
    try:
        trainer.fit(Net(), data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


CASES = [
    (2, 3, 1, "write", False),
    (2, 3, 0, "commit", False),
    (2, 2, 1, "write", True),
    pytest.param(3, 2, 2, "flush", False, marks=pytest.mark.full),
    pytest.param(2, 1, 0, "write", False, marks=pytest.mark.full),
    pytest.param(2, 3, 0, "commit", True, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "stage", "victim", "moment", "background"), CASES, ids=str)
def test_the_others_name_it_and_the_run_goes_on_from_the_one_before(
    pair: RankPool,
    tmp_path: Path,
    world: int,
    stage: int,
    victim: int,
    moment: str,
    background: bool,
) -> None:
    path = tmp_path / "run" / "x.ckpt"
    arguments = (stage, path, victim, moment, background)
    ranks = run_with_a_death(world, tmp_path / "ranks", interrupted, *arguments)
    assert ranks[victim].exit_code == -9
    for rank, outcome in enumerate(ranks):
        if rank != victim:
            assert outcome.exit_code == 0, outcome
            assert "Error: " in outcome.message
            assert f"rank {victim}" in outcome.message
            assert outcome.after_s < 20
    left = set(os.listdir(path.parent)) - {"x.ckpt"}
    assert all(name.startswith(".") and name.endswith(".tmp") for name in left)
    assert read(path)["global_step"] == 2
    resumed = pair.run(fit, {"stage": stage}, {"max_epochs": 1}, Net, {"seed": 9}, path, path)
    # On fewer ranks the batches that were left are shared among them: one step less in all.
    steps = 6 if world == 2 else 5
    assert resumed[0]["steps"] == steps
    assert os.listdir(path.parent) == ["x.ckpt"], "the next save removes drafts"
    assert read(path)["global_step"] == steps


def resume_last(rank: int, world: int, folder: Path, form: str) -> Any:
    seed_everything(5, verbose=False)

    def callbacks() -> list[Callback]:
        return [ModelCheckpoint(folder, "{step}", save_last=True, save_top_k=1)]

    settings = {"stage": 2, "save_format": form}
    trainer = make_trainer(settings, world, callbacks=callbacks, max_epochs=1)
    trainer.fit(Net(), data())
    (name,) = {p.name for p in folder.iterdir()} - {"last.ckpt"}
    trainer.strategy.barrier()
    if rank == 0:  # killed runs have left drafts that are newer than the whole checkpoint
        for hidden in ("last.ckpt", name, "last-v1.ckpt"):
            token, killed = uuid.uuid4().hex, LocalFolder(folder / hidden)
            killed.prepare(token)
            killed.open(token, "__0_0.distcp").write(b"half")
    trainer.strategy.barrier()
    trainer = make_trainer(settings, world, callbacks=callbacks, max_epochs=2)
    module = Net(seed=9)
    trainer.fit(module, data(), ckpt_path="last")
    hidden = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    return len(module.losses), str(trainer.ckpt_path), hidden


@pytest.mark.parametrize("form", ["full", "universal"])
def test_no_draft_is_taken_for_the_last_checkpoint(
    pair: RankPool, tmp_path: Path, form: str
) -> None:
    for steps, path, hidden in pair.run(resume_last, tmp_path, form):
        assert steps == 6, "the second epoch"
        assert Path(path).name == "last.ckpt"
        if form == "universal":
            assert len(hidden) == 2, "those whose names were not saved again"
