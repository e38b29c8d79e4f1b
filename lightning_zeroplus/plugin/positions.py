"""Random number generators, and where a dataloader stands in its epoch.

The order of an epoch is drawn when its first index is asked for: a sampler then draws from the
global generators or from one of its own. So a position is a number of batches and the state of the
generators at that moment; going there means drawing the same order again and leaving out its first
indices. Nothing is read from the data set for them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

__all__ = [
    "Place",
    "RandomState",
    "convert",
    "follow",
    "generators_of",
    "is_followed",
    "is_map_style",
    "iterate",
    "kept_random_state",
    "place_of",
    "random_state",
    "restart",
    "set_random_state",
    "terms_of",
    "unfollow",
]

RandomState: TypeAlias = dict[str, Any]
"""What `random_state` returns: tensors, numbers and texts only."""

_Loader: TypeAlias = DataLoader[Any]


# -- generators


def random_state(generators: Iterable[torch.Generator] = ()) -> RandomState:
    """Return the state of all global generators of this process, and of ``generators``.

    Those are Python's, NumPy's if it is imported, and torch's on the CPU and on the accelerators
    that are in use. A generator object that nobody passes here is not covered.
    """
    version, words, gauss = random.getstate()
    state: RandomState = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        drawn = numpy.random.get_state(legacy=False)
        if drawn["bit_generator"] == "MT19937":
            key = torch.tensor(drawn["state"]["key"].tolist())
            rest = {name: drawn[name] for name in ("bit_generator", "has_gauss", "gauss")}
            state["numpy"] = {**rest, "key": key, "pos": int(drawn["state"]["pos"])}
    for name, backend in _accelerators():
        state[name] = backend.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any], generators: Iterable[torch.Generator] = ()) -> None:
    """Set what ``state`` has and this process knows; the rest stays as it is."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    for generator, own in zip(generators, state["generators"], strict=False):
        generator.set_state(own)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        drawn = dict(state["numpy"])
        drawn["state"] = {"key": drawn.pop("key").numpy().astype("uint32"), "pos": drawn.pop("pos")}
        numpy.random.set_state(drawn)
    for name, backend in _accelerators():
        for index, own in enumerate(state.get(name, [])[: backend.device_count()]):
            backend.set_rng_state(own, index)


def _accelerators() -> list[tuple[str, Any]]:
    """Return the backends that this process has drawn from or could have."""
    backends = [("cuda", torch.cuda), ("xpu", torch.xpu)]
    return [(name, b) for name, b in backends if b.is_available() and b.is_initialized()]


@contextmanager
def kept_random_state(generators: Iterable[torch.Generator] = ()) -> Generator[None, None, None]:
    """Give generators back as they were, whatever is drawn inside."""
    generators = list(generators)
    before = random_state(generators)
    try:
        yield
    finally:
        set_random_state(before, generators)


def generators_of(loader: _Loader) -> list[torch.Generator]:
    """Return the generators that ``loader`` and its samplers have of their own, in fixed order."""
    found: dict[int, torch.Generator] = {}
    waiting: list[Any] = [loader]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
        if isinstance(part, DistributedSampler):  # Lightning's wrapper keeps the user's in there
            waiting.append(getattr(part.dataset, "_sampler", None))
    return list(found.values())


# -- positions


@dataclass(frozen=True)
class Place:
    """Where an iterator stands.

    Args:
        start: what was noted when its first index was drawn; None: that is still to come.
        batches: it has given so many.
        keep: whether drawing its order again leaves all generators as they were.
    """

    start: RandomState | None
    batches: int = 0
    keep: bool = True


class _Indices:
    """The indices of one pass over a dataloader, and the state in which their order was drawn."""

    def __init__(
        self, loader: _Loader, sampler: Iterable[Any], note: Callable[[], RandomState]
    ) -> None:
        self.start: RandomState | None = None
        self._sampler = sampler
        self._note = note
        self._place: Place | None = vars(loader).get("_zeroplus_place")
        self._generators = generators_of(loader)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # a TypeError is the right answer

    def __iter__(self) -> Iterator[Any]:
        place, self._place = self._place, None  # persistent workers come here in each epoch
        self.start = None
        if place is None or place.start is None:
            self.start = {**random_state(self._generators), **self._note()}
            yield from self._sampler
            return
        before = random_state(self._generators)
        set_random_state(place.start, self._generators)
        self.start = {**place.start, **self._note()} if not place.keep else place.start
        indices = iter(self._sampler)
        skipped = sum(1 for _ in islice(indices, place.batches))
        if skipped < place.batches:
            indices = iter(())
        elif place.keep and not skipped:  # most samplers draw the order only now
            indices = chain(list(islice(indices, 1)), indices)
        if place.keep:
            set_random_state(before, self._generators)
        yield from indices


