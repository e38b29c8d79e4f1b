"""What one rank does alone ends on its peers as an error with a name, not as a hang."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, make_trainer

pytestmark = pytest.mark.dist


class FailsAlone(Net):
    where = "training_step"

    def fail(self, here: str) -> None:
        if here == self.where and self.global_rank == 1 and self.global_step == 2:
            raise KeyError("planted")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("on_before_optimizer_step")


def run(rank: int, world: int, stage: int, where: str) -> tuple[str, float]:
    module = FailsAlone()
    module.where = where
    trainer = make_trainer({"stage": stage, "timeout": timedelta(seconds=20)}, world)
    start = time.monotonic()
    try:
        trainer.fit(module, data())
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "ended", 0.0


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        (1, "on_before_optimizer_step"),
        (3, "training_step"),
        pytest.param(1, "training_step", marks=pytest.mark.full),
        pytest.param(2, "training_step", marks=pytest.mark.full),
        pytest.param(2, "on_before_optimizer_step", marks=pytest.mark.full),
        pytest.param(3, "on_before_optimizer_step", marks=pytest.mark.full),
    ],
)
def test_an_exception_on_one_rank_ends_all(stage: int, where: str) -> None:
    # A pool of its own: Gloo pairs of the default group are in an unknown state afterwards.
    with RankPool(2) as pool:
        first, second = pool.run(run, stage, where)
        assert second[0] == "KeyError: 'planted'"
        assert first[0].startswith("CollectiveError: ")
        assert "rank 1" in first[0]
        assert "KeyError" in first[0]
        assert first[1] < 15
