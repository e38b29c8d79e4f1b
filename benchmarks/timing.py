"""Step time of all variants, interleaved in one group of rank processes."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from models import SHAPES, token_batches
from ranks import interface_sent_nbytes
from torch import Tensor
from variants import Variant, make_variant, train_step

__all__ = ["Samples", "TimingOptions", "time_on_rank"]

FIXED_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """What one timing run does."""

    model: str
    accumulate: int
    variants: tuple[str, ...]
    rounds: int
    warmup: int
    steps: int


@dataclass(kw_only=True)
class Samples:
    """One variant on one rank: a sample per timed step, a loss per round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    interface_nbytes: list[float] = field(default_factory=list)
    payload_nbytes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def time_on_rank(options: TimingOptions) -> dict[str, Samples]:
    """Train all variants side by side, a block of steps at a time, in rotating order."""
    batches = token_batches(SHAPES[options.model], dist.get_rank(), FIXED_BATCHES)
    setups = {name: make_variant(name, SHAPES[options.model]) for name in options.variants}
    samples = {name: Samples() for name in options.variants}
    gc.collect()
    gc.freeze()
    for number in range(options.warmup + options.rounds):
        shift = number % len(options.variants)
        start = number * options.steps * options.accumulate
        for name in options.variants[shift:] + options.variants[:shift]:
            block = Samples()
            _timed_block(setups[name], block, batches, start, options)
            samples[name].losses += block.losses
            if number >= options.warmup:
                samples[name].wall_s += block.wall_s
                samples[name].cpu_s += block.cpu_s
                samples[name].interface_nbytes += block.interface_nbytes
                samples[name].payload_nbytes += block.payload_nbytes
    return samples


def _timed_block(
    setup: Variant, block: Samples, batches: list[Tensor], start: int, options: TimingOptions
) -> None:
    loss = torch.zeros(())
    dist.barrier()
    interface, payload = interface_sent_nbytes(), setup.sent_nbytes()
    for step in range(options.steps):
        first = start + step * options.accumulate
        window = [batches[(first + i) % len(batches)] for i in range(options.accumulate)]
        wall, cpu = time.perf_counter(), time.process_time()
        loss = train_step(setup, window)
        block.wall_s.append(time.perf_counter() - wall)
        block.cpu_s.append(time.process_time() - cpu)
    dist.barrier()
    _count_traffic(setup, block, interface, payload, options.steps)
    dist.all_reduce(loss)
    block.losses.append(float(loss) / dist.get_world_size())


def _count_traffic(
    setup: Variant, block: Samples, interface: int | None, payload: int | None, steps: int
) -> None:
    now = interface_sent_nbytes()
    if now is not None and interface is not None:
        block.interface_nbytes.append((now - interface) / steps / dist.get_world_size())
    sent = setup.sent_nbytes()
    if sent is not None and payload is not None:
        block.payload_nbytes.append((sent - payload) / steps)
