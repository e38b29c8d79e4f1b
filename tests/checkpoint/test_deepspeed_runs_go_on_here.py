"""A run of DeepSpeed goes on under our Trainer, at every stage, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zeroplus import ZeroPlusStrategy
from lightning_zeroplus.checkpoint import read_checkpoint
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.zero import shard
from tests.checkpoint.fixtures.deepspeed import Gpt, recorded_losses, unpack
from tests.dist_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

STEP = 5
"""The checkpoints' last one."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return it with other settings than the run had: those come from the checkpoint."""
    params = list(model.parameters())
    wide = [p for p in params if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": [p for p in params if p.dim() <= 1]}, {"params": wide}], lr=1.0
    )


class Run(pl.LightningModule):
    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.net = Gpt()
        self.rows = rows
        self.losses: list[float] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The model was saved by itself, not inside of a LightningModule."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in state.items()}
        for saved in checkpoint["optimizer_states"]:
            saved["state"] = {f"net.{name}": value for name, value in saved["state"].items()}
            for group in saved["param_groups"]:
                group["params"] = [f"net.{name}" for name in group["params"]]

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(list(self.rows), batch_size=None)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


def rank_goes_on(rank: int, world: int, stage: int, folder: str, rows: torch.Tensor) -> list[float]:
    per_rank = rows.shape[1] // world
    own = rows[:, rank * per_rank : (rank + 1) * per_rank].flatten(1, 2)
    run = Run(own)
    trainer = pl.Trainer(
        strategy=ZeroPlusStrategy(stage=stage),  # type: ignore[arg-type]
        accelerator="cpu",
        devices=world,
        max_steps=len(rows),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(run, ckpt_path=folder)
    return run.losses


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("variant", "form"), [("s1_fp32", "universal"), ("s3_fp32", "ckpt")])
def test_the_trainer_goes_on_on_two_ranks(
    pool2: RankPool, shelf: Path, variant: str, form: str, stage: int
) -> None:
    rows = torch.load(shelf / "data.pt")[STEP:]
    found = pool2.run(rank_goes_on, stage, str(shelf / variant / form), rows)
    means = [sum(losses) / 2 for losses in zip(*found, strict=True)]
    assert means == pytest.approx(recorded_losses(shelf, variant)[STEP:], abs=1e-5, rel=0)


def continue_sharded(
    transport: Transport, stage: int, folder: Path, rows: torch.Tensor
) -> list[float]:
    checkpoint = read_checkpoint(folder)
    model = Gpt()
    optimizer = make_optimizer(model)
    engine = shard(model, EngineConfig(stage=stage), transport)  # type: ignore[arg-type]
    engine.attach(optimizer)
    engine.load_full_state(checkpoint["state_dict"])
    engine.load_full_optimizer_state_dict(optimizer, checkpoint["optimizer_states"][0])
    per_rank = rows.shape[1] // transport.world_size
    losses = []
    for row in rows:
        own = row[transport.rank * per_rank : (transport.rank + 1) * per_rank].flatten(0, 1)
        with engine.forward_pass():
            loss = model(own)
        with engine.backward_pass():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    engine.close()
    return losses


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("form", ["universal", "ckpt"])
@pytest.mark.parametrize("variant", ["s1_fp32", "s3_fp32"])
def test_the_next_losses_are_the_recorded_ones(
    shelf: Path, variant: str, form: str, stage: int, world: int
) -> None:
    rows = torch.load(shelf / "data.pt")[STEP:]
    found = run_virtual_ranks(
        world, lambda t: continue_sharded(t, stage, shelf / variant / form, rows)
    )
    means = [sum(losses) / world for losses in zip(*found, strict=True)]
    assert means == pytest.approx(recorded_losses(shelf, variant)[STEP:], abs=1e-5, rel=0)


def test_fresh_moments_would_be_noticed(shelf: Path) -> None:
    rows = torch.load(shelf / "data.pt")[STEP:]

    def forgetful(transport: Transport) -> list[float]:
        checkpoint = read_checkpoint(shelf / "s1_fp32" / "ckpt")
        model = Gpt()
        model.load_state_dict(checkpoint["state_dict"])
        optimizer = make_optimizer(model)
        for group, saved in zip(
            optimizer.param_groups,
            reversed(checkpoint["optimizer_states"][0]["param_groups"]),
            strict=True,
        ):
            group.update({k: v for k, v in saved.items() if k != "params"})
        losses = []
        for row in rows:
            loss = model(row.flatten(0, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    (losses,) = run_virtual_ranks(1, forgetful)
    assert losses != pytest.approx(recorded_losses(shelf, "s1_fp32")[STEP:], abs=1e-5, rel=0)
