"""The loopback does what every transport does."""

from __future__ import annotations

import re
import time

import pytest
import torch

from lightning_zeroplus.comm import Transport, run_virtual_ranks, solo_transport
from lightning_zeroplus.errors import CollectiveError
from tests.transport_conformance import CASES, FAULTS, tag

WORLDS = [2, 3]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_virtual_ranks_keep_the_contract(case: str, world: int) -> None:
    run_virtual_ranks(world, CASES[case], timeout_s=10)


@pytest.mark.parametrize("case", CASES)
def test_a_world_of_one_does_it_alone(case: str) -> None:
    CASES[case](solo_transport())


@pytest.mark.parametrize("world", WORLDS)
def test_a_gather_of_another_unit_is_named_on_all_ranks(world: int) -> None:
    texts = run_virtual_ranks(world, FAULTS["gather_of_another_unit"], timeout_s=10)
    odd = world - 1
    for rank, text in enumerate(texts):
        assert f"rank {odd} at #3 forward of head" in text
        assert f"rank {0 if rank == odd else rank} at #3 forward of stem" in text


@pytest.mark.parametrize("world", WORLDS)
def test_an_exchange_at_another_place_is_named_on_all_ranks(world: int) -> None:
    texts = run_virtual_ranks(world, FAULTS["exchange_at_another_place"], timeout_s=10)
    for text in texts:
        assert "#5 norm of" in text
        assert f"rank {world - 1} at #6 norm of" in text


def test_a_read_of_another_detail_is_named_on_all_ranks() -> None:
    for text in run_virtual_ranks(2, FAULTS["read_of_another_detail"], timeout_s=10):
        assert re.search(r"rank [01] at .* and rank [01] at ", text)


def test_a_failing_peer_ends_the_waits_at_once_and_is_named() -> None:
    started = time.monotonic()
    texts = run_virtual_ranks(3, FAULTS["peer_that_failed"], timeout_s=60)
    assert time.monotonic() - started < 10
    for rank, text in enumerate(texts[:2]):
        assert "Expected rank 2 to join #1 step of the work" in text
        assert f"(rank {rank})" in text
        assert "failed (ValueError: no more data)" in text


def test_a_finished_peer_ends_the_waits_at_once_and_is_named() -> None:
    texts = run_virtual_ranks(3, FAULTS["peer_that_finished"], timeout_s=60)
    for text in texts[:2]:
        assert "Expected rank 2 to join" in text
        assert "it has finished" in text


def test_a_peer_that_finished_did_not_fail_afterwards() -> None:
    texts = run_virtual_ranks(2, FAULTS["peer_that_failed_after_it_finished"], timeout_s=60)
    assert "it has finished" in texts[0]


def test_a_silent_peer_is_named_after_the_timeout() -> None:
    texts = run_virtual_ranks(2, FAULTS["peer_that_is_silent"], timeout_s=1)
    assert "Expected rank 1 to join #1 step of the work (rank 0) within 1 s" in texts[0]


def test_what_a_rank_raises_is_raised_by_the_run_and_ends_the_others() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 1:
            time.sleep(0.3)  # the others wait by then
            raise KeyError("lost")
        transport.exchange([1.0], tag())

    started = time.monotonic()
    with pytest.raises(KeyError, match="lost"):
        run_virtual_ranks(3, body, timeout_s=60)
    assert time.monotonic() - started < 10


def test_buckets_of_unequal_sizes_are_refused() -> None:
    def body(transport: Transport) -> None:
        numel = 2 + transport.rank
        parts = torch.split(torch.zeros(2 * numel), numel)
        transport.all_to_all(
            torch.cat(parts), torch.cat(parts), [numel] * 2, [numel] * 2, tag()
        ).wait()

    with pytest.raises(CollectiveError, match="Expected equal buckets on all ranks"):
        run_virtual_ranks(2, body, timeout_s=10)
