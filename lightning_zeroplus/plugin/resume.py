"""A resumed fit goes on as if it had never stopped: same random numbers, same next batch.

Lightning restores counters only. What is missing is captured here at each save, and taken up when
the fit that resumes has got to its first batch (`taking_up`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_zeroplus.plugin.positions import (
    follow,
    generators_of,
    is_followed,
    is_map_style,
    place_of,
    random_state,
    terms_of,
    unfollow,
)
from lightning_zeroplus.plugin.taking_up import TakingUp

__all__ = ["CHECKPOINT_KEY", "Resume"]

CHECKPOINT_KEY = "zeroplus_resume"
"""Under which a checkpoint has what `Resume.capture` returned on each rank, in rank order."""


class Resume:
    """What one strategy knows of random numbers and positions, of one fit after the other."""

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] | None = None
        self._world_size = 1
        self._taking_up: TakingUp | None = None
        self._followed: list[DataLoader[Any]] = []
        self._final: dict[str, Any] | None = None

    # -- saving

    def capture(self, trainer: Trainer) -> dict[str, Any]:
        """Return this rank's generators and positions, as they are or as the last fit left them.

        Tensors, numbers and texts only, so that it loads with ``weights_only=True``.
        """
        if not _is_fitting(trainer) and self._final is not None:
            return self._final
        if self._taking_up is not None:
            return self._taking_up.capture()
        return {
            "world_size": trainer.world_size,
            "random": random_state(),
            "position": _position(trainer),
        }

    # -- loading

    def restore(
        self,
        saved: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None,
        rank: int,
        world_size: int,
    ) -> None:
        """Keep what a checkpoint has, until `arm` is called.

        Args:
            saved: what `capture` returned: on each rank, in rank order, or on this rank, or on rank
                0 if the number of ranks was another; None or nothing: a checkpoint without it.
            rank: of this process.
            world_size: number of processes today.
        """
        if saved is not None and not isinstance(saved, Mapping):
            saved = saved[rank if rank < len(saved) else 0] if saved else None
        self._saved = saved or None
        self._world_size = world_size

    def arm(self, trainer: Trainer) -> None:
        """Take up in the coming fit what `restore` has kept; Lightning's counters are loaded."""
        if self._saved is None:
            return
        position = self._saved["position"]
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if position is not None and position["steps"] != current.processed:
            return  # counters are of another checkpoint, that of a search for a learning rate
        self._taking_up = TakingUp(trainer, self._saved, self._world_size)
        if trainer.fit_loop._combined_loader is not None:  # asked for before the fit
            self._taking_up.settle()

    # -- a fit

    def process(self, trainer: Trainer, dataloader: object) -> object:
        """Return ``dataloader``, followed if it is for training and cannot tell its own state."""
        if isinstance(dataloader, _Stateful) or not trainer.training:
            return dataloader
        if isinstance(dataloader, DataLoader) and not is_followed(dataloader):
            progress: Any = trainer.fit_loop.epoch_progress.current
            follow(dataloader, lambda: {"epoch": progress.processed}, self._holds_back)
            self._followed.append(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Set generators, after all hooks that an uninterrupted fit would not have run."""
        if self._taking_up is not None:
            self._taking_up.start(self._done)

    def on_validation_start(self) -> None:
        """Set generators again if an interrupted validation is run once more before training."""
        if self._taking_up is not None:
            self._taking_up.set_generators()

    def close(self, trainer: Trainer | None) -> None:
        """End the fit: dataloaders are ordinary again."""
        try:
            if trainer is not None and _is_fitting(trainer):
                self._final = self.capture(trainer)
        finally:
            self._done()
            for loader in self._followed:
                unfollow(loader)
            self._followed = []

    def _holds_back(self, loader: DataLoader[Any]) -> bool:
        return self._taking_up is not None and self._taking_up.holds_back(loader)

    def _done(self) -> None:
        if self._taking_up is not None:
            self._taking_up.close()
        self._taking_up = self._saved = None


def _is_fitting(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.stage is not None


def _position(trainer: Trainer) -> dict[str, Any] | None:
    """Return where the epoch and each of its dataloaders stand."""
    loop = trainer.fit_loop
    modes: Any = None if loop._combined_loader is None else loop._combined_loader._iterator
    if modes is None:
        return None
    current: Any = loop.epoch_loop.batch_progress.current
    steps = current.processed
    by_step = isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher)
    fetched = modes._idx if by_step else steps  # what was fetched in advance is fetched again
    wrapped = getattr(modes, "_consumed", [False] * len(modes.iterators))
    return {
        "steps": steps,
        "fetched": fetched,
        "last": current.ready == steps and loop.epoch_loop._num_ready_batches_reached(),
        "validates": _validates(trainer),
        "loaders": [
            _entry(*of_one, fetched, modes._idx)
            for of_one in zip(modes.iterables, modes.iterators, wrapped, strict=True)
        ],
    }


def _validates(trainer: Trainer) -> bool:
    """Return whether a batch is about to end, and validation comes next."""
    loop = trainer.fit_loop.epoch_loop
    current: Any = loop.batch_progress.current
    ending = current.ready == current.processed == current.completed + 1
    fetcher = trainer.fit_loop._data_fetcher
    return ending and fetcher is not None and loop._should_check_val_fx(fetcher)


def _entry(
    loader: Any, iterator: object, wrapped: bool, fetched: int, asked: int
) -> dict[str, Any]:
    place = place_of(iterator) if is_followed(loader) and is_map_style(loader) else None
    batches = None
    if place is not None:
        # One that has ended gives none any more; one that starts again counts from there.
        ahead = max(0, place.batches - (asked - fetched))
        batches = ahead if wrapped else min(place.batches, fetched)
    return {
        "wrapped": wrapped,
        "batches": batches,
        "start": None if place is None else place.start,
        "terms": terms_of(loader) if place is not None else None,
        "generators": [g.get_state() for g in generators_of(loader)],
    }
