"""Real ranks over Gloo do what every transport does."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from lightning_zeroplus.comm import Transport, c10d_transport
from tests.dist_pool import RankPool
from tests.transport_conformance import CASES, FAULTS

pytestmark = pytest.mark.dist


def _with_transport(act: Callable[[Transport], Any], timeout_s: float) -> Any:
    transport = c10d_transport(timeout=timedelta(seconds=timeout_s))
    try:
        return act(transport)
    finally:
        transport.close()


def rank_case(rank: int, world: int, name: str) -> None:
    _with_transport(CASES[name], 20)


def rank_fault(rank: int, world: int, name: str, timeout_s: float) -> tuple[str, float]:
    started = time.monotonic()
    return _with_transport(FAULTS[name], timeout_s), time.monotonic() - started


@pytest.mark.parametrize("case", CASES)
def test_real_ranks_keep_the_contract(pool2: RankPool, case: str) -> None:
    pool2.run(rank_case, case)


def test_a_gather_of_another_unit_is_named_on_all_ranks(pool2: RankPool) -> None:
    for rank, (text, _) in enumerate(pool2.run(rank_fault, "gather_of_another_unit", 20)):
        assert f"got rank {rank} at" in text
        assert "rank 0 at #3 forward of stem" in text
        assert "rank 1 at #3 forward of head" in text


def test_an_exchange_at_another_place_is_named_on_all_ranks(pool2: RankPool) -> None:
    for text, _ in pool2.run(rank_fault, "exchange_at_another_place", 20):
        assert "rank 0 at #5 norm of" in text
        assert "rank 1 at #6 norm of" in text


def test_a_read_of_another_detail_is_named_on_all_ranks(pool2: RankPool) -> None:
    for rank, (text, _) in enumerate(pool2.run(rank_fault, "read_of_another_detail", 20)):
        assert f"got rank {rank} at #5 touch of w and rank {1 - rank} at" in text


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("peer_that_failed", "failed (ValueError: no more data)"),
        ("peer_that_finished", "has finished"),
        ("peer_that_failed_after_it_finished", "has finished"),
    ],
)
def test_a_peer_that_is_gone_ends_the_wait_long_before_the_timeout(
    pool2: RankPool, fault: str, reason: str
) -> None:
    (text, seconds), _ = pool2.run(rank_fault, fault, 30.0)
    assert "Expected rank 1 to join #1 step of the work (rank 0)" in text
    assert reason in text
    assert seconds < 15


def test_a_silent_peer_is_named_after_the_timeout(pool2: RankPool) -> None:
    (text, seconds), _ = pool2.run(rank_fault, "peer_that_is_silent", 1.0)
    assert "Expected all ranks to join #1 step of the work (rank 0)" in text
    assert "rank 1: nothing yet" in text
    assert seconds >= 1
