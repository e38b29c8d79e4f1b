"""Whatever users train from, a resumed epoch goes on at the right batch, or says that it cannot."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_zeroplus.plugin.positions import is_followed
from tests.dist_pool import RankPool
from tests.plugin.resume_scenes import (
    Augmented,
    Dropped,
    SaveAt,
    differences,
    loader,
    saves,
    train,
)

pytestmark = pytest.mark.dist

RANDOM = {"use_distributed_sampler": False}
X = torch.linspace(-1, 1, 100).reshape(20, 5)


class Batches(Sampler[list[int]]):
    """A batch sampler of the user's, with batches of many sizes from Python's generator."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.count))
        random.shuffle(order)
        batches = []
        while order:
            size = min(random.choice([2, 3, 4]), len(order))
            batches.append([order.pop() for _ in range(size)])
        yield from batches


class SizedBatches(Batches):
    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.count).tolist()
        yield from (order[start : start + 4] for start in range(0, self.count, 4))

    def __len__(self) -> int:
        return self.count // 4


class AsItGoes(Sampler[int]):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield int(torch.randint(20, ()))

    def __len__(self) -> int:
        return 20


def sampled(sampler: Any, **options: Any) -> Any:
    return loader(shuffle=None, sampler=sampler, **options)


def own_generator() -> Any:
    return loader(generator=torch.Generator().manual_seed(8))


def sampler_generator() -> Any:
    generator = torch.Generator().manual_seed(8)
    return sampled(RandomSampler(range(20), replacement=True, num_samples=20, generator=generator))


def weighted() -> Any:
    return sampled(WeightedRandomSampler(torch.arange(1.0, 21), 20))


def user_batches() -> Any:
    return DataLoader(Augmented(), batch_sampler=SizedBatches())


def unbatched() -> Any:
    return DataLoader(Augmented(6), batch_size=None, shuffle=True)


def cycled() -> Any:
    return {"long": loader(), "short": loader(8), "other": loader(12)}


def combined(mode: Any) -> Any:
    return CombinedLoader({"long": loader(), "short": loader(12)}, mode)


def in_workers(**options: Any) -> Any:
    return DataLoader(X[:12], batch_size=4, shuffle=True, num_workers=2, **options)


def in_workers_kept() -> Any:
    return in_workers(persistent_workers=True)


VARIANTS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        own_generator,
        sampler_generator,
        weighted,
        user_batches,
        unbatched,
        cycled,
    )
}
VARIANTS["indices drawn as it goes"] = lambda: sampled(AsItGoes())
VARIANTS["drop_last"] = lambda: loader(18, drop_last=True)
VARIANTS["partial last batch"] = lambda: loader(18)
VARIANTS["max_size"] = lambda: combined("max_size")
VARIANTS["min_size"] = lambda: combined("min_size")


