"""A small universal checkpoint, made without an engine, and ways to damage it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.checkpoint import (
    Piece,
    ShardedCheckpoint,
    folder_at,
    mark,
    save_universal,
)
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.layout import Span
from lightning_zeroplus.plugin.universal import TransportGroup

__all__ = ["TENSORS", "part_of", "rewrite", "same_tensors", "write_small"]

TENSORS = {
    "a": torch.arange(105.0).reshape(5, 7, 3),
    "b": torch.tensor([1.5], dtype=torch.bfloat16),
    "c": torch.tensor(2.25),
    "d": torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "e": torch.empty(0, 3),
    "f": torch.arange(9),
}


def part_of(rank: int, world: int, scale: float = 1.0, epoch: int = 3) -> ShardedCheckpoint:
    """What one rank brings: its spans of the tensors, a tied name, and metadata."""
    part = ShardedCheckpoint({"state_dict": {}, "epoch": epoch, "small": torch.ones(3)})
    for name, tensor in TENSORS.items():
        key, count = f"model.{name}", tensor.numel()
        value = (tensor * scale).to(tensor.dtype)
        start, stop = count * rank // world, count * (rank + 1) // world
        flat = torch.as_strided(value, (count,), (1,))
        part.rest["state_dict"][name] = mark(key)
        if stop > start or (rank == 0 and not count):
            span = Span(start, stop)
            piece = Piece(key, ("model", name), flat[start:stop], tuple(tensor.shape), span,
                          tensor.stride())  # fmt: skip
            part.pieces.append(piece)
    part.rest["state_dict"]["tied"] = mark("model.tied")
    part.aliases["model.tied"] = (("model", "tied"), "model.a")
    big = torch.full((100, 50), scale)
    part.rest["big"] = part.take(("big",), big, inline=True)
    return part


def write_small(path: Path | str, world: int = 2, scale: float = 1.0, epoch: int = 3) -> None:
    def body(transport: Transport) -> None:
        part = part_of(transport.rank, world, scale, epoch)
        save_universal(part, folder_at(path), TransportGroup(transport))

    run_virtual_ranks(world, body, timeout_s=20.0)


def same_tensors(state: dict[str, torch.Tensor], scale: float = 1.0) -> bool:
    wanted = {**TENSORS, "tied": TENSORS["a"]}
    return state.keys() == wanted.keys() and all(
        torch.equal(state[name].clone(), (value * scale).to(value.dtype))
        for name, value in wanted.items()
    )


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest as somebody who means harm would: its checksum is right again.

    ``change`` edits the content, or returns another one.
    """
    file = path / "manifest.json"
    _, body, _ = file.read_bytes().split(b"\n", 2)
    content = json.loads(body)
    changed = change(content)
    content = content if changed is None else changed
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    first = f'{{"crc32":{zlib.crc32(body)},"manifest":\n'.encode()
    file.write_bytes(first + body + b"\n}\n")
