"""A pool of ranks answers, fails at once, and never hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.dist_pool import RankError, RankPool, RankTimeout

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def total(rank: int, world: int, start: int) -> float:
    value = torch.tensor(float(start + rank))
    dist.all_reduce(value)
    return value.item()


def own_group(rank: int, world: int) -> int:
    group = dist.new_group(list(range(world)))
    value = torch.ones(())
    dist.all_reduce(value, group=group)
    return int(value.item())


def pid(rank: int, world: int) -> int:
    return os.getpid()


def surroundings(rank: int, world: int) -> tuple[int, int, int, str]:
    return rank, world, torch.get_num_threads(), os.environ["LOCAL_RANK"]


def fail_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("the reason")
    dist.barrier()


def die_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(7)
    dist.barrier()


def hang_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        snooze()


def snooze() -> None:
    time.sleep(600)


def return_a_lambda(rank: int, world: int) -> object:
    return lambda: None


def test_results_come_in_rank_order(pool: RankPool) -> None:
    assert pool.run(surroundings) == [(0, 2, 1, "0"), (1, 2, 1, "1")]


def test_ranks_compute_together(pool: RankPool) -> None:
    assert pool.run(total, 5) == [11.0, 11.0]
    assert pool.run(own_group) == [2, 2]


def test_ranks_stay_alive_between_calls(pool: RankPool) -> None:
    assert pool.run(pid) == pool.run(pid) == pool.pids


def test_one_failing_rank_ends_the_call_at_once_with_its_traceback(pool: RankPool) -> None:
    pool.run(pid)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 raised") as caught:
        pool.run(fail_on, 1)
    assert time.monotonic() - started < 10
    assert "ValueError: the reason" in str(caught.value)
    assert "in fail_on" in str(caught.value)
    assert (caught.value.rank, caught.value.error_type) == (1, "ValueError")
    assert pool.pids == []


def test_a_dead_rank_is_told_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 died, exit code 7"):
        pool.run(die_on, 0)


def test_a_hanging_rank_is_ended_and_its_stack_told(pool: RankPool) -> None:
    pids = pool.run(pid)
    with pytest.raises(RankTimeout, match=r"no answer from rank \[1\] of 2 within 1 s") as caught:
        pool.run(hang_on, 1, timeout=1)
    assert "in snooze" in str(caught.value)
    assert not any(psutil.pid_exists(number) for number in pids)


def test_a_result_that_cannot_travel_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="return_a_lambda"):
        pool.run(return_a_lambda)


def test_a_pool_works_again_after_a_failure(pool: RankPool) -> None:
    with pytest.raises(RankError):
        pool.run(fail_on, 0)
    assert pool.run(total, 0) == [1.0, 1.0]


def test_an_end_leaves_no_process_behind() -> None:
    with RankPool(1, environment={"LOCAL_RANK": "0"}) as pool:
        (number,) = pool.run(pid)
    assert not psutil.pid_exists(number)