class Variant:
    """Makes the dataloaders of a variant, on the rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> tuple[Any, Any]:
        return VARIANTS[self.name](), DataLoader(X[:4], batch_size=4)


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_it_goes_on_at_the_next_batch(solo: RankPool, tmp_path: Path, name: str, hook: str) -> None:
    got = solo.run(differences, Variant(name), tmp_path, hook, RANDOM)[0]
    assert got["saves"] >= 2
    assert not got["wrong"]


@pytest.mark.parametrize("name", ["partial last batch", "weighted", "cycled", "user_batches"])
def test_it_goes_on_with_a_distributed_sampler(solo: RankPool, tmp_path: Path, name: str) -> None:
    options = {"use_distributed_sampler": name != "user_batches"}
    got = solo.run(differences, Variant(name), tmp_path, "on_train_batch_end", options)[0]
    assert not got["wrong"]


VARIANTS["workers"] = in_workers
VARIANTS["persistent workers"] = in_workers_kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "distributed"),
    [
        ("workers", False),
        pytest.param("workers", True, marks=pytest.mark.full),
        pytest.param("persistent workers", False, marks=pytest.mark.full),
    ],
)
def test_worker_processes_are_given_the_next_indices(
    solo: RankPool, tmp_path: Path, name: str, distributed: bool
) -> None:
    options = {"use_distributed_sampler": distributed}
    got = solo.run(differences, Variant(name), tmp_path, "on_train_batch_end", options)[0]
    assert got["saves"] == 6
    assert not got["wrong"]


# -- dataloaders of unknown length: Lightning fetches a batch in advance


VARIANTS["no length"] = lambda: DataLoader(X, batch_sampler=Batches())
VARIANTS["cycled, no length"] = lambda: {
    "long": DataLoader(X, batch_sampler=Batches()),
    "short": DataLoader(X[:8], batch_size=4, shuffle=True),
}


@pytest.mark.parametrize("name", ["no length", "cycled, no length"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_what_was_fetched_in_advance_is_fetched_again(
    solo: RankPool, tmp_path: Path, hook: str, name: str
) -> None:
    got = solo.run(differences, Variant(name), tmp_path, hook, RANDOM)[0]
    assert got["saves"] >= 2
    assert not got["wrong"]


# -- steps that fetch for themselves


class Fetching(Dropped):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class FetchingTwo(Dropped):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        first, batch_idx, _ = next(dataloader_iter)
        second, _, _ = next(dataloader_iter)
        return super().training_step({"a": first, "b": second}, batch_idx)


VARIANTS["24 samples"] = lambda: loader(24)


@pytest.mark.parametrize("model", [Fetching, FetchingTwo])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_step_that_fetches_gets_the_next_batch(
    solo: RankPool, tmp_path: Path, model: type[Dropped], hook: str
) -> None:
    got = solo.run(differences, Variant("24 samples"), tmp_path, hook, RANDOM, model)[0]
    assert got["saves"] >= 2
    assert not got["wrong"]


# -- where a position is impossible, or somebody else's


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for row in X:
            yield row + torch.randn(5)


class Yielding(DataLoader[Any]):
    """Iterators of it are generators."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Rows:
    """An iterable that is no dataloader."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X.reshape(5, 4, 5))

    def __len__(self) -> int:
        return 5


class Stateful(DataLoader[Any]):
    """Tells its own position, as torchdata's does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given = self.skip = 0

    def __iter__(self) -> Any:
        self.given, skip, self.skip = self.skip, self.skip, 0
        return self._rest(super().__iter__(), skip)

    def _rest(self, iterator: Any, skip: int) -> Any:
        for index, batch in enumerate(iterator):
            if index >= skip:
                self.given = index + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["given"]


VARIANTS["stream"] = lambda: DataLoader(Stream(), batch_size=4)
VARIANTS["generator"] = lambda: Yielding(X, batch_size=4)
VARIANTS["list"] = lambda: Rows()
VARIANTS["with stream"] = lambda: {"a": loader(), "b": DataLoader(Stream(), batch_size=4)}
VARIANTS["stateful"] = lambda: Stateful(X, batch_size=4)
VARIANTS["with stateful"] = lambda: {"a": loader(), "b": Stateful(X, batch_size=4)}


@pytest.mark.parametrize("name", ["stream", "generator", "list", "with stream"])
def test_an_epoch_that_is_over_needs_no_position(solo: RankPool, tmp_path: Path, name: str) -> None:
    got = solo.run(differences, Variant(name), tmp_path, "on_train_epoch_end", RANDOM)[0]
    assert got["saves"] == 2
    assert not got["wrong"]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.parametrize("name", ["stateful", "with stateful"])
def test_a_dataloader_that_tells_its_state_keeps_its_own_way(
    solo: RankPool, tmp_path: Path, name: str, hook: str
) -> None:
    got = solo.run(differences, Variant(name), tmp_path, hook, RANDOM)[0]
    assert got["saves"] >= 2
    assert not got["wrong"]


