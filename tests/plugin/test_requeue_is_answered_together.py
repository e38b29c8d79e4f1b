from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoint.reading import FORMATS, read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, fit, make_trainer, seed_everything

pytestmark = pytest.mark.dist


def slurm_environment(rank: int, world: int) -> dict[str, str]:
    return {
        "SLURM_NTASKS": str(world),
        "SLURM_NTASKS_PER_NODE": str(world),
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NAME": "train",
    }


def requeue(rank: int, world: int, settings: dict[str, Any], folder: Path, at: int, on: int) -> Any:
    """SLURM signals rank `on` in the middle of batch `at`."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    class Signalled(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == at and rank == on:
                signal.raise_signal(signal.SIGUSR1)
            return super().training_step(batch, batch_idx)

    calls: list[Any] = []
    seed_everything(5, verbose=False)

    def scontrol(command: Any, *args: Any, **kwargs: Any) -> int:
        calls.append(command)
        return 0

    with (
        mock.patch.dict(os.environ, slurm_environment(rank, world)),
        mock.patch("lightning.pytorch.trainer.connectors.signal_connector.call", scontrol),
    ):
        trainer = make_trainer(
            settings,
            world,
            plugins=lambda: [SLURMEnvironment(auto_requeue=True)],
            default_root_dir=str(folder),
        )
        trainer.fit(Signalled(), data())
    return calls, sorted(p.name for p in folder.glob("*.ckpt"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("at", "on", "steps"), [(2, 1, 3), (5, 0, 6)], ids=str)
def test_all_ranks_save_at_one_batch_and_rank_0_requeues(
    pair: RankPool, tmp_path: Path, form: str, stage: int, at: int, on: int, steps: int
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    got = pair.run(requeue, {"stage": stage, "save_format": form}, tmp_path, at, on)
    assert got[0][0] == [["scontrol", "requeue", "77"]]
    assert got[1][0] == []
    assert got[0][1] == ["hpc_ckpt_1.ckpt"]
    assert read(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == steps
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_saved_is_taken_up(pair: RankPool, tmp_path: Path, form: str) -> None:
    pair.run(requeue, {"stage": 3, "save_format": form}, tmp_path, 5, 0)
    resumed = pair.run(
        fit, {"stage": 2}, {"max_epochs": 1}, Net, {"seed": 3}, tmp_path / "hpc_ckpt_1.ckpt"
    )
    straight = pair.run(fit, {"stage": 3}, {"max_epochs": 1})
    assert resumed[0]["steps"] == straight[0]["steps"]
    close(resumed[0]["weights"], straight[0]["weights"])


def start_again(rank: int, world: int, settings: dict[str, Any], folder: Path) -> Any:
    """What the requeued job does: no path is given, Lightning looks for one."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    seed_everything(5, verbose=False)
    with mock.patch.dict(os.environ, slurm_environment(rank, world)):
        trainer = make_trainer(
            settings,
            world,
            plugins=lambda: [SLURMEnvironment(auto_requeue=True)],
            default_root_dir=str(folder),
            max_epochs=2,
        )
        module = Net(seed=9)
        trainer.fit(module, data())
    return len(module.losses), trainer.global_step


@pytest.mark.parametrize("form", FORMATS)
def test_a_draft_of_a_killed_save_does_not_stand_in_the_way(
    pair: RankPool, tmp_path: Path, form: str
) -> None:
    """SLURM's grace period was over before the second save was."""
    settings = {"stage": 2, "save_format": form}
    pair.run(requeue, settings, tmp_path, 5, 0)
    assert pair.run(start_again, settings, tmp_path) == [(6, 12)] * 2
    pair.run(leave_a_draft, form, tmp_path / "hpc_ckpt_2.ckpt")
    assert not (tmp_path / "hpc_ckpt_2.ckpt").exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert pair.run(start_again, settings, tmp_path) == [(6, 12)] * 2


def leave_a_draft(rank: int, world: int, form: str, path: Path) -> None:
    """Write as far as the last step before the name, on one rank, and forget to clean up."""
    from lightning_zeroplus.checkpoint import (
        ShardedCheckpoint,
        Solo,
        folder_at,
        save_universal,
        write_full,
    )
    from lightning_zeroplus.checkpoint.folder import LocalFolder

    class Killed(BaseException):
        pass

    def dies(*_: Any, **__: Any) -> Any:
        raise Killed

    if rank:
        return

    def write() -> None:
        if form == "full":
            write_full({"a": 1}, path)
        else:
            save_universal(ShardedCheckpoint({}), folder_at(path), Solo())

    with (
        mock.patch.object(LocalFolder, "commit", dies),
        mock.patch.object(LocalFolder, "abandon"),
        mock.patch.object(Path, "replace", dies),
        mock.patch.object(Path, "unlink"),
        pytest.raises(Killed),
    ):
        write()
