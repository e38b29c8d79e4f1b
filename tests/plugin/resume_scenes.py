"""Runs whose every step depends on random numbers, to be interrupted and resumed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")  # what Lightning advises about toy runs

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything  # noqa: E402

from lightning_zeroplus import ZeroPlusStrategy  # noqa: E402
from lightning_zeroplus.plugin.resume import Resume  # noqa: E402
from tests.plugin.scenes import make_trainer, weights_of  # noqa: E402

__all__ = [
    "Augmented",
    "Dropped",
    "Resuming",
    "ResumingFolders",
    "SaveAt",
    "differences",
    "loader",
    "saves",
    "train",
]


class Resuming(ZeroPlusStrategy):
    """The strategy under test; a subclass of it plants a defect."""

    form: Literal["full", "universal"] = "full"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, save_format=self.form, **kwargs)

    @property
    def resume(self) -> Resume:
        return self._resume


class ResumingFolders(Resuming):
    form = "universal"


class Augmented(Dataset[Tensor]):
    """Draws from every generator at each read, and notes the reads."""

    def __init__(self, count: int = 20) -> None:
        self.values = torch.linspace(-1, 1, count * 5).reshape(count, 5)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(index)
        noise = torch.randn(5) * 0.1 + random.random() + float(np.random.rand())
        return self.values[index] + noise


def loader(count: int = 20, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    options.setdefault("shuffle", True)
    return DataLoader(Augmented(count), batch_size=batch_size, **options)


class Dropped(LightningModule):
    """Dropout in training; validation draws nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 5))
        self.losses: list[float] = []
        self.steps: list[tuple[int, int]] = []

    def _loss(self, batch: Any) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        return sum((F.mse_loss(self.net(x), x) for x in parts if x is not None), torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(float(loss.detach()))
        self.steps.append((self.current_epoch, batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(batch), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        torch.rand(3)  # a hook that draws

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-2)


class SaveAt(Callback):
    """Saves in `hook`, each time it is called while training."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder, self.count = folder, 0
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, module: Dropped, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        done = len(module.losses)
        self.count += 1
        trainer.save_checkpoint(self.folder / f"{self.count:03d}-{done:03d}.ckpt")


Build = Callable[[], tuple[Any, Any]]
"""Returns training and validation dataloaders."""


def train(
    build: Build,
    world: int,
    options: dict[str, Any] | None = None,
    *,
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: Path | None = None,
    seed: int = 3,
    model: type[Dropped] = Dropped,
    strategy: type[Resuming] = Resuming,
    keep: bool = False,
) -> tuple[Dropped, Trainer]:
    """Fit; a resumed run starts from another state of all generators, and other weights.

    Lightning adds a `ModelCheckpoint` beside other callbacks, which is left out unless `keep`.
    """
    seed_everything(seed, verbose=False)
    module = model()
    settings = {"max_epochs": 2, "num_sanity_val_steps": 1, **(options or {})}
    chosen = {"callbacks": lambda: list(callbacks)} if callbacks else {}
    trainer = make_trainer(strategy(2), world, **settings, **chosen)
    for own in [] if keep else trainer.checkpoint_callbacks:
        trainer.callbacks.remove(own)
    # The order of a distributed sampler follows this seed; a job that is resumed keeps it.
    seed_everything(3, verbose=False)
    if ckpt_path is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
    training, validation = build()
    trainer.fit(module, training, validation, ckpt_path=ckpt_path)
    return module, trainer


def saves(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.glob("*.ckpt")):
        yield int(path.stem.split("-")[1]), path


def differences(
    rank: int,
    world: int,
    build: Build,
    folder: Path,
    hook: str = "on_train_batch_end",
    options: dict[str, Any] | None = None,
    model: type[Dropped] = Dropped,
    strategy: type[Resuming] = Resuming,
) -> dict[str, Any]:
    """Train, saving in each `hook`; resume each of the checkpoints; say which of them differ."""
    whole, _ = train(
        build, world, options, callbacks=(SaveAt(folder, hook),), model=model, strategy=strategy
    )
    wanted = weights_of(whole)
    wrong: dict[str, Any] = {}
    for done, path in saves(folder):
        resumed, _ = train(
            build, world, options, ckpt_path=path, seed=99, model=model, strategy=strategy
        )
        got = weights_of(resumed)
        if resumed.losses != whole.losses[done:]:
            wrong[path.stem] = ("losses", resumed.losses, whole.losses[done:])
        elif resumed.steps != whole.steps[done:]:
            wrong[path.stem] = ("steps", resumed.steps, whole.steps[done:])
        elif not all(torch.equal(got[name], wanted[name]) for name in wanted):
            wrong[path.stem] = ("weights",)
    return {"steps": len(whole.losses), "saves": len(list(saves(folder))), "wrong": wrong}
