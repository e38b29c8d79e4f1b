from __future__ import annotations

from pathlib import Path

import psutil
import torch

from lightning_zeroplus.checkpoint import read_full, write_full


def _anonymous() -> int:
    full = psutil.Process().memory_full_info()
    return int(full.uss) - sum(
        m.rss for m in psutil.Process().memory_maps() if m.path.endswith(".ckpt")
    )


def test_no_memory_is_taken_for_what_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_full({f"w{n}": torch.full((1 << 20,), float(n)) for n in range(16)}, path)
    before = _anonymous()
    state = read_full(path)
    total = sum(float(t[::1024].sum()) for t in state.values())
    assert total == 1024 * sum(range(16))
    assert _anonymous() - before < 16 << 20  # of 64 MB


def test_the_mapped_file_may_be_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_full({"a": torch.ones(100_000)}, path)
    state = read_full(path)
    write_full({"a": torch.zeros(100_000)}, path)
    path.unlink()
    assert float(state["a"].sum()) == 100_000
