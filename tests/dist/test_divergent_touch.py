"""Ranks that do not read together end in an error that names both, never in a mixture or a hang."""

from __future__ import annotations

import re

import pytest

from tests.dist.divergence import (
    READS,
    TIMEOUT_S,
    rank_makes_one_backward_more,
    rank_meets_a_finished_peer,
    rank_reads_another_weight,
    rank_reads_while_the_peer_is_in_a_barrier,
    rank_reads_while_the_peer_sleeps,
    rank_reads_while_the_peer_trains,
    rank_runs_another_block,
)
from tests.dist_pool import RankPool

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", READS)
def test_ranks_that_read_different_things_are_both_named_on_both(
    pool2: RankPool, name: str
) -> None:
    for rank, (text, seconds) in enumerate(pool2.run(rank_reads_another_weight, name, False)):
        own = r"touch of [12]\.(weight|twin) \([\w.: ]+\)"
        assert re.match(
            rf"Expected all ranks to act together, got rank {rank} at #\d+ {own} and "
            rf"rank {1 - rank} at #\d+ touch of [12]\. Run the same modules and touch the same",
            text,
        ), text
        assert seconds < TIMEOUT_S


def test_ranks_that_read_different_weights_under_autograd_are_named(pool2: RankPool) -> None:
    for text, seconds in pool2.run(rank_reads_another_weight, "largest element", True):
        assert "touch of 1" in text
        assert "touch of 2" in text
        assert seconds < TIMEOUT_S


def test_ranks_that_run_different_blocks_are_both_named_on_both(pool2: RankPool) -> None:
    for text, seconds in pool2.run(rank_runs_another_block):
        assert "rank 0 at" in text
        assert "forward of 1" in text
        assert "rank 1 at" in text
        assert "forward of 2" in text
        assert seconds < TIMEOUT_S


def test_a_rank_that_reads_alone_and_goes_on_is_named_on_both(pool2: RankPool) -> None:
    for text, seconds in pool2.run(rank_reads_while_the_peer_trains):
        assert "rank 0 at" in text
        assert "touch of 2" in text
        assert "rank 1 at" in text
        assert "forward of 0" in text
        assert seconds < TIMEOUT_S


def test_a_peer_in_the_users_own_barrier_is_named_after_the_timeout(pool2: RankPool) -> None:
    (text, seconds), (passed, _) = pool2.run(rank_reads_while_the_peer_is_in_a_barrier)
    assert text.startswith("Expected all ranks to join #")
    assert "touch of 2" in text
    assert "(rank 0)" in text
    assert "last engine operations of the others: rank 1: #" in text
    assert TIMEOUT_S - 1 <= seconds < TIMEOUT_S + 3
    assert passed == "the barrier was passed"


def test_a_peer_that_comes_late_is_waited_for(pool2: RankPool) -> None:
    texts = [text for text, _ in pool2.run(rank_reads_while_the_peer_sleeps, 2.5)]
    assert texts[0].startswith("no error, but 0.")
    assert texts[0] == texts[1]


def test_a_peer_that_has_finished_is_named_at_once(pool2: RankPool) -> None:
    (text, seconds), _ = pool2.run(rank_meets_a_finished_peer)
    assert text.startswith("Expected rank 1 to join #")
    assert "but it has finished; its last engine operation was #" in text
    assert seconds < TIMEOUT_S


def test_one_backward_more_on_one_rank_is_named_on_both(pool2: RankPool) -> None:
    for text, seconds in pool2.run(rank_makes_one_backward_more):
        assert text.startswith("Expected all ranks to ")
        assert "#" in text
        assert seconds < TIMEOUT_S + 3
