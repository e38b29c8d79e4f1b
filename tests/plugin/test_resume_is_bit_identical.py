"""Training that was interrupted goes on as if it had not been, wherever it was saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zeroplus.plugin import taking_up
from lightning_zeroplus.plugin.resume import CHECKPOINT_KEY
from tests.dist_pool import RankPool
from tests.plugin.resume_scenes import (
    Dropped,
    Resuming,
    SaveAt,
    differences,
    loader,
    saves,
    train,
)
from tests.plugin.scenes import weights_of

pytestmark = pytest.mark.dist

SHUFFLED = {"use_distributed_sampler": False}
"""`RandomSampler` stays, whose order comes from the global generator."""


def training_only() -> tuple[Any, Any]:
    return loader(), None


def with_validation() -> tuple[Any, Any]:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    return loader(), DataLoader(x, batch_size=4)


def with_drawing_validation() -> tuple[Any, Any]:
    return loader(), loader(8, shuffle=False)


EVERYWHERE = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
]
IN_VALIDATION = [
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
]
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "distributed sampler": {"use_distributed_sampler": True},
    "steps": {"max_steps": 15, "max_epochs": -1},
    "steps, distributed sampler": {
        "max_steps": 15,
        "max_epochs": -1,
        "use_distributed_sampler": True,
    },
    "reloaded dataloaders": {"reload_dataloaders_every_n_epochs": 1},
    "limited": {"limit_train_batches": 4},
    "no sanity check": {"num_sanity_val_steps": 0},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_saved_at_any_moment_of_training(
    solo: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    for build in (training_only, with_validation):
        for hook in EVERYWHERE:
            folder = tmp_path / build.__name__ / hook
            got = solo.run(differences, build, folder, hook, {**SHUFFLED, **options})[0]
            assert got["saves"] > 0
            assert not got["wrong"], (build.__name__, hook)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 2},
        {"val_check_interval": 2, "max_steps": 10, "max_epochs": -1},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2},
    ],
    ids=str,
)
def test_saved_around_validation(solo: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    for hook in [*IN_VALIDATION, "on_train_batch_end", "on_train_epoch_end"]:
        got = solo.run(differences, with_validation, tmp_path / hook, hook, {**SHUFFLED, **options})
        assert got[0]["saves"] > 0
        assert not got[0]["wrong"], hook


def test_saved_after_validation_that_draws(solo: RankPool, tmp_path: Path) -> None:
    for hook in ("on_validation_end", "on_train_epoch_end"):
        options = {**SHUFFLED, "val_check_interval": 2}
        got = solo.run(differences, with_drawing_validation, tmp_path / hook, hook, options)[0]
        assert got["saves"] > 0
        assert not got["wrong"], hook


@pytest.mark.parametrize("factor", [2, 3])
def test_saved_where_an_accumulated_step_is_complete(
    solo: RankPool, tmp_path: Path, factor: int
) -> None:
    options = {**SHUFFLED, "accumulate_grad_batches": factor}
    got = solo.run(differences, training_only, tmp_path, "on_train_batch_end", options)[0]
    # Gradients of an incomplete step are in no checkpoint of Lightning's.
    incomplete = {n for n in range(1, 11) if (n - 1) % 5 + 1 not in (factor, 2 * factor, 5)}
    assert {int(name.split("-")[1]) for name in got["wrong"]} == incomplete


def stop_and_resume(rank: int, world: int, folder: Path, options: dict[str, Any]) -> list[Any]:
    """Stop after each number of steps, save when the fit has ended, and resume."""
    endless = {**options, "max_epochs": -1}
    whole, _ = train(training_only, world, {**endless, "max_steps": 15})
    wrong = []
    for steps in range(1, 15):
        _, trainer = train(training_only, world, {**endless, "max_steps": steps})
        torch.rand(5)  # nothing of the fit
        path = folder / f"{steps}.ckpt"
        trainer.save_checkpoint(path)
        resumed, _ = train(
            training_only, world, {**endless, "max_steps": 15}, ckpt_path=path, seed=99
        )
        if (resumed.losses, resumed.steps) != (whole.losses[steps:], whole.steps[steps:]):
            wrong.append((steps, resumed.losses, whole.losses[steps:], resumed.steps))
    return wrong


@pytest.mark.parametrize("options", [SHUFFLED, {}], ids=["random", "distributed"])
def test_saved_after_a_fit_that_stopped(
    solo: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert not solo.run(stop_and_resume, tmp_path, options)[0]


def save_with_model_checkpoint(rank: int, world: int, folder: Path) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def every(folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)

    whole, _ = train(with_validation, world, SHUFFLED, callbacks=(every(folder),), keep=True)
    wrong = []
    for step in range(1, 11):
        path = folder / f"step={step}.ckpt"
        resumed, _ = train(with_validation, world, SHUFFLED, ckpt_path=path, seed=99)
        if resumed.losses != whole.losses[step:]:
            wrong.append(step)
    return wrong


def test_saved_by_model_checkpoint_at_every_step(solo: RankPool, tmp_path: Path) -> None:
    assert solo.run(save_with_model_checkpoint, tmp_path)[0] == []


class Failing(Dropped):
    """Without anything random but the order; the batch at `fail_at` cannot be had."""

    fail_at = -1

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.nn.Identity()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(self.losses) == self.fail_at:
            raise RuntimeError("no more")
        return super().training_step(batch, batch_idx)


def ordered() -> tuple[Any, Any]:
    return DataLoader(torch.linspace(-1, 1, 100).reshape(20, 5), batch_size=4, shuffle=True), None


@pytest.mark.parametrize("options", [SHUFFLED, {}], ids=["random", "distributed"])
def test_saved_when_a_batch_was_only_fetched(
    solo: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    # It is fetched again, so this holds as long as fetching draws nothing.
    got = solo.run(differences, ordered, tmp_path, "on_train_batch_start", options)[0]
    assert got["saves"] == 10
    assert not got["wrong"]


def fail_and_resume(rank: int, world: int, folder: Path) -> list[Any]:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    whole, _ = train(ordered, world, SHUFFLED, model=Failing)
    wrong = []
    for at in range(1, 10):
        Failing.fail_at = at
        saving = OnExceptionCheckpoint(folder, f"at-{at}")
        with pytest.raises(RuntimeError, match="no more"):
            train(ordered, world, SHUFFLED, callbacks=(saving,), model=Failing, keep=True)
        Failing.fail_at = -1
        path = folder / f"at-{at}.ckpt"
        resumed, _ = train(ordered, world, SHUFFLED, ckpt_path=path, seed=99, model=Failing)
        if resumed.losses != whole.losses[at:]:
            wrong.append((at, resumed.losses, whole.losses[at:]))
    return wrong


class FailingLater(Dropped):
    """Validation fails at its second batch."""

    fails = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and len(self.losses) == 4 and self.fails:
            raise RuntimeError("no more")
        super().validation_step(batch, batch_idx)


def fail_in_validation(rank: int, world: int, folder: Path) -> Any:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    options = {**SHUFFLED, "val_check_interval": 2}
    whole, _ = train(with_validation, world, options, model=FailingLater)
    FailingLater.fails = True
    saving = OnExceptionCheckpoint(folder, "failed")
    with pytest.raises(RuntimeError, match="no more"):
        train(with_validation, world, options, callbacks=(saving,), model=FailingLater, keep=True)
    FailingLater.fails = False
    path = folder / "failed.ckpt"
    resumed, _ = train(with_validation, world, options, ckpt_path=path, seed=99, model=FailingLater)
    return resumed.losses, whole.losses[4:]


def test_a_validation_that_failed_is_run_again(solo: RankPool, tmp_path: Path) -> None:
    resumed, whole = solo.run(fail_in_validation, tmp_path)[0]
    assert resumed == whole


def test_a_batch_that_failed_is_given_again(solo: RankPool, tmp_path: Path) -> None:
    assert not solo.run(fail_and_resume, tmp_path)[0]


class Leaving(Dropped):
    """Ends each epoch at its fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def test_saved_at_the_end_of_an_epoch_that_was_left(solo: RankPool, tmp_path: Path) -> None:
    for hook in ("on_train_epoch_end", "on_validation_end"):
        options = {**SHUFFLED, "val_check_interval": 3}
        got = solo.run(differences, with_validation, tmp_path / hook, hook, options, Leaving)[0]
        assert got["saves"] == 2
        assert not got["wrong"], hook


