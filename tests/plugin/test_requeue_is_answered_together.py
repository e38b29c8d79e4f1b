from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, fit, make_trainer

pytestmark = pytest.mark.dist


def requeue(rank: int, world: int, stage: int, folder: Path, at: int, on: int) -> Any:
    """SLURM signals rank `on` in the middle of batch `at`."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    class Signalled(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == at and rank == on:
                signal.raise_signal(signal.SIGUSR1)
            return super().training_step(batch, batch_idx)

    slurm = {
        "SLURM_NTASKS": str(world),
        "SLURM_NTASKS_PER_NODE": str(world),
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NAME": "train",
    }
    calls: list[Any] = []

    def scontrol(command: Any, *args: Any, **kwargs: Any) -> int:
        calls.append(command)
        return 0

    with (
        mock.patch.dict(os.environ, slurm),
        mock.patch("lightning.pytorch.trainer.connectors.signal_connector.call", scontrol),
    ):
        trainer = make_trainer(
            {"stage": stage},
            world,
            plugins=lambda: [SLURMEnvironment(auto_requeue=True)],
            default_root_dir=str(folder),
        )
        trainer.fit(Signalled(), data())
    return calls, sorted(p.name for p in folder.glob("*.ckpt"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("at", "on", "steps"), [(2, 1, 3), (5, 0, 6)], ids=str)
def test_all_ranks_save_at_one_batch_and_rank_0_requeues(
    pair: RankPool, tmp_path: Path, stage: int, at: int, on: int, steps: int
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    got = pair.run(requeue, stage, tmp_path, at, on)
    assert got[0][0] == [["scontrol", "requeue", "77"]]
    assert got[1][0] == []
    assert got[0][1] == ["hpc_ckpt_1.ckpt"]
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == steps
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_was_saved_is_taken_up(pair: RankPool, tmp_path: Path) -> None:
    pair.run(requeue, 3, tmp_path, 5, 0)
    resumed = pair.run(
        fit, {"stage": 2}, {"max_epochs": 1}, Net, {"seed": 3}, tmp_path / "hpc_ckpt_1.ckpt"
    )
    straight = pair.run(fit, {"stage": 3}, {"max_epochs": 1})
    assert resumed[0]["steps"] == straight[0]["steps"]
    close(resumed[0]["weights"], straight[0]["weights"])
