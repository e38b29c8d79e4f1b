"""Rank processes of a benchmark: one thread each, Gloo on the loopback interface."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["interface_sent_nbytes", "run_ranks"]

T = TypeVar("T")

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _LOOPBACK}


def run_ranks(
    world: int, fn: Callable[..., T], *arguments: object, environment: dict[str, str] | None = None
) -> list[T]:
    """Run `fn(*arguments)` in `world` fresh processes; return its results by rank.

    Args:
        world: number of processes.
        fn: a function at module level; `torch.distributed` is initialised when it runs.
        arguments: what it is called with.
        environment: more variables for the processes only.

    Raises:
        RuntimeError: a process failed; the rest are stopped.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = str(Path(folder, "store"))
        ranks = [
            context.Process(target=_rank, args=(rank, world, meeting_point, results, fn, arguments))
            for rank in range(world)
        ]
        with _environment({**_ENVIRONMENT, **(environment or {})}):
            for process in ranks:
                process.start()
        found: dict[int, T] = {}
        try:
            while len(found) < world:
                try:
                    rank, value = results.get(timeout=1)
                    found[rank] = value
                except Empty:
                    failed = [str(r) for r, p in enumerate(ranks) if p.exitcode not in (None, 0)]
                    if failed:
                        message = f"Rank {', '.join(failed)} failed; see its error above."
                        raise RuntimeError(message) from None
        finally:
            for process in ranks:
                if len(found) < world:
                    process.terminate()
                process.join()
    return [found[rank] for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    meeting_point: str,
    results: multiprocessing.Queue[object],
    fn: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    results.put((rank, fn(*arguments)))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def interface_sent_nbytes() -> int | None:
    """Return the bytes the loopback interface has carried, of all processes; None off Linux."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == _LOOPBACK:
            return int(counters.split()[8])
    return None
