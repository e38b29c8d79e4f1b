"""Saving and loading at least 1 GiB of training state beside `torch.save` and plain DCP.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --layers 24 --rounds 7 --folder /scratch

All three are measured in one group of rank processes, in turn: `torch.save` of the full state by
rank 0 and `torch.load` on every rank (as DDP does), `torch.distributed.checkpoint` of tensors that
are sharded over the ranks, and our universal folder at stage 3. Every file is flushed to the disk
before a save counts as done. Loads find the files in the page cache, all alike. Extra memory is the
peak of the resident set over what it was before, of the rank that took more. `stall` is how long
training waits when saving goes on in the background: for the copy to host memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from memory import _peak_rss, _restart_peak_rss, _rss, _trim
from models import GPT, Shape
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_zeroplus.checkpoint import folder_at, read_checkpoint, save_universal
from lightning_zeroplus.comm import c10d_transport
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.plugin.universal import OwnState, TransportGroup, shard_checkpoint
from lightning_zeroplus.zero import shard

STATES = ("exp_avg", "exp_avg_sq")


@dataclass
class Row:
    """Samples of one way of saving: seconds, and bytes of extra memory."""

    variant: str
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    save_extra: list[int] = field(default_factory=list)
    load_extra: list[int] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)


def make_model(layers: int, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(Shape(layers=layers, width=768, heads=12, vocabulary=8192, length=128, batch=1))


class TorchSave:
    """What DDP does: rank 0 writes everything, every rank reads everything."""

    name = "torch.save"

    def __init__(self, layers: int) -> None:
        model = make_model(layers, 0)
        self.state = {"model": {k: v.detach() for k, v in model.named_parameters()}}
        for key in STATES:
            self.state[key] = {k: torch.rand_like(v) for k, v in self.state["model"].items()}

    def save(self, path: Path) -> None:
        if dist.get_rank() == 0:
            with path.open("wb") as file:
                torch.save(self.state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, path: Path) -> None:
        found = torch.load(path, weights_only=True)
        for part, tensors in self.state.items():
            for key, value in tensors.items():
                value.copy_(found[part][key])

    def sums(self) -> float:
        return float(sum(v.double().sum() for t in self.state.values() for v in t.values()))

    def zero(self) -> None:
        for tensors in self.state.values():
            for value in tensors.values():
                value.zero_()


class Dcp:
    """PyTorch's own sharded format, as FSDP2 users have it."""

    name = "plain DCP"

    def __init__(self, layers: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = make_model(layers, 0)
        full = {k: v.detach() for k, v in model.named_parameters()}
        self.state = {"model": {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in full.items()}}
        for key in STATES:
            self.state[key] = {k: torch.rand_like(v) for k, v in self.state["model"].items()}

    def save(self, path: Path) -> None:
        dcp.save(self.state, checkpoint_id=path)

    def load(self, path: Path) -> None:
        dcp.load(self.state, checkpoint_id=path)

    def _locals(self) -> list[torch.Tensor]:
        return [v.to_local() for tensors in self.state.values() for v in tensors.values()]

    def sums(self) -> float:
        total = torch.tensor([float(sum(v.double().sum() for v in self._locals()))])
        dist.all_reduce(total)
        return float(total)

    def zero(self) -> None:
        for value in self._locals():
            value.zero_()


class Universal:
    """Ours, at stage 3, as the strategy calls it."""

    name = "universal"

    def __init__(self, layers: int) -> None:
        self.model = make_model(layers, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        transport = c10d_transport(timeout=timedelta(minutes=5))
        self.group = TransportGroup(transport)
        self.engine = shard(self.model, EngineConfig(stage=3), transport)
        self.engine.attach(self.optimizer)
        for unit in self.engine.units:
            for entry in unit.entries:
                local = entry.shard
                self.optimizer.state[entry.param] = {
                    "step": torch.tensor(1.0),
                    **{key: torch.rand_like(local) for key in STATES},
                }

    def _sharded(self) -> Any:
        own = OwnState(self.engine, dict(self.model.named_parameters()))
        states = [self.engine.own_optimizer_state(self.optimizer)]
        checkpoint = {"state_dict": dict(own.values), "optimizer_states": states}
        return shard_checkpoint(checkpoint, own, self.group.rank)

    def save(self, path: Path) -> None:
        save_universal(self._sharded(), folder_at(path), self.group)

    def stall(self) -> object:
        return self._sharded().snapshot()

    def load(self, path: Path) -> None:
        world = self.group.world_size
        found = read_checkpoint(path, rank=self.group.rank, world_size=world)
        dist.barrier()
        self.engine.load_full_state(found["state_dict"])
        (state,) = found["optimizer_states"]
        self.engine.load_full_optimizer_state_dict(self.optimizer, state)

    def _locals(self) -> list[torch.Tensor]:
        entries = [e for unit in self.engine.units for e in unit.entries]
        states = [s[k] for s in self.optimizer.state.values() for k in STATES if k in s]
        return [e.shard for e in entries if e.shard is not None] + states

    def sums(self) -> float:
        total = torch.tensor([float(sum(v.double().sum() for v in self._locals()))])
        dist.all_reduce(total)
        return float(total)

    def zero(self) -> None:
        for value in self._locals():
            value.zero_()


def measured(act: Callable[[], object]) -> tuple[float, int]:
    """Return seconds until all ranks are done, and this rank's extra memory."""
    gc.collect()
    _trim()
    dist.barrier()
    before = _rss()
    _restart_peak_rss()
    start = time.perf_counter()
    kept = act()
    dist.barrier()
    seconds = time.perf_counter() - start
    extra = max(0, _peak_rss() - before)
    del kept
    return seconds, extra


def on_rank(layers: int, rounds: int, folder: str) -> list[Row]:
    warnings.simplefilter("ignore")
    variants = [TorchSave(layers), Dcp(layers), Universal(layers)]
    rows = [Row(v.name) for v in variants]
    for round_ in range(rounds + 1):
        for variant, row in zip(variants, rows, strict=True):
            path = Path(folder, f"{variant.name.replace(' ', '-')}-{round_}.ckpt")
            right = variant.sums()
            save_s, save_extra = measured(lambda v=variant, p=path: v.save(p))
            variant.zero()
            load_s, load_extra = measured(lambda v=variant, p=path: v.load(p))
            if abs(variant.sums() - right) > 1e-9 * abs(right):
                raise RuntimeError(f"{variant.name} loaded other values than it saved")
            stall_s = measured(variant.stall)[0] if isinstance(variant, Universal) else None
            if round_:  # the first one warms up
                row.save_s.append(save_s)
                row.load_s.append(load_s)
                row.save_extra.append(save_extra)
                row.load_extra.append(load_extra)
                if stall_s is not None:
                    row.stall_s.append(stall_s)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table; return 1 if ours is not the fastest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="of width 768; 12 make 1.1 GB")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds over all three")
    parser.add_argument("--world", type=int, default=2, help="rank processes")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; None: temporary")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples there as well")
    options = parser.parse_args(arguments)
    nbytes = 3 * 4 * sum(p.numel() for p in make_model(options.layers, 0).parameters())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ranks = run_ranks(options.world, on_rank, options.layers, options.rounds, folder)
    print(
        f"**{nbytes / 2**30:.2f} GiB of state, {options.world} ranks** (torch {torch.__version__})"
    )
    print()
    print(
        "| variant | save s | GB/s | extra MiB | load s | GB/s | extra MiB | background stall s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for n, row in enumerate(ranks[0]):
        save_s, load_s = median(row.save_s), median(row.load_s)
        extra = [
            max(max(getattr(r[n], k)) for r in ranks) >> 20 for k in ("save_extra", "load_extra")
        ]
        stall = f"{median(row.stall_s):.3f}" if row.stall_s else "-"
        saved = f"{save_s:.2f} ({min(row.save_s):.2f}) | {nbytes / save_s / 1e9:.2f} | {extra[0]}"
        loaded = f"{load_s:.2f} ({min(row.load_s):.2f}) | {nbytes / load_s / 1e9:.2f} | {extra[1]}"
        print(f"| {row.variant} | {saved} | {loaded} | {stall} |")
    print(f"\nMedians (minimum) of {options.rounds} rounds, the three in turn.")
    if options.json:
        options.json.write_text(json.dumps([[asdict(row) for row in rows] for rows in ranks]))
    best = min(ranks[0], key=lambda row: median(row.save_s) + median(row.load_s))
    return 0 if best.variant == Universal.name else 1


if __name__ == "__main__":
    sys.exit(main())