def resume_again(rank: int, world: int, folder: Path, hook: str) -> Any:
    """Resume, save in each `hook` after that, and resume once more."""
    options = {**SHUFFLED, "val_check_interval": 2}
    whole, _ = train(
        with_validation, world, options, callbacks=(SaveAt(folder, "on_train_batch_end"),)
    )
    wrong, count = [], 0
    for done, path in saves(folder):
        between = folder / path.stem
        train(
            with_validation,
            world,
            options,
            ckpt_path=path,
            seed=98,
            callbacks=(SaveAt(between, hook),),
        )
        for more, second in saves(between):
            count += 1
            resumed, _ = train(with_validation, world, options, ckpt_path=second, seed=99)
            if resumed.losses != whole.losses[done + more :]:
                wrong.append((done, second.stem))
    return wrong, count


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_validation_end"])
def test_a_resumed_run_is_resumed(solo: RankPool, tmp_path: Path, hook: str) -> None:
    wrong, count = solo.run(resume_again, tmp_path, hook)[0]
    assert count >= 9
    assert not wrong


# -- what would go unnoticed otherwise


class KeepsPosition(Resuming):
    """Planted: the sampler skips nothing."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        upcoming = self.resume._taking_up
        assert upcoming is not None
        position = upcoming._position
        assert position is not None
        upcoming._position = {
            **position,
            "loaders": [{**entry, "batches": 0} for entry in position["loaders"]],
        }


class KeepsGenerators(Resuming):
    """Planted: generators stay as they are."""

    def on_train_start(self) -> None:
        with taking_up.kept_random_state():
            super().on_train_start()


class KeepsOrder(Resuming):
    """Planted: the order is drawn anew."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        upcoming = self.resume._taking_up
        assert upcoming is not None
        position = upcoming._position
        assert position is not None
        start = taking_up.random_state()
        upcoming._position = {
            **position,
            "loaders": [{**entry, "start": {**start, "epoch": 0}} for entry in position["loaders"]],
        }


