from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

from tests.checkpoint.reading import read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, fit, make_trainer, seed_everything

pytestmark = pytest.mark.dist


class Terminated(Net):
    """The scheduler signals all ranks during the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def run(rank: int, world: int, settings: dict[str, Any], folder: Path) -> tuple[str, int]:
    def callbacks() -> list[Callback]:
        return [OnExceptionCheckpoint(folder, "last")]

    seed_everything(5, verbose=False)
    trainer = make_trainer(settings, world, callbacks=callbacks)
    try:
        trainer.fit(Terminated(), data(), ckpt_path=None)
    except BaseException as error:
        return type(error).__name__, trainer.global_step
    return "ended", 0


@pytest.mark.parametrize(
    ("form", "stage"),
    [
        ("universal", 3),
        pytest.param("full", 3, marks=pytest.mark.full),
        pytest.param("universal", 1, marks=pytest.mark.full),
        pytest.param("full", 1, marks=pytest.mark.full),
    ],
)
def test_all_ranks_stop_and_the_run_can_be_resumed(tmp_path: Path, form: str, stage: int) -> None:
    settings = {"stage": stage, "save_format": form}
    with RankPool(2) as pool:
        assert pool.run(run, settings, tmp_path) == [("SIGTERMException", 3)] * 2
    path = tmp_path / "last.ckpt"
    assert read(path)["global_step"] == 3
    with RankPool(2) as pool:
        resumed = pool.run(fit, settings, {"max_epochs": 1}, Net, {"seed": 2}, path)
        assert resumed[0]["steps"] == 6
