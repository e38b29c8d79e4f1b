"""Folders that others write: plain DCP, FSDP2, and Lightning's own sharded strategies."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from tests.plugin.scenes import Net, data, make_trainer, seed_everything, weights_of

__all__ = ["evaluate", "optimizer_of", "save_by_fsdp2", "save_by_model_parallel", "train_on"]

STEPS = 6


def _batches(rank: int, world: int) -> Any:
    """The batches that a Trainer hands out in the first epoch."""
    source = data().dataset
    sampler: Any = DistributedSampler(source, world, rank, shuffle=True, seed=5)  # type: ignore[arg-type]
    return DataLoader(source, batch_size=4, sampler=sampler)


def save_by_fsdp2(rank: int, world: int, path: Path, layout: str) -> dict[str, Any]:
    """Train by hand under FSDP2 and save under the given names; return full weights."""
    warnings.simplefilter("ignore")
    seed_everything(5, verbose=False)
    module = Plain()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    optimizer = module.configure_optimizers()
    for batch in _batches(rank, world):
        module.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, state = get_model_state_dict(module), get_optimizer_state_dict(module, optimizer)
    trees: dict[str, Any] = {
        "model and optimizer_0": {"model": model, "optimizer_0": state},
        "state_dict and optimizer_0": {"state_dict": model, "optimizer_0": state},
        "model and optimizer": {"model": model, "optimizer": state},
        "model and optim": {"model": model, "optim": state},
        "model alone": {"model": model},
        "weights without a prefix": model,
    }
    dcp.save(trees[layout], checkpoint_id=path)
    full = {}
    for name, value in module.state_dict().items():
        full[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    if dist.is_initialized():
        dist.barrier()
    return full


class Plain(Net):
    """No BatchNorm: its statistics are a matter of each rank."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed, schedule=False)
        self.norm = torch.nn.Identity()  # type: ignore[assignment]


class Parallel(Plain):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def save_by_model_parallel(rank: int, world: int, path: Path) -> dict[str, Any]:
    """Train and save with Lightning's FSDP2 strategy."""
    warnings.simplefilter("ignore")
    seed_everything(5, verbose=False)
    strategy = ModelParallelStrategy(
        data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=True
    )
    trainer = make_trainer(strategy, world)
    module = Parallel()
    trainer.fit(module, data())
    trainer.save_checkpoint(path)
    full = {}
    for name, value in module.state_dict().items():
        full[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    return full


def train_on(
    rank: int, world: int, strategy: Any, path: Path | None, epochs: int
) -> dict[str, Any]:
    """Train ours, or DDP, from a checkpoint."""
    seed_everything(5, verbose=False)
    module = Plain(seed=1 if path is None else 9)
    trainer = make_trainer(strategy, world, max_epochs=epochs)
    trainer.fit(module, data(), ckpt_path=path)
    return {"weights": weights_of(module), "steps": trainer.global_step, "losses": module.losses}


def evaluate(rank: int, world: int, strategy: Any, path: Path) -> dict[str, Any]:
    module = Plain(seed=9)
    make_trainer(strategy, world).validate(module, data(8), path, verbose=False)
    return weights_of(module)


def optimizer_of(rank: int, world: int, stage: int, path: Path) -> Any:
    """Return what the optimizer has right after resuming."""
    seen: dict[str, Any] = {}

    class Looks(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            with trainer.strategy.full_parameters():
                seen["weights"] = weights_of(module)
            seen["exp_avg"] = {
                name: trainer.strategy.full_optimizer_state(p, "exp_avg").clone()
                for name, p in module.named_parameters()
            }
            state = trainer.optimizers[0].state
            seen["steps"] = {float(s["step"]) for s in state.values() if "step" in s}

    seed_everything(5, verbose=False)
    trainer = make_trainer(
        {"stage": stage},
        world,
        callbacks=lambda: [Looks()],
        enable_checkpointing=False,
        max_epochs=3,
    )
    trainer.fit(Plain(seed=9), data(), ckpt_path=path)
    return seen
