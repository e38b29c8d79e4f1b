"""What goes wrong between ranks that share memory is named, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.comm import Transport, make_transport
from lightning_zeroplus.comm.host import HostTransport, memory, over_host
from lightning_zeroplus.config import EngineConfig, TransportName
from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.zero import Engine, shard
from tests.crash import die, run_with_a_death
from tests.dist_pool import RankPool
from tests.rank_transport import rank_transport

pytestmark = pytest.mark.dist


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def _train(transport: Transport, stage: int, steps: int, at_step: Any = None) -> Engine:
    model = _model()
    engine = shard(model, EngineConfig(stage=stage), transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    for step in range(steps):
        if at_step is not None:
            at_step(transport.rank, step)
        batch = torch.full((4, 64), 0.1 * (transport.rank + step))
        with engine.forward_pass():
            loss = model(batch).square().mean()
        with engine.backward_pass():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine


def _killed(rank: int, world: int, stage: int) -> str:
    def at_step(rank: int, step: int) -> None:
        if rank == 1 and step == 3:
            die()

    transport = make_transport("shared_memory", timeout=timedelta(seconds=60))
    _train(transport, stage, 8, at_step)
    return "trained on"


@pytest.mark.parametrize(
    "stage",
    [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3],
)
def test_a_killed_rank_is_named_at_once(tmp_path: Path, stage: int) -> None:
    survivor, killed = run_with_a_death(2, tmp_path, _killed, stage)
    assert killed.exit_code == -signal.SIGKILL
    assert "CollectiveError: Expected rank 1 to join" in survivor.message
    assert "has ended" in survivor.message
    assert survivor.after_s < 3


def _stopped(rank: int, world: int) -> str:
    def at_step(rank: int, step: int) -> None:
        if rank == 1 and step == 3:
            # Continued by nobody: a child does it when the other rank has given up.
            if os.fork() == 0:
                time.sleep(6)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)

    transport = make_transport("shared_memory", timeout=timedelta(seconds=2))
    start = time.monotonic()
    try:
        _train(transport, 2, 8, at_step)
    except Exception as error:
        return f"{type(error).__name__}: {error} after {time.monotonic() - start:.0f} s"
    return "trained on"


def test_a_stopped_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    survivor, _ = run_with_a_death(2, tmp_path, _stopped)
    assert "CollectiveError: Expected all ranks to join" in survivor.message
    assert "rank 1: " in survivor.message


def _diverging(rank: int, world: int) -> str:
    transport = make_transport("shared_memory", timeout=timedelta(seconds=60))
    model = _model()
    engine = shard(model, EngineConfig(stage=2), transport)
    start = time.monotonic()
    try:
        if rank == 0:
            with engine.forward_pass():
                loss = model(torch.ones(1, 64)).sum()
            with engine.backward_pass():
                loss.backward()
        else:
            engine.exchange([1.0])
    except Exception as error:
        return f"{type(error).__name__}: {error} ({time.monotonic() - start < 5})"
    return "no error"


def test_ranks_that_reduce_and_exchange_are_named_on_both(tmp_path: Path) -> None:
    for outcome in run_with_a_death(2, tmp_path, _diverging):
        assert "CollectiveError: Expected all ranks to act together" in outcome.message
        assert "reduce of" in outcome.message
        assert "at #2 setup" in outcome.message
        assert outcome.message.endswith("(True)")


# -- where there is no shared memory


def _on_rank_1(rank: int, plant: str) -> contextlib.AbstractContextManager[None]:
    return _planted(plant) if rank == 1 else contextlib.nullcontext()


@contextlib.contextmanager
def _planted(plant: str) -> Iterator[None]:
    patch = pytest.MonkeyPatch()

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if plant in {"no memfd", "tiny /dev/shm"}:
        patch.setattr(os, "memfd_create", fails)
    if plant == "tiny /dev/shm":
        patch.setattr(os, "posix_fallocate", full)
    if plant == "another host":
        patch.setattr("lightning_zeroplus.comm.host.transport._host", lambda: "elsewhere")
    if plant == "no pidfd":
        patch.setattr(os, "pidfd_open", fails)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if plant == "no descriptors":
        lowest = os.dup(0)  # the limit is one of numbers, not of how many are open
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        patch.undo()


def _chosen(rank: int, world: int, plant: str) -> tuple[bool, str]:
    beneath = rank_transport(20)
    with _on_rank_1(rank, plant):
        over, reason = over_host(beneath)
    if over is not None:
        _train(over, 3, 2).close()
    return over is not None, reason


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        ("tiny /dev/shm", "rank 1 gets no shared memory"),
        ("no descriptors", "Too many open files"),
        ("another host", "ranks are on several hosts, or in several containers"),
        ("no pidfd", "rank 1 cannot follow the other processes"),
    ],
)
def test_without_shared_memory_all_ranks_know_why(pool2: RankPool, plant: str, reason: str) -> None:
    for over, found in pool2.run(_chosen, plant):
        assert not over
        assert reason in found


def test_a_system_without_memfd_shares_unnamed_files(pool2: RankPool) -> None:
    before = set(os.listdir("/dev/shm"))
    assert pool2.run(_chosen, "no memfd") == [(True, "")] * 2
    assert set(os.listdir("/dev/shm")) <= before


def _by_name(rank: int, world: int, name: TransportName) -> str:
    patch = pytest.MonkeyPatch()
    patch.setattr("lightning_zeroplus.comm.host.futex.is_proven", lambda: False)
    try:
        return type(make_transport(name, timeout=timedelta(seconds=20))).__name__
    except ConfigError as error:
        return str(error)
    finally:
        patch.undo()


def test_shared_memory_by_name_is_refused_where_there_is_none(pool2: RankPool) -> None:
    for text in pool2.run(_by_name, "shared_memory"):
        assert "Linux with x86-64 only" in text
        assert "Use transport='auto'" in text
    assert pool2.run(_by_name, "auto") == ["C10dTransport"] * 2


# -- what is left


def _mapped() -> int:
    """Return the bytes of our anonymous files that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:zeroplus" in line:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            total += stop - start
    return total


