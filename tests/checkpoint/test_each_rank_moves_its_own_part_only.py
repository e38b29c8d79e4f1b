"""Work is shared: a rank writes its spans, and reads those that it needs, and nothing is twice."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zeroplus.checkpoint import datafile, load, manifest, read_checkpoint
from lightning_zeroplus.checkpoint.folder import LocalFolder
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from tests.checkpoint.virtual import PLACES, Live, Mixed, Place, saved, write

SLACK = 4 * 90
"""Of a tensor in another memory order a part is read from its first element to its last."""


class Meter:
    """Counts bytes of data files that each virtual rank reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes: Counter[int] = Counter()
        read, into = LocalFolder.read, LocalFolder.read_into

        def counted(folder: LocalFolder, name: str, start: int = 0, stop: Any = None) -> Any:
            found = read(folder, name, start, stop)
            self.nbytes[threading.get_ident()] += len(found)
            return found

        def filled(folder: LocalFolder, name: str, start: int, out: memoryview) -> None:
            self.nbytes[threading.get_ident()] += out.nbytes
            into(folder, name, start, out)

        monkeypatch.setattr(LocalFolder, "read", counted)
        monkeypatch.setattr(LocalFolder, "read_into", filled)

    def take(self) -> int:
        """Return the bytes of this thread since the last time."""
        return self.nbytes.pop(threading.get_ident(), 0)


@pytest.mark.parametrize("at", [(1, 3), (3, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("to", PLACES, ids=str)
def test_a_rank_reads_its_spans(monkeypatch: pytest.MonkeyPatch, at: Place, to: Place) -> None:
    path, _ = saved("fused AdamW", at)
    meter = Meter(monkeypatch)

    def body(transport: Transport) -> tuple[int, int, int, int]:
        rank, world = transport.rank, transport.world_size
        checkpoint = read_checkpoint(path, rank=rank, world_size=world)
        live = Live(transport, to[0], "fused AdamW", module=Mixed(seed=2))
        mine = sum(span.local.nbytes for span in live.engine.own_weights().values())
        meter.take()
        live.engine.load_full_state(checkpoint["state_dict"])
        weights = meter.take()
        (own,) = checkpoint["optimizer_states"]
        live.engine.load_full_optimizer_state_dict(live.optimizer, own)
        return mine, weights, meter.take(), len(own["state"])

    ranks = run_virtual_ranks(to[1], body)
    whole = sum(mine for mine, *_ in ranks)
    for mine, weights, states, count in ranks:
        # Two moments; a step count of four bytes each. The frozen parameter has no state.
        assert states <= 2 * mine + 4 * count + 2 * SLACK
        if to[0] == 3:
            assert weights <= mine + 200 + SLACK, "and buffers"
    assert sum(states for _, _, states, _ in ranks) < 2 * whole + to[1] * (2 * SLACK + 4 * count)


def test_the_check_of_a_large_file_is_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (load, manifest, datafile):
        monkeypatch.setattr(module, "BLOCK_NBYTES", 1024)

    def save(transport: Transport) -> None:
        write(Live(transport, 2, "SGD"), tmp_path / "x.ckpt")

    run_virtual_ranks(2, save)
    meter = Meter(monkeypatch)
    path = tmp_path / "x.ckpt"
    data = sum(f.stat().st_size for f in path.iterdir() if f.name != "manifest.json")
    rest = (path / "manifest.json").stat().st_size + (path / "meta.pt").stat().st_size
    for rank in range(3):
        read_checkpoint(path, rank=rank, world_size=3)
        assert meter.take() - rest < data / 3 + 2 * 1024


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_writes_its_spans_and_nothing_is_written_twice(
    tmp_path: Path, stage: int, world: int
) -> None:
    path = tmp_path / "x.ckpt"

    def body(transport: Transport) -> int:
        module = Mixed()
        module.register_buffer("table", torch.arange(500_000.0))
        live = Live(transport, stage, "fused AdamW", module=module)
        live.train(0, 1)
        states = [v for s in live.optimizer.state.values() for v in s.values()]
        write(live, path, big=[torch.full((300_000,), float(n)) for n in range(6)])
        own = live.engine.own_weights().values()
        return sum(s.local.nbytes for s in own) + sum(v.nbytes for v in states if v.dim())

    own = run_virtual_ranks(world, body)
    shared = (500_000 + 6 * 300_000) * 4
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(world)]
    framing = 2000 * 120  # head and tail of each box; small tensors are mostly that
    assert sum(own) + shared <= sum(sizes) <= sum(own) + shared + framing
    for size, mine in zip(sizes, own, strict=True):
        assert size <= mine + shared / world + 500_000 * 4 + framing