def resume_with_warnings(rank: int, world: int, name: str, folder: Path) -> Any:
    train(Variant(name), world, RANDOM, callbacks=(SaveAt(folder, "on_train_batch_end"),))
    path = next(path for done, path in saves(folder) if done == 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, _ = train(Variant(name), world, RANDOM, ckpt_path=path, seed=99)
    said = [
        str(w.message) for w in caught if "start again from their first batch" in str(w.message)
    ]
    return len(resumed.losses), said


@pytest.mark.parametrize("name", ["stream", "generator", "list", "with stream"])
def test_an_epoch_without_position_starts_again_and_says_so(
    solo: RankPool, tmp_path: Path, name: str
) -> None:
    steps, said = solo.run(resume_with_warnings, name, tmp_path)[0]
    # Lightning counts batches to the epoch's known end, or runs a stream to its own.
    assert steps == {"stream": 10, "generator": 8, "list": 8, "with stream": 10}[name]
    assert len(said) == 1
    assert "Expected to go on after batch 2 of the epoch" in said[0]


class StatefulStream(Stateful):
    """Its length is not known."""

    def __len__(self) -> int:
        raise TypeError


VARIANTS["stateful, no length"] = lambda: StatefulStream(X, batch_size=4)
VARIANTS["stateful, with generator"] = lambda: {
    "a": Stateful(X, batch_size=4),
    "b": Yielding(X, batch_size=4),
}


def resume_stateful(rank: int, world: int, name: str, folder: Path) -> Any:
    class First(Dropped):
        first: float | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.first is None:
                rows = batch["a"] if isinstance(batch, dict) else batch
                First.first = self.first = float(rows[0, 0])
            return super().training_step(batch, batch_idx)

    _, said = resume_with_warnings(rank, world, name, folder)
    path = next(path for done, path in saves(folder) if done == 2)
    First.first = None
    train(Variant(name), world, RANDOM, ckpt_path=path, seed=99, model=First)
    return First.first, len(said)


@pytest.mark.parametrize(
    ("name", "given", "warned"),
    [
        ("stateful", 2, 0),
        # Lightning had fetched one in advance, and the dataloader tells that as given.
        ("stateful, no length", 3, 0),
        ("stateful, with generator", 2, 1),
    ],
)
def test_a_told_state_is_not_lost_beside_others(
    solo: RankPool, tmp_path: Path, name: str, given: int, warned: int
) -> None:
    assert solo.run(resume_stateful, name, tmp_path)[0] == (float(X[4 * given, 0]), warned)


# -- unusual fits


class Estimating(Dropped):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches in (6, 10)  # asks for the dataloaders
        return super().configure_optimizers()


VARIANTS["shuffled"] = loader


class OneForBoth(Variant):
    def __call__(self) -> tuple[Any, Any]:
        training = loader()
        return training, training


@pytest.mark.parametrize(
    "name",
    ["shuffled", "own_generator", pytest.param("persistent workers", marks=pytest.mark.full)],
)
def test_dataloaders_that_were_asked_for_before(solo: RankPool, tmp_path: Path, name: str) -> None:
    for hook in ("on_train_batch_end", "on_train_epoch_end"):
        got = solo.run(differences, Variant(name), tmp_path / hook, hook, RANDOM, Estimating)[0]
        assert not got["wrong"], hook


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
def test_one_dataloader_for_training_and_validation(
    solo: RankPool, tmp_path: Path, hook: str
) -> None:
    got = solo.run(differences, OneForBoth("-"), tmp_path, hook, RANDOM)[0]
    # A validation that was due is left out by Lightning, and with it what its batches draw.
    expected = {"005-005"} if hook == "on_train_batch_end" else set()
    assert set(got["wrong"]) == expected


class Rated(Dropped):
    """Its learning rate is looked for, and not taken."""

    lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-2)


