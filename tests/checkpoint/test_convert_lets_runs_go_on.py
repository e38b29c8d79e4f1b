"""A run goes on from a converted checkpoint as from the one that was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_zeroplus import consolidate
from lightning_zeroplus.checkpoint import convert_checkpoint
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, fit

SHARDED = {"stage": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pair: RankPool) -> Path:
    """What two ranks saved after an epoch, at stage 3 and under DDP."""
    folder = tmp_path_factory.mktemp("runs")
    for strategy, name in ((SHARDED, "sharded.ckpt"), ("ddp", "ddp.ckpt")):
        pair.run(fit, strategy, None, Net, None, None, folder / name, timeout=100.0)
    return folder


def go_on(pair: RankPool, strategy: Any, path: Path) -> dict[str, Any]:
    """Return what a second epoch makes of the checkpoint at ``path``."""
    options = {"max_epochs": 2}
    found = pair.run(fit, strategy, options, Net, None, path, timeout=100.0)[0]
    assert found["steps"] == 12
    return found  # type: ignore[no-any-return]


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    close(got["weights"], wanted["weights"])
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert len(got["losses"]) == 6
    assert got["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)


@pytest.mark.dist
def test_under_ddp_from_a_consolidated_checkpoint(folder: Path, pair: RankPool) -> None:
    consolidate(folder / "sharded.ckpt", folder / "consolidated.ckpt")
    ddp = go_on(pair, "ddp", folder / "consolidated.ckpt")
    same(ddp, go_on(pair, SHARDED, folder / "sharded.ckpt"))
    same(ddp, go_on(pair, "ddp", folder / "ddp.ckpt"))


@pytest.mark.dist
def test_sharded_from_a_checkpoint_of_ddp(folder: Path, pair: RankPool) -> None:
    convert_checkpoint(folder / "ddp.ckpt", folder / "universal.ckpt", "universal")
    found = go_on(pair, {"stage": 2}, folder / "universal.ckpt")
    same(found, go_on(pair, "ddp", folder / "ddp.ckpt"))


@pytest.mark.dist
def test_sharded_from_deepspeeds_layout(folder: Path, pair: RankPool) -> None:
    convert_checkpoint(folder / "sharded.ckpt", folder / "deepspeed", "deepspeed")
    found = go_on(pair, SHARDED, folder / "deepspeed")
    same(found, go_on(pair, SHARDED, folder / "sharded.ckpt"))
