"""With `AsyncCheckpointIO` training goes on while a checkpoint is written; nothing gets lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_zeroplus.checkpoint.datafile import DataFile
from tests.checkpoint.reading import numbered, read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, fit, make_trainer, seed_everything

pytestmark = pytest.mark.dist

STAGES = [1, 3, pytest.param(2, marks=pytest.mark.full)]


class Gate:
    """Holds back every write of a data file until it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.arrived = threading.Event()
        self.broken: Exception | None = None

    def __enter__(self) -> Gate:
        self._write = original = DataFile.write

        def write(file: DataFile, part: Any) -> int:
            self.arrived.set()
            assert self.event.wait(30)
            if self.broken is not None:
                raise self.broken
            return original(file, part)

        DataFile.write = write  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.event.set()
        DataFile.write = self._write  # type: ignore[method-assign]


class AfterBatch(Callback):
    """Calls a function with the trainer and the number of the batch."""

    def __init__(self, act: Callable[[Any, int], None]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, n: int) -> None:
        self.act(trainer, n)


def trainer_of(
    settings: dict[str, Any], world: int, callbacks: Callable[[], list[Callback]], **options: Any
) -> Any:
    seed_everything(5, verbose=False)
    settings = {"timeout": timedelta(seconds=60), **settings}
    plugins = options.pop("plugins", lambda: [AsyncCheckpointIO()])
    options.setdefault("enable_checkpointing", False)  # but for what the test saves
    return make_trainer(settings, world, callbacks=callbacks, plugins=plugins, **options)


# -- going on


