"""What a resumed fit takes up, from Lightning's restored counters to the first batch.

Lightning starts the epoch's dataloaders again from their first batch. The moments that its loops
leave for going on instead are these:

- The fit loop makes iterators in `setup_data`, too early: counters are not final, samplers have not
  been told their epoch, and hooks are still to draw random numbers. Where all dataloaders can be
  followed, those iterators are empty ones.
- `Strategy.on_train_start` is the last that a resumed fit runs and an uninterrupted one does not.
  After it generators are as they were at the save.
- At the first batch that is asked for, iterators are made that go on where the epoch stood. If
  the epoch was over, they are made as an uninterrupted loop makes them at this point.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lightning_zeroplus.plugin.positions import (
    Place,
    convert,
    generators_of,
    is_followed,
    iterate,
    kept_random_state,
    random_state,
    restart,
    set_random_state,
    terms_of,
)

__all__ = ["TakingUp"]

_UNTRUE_ADVICE = "You're resuming from a checkpoint that ended before the epoch ended"


class TakingUp:
    """One resume.

    Args:
        trainer: its loops have loaded their counters.
        saved: what `Resume.capture` returned.
        world_size: number of ranks today.
    """

    def __init__(self, trainer: Trainer, saved: Mapping[str, Any], world_size: int) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop
        self._saved = saved
        self._ranks = (int(saved["world_size"]), world_size)
        self._position: dict[str, Any] | None = saved["position"]
        self._settled = self._started = self._taken = False
        self._done: Callable[[], None] = self.close
        self._undo = ExitStack()
        self._obstacle = ""

    @property
    def _same_world(self) -> bool:
        return self._ranks[0] == self._ranks[1]

    def _loaders(self) -> list[Any]:
        combined = self._loop._combined_loader
        return [] if combined is None else combined.flattened

    def capture(self) -> dict[str, Any]:
        """Return what was restored: no batch has been given since."""
        then, now = self._ranks
        return {
            "world_size": now if self._settled else then,
            "random": random_state() if self._started else self._saved["random"],
            "position": self._position,
        }

    def close(self) -> None:
        """Leave nothing behind, whether the first batch has come or not."""
        self._undo.close()

    def holds_back(self, loader: DataLoader[Any]) -> bool:
        """Return whether the iterator that the loop asks for now is not the one it will use."""
        loaders = self._loaders()
        if not self._trainer.training or not any(own is loader for own in loaders):
            return False
        if self._started:  # dataloaders may have been reloaded, so there is another fetcher
            self._meet()
            return False
        self.settle()
        # Empty iterators may be asked for a batch in advance; that must not cost others one.
        return all(is_followed(own) for own in loaders)

    # -- counters

    def settle(self) -> None:
        """Express the position, and Lightning's counters, in batches of today; once."""
        if self._settled:
            return
        self._settled = True
        position = self._position
        if position is None:
            self._obstacle = "the checkpoint is from before there were dataloaders"
            return
        try:
            entries, shift = self._convert(position)
        except _CannotPlaceError as reason:
            self._obstacle = str(reason)
            entries, shift = [{**e, "batches": None} for e in position["loaders"]], 0
        counts = {name: position[name] + shift for name in ("steps", "fetched")}
        self._position = {**position, **counts, "loaders": entries}
        current = self._loop.epoch_loop.batch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + shift)
        if self._loop.restarting and not self._obstacle and not position["last"]:
            self._reopen_epoch(entries)

    def _reopen_epoch(self, entries: list[dict[str, Any]]) -> None:
        """Take an epoch that `max_steps` has cut short for what it is; Lightning counts it."""
        cut = {entry["start"]["epoch"] for entry in entries if entry["start"] is not None}
        progress: Any = self._loop.epoch_progress
        if progress.current.processed - 1 in cut:
            for counts in (progress.current, progress.total):
                counts.processed -= 1
                counts.completed = counts.processed

    def _convert(self, position: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
        """Return the entries of ``position`` in batches of today, and by how many they differ."""
        loaders, entries = self._loaders(), position["loaders"]
        if len(loaders) != len(entries):
            raise _CannotPlaceError(f"it had {len(entries)} dataloaders, now {len(loaders)}")
        converted = []
        for loader, entry in zip(loaders, entries, strict=True):
            if not is_followed(loader) and isinstance(loader, _Stateful):
                converted.append(entry)  # Lightning restores it
            elif not is_followed(loader) or entry["batches"] is None:
                raise _CannotPlaceError("only a dataloader over a map-style data set can skip")
            else:
                batches = self._batches(loader, entry, last=position["last"])
                converted.append({**entry, "batches": batches, "terms": terms_of(loader)})
        pairs = zip(converted, entries, strict=True)
        shifts = [new["batches"] - old["batches"] for new, old in pairs if new is not old]
        if any(shifts) and len(loaders) > 1:
            raise _CannotPlaceError("several dataloaders have batches of other sizes now")
        return converted, shifts[0] if shifts else 0

    def _batches(self, loader: DataLoader[Any], entry: Mapping[str, Any], *, last: bool) -> int:
        terms, batches = terms_of(loader), int(entry["batches"])
        if self._same_world and terms == entry["terms"]:
            return batches
        combined = self._loop._combined_loader
        assert combined is not None
        assert combined.limits is not None
        total = int(min(len(loader), combined.limits[0]))
        now = total if last else convert(batches, entry["terms"], terms, ranks=self._ranks)
        if now is None:
            raise _CannotPlaceError(
                f"the samples of {batches} batches of {self._ranks[0]} ranks ({entry['terms']}) "
                f"are no whole number of batches of {self._ranks[1]} ({terms}), or in another order"
            )
        return min(now, total)

    # -- taking up

    def start(self, done: Callable[[], None]) -> None:
        """Set generators; at the first batch set positions and call ``done``."""
        self.settle()
        self._started, self._done = True, done
        self.set_generators()
        self._mend_restart()
        if not self._same_world:
            rank_zero_info(
                f"The checkpoint is of {self._ranks[0]} ranks and resumed by {self._ranks[1]}: "
                f"random number generators are not restored."
            )
        if not self._obstacle:
            self._undo.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=_UNTRUE_ADVICE)
        self._meet()

    def set_generators(self) -> None:
        """Set the generators of the process and those of the dataloaders to what they were."""
        if not self._started or not self._same_world:
            return
        set_random_state(self._saved["random"])
        entries = [] if self._position is None else self._position["loaders"]
        for loader, entry in zip(self._loaders(), entries, strict=False):
            for own, state in zip(generators_of(loader), entry["generators"], strict=False):
                own.set_state(state)

    def _mend_restart(self) -> None:
        """Let a restart at an epoch's edge begin the epoch; Lightning takes it for a later moment.

        After a save at the end of the last batch, it leaves out `on_train_epoch_start` of the next
        epoch, and "forwards" a validation whether one was due or not. With `max_steps`, it counts
        an epoch that is over once more. At the start of an epoch, it takes the batches of the
        epoch before for its own and trains on none.
        """
        loop, epoch_loop = self._loop, self._loop.epoch_loop
        if loop.restarted_on_epoch_start:
            epoch_loop.restarting = False
        position = self._saved["position"]
        if position is None or not position["last"]:
            return
        if loop.restarted_mid_epoch and epoch_loop.restarted_on_train_batch_end:
            epoch_loop._batches_that_stepped += 1
            if position["validates"]:
                # Lightning leaves it out; as much is drawn for its iterators.
                epoch_loop.val_loop.increment_progress_to_evaluation_end()
        progress: Any = loop.epoch_progress
        if progress.current.processed == progress.current.ready:
            loop._restarting = epoch_loop.restarting = False
            loop.reset_restart_stage()
            for counts in (progress.current, progress.total):
                counts.completed = counts.processed

    def _meet(self) -> None:
        """Make the fetcher say when the first batch is asked for."""
        fetcher = self._loop._data_fetcher
        if fetcher is None or self._taken:
            return
        kind = type(fetcher)
        if not issubclass(kind, _TellsFirst):
            fetcher.__class__ = type(f"TellsFirst{kind.__name__}", (_TellsFirst, kind), {})
        vars(fetcher)["_zeroplus_first"] = self._take_up

    def _take_up(self, fetcher: _DataFetcher) -> None:
        self._taken = True
        loaders, position = self._loaders(), self._position
        followed = [is_followed(own) for own in loaders]
        # What others have given in advance is in the fetcher already.
        untouchable = fetcher.length is None and not all(followed)
        if untouchable and any(followed):
            self._obstacle = self._obstacle or "dataloaders without a length are combined"
        # What Lightning counts decides whether the epoch goes on or another one begins.
        ready = self._loop.epoch_loop.batch_progress.current.ready
        goes_on = position is not None and position["steps"] == ready
        if untouchable:
            pass
        elif position is not None and goes_on and not self._obstacle:
            with kept_random_state(g for own in loaders for g in generators_of(own)):
                self._go_on(fetcher, position)
                _fetch_ahead(fetcher)
        elif self._loop.is_resuming:
            # An uninterrupted loop asks for iterators here; this one has none that count.
            self._begin(fetcher, others=not goes_on)
            _fetch_ahead(fetcher)
        if self._obstacle and position is not None and position["steps"] and not position["last"]:
            rank_zero_warn(
                f"Expected to go on after batch {position['steps']} of the epoch, got dataloaders "
                f"that start again from their first batch: {self._obstacle}. Save at an epoch's "
                f"end, or give the dataloader `state_dict` and `load_state_dict`."
            )
        self._done()

    def _go_on(self, fetcher: _DataFetcher, position: Mapping[str, Any]) -> None:
        modes: Any = fetcher.combined_loader._iterator
        entries = position["loaders"]
        for index, (loader, entry) in enumerate(zip(modes.iterables, entries, strict=True)):
            if is_followed(loader):
                place = Place(entry["start"], entry["batches"])
                modes.iterators[index] = iterate(loader, place)
        fetcher.fetched = modes._idx = position["fetched"]
        _mark_wrapped(modes, [entry["wrapped"] for entry in entries])

    def _begin(self, fetcher: _DataFetcher, *, others: bool) -> None:
        modes: Any = fetcher.combined_loader._iterator
        for index, loader in enumerate(modes.iterables):
            if is_followed(loader):
                modes.iterators[index] = restart(loader)
            elif others:  # else one that tells its state goes on
                modes.iterators[index] = iter(loader)
        # The empty iterators may have been asked in advance.
        _mark_wrapped(modes, [False] * len(modes.iterators))


class _CannotPlaceError(Exception):
    """The position means nothing to today's dataloaders."""


class _TellsFirst(_DataFetcher):
    """A fetcher that says when its first batch is asked for."""

    def __next__(self) -> Any:
        first = vars(self).pop("_zeroplus_first", None)
        if first is not None:
            first(self)
        return super().__next__()


def _mark_wrapped(modes: Any, wrapped: list[bool]) -> None:
    if hasattr(modes, "_consumed"):
        modes._consumed = wrapped


def _fetch_ahead(fetcher: _DataFetcher) -> None:
    """Fetch what ``fetcher`` would have in advance from the iterators that it has got."""
    if not isinstance(fetcher, _PrefetchDataFetcher) or fetcher.length is not None:
        return
    fetcher.batches.clear()
    fetcher.done = False
    for _ in range(fetcher.prefetch_batches):
        with suppress(StopIteration):
            fetcher.batches.append(_DataFetcher.__next__(fetcher))
