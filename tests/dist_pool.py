"""Ranks that stay alive: real processes over Gloo that run one function after another.

Starting a rank costs an interpreter and an import of torch; a pool pays that once per file. A pool
whose ranks failed is ended, and the next call starts a new one, so no case inherits the wreck of
another.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["RankError", "RankPool", "RankTimeout"]

_START_S = 90.0
_GRACE_S = 5.0


class RankError(AssertionError):
    """A rank raised or died; the message is its traceback."""

    def __init__(self, message: str, *, rank: int, error_type: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type


class RankTimeout(AssertionError):
    """Ranks did not answer in time; the message holds the stacks of all of them."""


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    stacks: Path


class RankPool:
    """`world` processes with `torch.distributed` initialised, started at the first `run`.

    Each rank has one thread, and the environment of a rank that somebody else launched
    (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, ...), so Lightning starts no processes of its own there.
    """

    def __init__(self, world: int, *, environment: dict[str, str] | None = None) -> None:
        self.world = world
        self._environment = environment or {}
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live ranks, in rank order; empty before the first `run`."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Return what `fn(rank, world, *args)` returned on each rank, in rank order.

        Raises:
            RankError: a rank raised or died. Nobody waits for the others: the pool is ended.
            RankTimeout: no answer within `timeout` seconds. The pool is ended.
        """
        job = pickle.dumps((fn, args))
        if not self._ranks:
            self._start()
        try:
            for rank, member in enumerate(self._ranks):
                try:
                    member.pipe.send_bytes(job)
                except OSError:
                    self._raise_death(rank)
            return self._collect(timeout, f"{fn.__module__}.{fn.__qualname__}")
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End all ranks, in order first and by force after a few seconds."""
        for member in self._ranks:
            try:
                member.pipe.send_bytes(pickle.dumps(None))
            except OSError:
                continue
        deadline = time.monotonic() + _GRACE_S
        for member in self._ranks:
            member.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # A pool nobody closed must not keep the interpreter waiting for its ranks.
        atexit.register(self._kill)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            stacks = folder / f"stacks-{rank}.txt"
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world, folder / "store", stacks, self._environment),
                name=f"rank-{rank}",
                daemon=False,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stacks))
        try:
            self._collect(_START_S, "start")
        except BaseException:
            self._kill()
            raise

    def _collect(self, timeout: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while len(answers) < self.world:
            waiting: dict[Any, int] = {
                m.pipe: rank for rank, m in enumerate(self._ranks) if rank not in answers
            }
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankTimeout(self._describe_hang(sorted(waiting.values()), timeout, what))
            for pipe in ready:
                rank = waiting[pipe]
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> Any:
        try:
            kind, payload = pickle.loads(self._ranks[rank].pipe.recv_bytes())
        except (EOFError, OSError):
            self._raise_death(rank)
        if kind == "error":
            error_type, text = payload
            raise RankError(
                f"rank {rank} of {self.world} raised\n{text}", rank=rank, error_type=error_type
            )
        return payload

    def _raise_death(self, rank: int) -> None:
        member = self._ranks[rank]
        member.process.join(_GRACE_S)
        text = f"rank {rank} of {self.world} died, exit code {member.process.exitcode}"
        stacks = member.stacks.read_text() if member.stacks.exists() else ""
        raise RankError(f"{text}\n{stacks}".rstrip(), rank=rank, error_type="death")

    def _describe_hang(self, silent: list[int], timeout: float, what: str) -> str:
        for member in self._ranks:
            if member.process.pid is not None and member.process.is_alive():
                os.kill(member.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        parts = [f"{what}: no answer from rank {silent} of {self.world} within {timeout} s"]
        for rank, member in enumerate(self._ranks):
            stacks = member.stacks.read_text() if member.stacks.exists() else ""
            parts.append(f"--- rank {rank}\n{stacks.rstrip() or '(no stack)'}")
        return "\n".join(parts)

    def _kill(self) -> None:
        for member in self._ranks:
            if member.process.is_alive():
                member.process.kill()
            member.process.join()
            member.process.close()
            member.pipe.close()
        self._ranks = []
        atexit.unregister(self._kill)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(
    pipe: Connection,
    rank: int,
    world: int,
    store: Path,
    stacks: Path,
    environment: dict[str, str],
) -> None:
    """Body of one rank: initialise, then run what comes through the pipe until it says None."""
    with stacks.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        try:
            _initialise(rank, world, store, environment)
        except BaseException as error:
            _answer_error(pipe, error)
            return
        _answer(pipe, None)
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
            except EOFError:  # the test process is gone
                os._exit(1)
            except BaseException as error:  # a function that cannot be imported here
                _answer_error(pipe, error)
                continue
            if job is None:
                break
            fn, args = job
            try:
                _answer(pipe, fn(rank, world, *args))
            except BaseException as error:
                _answer_error(pipe, error)
        _finish()


def _initialise(rank: int, world: int, store: Path, environment: dict[str, str]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29400",  # read by Lightning, bound by nobody: the group below has a file store
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
    )
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def _finish() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        # Without a barrier, Gloo may abort the process when work of a peer is still in flight.
        dist.barrier()
        dist.destroy_process_group()


def _answer(pipe: Connection, result: Any) -> None:
    pipe.send_bytes(pickle.dumps(("result", result)))


def _answer_error(pipe: Connection, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    pipe.send_bytes(pickle.dumps(("error", (type(error).__name__, text))))
