"""Ranks whose loops end at different batches, and where a loop starts and ends.

Evaluation may be uneven: a rank that has run out of batches serves its peers' gathers until all
have ended. That must happen after its last step and before the metrics of the loop are reduced
over ranks, and Lightning calls nothing of a strategy or a callback in between. (A wrapped
dataloader is no such place: batches are prefetched, so it ends before the last step has run, and
with a known length it is never asked for more. `on_*_epoch_end` is too late: metrics were reduced.)
What the loop itself asks is its fetcher, so the fetcher tells; it is made per run and ours to see
in the strategy's `on_*_start`. Its first call is also the last moment before the first step that
every rank reaches, after all `on_*_epoch_start` hooks.

Training must be even, as under DDP. Where lengths are unknown or differ, ranks compare at every
fetch whether they have a batch and whether it is the last, and all of them raise together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop

from lightning_zeroplus.errors import CollectiveError

__all__ = [
    "EvaluatingLoop",
    "LoaderEnds",
    "compare_training_batches",
    "tell_loader_ends",
    "tell_skipped_loop",
]

EvaluatingLoop: TypeAlias = _EvaluationLoop | _PredictionLoop


class LoaderEnds:
    """Counts the dataloaders of one evaluation that have ended on this rank.

    Every rank counts to the same number, whichever of its dataloaders are empty.

    Args:
        total: number of dataloaders.
        on_start: called once, before the first batch is fetched.
        on_end: called once for each dataloader.
    """

    def __init__(
        self, total: int, on_start: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self.total = total
        self._on_start = on_start
        self._on_end = on_end
        self._started = False
        self._ended = 0

    def start(self) -> None:
        """The first batch is about to be fetched, or a later one."""
        if not self._started:
            self._started = True
            self._on_start()

    def reach(self, index: int) -> None:
        """All dataloaders before ``index`` have ended."""
        while self._ended < min(index, self.total):
            self._ended += 1
            self._on_end()

    def finish(self) -> None:
        """All dataloaders have ended."""
        self.reach(self.total)


def tell_loader_ends(
    loop: EvaluatingLoop,
    on_start: Callable[[], None],
    on_end: Callable[[], None],
) -> LoaderEnds:
    """Make the run of ``loop`` that is starting call ``on_start``, then ``on_end`` per loader."""
    fetcher = loop._data_fetcher
    assert fetcher is not None
    ends = LoaderEnds(_count_loaders(loop), on_start, on_end)
    _extend(fetcher, _TellsEnds)
    vars(fetcher)["_loader_ends"] = ends
    return ends


def tell_skipped_loop(
    loop: EvaluatingLoop,
    on_start: Callable[[], None],
    on_end: Callable[[], None],
) -> None:
    """Make the calls of `tell_loader_ends` for a ``loop`` that this rank had no batches for."""
    ends = LoaderEnds(_count_loaders(loop), on_start, on_end)
    ends.start()
    ends.finish()


def _count_loaders(loop: EvaluatingLoop) -> int:
    """Return how many dataloaders ``loop`` takes one after the other."""
    loader = loop._combined_loader
    if loader is None:
        return 0
    return len(loader.flattened) if loader._mode == "sequential" else 1


class _TellsEnds(_DataFetcher):
    """A fetcher that says when a dataloader has ended: at the next one's batch or at the end."""

    _loader_ends: LoaderEnds

    def __next__(self) -> Any:
        self._loader_ends.start()
        try:
            item = super().__next__()
        except StopIteration:
            self._loader_ends.finish()
            raise
        if isinstance(item, tuple):
            self._loader_ends.reach(item[2])
        return item


_ENDED, _MORE, _LAST = range(3)
_STATES = ("has no more batches", "has more batches", "is at its last batch")


def compare_training_batches(loop: _FitLoop, exchange: Callable[[int], list[int]]) -> None:
    """Make the batches of ``loop`` end on all ranks together or not at all.

    Args:
        loop: a fit loop whose data has been set up.
        exchange: returns every rank's number, in rank order; collective.
    """
    fetcher = loop._data_fetcher
    # A step that fetches for itself may do so any number of times, so there is nothing to compare.
    if fetcher is None or isinstance(fetcher, (_ComparesBatches, _DataLoaderIterDataFetcher)):
        return
    _extend(fetcher, _ComparesBatches)
    vars(fetcher)["_exchange"] = exchange
    vars(fetcher)["_even"] = None
    vars(fetcher)["_given"] = 0


class _ComparesBatches(_DataFetcher):
    """A fetcher that raises on every rank at the batch at which one of them ends alone."""

    _exchange: Callable[[int], list[int]]
    _even: bool | None
    _given: int

    def __next__(self) -> Any:
        if self._even is None:
            self._even = self._lengths_agree()
        if self._even:
            return super().__next__()
        try:
            item = super().__next__()
        except StopIteration:
            self._compare(_ENDED)
            raise
        self._compare(_LAST if self.done else _MORE)
        self._given += 1
        return item

    def reset(self) -> None:
        super().reset()
        self._even = None
        self._given = 0

    def _lengths_agree(self) -> bool:
        loaders = self.combined_loader.flattened
        known = all(sized_len(dl) is not None and not has_iterable_dataset(dl) for dl in loaders)
        length = self.length if known and self.length is not None else -1
        lengths = self._exchange(length)
        return min(lengths) >= 0 and min(lengths) == max(lengths)

    def _compare(self, state: int) -> None:
        states = self._exchange(state)
        if min(states) == max(states):
            return
        ranks = ", ".join(f"rank {r} {_STATES[s]}" for r, s in enumerate(states))
        raise CollectiveError(
            f"Expected as many training batches on every rank, got a difference after "
            f"{self._given} batches: {ranks}. Use a sampler that gives all ranks the same number "
            f"(drop_last=True), or set limit_train_batches to what the shortest rank has."
        )


def _extend(fetcher: _DataFetcher, extension: type[_DataFetcher]) -> None:
    """Put ``extension`` before the class of ``fetcher``, which the loop has already made."""
    kind = type(fetcher)
    if not issubclass(kind, extension):
        fetcher.__class__ = type(f"{extension.__name__}{kind.__name__}", (extension, kind), {})