@pytest.mark.parametrize("planted", [KeepsPosition, KeepsGenerators, KeepsOrder])
def test_the_comparison_notices_what_is_missing(
    solo: RankPool, tmp_path: Path, planted: type[Resuming]
) -> None:
    got = solo.run(
        differences, training_only, tmp_path, "on_train_batch_end", SHUFFLED, Dropped, planted
    )[0]
    assert len(got["wrong"]) >= 8


# -- what is in a checkpoint


def save_and_look(rank: int, world: int, folder: Path) -> Any:
    train(with_validation, world, callbacks=(SaveAt(folder, "on_train_batch_end"),))
    sizes = []
    for _, path in saves(folder):
        saved = torch.load(path, weights_only=True)[CHECKPOINT_KEY]
        assert len(saved) == world
        sizes.append(_nbytes(saved[0]))
    return max(sizes)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def test_it_is_small_and_loads_with_weights_only(solo: RankPool, tmp_path: Path) -> None:
    assert solo.run(save_and_look, tmp_path)[0] < 64 << 10


def resume_from_foreign(rank: int, world: int, folder: Path) -> Any:
    """A checkpoint without the entry is resumed as Lightning does."""
    train(training_only, world, callbacks=(SaveAt(folder, "on_train_batch_end"),))
    path = next(path for done, path in saves(folder) if done == 3)
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint[CHECKPOINT_KEY]
    torch.save(checkpoint, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, _ = train(training_only, world, ckpt_path=path, seed=99)
    warned = any("not resumable" in str(w.message) for w in caught)
    return len(resumed.losses), warned


def test_a_checkpoint_of_ddp_resumes_as_in_lightning(solo: RankPool, tmp_path: Path) -> None:
    assert solo.run(resume_from_foreign, tmp_path)[0] == (7, True)


def resume_quietly(rank: int, world: int, folder: Path) -> Any:
    train(training_only, world, callbacks=(SaveAt(folder, "on_train_batch_end"),))
    path = next(path for done, path in saves(folder) if done == 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        train(training_only, world, ckpt_path=path, seed=99)
        assert warnings.filters == filters
    return [str(w.message) for w in caught if "resum" in str(w.message)]


def test_lightning_does_not_warn_of_what_was_restored(solo: RankPool, tmp_path: Path) -> None:
    assert solo.run(resume_quietly, tmp_path)[0] == []


def test_weights_are_those_of_the_last_step(solo: RankPool) -> None:
    """The comparisons above would mean little if nothing depended on random numbers."""
    first, second = solo.run(train_twice)[0]
    assert any(not torch.equal(first[name], second[name]) for name in first)


def train_twice(rank: int, world: int) -> Any:
    class OtherDropout(Dropped):
        def on_train_start(self) -> None:
            torch.manual_seed(4)

    return [weights_of(train(training_only, world, model=m)[0]) for m in (Dropped, OtherDropout)]
