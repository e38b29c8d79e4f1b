"""Each rank goes on with its own random numbers; other numbers of ranks with the right samples."""

from __future__ import annotations

import logging
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch.utils.data import DataLoader

from lightning_zeroplus.plugin.positions import convert, random_state, set_random_state
from tests.dist_pool import RankPool
from tests.plugin.resume_scenes import (
    Augmented,
    Dropped,
    ResumingFolders,
    SaveAt,
    differences,
    loader,
    saves,
    train,
)

pytestmark = pytest.mark.dist


def both() -> tuple[Any, Any]:
    return loader(40), DataLoader(torch.ones(8, 5), batch_size=4)


class Apart(Dropped):
    """Ranks draw different numbers."""

    def on_fit_start(self) -> None:
        if self.trainer.ckpt_path is None:
            torch.manual_seed(self.global_rank)
            random.seed(self.global_rank)


@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 2}, {"max_steps": 12, "max_epochs": -1}],
    ids=str,
)
def test_two_ranks_go_on_as_they_were(
    pair: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    for hook in ("on_train_batch_end", "on_train_epoch_end", "on_validation_end"):
        for got in pair.run(differences, both, tmp_path / hook, hook, options, Apart):
            assert got["saves"] >= 2
            assert not got["wrong"], hook


def test_folders_hold_as_much(pair: RankPool, tmp_path: Path) -> None:
    arguments = ("on_train_batch_end", {"val_check_interval": 2}, Apart, ResumingFolders)
    for got in pair.run(differences, both, tmp_path, *arguments):
        assert got["saves"] == 10
        assert not got["wrong"]


# -- another number of ranks


class Reads(Dropped):
    """Trains on nothing but the order; notes samples by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.losses.append(0.0)
        self.samples.setdefault(self.current_epoch, []).append(sorted(batch[:, 0].tolist()))
        self.indices.append(batch_idx)
        return self.net(batch).sum() * 0

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[int, list[list[float]]] = {}
        self.indices: list[int] = []
        self.validated: list[tuple[int, int]] = []

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, len(self.losses)))


class Numbered:
    """`count` samples that are their own names, in batches of `size`."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __call__(self) -> tuple[Any, Any]:
        rows = torch.arange(float(self.count))[:, None].expand(-1, 5)
        return DataLoader(rows, self.size, shuffle=True), DataLoader(rows[:4], 2)


def save_all(rank: int, world: int, build: Any, folder: Path, hook: str) -> Any:
    module, _ = train(build, world, callbacks=(SaveAt(folder, hook),), model=Reads)
    return module.samples


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def resume_here(rank: int, world: int, build: Any, path: Path) -> Any:
    said = Said()
    logger = rank_zero.log
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module, _ = train(build, world, ckpt_path=path, seed=99, model=Reads)
    finally:
        logger.removeHandler(said)
    return {
        "samples": module.samples,
        "indices": module.indices,
        "validated": module.validated,
        "warned": [str(w.message) for w in caught if "first batch" in str(w.message)],
        "said": [line for line in said.lines if "generators are not restored" in line],
    }


def named(ranks: list[dict[int, list[list[float]]]], epoch: int, until: int | None = None) -> Any:
    return sorted(x for own in ranks for batch in own.get(epoch, [])[:until] for x in batch)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
@pytest.mark.parametrize(("then", "now"), [("pair", "solo"), ("solo", "pair")])
def test_no_sample_is_seen_twice_or_missed(
    request: pytest.FixtureRequest, tmp_path: Path, then: str, now: str, hook: str
) -> None:
    build = Numbered(24, 2)
    whole = request.getfixturevalue(then).run(save_all, build, tmp_path, hook)
    steps = len(whole[0][0])
    for done, path in saves(tmp_path):
        epoch, batches = divmod(done, steps)
        got = request.getfixturevalue(now).run(resume_here, build, path)
        if got[0]["indices"]:
            assert len(got[0]["said"]) == 1
        now_steps = steps * len(whole) // len(got)
        taken = batches * len(whole)
        if taken % len(got):  # no whole number of batches
            assert len(got[0]["warned"]) == 1
            assert "no whole number of batches" in got[0]["warned"][0]
            continue
        assert not got[0]["warned"]
        seen = [own["samples"] for own in got]
        if epoch < 2 and batches:
            both_parts = sorted(named(whole, epoch, batches) + named(seen, epoch))
            assert both_parts == [float(x) for x in range(24)]
            assert got[0]["indices"][0] == taken // len(got)
            # The end of the epoch is found, and validation comes there.
            assert (epoch, now_steps - taken // len(got)) in got[0]["validated"]
        if epoch == 0:
            assert named(seen, 1) == [float(x) for x in range(24)]


def test_another_batch_size_goes_on_after_the_same_samples(solo: RankPool, tmp_path: Path) -> None:
    whole = solo.run(save_all, Numbered(24, 2), tmp_path, "on_train_batch_end")
    for done, path in saves(tmp_path):
        if done >= 12:
            break
        got = solo.run(resume_here, Numbered(24, 4), path)[0]
        if done % 2:
            assert len(got["warned"]) == 1
        else:
            seen = named(whole, 0, done) + named([got["samples"]], 0)
            assert sorted(seen) == [float(x) for x in range(24)]


def test_another_data_set_starts_again_and_says_so(solo: RankPool, tmp_path: Path) -> None:
    solo.run(save_all, Numbered(24, 2), tmp_path, "on_train_batch_end")
    path = next(path for done, path in saves(tmp_path) if done == 4)
    got = solo.run(resume_here, Numbered(20, 2), path)[0]
    assert len(got["warned"]) == 1
    assert "'samples': 24" in got["warned"][0]
    assert "'samples': 20" in got["warned"][0]


# -- the arithmetic of it, without ranks


@pytest.mark.parametrize(
    ("batches", "was", "now", "ranks", "expected"),
    [
        (3, {}, {}, (2, 2), 3),
        (3, {}, {}, (2, 1), 6),
        (4, {}, {}, (1, 2), 2),
        (3, {}, {}, (1, 2), None),
        (3, {"batch_size": 2}, {"batch_size": 3}, (1, 1), 2),
        (2, {"batch_size": 2}, {"batch_size": 3}, (1, 1), None),
        (2, {"batch_size": 3}, {"batch_size": 2}, (2, 3), 2),
        (3, {}, {"samples": 9}, (1, 1), None),
        (3, {}, {"distributed": [7, True]}, (1, 1), None),
        (3, {"distributed": None}, {"distributed": None}, (2, 1), None),
        (3, {"distributed": None}, {"distributed": None}, (2, 2), 3),
        (3, {"batch_size": None}, {"batch_size": None}, (2, 2), 3),
        (3, {"batch_size": None}, {"batch_size": None}, (2, 1), None),
    ],
    ids=str,
)
def test_batches_are_converted_only_if_they_hold_the_same_samples(
    batches: int,
    was: dict[str, Any],
    now: dict[str, Any],
    ranks: tuple[int, int],
    expected: int | None,
) -> None:
    terms = {"batch_size": 2, "samples": 24, "distributed": [0, True]}
    assert convert(batches, {**terms, **was}, {**terms, **now}, ranks=ranks) == expected


def test_all_generators_of_the_process_are_restored(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(4)
    random.gauss(0, 1)  # leaves the second of two numbers behind

    def draw() -> Any:
        rows = [
            Augmented(2)[0].tolist() for _ in range(700)
        ]  # NumPy's and Python's words turn over
        return (
            rows,
            torch.rand(3).tolist(),
            random.gauss(0, 1),
            torch.rand(3, generator=own).tolist(),
        )

    torch.save(random_state([own]), tmp_path / "state.pt")
    first = draw()
    assert draw() != first
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), [own])
    assert draw() == first


def test_generators_of_accelerators_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, torch.Tensor] = {}
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "get_rng_state_all": lambda: [torch.tensor([5]), torch.tensor([6])],
        "set_rng_state": lambda state, index: found.update({index: state}),
    }.items():
        monkeypatch.setattr(torch.xpu, name, value)
    state = random_state()
    assert "cuda" not in state
    set_random_state(state)  # one device fewer than there were
    assert found == {0: torch.tensor([5])}
