"""The demo's phases, each run as a command of its own by `zeroplus demo`."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from typing_extensions import override

from lightning_zeroplus import ZeroPlusStrategy
from lightning_zeroplus.cli.demo_model import GPT, Block, StdlibText
from lightning_zeroplus.cli.demo_table import STRATEGIES

_MORE_STEPS = 10
_SEED = 20
# Found by themselves, the units of so small a model would be merged into one.
_UNITS: list[str | type[nn.Module]] = [Block]


def train(folder: Path, steps: int, devices: int) -> None:
    """Write `gpt.ckpt` and, on rank 0, `train.json`."""
    pl.seed_everything(_SEED, verbose=False)
    trainer = pl.Trainer(
        strategy=ZeroPlusStrategy(stage=3, units=_UNITS),
        devices=devices,
        max_epochs=1,
        limit_train_batches=steps,
        **_quiet(),
    )
    model = GPT(total=steps)
    trainer.fit(model, StdlibText())
    trainer.save_checkpoint(folder / "gpt.ckpt")
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["val_loss"].item()
        _write(folder / "train.json", val_loss=loss, step=trainer.global_step)


def resume(folder: Path, steps: int) -> None:
    """Load `gpt.ckpt` in one process, train a little more, and write `resume.json`."""
    pl.seed_everything(_SEED, verbose=False)
    first = _FirstStep()
    trainer = pl.Trainer(
        strategy=ZeroPlusStrategy(stage=1),
        devices=1,
        max_epochs=2,
        limit_train_batches=_MORE_STEPS,
        callbacks=[first],
        **_quiet(),
    )
    model = GPT(total=steps)
    text = StdlibText()
    (loaded,) = trainer.validate(model, text, ckpt_path=folder / "gpt.ckpt", verbose=False)
    trainer.fit(model, text, ckpt_path=folder / "gpt.ckpt")
    written = model.generate(b"def ", 300).decode(errors="replace")
    _write(
        folder / "resume.json",
        loaded_val_loss=loaded["val_loss"],
        val_loss=trainer.callback_metrics["val_loss"].item(),
        first_step=first.step,
        step=trainer.global_step,
        text=written,
    )


def measure(folder: Path, strategy: str, devices: int) -> None:
    """Write what this rank keeps during two windows of two microbatches."""
    memory = _Memory()
    trainer = pl.Trainer(
        strategy=_make_strategy(strategy),
        devices=devices,
        max_steps=2,
        accumulate_grad_batches=2,
        limit_val_batches=0,
        enable_progress_bar=False,
        callbacks=[memory],
        **_quiet(),
    )
    model = GPT()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trainer.fit(model, StdlibText())
    path = folder / f"memory-{strategy}-rank{trainer.global_rank}.json"
    _write(path, parameters=parameters, **memory.nbytes)


class _FirstStep(pl.Callback):
    """Remembers at which step training began."""

    step = -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


class _Memory(pl.Callback):
    """Notes gradients between the microbatches of a window, the rest after a step."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        self._between = 0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        now = _count(trainer, pl_module)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            self._between = now["gradients"]
        self.nbytes = {**now, "gradients": self._between}


def _make_strategy(name: str) -> DDPStrategy:
    stages: dict[str, Literal[1, 2, 3]] = {"stage_1": 1, "stage_2": 2, "stage_3": 3}
    return ZeroPlusStrategy(stage=stages[name], units=_UNITS) if name in stages else DDPStrategy()


def _count(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, int]:
    if isinstance(trainer.strategy, ZeroPlusStrategy):
        report = trainer.strategy.memory_report()
        return {
            "weights": report.weights,
            "gradients": report.gradients,
            "optimizer_state": report.optimizer_state + report.master_weights,
            "unsharded_peak": report.unsharded_peak,
        }
    parameters = list(module.parameters())
    states = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "optimizer_state": sum(state.nbytes for state in states),
        "unsharded_peak": 0,
    }


def _quiet() -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }


def _write(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content))


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=["train", "resume", "measure"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    chosen = parser.parse_args()
    # Hints on data loader workers and deprecations inside Lightning are not the demo's subject.
    warnings.filterwarnings("ignore", module=r"lightning\.")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if chosen.phase == "train":
        train(chosen.folder, chosen.steps, chosen.devices)
    elif chosen.phase == "resume":
        resume(chosen.folder, chosen.steps)
    else:
        measure(chosen.folder, chosen.strategy, chosen.devices)


if __name__ == "__main__":
    _main()