class Finder(LearningRateFinder):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        pl_module.losses.clear()
        pl_module.steps.clear()


def finder() -> LearningRateFinder:
    return Finder(num_training_steps=3, update_attr=False)


def find_rate_and_resume(rank: int, world: int, folder: Path) -> Any:
    build = Variant("shuffled")
    saving = SaveAt(folder, "on_train_batch_end")
    whole, _ = train(build, world, RANDOM, callbacks=(finder(), saving), model=Rated)
    wrong = []
    for done, path in saves(folder):
        if done:  # those of the search have seen no step of the fit
            resumed, _ = train(build, world, RANDOM, ckpt_path=path, seed=99, model=Rated)
            if resumed.losses != whole.losses[done:]:
                wrong.append((done, len(resumed.losses), len(whole.losses)))
    waits: list[bool] = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            waits.append(trainer.strategy.resume._taking_up is not None)

    callbacks = (Look(), finder())
    again, _ = train(build, world, RANDOM, callbacks=callbacks, ckpt_path=path, model=Rated)
    return wrong, len(whole.losses), len(again.losses), any(waits)


def test_a_search_for_the_rate_takes_nothing_up(solo: RankPool, tmp_path: Path) -> None:
    wrong, steps, again, waits = solo.run(find_rate_and_resume, tmp_path)[0]
    assert not wrong
    # Lightning forgets what it resumes from when it searches for a rate in between.
    assert steps == again == 10
    assert not waits


# -- reads, and what is left behind


def read_after(rank: int, world: int, folder: Path, sized: bool) -> Any:
    held: list[Any] = []

    def build() -> tuple[Any, Any]:
        sampler = SizedBatches() if sized else Batches()
        held.append(DataLoader(Augmented(), batch_sampler=sampler))
        return held[-1], None

    train(build, world, RANDOM, callbacks=(SaveAt(folder, "on_train_batch_end"),))
    path = next(path for done, path in saves(folder) if done == 3)
    train(build, world, RANDOM, ckpt_path=path, seed=99)
    first, second = (own.dataset.reads for own in held)
    return first[-len(second) :] == second, len(first) - len(second)


@pytest.mark.parametrize("sized", [True, False])
def test_what_is_skipped_is_not_read(solo: RankPool, tmp_path: Path, sized: bool) -> None:
    same, skipped = solo.run(read_after, tmp_path, sized)[0]
    assert same
    assert 6 <= skipped <= 12


class Named(DataLoader[Any]):
    label = "mine"


def look_during_and_after(rank: int, world: int, end: str) -> Any:
    training = Named(X, batch_size=4, shuffle=True)
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            own = trainer.train_dataloader
            seen["same"] = own is training
            seen["kind"] = isinstance(own, Named) and type(own).__name__
            seen["length"] = len(own)
            seen["label"] = own.label
            seen["followed"] = is_followed(own)
            seen["copies"] = [
                type(twin) is Named and len(twin) == 5
                for twin in (copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own)))
            ]
            if end == "error":
                raise ValueError("on purpose")

    try:
        train(lambda: (training, None), world, RANDOM, callbacks=(Look(),))
    except ValueError:
        assert end == "error"
    seen["kind after"] = type(training) is Named
    seen["left"] = [name for name in vars(training) if "zeroplus" in name]
    seen["batches"] = len(list(training)), len(list(training))
    seen["copy after"] = type(pickle.loads(pickle.dumps(training))) is Named
    return seen


@pytest.mark.parametrize("end", ["success", "error"])
def test_the_users_dataloader_stays_what_it_is(solo: RankPool, end: str) -> None:
    assert solo.run(look_during_and_after, end)[0] == {
        "same": True,
        "kind": "Named",
        "length": 5,
        "label": "mine",
        "followed": True,
        "copies": [True, True, True],
        "kind after": True,
        "left": [],
        "batches": (5, 5),
        "copy after": True,
    }
