from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.checkpoint.reading import FORMATS, numbered, read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, make_trainer

pytestmark = pytest.mark.dist


class SavesMidway(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, n: int) -> None:
        if n == 2:
            trainer.save_checkpoint(self.folder / "midway.ckpt")
            trainer.save_checkpoint(self.folder / "weights.ckpt", weights_only=True)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / "in validation.ckpt")


def save_everywhere(rank: int, world: int, strategy: Any, folder: Path) -> None:
    trainer = make_trainer(
        strategy, world, callbacks=lambda: [SavesMidway(folder)], accumulate_grad_batches=2
    )
    module = Net()
    trainer.fit(module, data(), data(seed=1))
    trainer.save_checkpoint(folder / "after fit.ckpt")
    trainer.test(module, data(seed=1), verbose=False)
    trainer.save_checkpoint(folder / "after test.ckpt")


NAMES = ["midway", "weights", "in validation", "after fit", "after test"]


@pytest.fixture(scope="module")
def theirs(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DDP saves at each moment."""
    folder = tmp_path_factory.mktemp("theirs")
    pair.run(save_everywhere, "ddp", folder)
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_every_moment_saves_what_ddp_saves(
    pair: RankPool, tmp_path: Path, theirs: Path, form: str, stage: int
) -> None:
    pair.run(save_everywhere, {"stage": stage, "save_format": form}, tmp_path / "ours")
    for name in NAMES:
        ours = read(tmp_path / "ours" / f"{name}.ckpt")
        wanted = torch.load(theirs / f"{name}.ckpt")
        close(ours["state_dict"], wanted["state_dict"])
        assert ("optimizer_states" in ours) == (name != "weights")
        if name != "weights":
            torch.testing.assert_close(
                numbered(ours["optimizer_states"][0]),
                numbered(wanted["optimizer_states"][0]),
                rtol=1e-5,
                atol=1e-6,
            )


def rotate(rank: int, world: int, strategy: Any, folder: Path, last: Any) -> Any:
    best = ModelCheckpoint(
        folder,
        "{step}",
        monitor="val_loss",
        save_top_k=2,
        save_last=last,
        enable_version_counter=False,
    )
    trainer = make_trainer(
        strategy, world, callbacks=lambda: [best], max_epochs=4, val_check_interval=2
    )
    trainer.fit(Net(lr=0.1), data(), data(seed=1))
    trainer.test(ckpt_path="best", dataloaders=data(seed=1), verbose=False)
    return {
        "best": float(read(best.best_model_path)["callbacks"][best.state_key]["best_model_score"]),
        "files": sorted(p.name for p in folder.iterdir()),
        "tested": float(trainer.callback_metrics["test_loss"]),
        "last": str(read(folder / "last.ckpt")["global_step"]),
        "link": (folder / "last.ckpt").is_symlink(),
    }


@pytest.fixture(scope="module")
def rotated(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What DDP leaves."""
    folder = tmp_path_factory.mktemp("rotated")
    return {last: pair.run(rotate, "ddp", folder / str(last), last)[0] for last in (True, "link")}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("last", [True, "link"])
@pytest.mark.parametrize("form", FORMATS)
def test_best_and_last_rotate_as_under_ddp(
    pair: RankPool, tmp_path: Path, rotated: Any, form: str, stage: int, last: Any
) -> None:
    theirs = rotated[last]
    settings = {"stage": stage, "save_format": form}
    ours = pair.run(rotate, settings, tmp_path / "ours", last)[0]
    assert ours["files"] == theirs["files"]
    assert ours["best"] == pytest.approx(theirs["best"], rel=1e-5)
    assert ours["tested"] == pytest.approx(theirs["tested"], rel=1e-5)
    assert (ours["last"], ours["link"]) == (theirs["last"], theirs["link"])


class Edits(Net):
    """Edits the dictionary in its hooks, as users do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["first.bias"]
        checkpoint["state_dict"]["extra"] = checkpoint["state_dict"]["first.weight"].sum()
        checkpoint["mine"] = {"a": torch.ones(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["first.bias"] = torch.full((11,), 7.0)
        del checkpoint["state_dict"]["extra"]
        self.got = checkpoint["mine"]["a"]


def edit(rank: int, world: int, strategy: Any, path: Path) -> Any:
    trainer = make_trainer(strategy, world)
    trainer.fit(Edits(), data())
    trainer.save_checkpoint(path)
    module = Edits()
    make_trainer(strategy, world, max_epochs=1).validate(module, data(), path, verbose=False)
    return module.got, module.first.bias.detach(), sorted(read(path)["state_dict"])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_hooks_may_edit_what_is_saved_and_loaded(
    pair: RankPool, tmp_path: Path, form: str, stage: int
) -> None:
    settings = {"stage": stage, "save_format": form}
    for got, bias, names in pair.run(edit, settings, tmp_path / "x.ckpt"):
        assert torch.equal(got, torch.ones(3))
        assert torch.equal(bias, torch.full((11,), 7.0))
        assert "extra" in names
        assert "first.bias" not in names


class SavesAtEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def ema_run(rank: int, world: int, strategy: Any, path: Path, resume: bool) -> Any:
    trainer = make_trainer(
        strategy,
        world,
        callbacks=lambda: [EMAWeightAveraging(decay=0.7), SavesAtEnd(path)],
        max_epochs=2,
    )
    module = Net(seed=5 if resume else 1)
    trainer.fit(module, data(), data(seed=1), ckpt_path=path if resume else None)
    return {n: w.detach().clone() for n, w in module.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_averaged_weights_resume(pair: RankPool, tmp_path: Path, form: str, stage: int) -> None:
    path = tmp_path / "ema.ckpt"
    settings = {"stage": stage, "save_format": form}
    straight = pair.run(ema_run, settings, path, False)
    keys = read(path).keys()
    assert {"current_model_state", "averaging_state"} <= set(keys)
    resumed = pair.run(ema_run, settings, path, True)
    close(resumed[0], straight[0])
    close(straight[0], pair.run(ema_run, "ddp", tmp_path / "ddp.ckpt", False)[0])


def asynchronously(rank: int, world: int, strategy: Any, path: Path) -> None:
    trainer = make_trainer(strategy, world, plugins=lambda: [AsyncCheckpointIO()])
    trainer.fit(Net(), data())
    trainer.save_checkpoint(path)
    trainer.strategy.checkpoint_io.teardown()


@pytest.mark.parametrize("form", FORMATS)
def test_a_wrapping_io_keeps_the_form(pair: RankPool, tmp_path: Path, form: str) -> None:
    pair.run(asynchronously, {"stage": 3, "save_format": form}, tmp_path / "ours.ckpt")
    pair.run(asynchronously, "ddp", tmp_path / "theirs.ckpt")
    assert (tmp_path / "ours.ckpt").is_dir() == (form == "universal")
    close(
        read(tmp_path / "ours.ckpt")["state_dict"],
        torch.load(tmp_path / "theirs.ckpt")["state_dict"],
    )
