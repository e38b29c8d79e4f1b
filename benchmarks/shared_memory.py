"""How fast ranks of one host reduce and refresh, beside copying a peer's memory.

    python benchmarks/shared_memory.py
    python benchmarks/shared_memory.py --mb 16 64 256 --world 4

One bucket and one unit of weights of each size, as stages 1 and 2 have them: `reduce` is from the
call that posts a full bucket to the sum in the accumulator, `refresh` from updated shards to full
weights on every rank. `copy` is one pass over a peer's memory into memory of one's own, all ranks
at once. GB/s are of the whole tensor, so that a reduction, which reads it once and writes a part,
can be faster than the copy. Medians; the three in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from ranks import run_ranks

from lightning_zeroplus.comm import Operation, Tag, Transport
from lightning_zeroplus.comm.bucket import BucketMemory
from lightning_zeroplus.comm.host.storage import HostWeights
from lightning_zeroplus.comm.memory import memory_of
from lightning_zeroplus.layout import GradLayout, ParamSpec, WeightLayout
from lightning_zeroplus.layout.bucket import header_numel
from lightning_zeroplus.zero.sums import sum_into

SIZES_MB = (16, 64, 256)


def on_rank(sizes_mb: tuple[int, ...], rounds: int, dtype_name: str) -> list[dict[str, float]]:
    from lightning_zeroplus.comm import make_transport

    dtype = getattr(torch, dtype_name)
    transport = make_transport("shared_memory", timeout=timedelta(minutes=2))
    return [_one_size(transport, size_mb, rounds, dtype) for size_mb in sizes_mb]


def _one_size(
    transport: Transport, size_mb: int, rounds: int, dtype: torch.dtype
) -> dict[str, float]:
    world, rank = transport.world_size, transport.rank
    memory = memory_of(transport, torch.device("cpu"))
    numel = size_mb * 10**6 // dtype.itemsize
    layout = WeightLayout((ParamSpec("w", numel, (numel,), (1,)),), dtype.itemsize, world)
    head = header_numel(1, world, dtype.itemsize)
    grads = GradLayout(layout, (0,), dtype.itemsize, head, rank)
    bucket = memory.bucket(grads, dtype, BucketMemory(0, 0, permanent=False))
    weights = memory.weights(layout, dtype, resident=True, pool=memory.gradients, block_nbytes=None)
    assert isinstance(weights, HostWeights)
    gradient = torch.rand(numel).to(dtype)
    accumulator = torch.zeros(grads.body_numel(rank))
    mine = torch.zeros(layout.shard_numel, dtype=dtype)

    def reduce(turn: int) -> None:
        bucket.start_reduce(Tag(turn, Operation.REDUCE, 0))
        sum_into(accumulator, bucket.finish_reduce().terms)
        bucket.release()

    def refresh(turn: int) -> None:
        work = weights.start_refresh(Tag(turn, Operation.REFRESH, 0))
        assert work is not None
        work.wait()
        weights.before_write()

    def copy(turn: int) -> None:
        mine.copy_(weights.part_of((rank + 1) % world))

    found: dict[str, list[float]] = {"refresh": [], "reduce": [], "copy": []}
    for turn in range(rounds + 2):
        bucket.land(0, gradient, 1.0 / world, add=False)
        for name, act in (("refresh", refresh), ("reduce", reduce), ("copy", copy)):
            found[name].append(_seconds(act, turn))
    memory.close(alone=False)
    return {name: median(seconds[2:]) for name, seconds in found.items()}


def _seconds(act: Callable[[int], None], turn: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    act(turn)
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a figure is below 60 % of the copy's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=list(SIZES_MB), help="tensor sizes")
    parser.add_argument("--world", type=int, default=2, help="rank processes")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args(arguments)
    ranks = run_ranks(options.world, on_rank, tuple(options.mb), options.rounds, options.dtype)
    print(f"**{options.dtype}, {options.world} ranks, 1 thread each** (torch {torch.__version__})")
    print("\n| MB | copy GB/s | reduce GB/s | of copy | refresh GB/s | of copy |")
    print("| --- | --- | --- | --- | --- | --- |")
    slow = False
    for n, size_mb in enumerate(options.mb):
        rate = {name: size_mb / 1e3 / max(rows[n][name] for rows in ranks) for name in ranks[0][n]}
        rate["copy"] /= options.world  # of one rank's part
        shares = [rate[name] / rate["copy"] for name in ("reduce", "refresh")]
        slow = slow or min(shares) < 0.6
        print(
            f"| {size_mb} | {rate['copy']:.1f} | {rate['reduce']:.1f} | {shares[0]:.2f} "
            f"| {rate['refresh']:.1f} | {shares[1]:.2f} |"
        )
    return int(slow)


if __name__ == "__main__":
    raise SystemExit(main())
