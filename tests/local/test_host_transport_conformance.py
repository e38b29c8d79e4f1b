"""Shared memory between virtual ranks does what every transport does."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.comm.host import HostTransport, over_host
from lightning_zeroplus.comm.transport import Operation, Tag
from tests.transport_conformance import CASES, FAULTS

WORLDS = [2, 3]


def host_transport(transport: Transport) -> HostTransport:
    over, reason = over_host(transport)
    assert over is not None, reason
    return over


def on_host(name: str, transport: Transport) -> object:
    return {**CASES, **FAULTS}[name](host_transport(transport))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_a_host_keep_the_contract(case: str, world: int) -> None:
    run_virtual_ranks(world, lambda t: on_host(case, t), timeout_s=10)


@pytest.mark.parametrize("world", WORLDS)
def test_a_gather_of_another_unit_is_named_on_all_ranks(world: int) -> None:
    texts = run_virtual_ranks(world, lambda t: on_host("gather_of_another_unit", t), timeout_s=10)
    odd = world - 1
    for rank, text in enumerate(texts):
        assert f"rank {odd} at #3 forward of head" in text
        assert f"rank {0 if rank == odd else rank} at #3 forward of stem" in text


@pytest.mark.parametrize("world", WORLDS)
def test_an_exchange_at_another_place_is_named_on_all_ranks(world: int) -> None:
    texts = run_virtual_ranks(
        world, lambda t: on_host("exchange_at_another_place", t), timeout_s=10
    )
    for text in texts:
        assert "#5 norm of" in text
        assert f"rank {world - 1} at #6 norm of" in text


def test_a_failing_peer_ends_the_waits_at_once_and_is_named() -> None:
    started = time.monotonic()
    texts = run_virtual_ranks(3, lambda t: on_host("peer_that_failed", t), timeout_s=60)
    assert time.monotonic() - started < 10
    for rank, text in enumerate(texts[:2]):
        assert "Expected rank 2 to join #1 step of the work" in text
        assert f"(rank {rank})" in text
        assert "failed (ValueError: no more data)" in text


def test_many_exchanges_in_a_row_mix_nothing_up() -> None:
    def body(transport: Transport) -> None:
        over = host_transport(transport)
        for turn in range(1500):
            tag = Tag(turn, Operation.NORM, -1)
            rows = over.exchange([float(turn), float(over.rank)], tag)
            assert rows == [[float(turn), float(r)] for r in range(3)]

    run_virtual_ranks(3, body, timeout_s=30)


def test_a_small_gather_of_doubles_is_exact() -> None:
    def body(transport: Transport) -> torch.Tensor:
        over = host_transport(transport)
        mine = torch.tensor([0.1, 2**60 + 1.0], dtype=torch.float64) * (over.rank + 1)
        out = torch.empty(4, dtype=torch.float64)
        over.all_gather(out, mine, Tag(1, Operation.TOUCH, 0)).wait()
        return out

    base = torch.tensor([0.1, 2**60 + 1.0], dtype=torch.float64)
    for out in run_virtual_ranks(2, body):
        assert torch.equal(out, torch.cat([base, base * 2]))
