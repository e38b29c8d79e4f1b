"""What every transport does, as functions of one rank that check themselves.

Each runs on all ranks together. `CASES` end well; `FAULTS` answer with the text of the error that
the rank ended in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_zeroplus.comm import Operation, Tag, Transport
from lightning_zeroplus.errors import CollectiveError

__all__ = ["CASES", "FAULTS", "tag"]

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


def tag(sequence: int = 1, operation: Operation = Operation.STEP, unit: int = 0) -> Tag:
    return Tag(sequence, operation, unit, "the work")


def _shard(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(numel) + 10 * rank).to(dtype)


def gathers_shards_in_rank_order(transport: Transport) -> None:
    for dtype in _DTYPES:
        out = torch.zeros(3 * transport.world_size, dtype=dtype)
        work = transport.all_gather(out, _shard(transport.rank, 3, dtype), tag())
        work.wait()
        assert work.is_completed()
        expected = torch.cat([_shard(r, 3, dtype) for r in range(transport.world_size)])
        assert torch.equal(out, expected)


def gathers_in_place(transport: Transport) -> None:
    rank = transport.rank
    out = torch.full((5 * transport.world_size,), -1.0)
    own = out[5 * rank : 5 * rank + 5]
    own.copy_(_shard(rank, 5))
    transport.all_gather(out, own, tag()).wait()
    assert torch.equal(out, torch.cat([_shard(r, 5) for r in range(transport.world_size)]))


def gathers_nothing_of_nothing(transport: Transport) -> None:
    transport.all_gather(torch.empty(0), torch.empty(0), tag()).wait()


def waits_as_often_as_asked(transport: Transport) -> None:
    out = torch.zeros(transport.world_size)
    work = transport.all_gather(out, _shard(transport.rank, 1), tag())
    work.wait()
    out.fill_(7.0)
    work.wait()
    assert torch.equal(out, torch.full_like(out, 7.0))


def sends_each_rank_its_part_whatever_its_size(transport: Transport) -> None:
    """Rank s sends `s + r` elements of value `10 s + r` to rank r; rank 0 keeps nothing."""
    rank, world = transport.rank, transport.world_size
    for dtype in _DTYPES:
        sent = [rank + r for r in range(world)]
        received = [s + rank for s in range(world)]
        source = torch.cat([torch.full((n,), 10 * rank + r) for r, n in enumerate(sent)]).to(dtype)
        out = torch.zeros(sum(received), dtype=dtype)
        transport.all_to_all(out, source, received, sent, tag()).wait()
        expected = torch.cat([torch.full((n,), 10 * s + rank) for s, n in enumerate(received)])
        assert torch.equal(out, expected.to(dtype))


def lets_a_sender_reuse_its_memory_after_the_wait(transport: Transport) -> None:
    rank, world = transport.rank, transport.world_size
    source = torch.full((world,), float(rank))
    for _ in range(3):
        out = torch.zeros(world)
        transport.all_to_all(out, source, [1] * world, [1] * world, tag()).wait()
        expected = torch.arange(float(world)) + source[0] - rank
        source.add_(1.0)
        assert torch.equal(out, expected)


def keeps_the_channels_apart(transport: Transport) -> None:
    """Rank 0 starts its reduction before its gather, the others after theirs."""
    rank, world = transport.rank, transport.world_size
    weights, gradients = torch.zeros(world), torch.zeros(world)

    def gather() -> object:
        return transport.all_gather(weights, _shard(rank, 1), tag())

    def reduce() -> object:
        mine = torch.full((world,), float(rank))
        return transport.all_to_all(gradients, mine, [1] * world, [1] * world, tag())

    works = [start() for start in ((reduce, gather) if rank == 0 else (gather, reduce))]
    for work in works:
        work.wait()  # type: ignore[attr-defined]
    assert torch.equal(weights, 10 * torch.arange(float(world)))
    assert torch.equal(gradients, torch.arange(float(world)))


def exchanges_numbers_exactly(transport: Transport) -> None:
    payload = [float(transport.rank), 2.0**53, -0.0, float("inf"), float("nan"), 1e-300]
    rows = transport.exchange(payload, tag())
    assert [row[0] for row in rows] == [float(r) for r in range(transport.world_size)]
    for row in rows:
        assert row[1] == 2.0**53
        assert str(row[2]) == "-0.0"
        assert row[3] == float("inf")
        assert row[4] != row[4]
        assert row[5] == 1e-300
    assert transport.exchange([], tag()) == [[]] * transport.world_size


def exchanges_bytes_of_any_length(transport: Transport) -> None:
    def payload(rank: int) -> bytes:
        return bytes(range(256)) * (rank + 1)

    ranks = range(transport.world_size)
    assert transport.exchange_bytes(payload(transport.rank), tag()) == [payload(r) for r in ranks]


def exchanges_bytes_of_which_some_are_empty(transport: Transport) -> None:
    mine = b"last" if transport.rank == transport.world_size - 1 else b""
    rows = transport.exchange_bytes(mine, tag())
    assert rows == [b""] * (transport.world_size - 1) + [b"last"]


def exchanges_bytes_of_which_all_are_empty(transport: Transport) -> None:
    assert transport.exchange_bytes(b"", tag()) == [b""] * transport.world_size


def broadcasts_from_any_rank(transport: Transport) -> None:
    for source in range(transport.world_size):
        for dtype in (*_DTYPES, torch.bool):
            for shape in ((), (1,), (2, 3), (0, 3)):
                value = torch.full(shape, 1 + source).to(dtype)
                mine = value.clone() if transport.rank == source else torch.zeros_like(value)
                transport.broadcast(mine, source, tag())
                assert torch.equal(mine, value)


def broadcasts_into_a_leaf_that_needs_gradients(transport: Transport) -> None:
    leaf = torch.full((3,), float(transport.rank)).requires_grad_()
    transport.broadcast(leaf, 0, tag())
    assert torch.equal(leaf.detach(), torch.zeros(3))
    assert leaf.is_leaf


def collects_ragged_shards_on_one_rank(transport: Transport) -> None:
    """Rank r has `2 r` elements, so rank 0 has none."""
    ranks = range(transport.world_size)
    for destination in ranks:
        for dtype in (torch.float32, torch.bfloat16):
            mine = _shard(transport.rank, 2 * transport.rank, dtype)
            found = transport.collect(mine, destination, tag())
            if transport.rank != destination:
                assert found is None
                continue
            assert found is not None
            for rank, part in zip(ranks, found, strict=True):
                assert torch.equal(part, _shard(rank, 2 * rank, dtype))


def collects_only_empty_shards(transport: Transport) -> None:
    found = transport.collect(torch.empty(0), 0, tag())
    if transport.rank == 0:
        assert found is not None
        assert [part.numel() for part in found] == [0] * transport.world_size


def announces_without_comparing(transport: Transport) -> None:
    mine = Tag(4, Operation(1 + transport.rank), 20 + transport.rank, "mine", detail=2**31)
    tags = transport.announce(mine)
    ranks = range(transport.world_size)
    assert [(t.sequence, t.detail) for t in tags] == [(4, 2**31)] * transport.world_size
    assert [t.operation for t in tags] == [Operation(1 + r) for r in ranks]
    assert [t.unit for t in tags] == [20 + r for r in ranks]


def gathers_for_different_reasons_together(transport: Transport) -> None:
    """One rank touches what the others prefetch: that is the same gather."""
    why = Operation.TOUCH if transport.rank == 0 else Operation.PREFETCH
    out = torch.zeros(transport.world_size)
    transport.all_gather(out, _shard(transport.rank, 1), tag(operation=why)).wait()
    assert torch.equal(out, 10 * torch.arange(float(transport.world_size)))


def counts_what_it_sends_by_the_ring_law(transport: Transport) -> None:
    """A small tag or size may travel with each payload."""
    rank, world = transport.rank, transport.world_size
    peers = world - 1
    parts = [100 * (r + 1) for r in range(world)]
    numbers = [0.0] * 50
    expected: list[tuple[Callable[[], object], int]] = [
        (lambda: transport.all_gather(torch.zeros(300 * world), torch.ones(300), tag()).wait(),
         peers * 300 * 4),
        (lambda: transport.all_to_all(torch.zeros(parts[rank] * world), torch.zeros(sum(parts)),
                                      [parts[rank]] * world, parts, tag()).wait(),
         4 * (sum(parts) - parts[rank])),
        (lambda: transport.broadcast(torch.zeros(500), 0, tag()), 4 * 500 * peers * (rank == 0)),
        (lambda: transport.collect(torch.zeros(200), 0, tag()), 4 * 200 * (rank != 0)),
        (lambda: transport.exchange(numbers, tag()), peers * 8 * len(numbers)),
        (lambda: transport.exchange_bytes(b"x" * 400, tag()), peers * 400),
    ]  # fmt: skip
    for number, (send, law) in enumerate(expected):
        before = transport.sent_nbytes
        send()
        sent = transport.sent_nbytes - before
        assert law <= sent <= law + 64 * peers, f"case {number}: {sent}, expected {law}"


CASES: dict[str, Callable[[Transport], None]] = {
    case.__name__: case
    for case in (
        gathers_shards_in_rank_order,
        gathers_in_place,
        gathers_nothing_of_nothing,
        waits_as_often_as_asked,
        sends_each_rank_its_part_whatever_its_size,
        lets_a_sender_reuse_its_memory_after_the_wait,
        keeps_the_channels_apart,
        exchanges_numbers_exactly,
        exchanges_bytes_of_any_length,
        exchanges_bytes_of_which_some_are_empty,
        exchanges_bytes_of_which_all_are_empty,
        broadcasts_from_any_rank,
        broadcasts_into_a_leaf_that_needs_gradients,
        collects_ragged_shards_on_one_rank,
        collects_only_empty_shards,
        announces_without_comparing,
        gathers_for_different_reasons_together,
        counts_what_it_sends_by_the_ring_law,
    )
}


def _error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except CollectiveError as error:
        return str(error)
    return "no error"


def _odd_one(transport: Transport) -> int:
    """Return 1 on the last rank, else 0."""
    return int(transport.rank == transport.world_size - 1)


def gather_of_another_unit(transport: Transport) -> str:
    transport.labels = ["stem", "head"]
    unit = _odd_one(transport)
    mine = Tag(3, Operation.FORWARD, unit, transport.labels[unit])
    out = torch.zeros(transport.world_size)
    return _error_of(lambda: transport.all_gather(out, torch.zeros(1), mine).wait())


def exchange_at_another_place(transport: Transport) -> str:
    mine = Tag(5 + _odd_one(transport), Operation.NORM, 0, "grad norm")
    return _error_of(lambda: transport.exchange([1.0], mine))


def read_of_another_detail(transport: Transport) -> str:
    mine = Tag(5, Operation.TOUCH, 0, "w", detail=_odd_one(transport))
    out = torch.zeros(transport.world_size)
    return _error_of(lambda: transport.all_gather(out, torch.zeros(1), mine).wait())


def peer_that_failed(transport: Transport) -> str:
    if _odd_one(transport):
        time.sleep(0.3)  # the others wait by then
        transport.fail("ValueError: no more data")
        return ""
    return _error_of(lambda: transport.exchange([1.0], tag()))


def peer_that_finished(transport: Transport) -> str:
    if _odd_one(transport):
        time.sleep(0.3)  # the others wait by then
        transport.close()
        return ""
    out = torch.zeros(transport.world_size)
    return _error_of(lambda: transport.all_gather(out, torch.zeros(1), tag()).wait())


def peer_that_failed_after_it_finished(transport: Transport) -> str:
    """What a rank said first stands."""
    if _odd_one(transport):
        transport.close()
        transport.fail("too late")
        return ""
    return _error_of(lambda: transport.exchange([1.0], tag()))


def peer_that_is_silent(transport: Transport) -> str:
    """The last rank comes after the time-out of 1 s."""
    if _odd_one(transport):
        time.sleep(2.5)
    return _error_of(lambda: transport.exchange([1.0], tag(unit=0)))


FAULTS: dict[str, Callable[[Transport], str]] = {
    fault.__name__: fault
    for fault in (
        gather_of_another_unit,
        exchange_at_another_place,
        read_of_another_detail,
        peer_that_failed,
        peer_that_finished,
        peer_that_failed_after_it_finished,
        peer_that_is_silent,
    )
}
