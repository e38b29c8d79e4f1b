"""Ranks of a ``torch.distributed`` process group.

The engine has groups of its own, so that a user's barrier never pairs with a gather. Over Gloo a
reduce-scatter sends twice the ring law and sums in an order that depends on the position, so
reductions are an all-to-all and a local sum in rank order here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_zeroplus.comm.loopback import solo_transport
from lightning_zeroplus.comm.transport import Operation, Tag, Transport, Work, check_tags
from lightning_zeroplus.comm.watch import Watch
from lightning_zeroplus.errors import CollectiveError

__all__ = ["C10dTransport", "c10d_transport", "shared_transport"]

_INSTANCES = itertools.count()

# torch 2.13 renamed it and warns of the old name.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


def c10d_transport(
    *, timeout: timedelta = timedelta(minutes=30), backend: str | None = None
) -> Transport:
    """Return a transport over all ranks of the default process group; collective.

    A world without an initialised process group is a world of one rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return solo_transport()
    return C10dTransport(timeout=timeout, backend=backend)


_SHARED: dict[tuple[str, timedelta], C10dTransport] = {}


def shared_transport(purpose: str, *, timeout: timedelta) -> Transport:
    """Return this process's transport for ``purpose``, made when it is first asked for; collective.

    A process group keeps threads until the process ends, so that one run after the other, in a
    sweep of settings for example, must not make its own. What a failure has spoilt on any rank is
    made anew on all.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return solo_transport()
    key = (purpose, timeout)
    found = _SHARED.get(key)
    fit = found is not None and found.works_over(dist.distributed_c10d._get_default_group())
    fits: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fits, fit)
    if found is None or not all(fits):
        found = _SHARED[key] = C10dTransport(timeout=timeout)
    return found


class _Wait:
    """A group's work under the eyes of the watch."""

    def __init__(
        self, watch: Watch, works: list[Any], tag: Tag, *, on_device: bool = False
    ) -> None:
        self._watch = watch
        self._on_device = on_device
        self._works = works
        self._tag = tag

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            if self._on_device:
                work.wait()  # orders streams; a time-out would block the host instead
                continue
            self._watch.wait(self._tag, functools.partial(_attempt, work, self._tag, self._watch))

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _attempt(work: Any, tag: Tag, watch: Watch, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if "imed out" in str(error) and not work.is_completed():
            return False
        raise CollectiveError(
            f"Expected all ranks to join {tag}, but {watch.who_is_gone()}. Look for its error. "
            f"({_first_line(error)})"
        ) from error
    return True


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _encode(tag: Tag) -> torch.Tensor:
    words = [tag.sequence, int(tag.operation), tag.unit, tag.detail]
    return torch.tensor(words, dtype=torch.int64)


def _decode(tags: torch.Tensor) -> list[Tag]:
    rows = tags.view(-1, 4).tolist()
    return [Tag(row[0], Operation(row[1]), row[2], detail=row[3]) for row in rows]


class _Channel:
    """The groups that carry one channel: the device's, and Gloo for small things on the host."""

    def __init__(self, limit: timedelta, backend: str | None) -> None:
        self._device = dist.new_group(timeout=limit, backend=backend)
        if "gloo" in str(dist.get_backend_config(self._device)):
            self._host = self._device
        else:
            self._host = dist.new_group(timeout=limit, backend="gloo")

    def of(self, tensor: torch.Tensor) -> Any:
        """Return the group that can carry ``tensor``."""
        return self._host if tensor.device.type == "cpu" else self._device


class C10dTransport(Transport):
    """All ranks of the default process group, over two groups of the engine's own."""

    preferred_bucket_nbytes = 16 << 20
    least_unit_nbytes = 4 << 20

    def __init__(self, *, timeout: timedelta, backend: str | None = None) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._default_group = dist.distributed_c10d._get_default_group()
        self.sent_nbytes = 0
        self.labels: list[str] = []
        # Gloo's own limit must lie beyond ours, or its error comes first and names nobody.
        limit = timeout + timedelta(seconds=30)
        self._weights = _Channel(limit, backend)
        self._gradients = _Channel(limit, backend)
        # Every rank makes its transports in the same order, so a counter names them alike.
        store: Any = dist.distributed_c10d._get_default_store()
        prefix = f"zeroplus/{next(_INSTANCES)}"
        self._watch = Watch(
            dist.distributed_c10d.PrefixStore(prefix, store.clone()),
            self.rank,
            self.world_size,
            timeout.total_seconds(),
        )

    def works_over(self, group: Any) -> bool:
        """Return whether this was made over ``group``, and nothing has ended it. *Local.*"""
        return self._default_group is group and self._watch.is_on

    @override
    def note(self, tag: Tag) -> None:
        self._watch.current = tag

    @override
    def wait_for(self, tag: Tag, attempt: Callable[[float], bool], peer: int) -> None:
        self._watch.wait(tag, attempt, peer)

    # -- weights channel

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        self._watch.current = tag
        # Tags first and alone: Gloo ends the process when ranks gather different sizes. A refresh
        # follows an agreed update, so its order needs no tags.
        if tag.operation is not Operation.REFRESH:
            check_tags(self.announce(tag), tag, self.rank, self.labels)
        works: list[Any] = []
        if shard.numel():
            target, source = _bytes(out), _bytes(shard)
            works.append(_all_gather(target, source, group=self._weights.of(target), async_op=True))
        self.sent_nbytes += (self.world_size - 1) * shard.numel() * shard.element_size()
        return _Wait(self._watch, works, tag, on_device=out.device.type != "cpu")

    @override
    def announce(self, tag: Tag) -> list[Tag]:
        self._watch.current = tag
        tags = torch.empty(4 * self.world_size, dtype=torch.int64)
        work = _all_gather(tags, _encode(tag), group=self._weights.of(tags), async_op=True)
        _Wait(self._watch, [work], tag).wait()
        self.sent_nbytes += (self.world_size - 1) * 32
        return _decode(tags)

    # -- gradients channel

    @override
    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_numels: Sequence[int],
        source_numels: Sequence[int],
        tag: Tag,
    ) -> Work:
        self._watch.current = tag
        size = source.element_size()
        work = dist.all_to_all_single(
            _bytes(out),
            _bytes(source),
            [n * size for n in out_numels],
            [n * size for n in source_numels],
            group=self._gradients.of(source),
            async_op=True,
        )
        self.sent_nbytes += (sum(source_numels) - source_numels[self.rank]) * size
        return _Wait(self._watch, [work], tag, on_device=source.device.type != "cpu")

    @override
    def exchange(self, payload: Sequence[float], tag: Tag) -> list[list[float]]:
        self._watch.current = tag
        head = [tag.sequence, int(tag.operation), tag.unit, tag.detail]
        row = [*map(float, head), *payload]
        mine = torch.tensor(row, dtype=torch.float64)
        rows = torch.empty(len(row) * self.world_size, dtype=torch.float64)
        work = _all_gather(rows, mine, group=self._gradients.of(rows), async_op=True)
        _Wait(self._watch, [work], tag).wait()
        self.sent_nbytes += (self.world_size - 1) * mine.numel() * 8
        table = rows.view(self.world_size, -1).tolist()
        tags = [Tag(int(r[0]), Operation(int(r[1])), int(r[2]), detail=int(r[3])) for r in table]
        check_tags(tags, tag, self.rank, self.labels)
        return [r[4:] for r in table]

    # -- set-up and state, in no hot path

    @override
    def exchange_bytes(self, payload: bytes, tag: Tag) -> list[bytes]:
        body = torch.tensor(list(payload), dtype=torch.uint8)
        return [bytes(part.tolist()) for part in self._ragged(body, tag)]

    def _ragged(self, mine: torch.Tensor, tag: Tag) -> list[torch.Tensor]:
        self._watch.current = tag
        sizes = torch.empty(self.world_size, dtype=torch.int64)
        size = torch.tensor([mine.numel()], dtype=torch.int64)
        work = _all_gather(sizes, size, group=self._gradients.of(sizes), async_op=True)
        _Wait(self._watch, [work], tag).wait()
        most = int(sizes.max())
        padded = torch.zeros(most, dtype=mine.dtype)
        padded[: mine.numel()] = mine
        table = torch.empty(most * self.world_size, dtype=mine.dtype)
        work = _all_gather(table, padded, group=self._gradients.of(table), async_op=True)
        _Wait(self._watch, [work], tag).wait()
        self.sent_nbytes += (self.world_size - 1) * (most * mine.element_size() + 8)
        rows = table.view(self.world_size, most)
        return [rows[r, : int(sizes[r])] for r in range(self.world_size)]

    @override
    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        self._watch.current = tag
        view = _bytes(tensor.detach())
        if view.numel() == 0:
            return
        work = dist.broadcast(view, source, group=self._gradients.of(view), async_op=True)
        _Wait(self._watch, [work], tag).wait()
        if self.rank == source:
            self.sent_nbytes += (self.world_size - 1) * view.numel()

    @override
    def collect(self, shard: torch.Tensor, destination: int, tag: Tag) -> list[torch.Tensor] | None:
        self._watch.current = tag
        sizes = torch.empty(self.world_size, dtype=torch.int64)
        mine = torch.tensor([shard.numel()], dtype=torch.int64)
        work = _all_gather(sizes, mine, group=self._gradients.of(sizes), async_op=True)
        _Wait(self._watch, [work], tag).wait()
        numels = [int(n) for n in sizes]
        here = self.rank == destination
        received = sum(numels) if here else 0
        out = torch.empty(received, dtype=shard.dtype, device=shard.device)
        source_numels = [shard.numel() if r == destination else 0 for r in range(self.world_size)]
        out_numels = numels if here else [0] * self.world_size
        self.all_to_all(out, shard, out_numels, source_numels, tag).wait()
        return list(torch.split(out, numels)) if here else None

    @override
    def fail(self, message: str) -> None:
        self._watch.stop(f"failed ({message})")

    @override
    def close(self) -> None:
        self._watch.stop("has finished")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1) if tensor.dim() != 1 else tensor
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
