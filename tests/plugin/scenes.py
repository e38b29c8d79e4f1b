"""Small models and runs that the tests of the strategy share; everything is the same each time."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")  # what Lightning advises about toy runs

from lightning.pytorch import LightningModule, Trainer, seed_everything  # noqa: E402

from lightning_zeroplus import ZeroPlusStrategy  # noqa: E402

__all__ = ["Block", "Net", "close", "data", "fit", "make_trainer", "weights_of"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(F.gelu(self.norm(x)))


class Net(LightningModule):
    """Odd sizes, repeated blocks, a buffer, a tied weight."""

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float = 0.02,
        seed: int = 1,
        tied: bool = True,
        schedule: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.kind, self.lr, self.schedule = optimizer, lr, schedule
        self.first = nn.Linear(7, 11)
        self.blocks = nn.ModuleList(Block(11) for _ in range(3))
        self.norm = nn.BatchNorm1d(11)
        self.last = nn.Linear(11, 7)
        self.again = nn.Linear(11, 7, bias=False)
        if tied:
            self.again.weight = self.last.weight
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.last(x) + self.again(x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        if self.kind == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.9)
        else:
            # A small eps would hide gradients that are wrong by a constant factor.
            optimizer = torch.optim.AdamW(groups, lr=self.lr, eps=1e-2)
        if not self.schedule:
            return optimizer
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
                "interval": "step",
            }
        ]


def data(count: int = 48, batch_size: int = 4, seed: int = 0) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 7, generator=source)
    y = torch.sin(3 * x) + 0.1 * torch.randn(count, 7, generator=source)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)  # no shuffling


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Return this process's folder, which goes with it."""
    return tempfile.TemporaryDirectory(prefix="zeroplus-test-", ignore_cleanup_errors=True)


def make_trainer(strategy: Any, world: int, **options: Any) -> Trainer:
    """A quiet trainer; `strategy` is an object, a registered name or the settings of ours."""
    if isinstance(strategy, dict):
        strategy = ZeroPlusStrategy(**strategy)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "default_root_dir": tempfile.mkdtemp(dir=_scratch().name),
    }
    for name in ("plugins", "callbacks"):  # made here: a callback holds what no pipe can carry
        if name in options:
            options = {**options, name: options[name]()}
    settings["enable_checkpointing"] = "callbacks" in options
    return Trainer(strategy=strategy, **{**settings, **options})


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fit(
    rank: int,
    world: int,
    strategy: Any,
    options: dict[str, Any] | None = None,
    model: Callable[..., LightningModule] = Net,
    arguments: dict[str, Any] | None = None,
    ckpt_path: str | Path | None = None,
    save_to: str | Path | None = None,
) -> dict[str, Any]:
    """Train and return weights, losses and metrics of this rank."""
    seed_everything(5, verbose=False)
    trainer = make_trainer(strategy, world, **(options or {}))
    module = model(**(arguments or {}))
    trainer.fit(module, data(), data(seed=1), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "weights": weights_of(module),
        "losses": list(getattr(module, "losses", [])),
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def close(
    got: dict[str, Tensor], wanted: dict[str, Tensor], *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Assert equal names and, within the promise of the design, equal values."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