def go_on(rank: int, world: int, stage: int, folder: Path) -> Any:
    path = folder / "x.ckpt"
    seen: dict[str, Any] = {}

    def act(trainer: Any, n: int) -> None:
        if n == 1:
            trainer.save_checkpoint(folder / "before.ckpt")
            trainer.strategy._wait_for_save()
            gate.__enter__()
            start = time.monotonic()
            trainer.save_checkpoint(path)
            seen["stalled"] = time.monotonic() - start
        elif n in {2, 3}:
            seen.setdefault("steps while writing", []).append(trainer.global_step)
            seen.setdefault("there", []).append(path.exists())
        elif n == 4:
            assert gate.arrived.is_set()
            gate.event.set()

    gate = Gate()
    trainer = trainer_of({"stage": stage}, world, lambda: [AfterBatch(act)])
    module = Net()
    try:
        trainer.fit(module, data())
    finally:
        gate.__exit__()
    seen["losses"] = module.losses
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_and_what_is_saved_is_from_the_moment_of_saving(
    pair: RankPool, tmp_path: Path, stage: int
) -> None:
    wanted = pair.run(fit, {"stage": stage}, {"max_epochs": 1})
    for seen, straight in zip(pair.run(go_on, stage, tmp_path), wanted, strict=True):
        assert seen["steps while writing"] == [3, 4]
        assert seen["there"] == [False, False]
        assert seen["losses"] == straight["losses"], "saving changes nothing"
        assert seen["stalled"] < 5
    # The weights have changed since; the same moment, saved twice, is the same checkpoint.
    before, after = read(tmp_path / "before.ckpt"), read(tmp_path / "x.ckpt")
    assert before["global_step"] == after["global_step"] == 2
    close(after["state_dict"], before["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(
        numbered(after["optimizer_states"][0]),
        numbered(before["optimizer_states"][0]),
        rtol=0,
        atol=0,
    )
    assert after["lr_schedulers"] == before["lr_schedulers"]
    assert after["loops"] == before["loops"]


def save_both_ways(rank: int, world: int, stage: int, folder: Path) -> None:
    for name, plugins in (("async", lambda: [AsyncCheckpointIO()]), ("sync", list)):

        def act(trainer: Any, n: int, name: str = name) -> None:
            trainer.save_checkpoint(folder / f"{name}-{n}.ckpt")

        trainer = trainer_of({"stage": stage}, world, lambda: [AfterBatch(act)], plugins=plugins)
        trainer.fit(Net(), data())


@pytest.mark.parametrize("stage", STAGES)
def test_every_step_saved_asynchronously_is_what_is_saved_otherwise(
    pair: RankPool, tmp_path: Path, stage: int
) -> None:
    pair.run(save_both_ways, stage, tmp_path)
    for n in range(6):
        ours, theirs = (read(tmp_path / f"{name}-{n}.ckpt") for name in ("async", "sync"))
        close(ours["state_dict"], theirs["state_dict"], rtol=0, atol=0)
        assert ours["global_step"] == n + 1


# -- the next save


def save_twice(rank: int, world: int, folder: Path) -> list[float]:
    times: list[float] = []

    def act(trainer: Any, n: int) -> None:
        if n == 1:
            gate.__enter__()
            trainer.save_checkpoint(folder / "one.ckpt")
        elif n == 2:
            opener = threading.Timer(1.0, gate.event.set)
            opener.start()
            start = time.monotonic()
            trainer.save_checkpoint(folder / "two.ckpt")
            times.append(time.monotonic() - start)
            assert (folder / "one.ckpt").is_dir() or rank > 0
            trainer.strategy.barrier()
            assert (folder / "one.ckpt").is_dir()

    gate = Gate()
    try:
        trainer_of({"stage": 2}, world, lambda: [AfterBatch(act)]).fit(Net(), data())
    finally:
        gate.__exit__()
    return times


def test_the_next_save_waits_for_the_one_before(pair: RankPool, tmp_path: Path) -> None:
    for (waited,) in pair.run(save_twice, tmp_path):
        assert waited > 0.5
    assert sorted(os.listdir(tmp_path)) == ["one.ckpt", "two.ckpt"]
    assert read(tmp_path / "one.ckpt")["global_step"] == 2
    assert read(tmp_path / "two.ckpt")["global_step"] == 3


def load_at_once(rank: int, world: int, path: Path) -> int:
    trainer = trainer_of({"stage": 2}, world, lambda: [Callback()])
    module = Net()
    trainer.fit(module, data())
    with Gate() as gate:
        trainer.save_checkpoint(path)
        threading.Timer(0.5, gate.event.set).start()
        trainer.validate(module, data(), ckpt_path=path, verbose=False)
    return int(trainer.global_step)


def test_loading_waits_for_what_is_being_written(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(load_at_once, tmp_path / "x.ckpt") == [6, 6]


# -- errors


def save_with_an_error(
    rank: int, world: int, folder: Path, victim: int, again: bool, form: str = "universal"
) -> tuple[str, int, float]:
    def act(trainer: Any, n: int) -> None:
        if n == 1:
            trainer.save_checkpoint(folder / "good.ckpt")
            trainer.strategy._wait_for_save()
            if rank == victim:
                gate.broken = OSError(28, "No space left on device")
            gate.__enter__()
            gate.event.set()
            trainer.save_checkpoint(folder / "bad.ckpt")
        if n == 3 and again:
            gate.__exit__()
            trainer.save_checkpoint(folder / "next.ckpt")

    gate = Gate()
    trainer = trainer_of({"stage": 3}, world, lambda: [AfterBatch(act)])
    start = time.monotonic()
    try:
        trainer.fit(Net(), data())
        message = "ended"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        gate.__exit__()
    return message, trainer.global_step, time.monotonic() - start


@pytest.mark.parametrize(
    ("again", "victim"),
    [
        pytest.param(True, 0, id="at the next save-0"),
        pytest.param(True, 1, marks=pytest.mark.full, id="at the next save-1"),
        pytest.param(False, 0, marks=pytest.mark.full, id="at the end-0"),
        pytest.param(False, 1, id="at the end-1"),
    ],
)
def test_an_error_surfaces_on_every_rank(tmp_path: Path, again: bool, victim: int) -> None:
    with RankPool(2) as pool:
        for message, steps, seconds in pool.run(save_with_an_error, tmp_path, victim, again):
            assert message.startswith("CheckpointError: ")
            assert f"No space left on device (rank {victim})" in message
            assert "bad.ckpt" in message
            assert steps == (4 if again else 6)
            assert seconds < 20
        assert not (tmp_path / "bad.ckpt").exists()
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
        (resumed, _) = pool.run(
            fit, {"stage": 2}, {"max_epochs": 1}, Net, {"seed": 9}, tmp_path / "good.ckpt"
        )
        assert resumed["steps"] == 6


def fail_alone(rank: int, world: int, folder: Path) -> tuple[str, float]:
    """Rank 1 fails in a hook where rank 0 has begun to save already."""

    def act(trainer: Any, n: int) -> None:
        if n == 1:
            trainer.save_checkpoint(folder / "good.ckpt")
        if n == 3:
            if rank == 1:
                raise KeyError("planted")
            trainer.save_checkpoint(folder / "half.ckpt")

    trainer = trainer_of({"stage": 2}, world, lambda: [AfterBatch(act)])
    start = time.monotonic()
    try:
        trainer.fit(Net(), data())
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "ended", 0.0


def test_a_rank_that_fails_before_it_saves_leaves_nobody_waiting(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        first, second = pool.run(fail_alone, tmp_path, timeout=100)
    assert second[0] == "KeyError: 'planted'"
    assert "rank 1" in first[0]
    assert first[1] < 20
    assert second[1] < 20
    assert read(tmp_path / "good.ckpt")["global_step"] == 2


# -- what is removed


def replace(rank: int, world: int, folder: Path) -> list[Any]:
    """Keep one checkpoint only, while the new one is held back."""
    seen: list[Any] = []

    def callbacks() -> list[Callback]:
        keeps = ModelCheckpoint(
            folder, "{step}", monitor="step", mode="max", save_top_k=1, every_n_train_steps=1
        )
        return [AfterBatch(before), keeps, AfterBatch(after)]

    def before(trainer: Any, n: int) -> None:
        if n == 3:
            trainer.strategy._wait_for_save()
            gate.__enter__()

    def after(trainer: Any, n: int) -> None:
        if n == 3:
            trainer.strategy.barrier()
            assert gate.arrived.wait(20)
            seen.append(sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")))
            trainer.strategy.barrier()
            gate.event.set()
            trainer.strategy._wait_for_save()
            trainer.strategy.barrier()

    gate = Gate()
    trainer = trainer_of({"stage": 3}, world, callbacks, enable_checkpointing=True)
    for own in [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]:
        trainer.callbacks.remove(own)
        trainer.callbacks.insert(1, own)  # Lightning puts them last
    try:
        trainer.fit(Net(), data())
    finally:
        gate.__exit__()
    trainer.strategy.barrier()
    seen.append(sorted(p.name for p in folder.iterdir()))
    return seen


def test_the_one_before_is_removed_when_the_new_one_is_complete(
    pair: RankPool, tmp_path: Path
) -> None:
    for during, end in pair.run(replace, tmp_path):
        assert during == ["step=3.ckpt"]
        assert end == ["step=6.ckpt"]
    assert read(tmp_path / "step=6.ckpt")["global_step"] == 6


def rotate(rank: int, world: int, plugins: Any, folder: Path, last: Any, fails: bool) -> Any:
    def callbacks() -> list[Callback]:
        return [
            ModelCheckpoint(
                folder,
                "{step}",
                monitor="val_loss",
                save_top_k=2,
                save_last=last,
                enable_version_counter=False,
            ),
            AfterBatch(break_disk),
        ]

    def break_disk(trainer: Any, n: int) -> None:
        if fails and rank == 1 and trainer.global_step == 20:
            gate.broken = OSError(28, "No space left on device")
            gate.event.set()
            gate.__enter__()

    gate = Gate()
    options = {"max_epochs": 4, "val_check_interval": 2, "enable_checkpointing": True}
    trainer = trainer_of({"stage": 2}, world, callbacks, plugins=plugins, **options)
    try:
        trainer.fit(Net(lr=0.1), data(), data(seed=1))
    except Exception as error:
        if not fails or "No space left" not in str(error):
            raise
    finally:
        gate.__exit__() if gate.broken else None
    trainer.strategy.barrier()
    return {
        "files": sorted(p.name for p in folder.iterdir()),
        "link": os.readlink(folder / "last.ckpt") if last == "link" else "",
        "best": trainer.checkpoint_callback.best_model_path.rpartition("/")[2],
    }


def asynchronously() -> list[Any]:
    return [AsyncCheckpointIO()]


@pytest.mark.parametrize("last", [True, "link"])
def test_best_and_last_rotate_as_without_it(pair: RankPool, tmp_path: Path, last: Any) -> None:
    theirs = pair.run(rotate, list, tmp_path / "theirs", last, False)
    ours = pair.run(rotate, asynchronously, tmp_path / "ours", last, False)
    assert ours == theirs
    for name in ours[0]["files"]:
        one, other = read(tmp_path / "ours" / name), read(tmp_path / "theirs" / name)
        close(one["state_dict"], other["state_dict"], rtol=0, atol=0)
        assert one["global_step"] == other["global_step"]


@pytest.mark.parametrize("last", [True, pytest.param("link", marks=pytest.mark.full)])
def test_a_disk_that_fills_up_leaves_the_last_checkpoint_that_was_whole(
    tmp_path: Path, last: Any
) -> None:
    with RankPool(2) as pool:
        seen = pool.run(rotate, asynchronously, tmp_path, last, True)[0]
        names = [n for n in seen["files"] if n != "last.ckpt"]
        assert names
        steps = [read(tmp_path / name)["global_step"] for name in names]
        assert max(steps) >= 16, "that of step 18 may be on its way when the disk is full"
        resumed = pool.run(resume_last, tmp_path)
    assert resumed[0] == resumed[1]
    assert resumed[0] == max(steps)


def resume_last(rank: int, world: int, folder: Path) -> int:
    def callbacks() -> list[Callback]:
        return [ModelCheckpoint(folder, "{step}", save_last=True)]

    options = {"max_epochs": 4, "enable_checkpointing": True}
    trainer = trainer_of({"stage": 2}, world, callbacks, plugins=list, **options)

    class Notes(Net):
        def on_train_start(self) -> None:
            self.started_at = self.trainer.global_step

    module = Notes(lr=0.1)
    trainer.fit(module, data(), ckpt_path="last")
    return int(module.started_at)