class _Followed(_Loader):
    """A dataloader whose iterators know where they stand."""

    @property
    @override
    def _index_sampler(self) -> Any:
        # Asked once by each new iterator, which keeps the answer.
        return _Indices(self, super()._index_sampler, vars(self)["_zeroplus_note"])

    @override
    def __iter__(self) -> Any:
        if vars(self)["_zeroplus_holds_back"](self):
            return iter(())
        return super().__iter__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        twin = object.__new__(_plain(self))
        kept = {name: value for name, value in vars(self).items() if name not in _OURS}
        vars(twin).update(kept)
        return _itself, (twin,)


def _itself(loader: _Loader) -> _Loader:
    """Stands in a pickle of a followed dataloader before the ordinary one that it holds."""
    return loader


_OURS = ("_zeroplus_note", "_zeroplus_holds_back", "_zeroplus_place")


def follow(
    loader: _Loader, note: Callable[[], RandomState], holds_back: Callable[[_Loader], bool]
) -> None:
    """Make ``loader`` one whose iterators know their place; it stays the same object.

    Args:
        loader: a dataloader that cannot tell its state by itself.
        note: returns what is to be noted beside the generators when an order is drawn.
        holds_back: returns whether an iterator that is asked for now is empty, because the one
            that counts is made later.
    """
    if isinstance(loader, _Followed):
        return
    vars(loader)["_zeroplus_note"] = note
    vars(loader)["_zeroplus_holds_back"] = holds_back
    kind = type(loader)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    loader.__class__ = type(kind.__name__, (_Followed, kind), names)


def unfollow(loader: object) -> None:
    """Make ``loader`` the ordinary dataloader that it was."""
    if isinstance(loader, _Followed):
        loader.__class__ = _plain(loader)  # type: ignore[assignment]  # its own class again
        for name in _OURS:
            vars(loader).pop(name, None)


def is_followed(loader: object) -> bool:
    """Return whether ``loader`` is followed at present."""
    return isinstance(loader, _Followed)


def _plain(loader: _Followed) -> type[_Loader]:
    kind: type[_Loader] = type(loader).__bases__[1]
    return kind


def iterate(loader: _Loader, place: Place) -> Any:
    """Return a new iterator over ``loader`` that goes on from ``place``."""
    if loader._iterator is not None:  # persistent workers have indices of another place
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None
    vars(loader)["_zeroplus_place"] = place
    try:
        iterator = iter(loader)
    finally:
        del vars(loader)["_zeroplus_place"]
    if isinstance(iterator, _BaseDataLoaderIter):
        iterator._num_yielded = place.batches
    return iterator


def restart(loader: _Loader) -> Any:
    """Return a new iterator over ``loader`` that draws what one of a later epoch draws."""
    if loader.persistent_workers and loader._iterator is None:
        # Only the first iterator starts workers, and only that draws a seed for them.
        now = random_state(generators_of(loader))
        return iterate(loader, Place(now, keep=False))
    return iter(loader)


def place_of(iterator: object) -> Place | None:
    """Return where an iterator over a followed dataloader stands; None if it cannot tell."""
    indices = getattr(iterator, "_index_sampler", None)
    if not isinstance(iterator, _BaseDataLoaderIter) or not isinstance(indices, _Indices):
        return None
    return Place(indices.start, iterator._num_yielded)


# -- comparing


def terms_of(loader: _Loader) -> dict[str, Any]:
    """Return what a number of batches of ``loader`` depends on."""
    sampler = loader.sampler
    distributed = [sampler.seed, sampler.shuffle] if type(sampler) is DistributedSampler else None
    try:
        samples: int | None = len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        samples = None
    return {
        "batch_size": 1 if loader.batch_sampler is None else loader.batch_size,
        "samples": samples,
        "distributed": distributed,
    }


def is_map_style(loader: _Loader) -> bool:
    """Return whether indices decide what ``loader`` gives."""
    return not isinstance(loader.dataset, IterableDataset)


def convert(
    batches: int, was: Mapping[str, Any], now: Mapping[str, Any], *, ranks: tuple[int, int]
) -> int | None:
    """Return how many batches on ``now`` terms have the samples of ``batches`` on terms it ``was``.

    Args:
        batches: given by each rank since the epoch's start.
        was: the terms of then.
        now: the terms of today.
        ranks: their number then and today.

    Returns:
        None if no number of whole batches has them, or if their order is another one.
    """
    if was == now and ranks[0] == ranks[1]:
        return batches
    if was["samples"] != now["samples"] or was["distributed"] != now["distributed"]:
        return None
    # Ranks take turns in a distributed sampler's order, so together they have had its beginning.
    if ranks[0] != ranks[1] and now["distributed"] is None:
        return None
    if not was["batch_size"] or not now["batch_size"]:
        return None
    whole, rest = divmod(batches * was["batch_size"] * ranks[0], now["batch_size"] * ranks[1])
    return None if rest else whole