def _after_close(rank: int, world: int, stage: int) -> tuple[int, int, int]:
    transport = rank_transport(20, "shared_memory")
    assert isinstance(transport, HostTransport)
    _train(transport, stage, 2).close()  # what is made once: boards, threads
    gc.collect()
    before, files = _mapped(), len(os.listdir("/proc/self/fd"))
    engine = _train(transport, stage, 2)
    during = _mapped()
    engine.close()
    gc.collect()  # an exception's frames, not the engine's
    return during - before, _mapped() - before, len(os.listdir("/proc/self/fd")) - files


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_closed_engine_leaves_the_model_in_ordinary_memory(pool2: RankPool, stage: int) -> None:
    for during, after, files in pool2.run(_after_close, stage):
        assert during > 0
        assert after == 0
        assert files == 0


def _child_writes(rank: int, world: int, stage: int) -> tuple[bool, bool]:
    transport = rank_transport(20, "shared_memory")
    model = _model()
    engine = shard(model, EngineConfig(stage=stage), transport)
    weights = engine.units[0].weights
    memory_seen = weights.flat if stage < 3 else weights.shard
    before = memory_seen.clone()
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                memory_seen.fill_(7.0)
            os._exit(0 if bool((memory_seen == 7.0).all()) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    same = torch.equal(memory_seen, before)
    engine.close()
    return os.waitstatus_to_exitcode(status) == 0, same


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_forked_worker_writes_stays_in_it(pool2: RankPool, stage: int) -> None:
    assert pool2.run(_child_writes, stage) == [(True, True)] * 2


def _jobs_memory(rank: int, world: int) -> float:
    engine = _train(rank_transport(20, "shared_memory"), 2, 20)
    total = float(sum(p.double().sum() for p in engine.module.parameters()))
    engine.close()
    return total


def test_two_jobs_on_one_host_do_not_meet() -> None:
    with RankPool(2) as first, RankPool(2) as second:
        import threading

        found: dict[int, list[float]] = {}
        threads = [
            threading.Thread(target=lambda n=n, p=p: found.update({n: p.run(_jobs_memory)}))
            for n, p in enumerate((first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found[0] == found[1]
    assert len(set(found[0])) == 1


def test_a_descriptor_that_stands_for_another_file_is_noticed() -> None:
    first, second = memory.HostFile(), memory.HostFile()
    (_, wanted), (_, other) = first.block(1), second.block(1)
    os.close(memory.open_peer(os.getpid(), wanted.descriptor, wanted.inode))
    with pytest.raises(OSError, match="another file by now"):
        memory.open_peer(os.getpid(), other.descriptor, wanted.inode)


def test_a_peers_file_must_be_a_file(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(OSError, match="no regular file"):
            memory.open_peer(os.getpid(), read)
    finally:
        os.close(read)
        os.close(write)
