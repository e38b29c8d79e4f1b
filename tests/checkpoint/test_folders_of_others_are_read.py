"""Folders of `torch.distributed.checkpoint`, FSDP2 and Lightning's strategies resume here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole
from lightning_zeroplus.layout import Span
from tests.checkpoint.foreign import (
    evaluate,
    optimizer_of,
    save_by_fsdp2,
    save_by_model_parallel,
    train_on,
)
from tests.checkpoint.small_folder import TENSORS
from tests.dist_pool import RankPool
from tests.plugin.scenes import close

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]


# -- read in one process


def plain_folder(path: Path) -> dict[str, Any]:
    tree = {
        "model": TENSORS,
        "optimizer_0": {
            "state": {"a": {"exp_avg": TENSORS["a"] + 1, "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a"]}],
        },
        "optimizer_1": {"state": {}, "param_groups": [{"lr": 0.2, "params": ["f"]}]},
    }
    dcp.save(tree, checkpoint_id=path, no_dist=True)
    return tree


def test_every_tensor_and_setting_of_a_plain_folder_is_there(tmp_path: Path) -> None:
    tree = plain_folder(tmp_path / "x")
    found = read_whole(read_checkpoint(tmp_path / "x"))
    assert found["state_dict"].keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(found["state_dict"][name], value)
        assert found["state_dict"][name].dtype == value.dtype
    first, second = found["optimizer_states"]
    assert torch.equal(first["state"]["a"]["exp_avg"], TENSORS["a"] + 1)
    assert first["state"]["a"]["step"] == 3
    assert first["param_groups"] == tree["optimizer_0"]["param_groups"]
    assert second["param_groups"] == tree["optimizer_1"]["param_groups"]


def test_tensors_are_read_when_they_are_needed(tmp_path: Path) -> None:
    plain_folder(tmp_path / "x")
    found = read_checkpoint(tmp_path / "x")["state_dict"]
    for name in os.listdir(tmp_path / "x"):
        if name.endswith(".distcp"):
            (tmp_path / "x" / name).rename(tmp_path / name)
    assert tuple(found["a"].shape) == (5, 7, 3)
    for file in tmp_path.glob("*.distcp"):
        file.rename(tmp_path / "x" / file.name)
    part = found["d"].read_span(Span(7, 50), TENSORS["d"].stride())
    assert torch.equal(part, torch.as_strided(TENSORS["d"], (120,), (1,))[7:50])


# -- resumed by a Trainer

LAYOUTS = [
    "model and optimizer_0",
    "state_dict and optimizer_0",
    "model and optimizer",
    "model and optim",
]


@pytest.fixture(scope="module")
def ddp(pair: RankPool) -> Any:
    """What one epoch, and two, of the same training end with."""
    return [pair.run(train_on, "ddp", None, epochs)[0] for epochs in (1, 2)]


@pytest.mark.parametrize(("layout", "stage"), zip(LAYOUTS, (3, 1, 2, 3), strict=True), ids=str)
def test_weights_and_optimizer_of_fsdp2_are_taken_up(
    pair: RankPool, solo: RankPool, tmp_path: Path, ddp: Any, layout: str, stage: int
) -> None:
    path = tmp_path / "x"
    full = pair.run(save_by_fsdp2, path, layout)[0]
    close(full, ddp[0]["weights"])  # the folder is of the run that we think it is of
    for pool in (pair, solo):
        for seen in pool.run(optimizer_of, stage, path):
            close(seen["weights"], full, rtol=0, atol=0)
            assert seen["steps"] == {6.0}
            assert all(float(value.abs().sum()) > 0 for value in seen["exp_avg"].values())


@pytest.mark.parametrize("layout", ["model alone", "weights without a prefix"])
def test_weights_alone_serve_evaluation(
    pair: RankPool, tmp_path: Path, ddp: Any, layout: str
) -> None:
    path = tmp_path / "x"
    full = pair.run(save_by_fsdp2, path, layout)[0]
    found = read_whole(read_checkpoint(path))["state_dict"]
    close(found, full, rtol=0, atol=0)
    for stage in (1, 3):
        for weights in pair.run(evaluate, {"stage": stage}, path):
            close(weights, full, rtol=0, atol=0)


@pytest.fixture(scope="module")
def parallel(pair: RankPool, tmp_path_factory: pytest.TempPathFactory, ddp: Any) -> Path:
    """What Lightning's own FSDP2 strategy saved after one epoch."""
    path = tmp_path_factory.mktemp("parallel") / "x.ckpt"
    close(pair.run(save_by_model_parallel, path)[0], ddp[0]["weights"])
    assert (path / "meta.pt").is_file()
    return path


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_lightnings_model_parallel_strategy_goes_on(
    pair: RankPool, parallel: Path, ddp: Any, stage: int
) -> None:
    for rank in pair.run(train_on, {"stage": stage}, parallel, 2):
        close(rank["weights"], ddp[1]["weights"])
        assert rank["steps"] == 12
        assert len(rank["losses"]) == 6


def test_a_run_of_lightnings_fsdp_strategy_goes_on(
    pair: RankPool, parallel: Path, tmp_path: Path, ddp: Any
) -> None:
    """That strategy wants a GPU; its folders differ from the other one's in the names only."""
    tree = read_whole(read_checkpoint(parallel))
    meta = torch.load(parallel / "meta.pt", weights_only=False)
    fsdp = tmp_path / "fsdp.ckpt"
    content = {"model": tree["state_dict"], "optimizer_0": tree["optimizer_states"][0]}
    dcp.save(content, checkpoint_id=fsdp, no_dist=True)
    torch.save(meta, fsdp / "meta.pt")
    for rank in pair.run(train_on, {"stage": 3}, fsdp, 2):
        close(rank["weights"], ddp[1]["weights"])
        assert rank["steps"] == 12
