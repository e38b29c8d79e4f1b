"""Ranks of which one is killed: what the others say, and how soon."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist_pool import _initialise

__all__ = ["Outcome", "die", "run_with_a_death"]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    exit_code: int | None
    message: str
    after_s: float
    """Seconds from the death of the killed rank to this rank's end."""


def die() -> None:
    """Be killed, as by the kernel when memory is short."""
    Path(os.environ["DEATH_NOTE"]).write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def run_with_a_death(
    world: int, folder: Path, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Outcome]:
    """Run ``fn(rank, world, *args)`` on real ranks; nobody ends a rank because another died."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, world, folder, fn, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    outcomes = []
    for rank, process in enumerate(processes):
        code = process.exitcode
        if process.is_alive():
            process.kill()
            process.join()
        file = folder / f"rank{rank}.json"
        message, ended = json.loads(file.read_text()) if file.exists() else ("", float("nan"))
        note = folder / "death"
        died = float(note.read_text()) if note.exists() else float("nan")
        outcomes.append(Outcome(code, message, ended - died))
    return outcomes


def _rank(rank: int, world: int, folder: Path, fn: Callable[..., Any], args: Any) -> None:
    os.environ["DEATH_NOTE"] = str(folder / "death")
    _initialise(rank, world, folder / "store", {})
    try:
        message = str(fn(rank, world, *args))
    except BaseException as error:
        message = "".join(traceback.format_exception_only(error))
    (folder / f"rank{rank}.json").write_text(json.dumps([message, time.time()]))
    os._exit(0)  # the process group cannot be ended in order
