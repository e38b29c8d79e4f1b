"""Writing a universal checkpoint: every rank its own part, the first rank what joins them.

    exchange what each rank brings        -> who writes what all of them have; the draft is there
    each rank: its tensors into its file  -> flushed to the disk
    exchange what was written, or why not -> one failure is everybody's
    first rank: .metadata, meta.pt, manifest.json, then the rename
    exchange how that went

A rank that fails on the way says so in the exchange that comes next; a rank that dies is named by
the transport. Nothing that was at the path before is touched until the rename.
"""

from __future__ import annotations

import io
import uuid
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lightning_zeroplus.checkpoint.blob import bytes_of
from lightning_zeroplus.checkpoint.datafile import DataFile
from lightning_zeroplus.checkpoint.dcp import METADATA, dump_metadata
from lightning_zeroplus.checkpoint.folder import Folder
from lightning_zeroplus.checkpoint.manifest import (
    MANIFEST,
    FileSums,
    Manifest,
    SavedBox,
    TensorRecord,
)
from lightning_zeroplus.checkpoint.sharded import Piece, ShardedCheckpoint
from lightning_zeroplus.checkpoint.tree import Path, set_at
from lightning_zeroplus.errors import CheckpointError

__all__ = ["META", "OURS", "Group", "Solo", "pack", "save_universal", "unpack"]

META = "meta.pt"
"""Lightning's metadata; its own FSDP strategies look for this name."""

OURS = "zeroplus"
"""Key of what is ours in the metadata."""


_SHARED_NBYTES = 2**20
"""Smaller tensors that every rank has are written by the first."""


class Group(Protocol):
    """The ranks that save together."""

    rank: int
    world_size: int

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Return every rank's payload, by rank, on every rank."""


class Solo:
    """A group of one."""

    rank = 0
    world_size = 1

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Return the payload."""
        return [payload]


def pack(value: object) -> bytes:
    """Return ``value``, of plain types and tensors, as bytes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(raw: bytes) -> Any:
    """Return what `pack` was given; nothing but plain types and tensors is made."""
    return torch.load(io.BytesIO(raw), weights_only=True)


def save_universal(checkpoint: ShardedCheckpoint, folder: Folder, group: Group) -> None:
    """Make ``folder`` hold ``checkpoint``, or leave what was there. Collective over ``group``.

    Raises:
        CheckpointError: a rank could not write; on every rank, naming it and why.
    """
    _Save(checkpoint, folder, group).run()


class _Save:
    def __init__(self, checkpoint: ShardedCheckpoint, folder: Folder, group: Group) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._group = group
        self._first = group.rank == 0
        self._token = uuid.uuid4().hex

    def run(self) -> None:
        try:
            offers = self._together("begin", self._offer)
            self._token = offers[0]["token"]
            written = self._together("write", lambda: self._write(offers))
            self._together("commit", lambda: self._commit(written))
        except BaseException:
            if self._first:
                self._folder.abandon(self._token)
            raise

    def _together(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Return what ``act`` gave on every rank.

        Raises:
            CheckpointError: it raised on one of them.
        """
        failure: Exception | None = None
        row: dict[str, Any] = {}
        try:
            row["done"] = act()
        except Exception as error:  # noqa: BLE001  # raised below, when all ranks know of it
            failure, row = error, {"failed": f"{type(error).__name__}: {error}"}
        rows = self._group.exchange(pack(row), f"a checkpoint's {what}")
        found = [unpack(raw) for raw in rows]
        reasons = [f"{row['failed']} (rank {n})" for n, row in enumerate(found) if "failed" in row]
        if reasons:
            raise CheckpointError(
                f"Expected to write a checkpoint, got {'; '.join(reasons[:3])} ({self._folder}). "
                f"Earlier checkpoints are unchanged; free space or choose another folder."
            ) from failure
        return [row["done"] for row in found]

    def _offer(self) -> dict[str, Any]:
        if self._first:
            self._folder.prepare(self._token)
        alone = self._group.world_size == 1
        return {
            "token": self._token,
            "replicated": {
                key: [
                    str(tensor.dtype),
                    list(tensor.shape),
                    tensor.nbytes,
                    None if alone else _digest(tensor),
                ]
                for key, (_, tensor) in self._checkpoint.replicated.items()
            },
        }

    def _write(self, offers: list[dict[str, Any]]) -> dict[str, Any]:
        mine = self._checkpoint.pieces + self._share(offers)
        name = f"__{self._group.rank}_0.distcp"
        records: dict[str, list[Any]] = {}
        sums: dict[str, list[Any]] = {}
        if any(piece.local.numel() for piece in mine):
            file = DataFile(name, self._folder.open(self._token, name))
            seen: dict[tuple[torch.dtype, bytes], list[SavedBox]] = {}
            for piece in mine:
                records[piece.key] = _record(piece, _write_piece(file, piece, seen))
            file.close()
            sums[name] = list(file.sums)
        else:
            records = {piece.key: _record(piece, []) for piece in mine}
        return {
            "records": records,
            "places": {piece.key: list(piece.place) for piece in mine},
            "sums": sums,
            "aliases": [[k, list(at), of] for k, (at, of) in self._checkpoint.aliases.items()],
            "leaves": [[list(path), value] for path, value in self._checkpoint.leaves],
        }

    def _share(self, offers: list[dict[str, Any]]) -> list[Piece]:
        """Return what this rank writes of the tensors that the first rank, or all, have."""
        first = offers[0]["replicated"]
        common = {
            key
            for key, row in first.items()
            if row[3] is not None and all(o["replicated"].get(key) == row for o in offers)
        }
        load = [0] * len(offers)
        load[0] = sum(row[2] for key, row in first.items() if key not in common)
        writer = dict.fromkeys(first, 0)
        for key in sorted(common, key=lambda k: (-first[k][2], k)):
            rank = load.index(min(load))
            writer[key] = rank
            load[rank] += first[key][2]
        return [
            Piece.whole(key, place, tensor)
            for key, (place, tensor) in self._checkpoint.replicated.items()
            if writer.get(key) == self._group.rank
        ]

    def _commit(self, written: list[dict[str, Any]]) -> None:
        if not self._first:
            return
        manifest, places = self._join(written)
        meta = self._meta(written)
        manifest.files[META] = self._write_file(META, pack(meta))
        metadata = dump_metadata(manifest.tensors, places)
        manifest.files[METADATA] = self._write_file(METADATA, metadata)
        manifest.refuse_nonsense(self._folder)
        self._write_file(MANIFEST, manifest.to_bytes())
        self._folder.commit(self._token)

    def _join(self, written: list[dict[str, Any]]) -> tuple[Manifest, dict[str, Path]]:
        tensors: dict[str, TensorRecord] = {}
        places: dict[str, Path] = {}
        files: dict[str, FileSums] = {}
        for row in written:
            for key, packed in row["records"].items():
                record = TensorRecord.parse(packed)
                known = tensors.setdefault(key, TensorRecord(record.dtype, record.shape))
                if (known.dtype, known.shape) != (record.dtype, record.shape):
                    raise CheckpointError(
                        f"Expected one dtype and shape of {key}, got {known.dtype} "
                        f"{known.shape} and {record.dtype} {record.shape} on different ranks."
                    )
                known.boxes.extend(record.boxes)
            places.update({key: tuple(place) for key, place in row["places"].items()})
            files.update({name: FileSums.parse(sums) for name, sums in row["sums"].items()})
        for key, place, of in (alias for row in written for alias in row["aliases"]):
            if key not in tensors and of in tensors:  # other ranks may have told two tensors apart
                tensors[key], places[key] = tensors[of], tuple(place)
        facts = {"world_size": self._group.world_size, **self._checkpoint.facts}
        return Manifest(tensors, files, facts), places

    def _meta(self, written: list[dict[str, Any]]) -> dict[str, Any]:
        rest = dict(self._checkpoint.rest)
        for row in written:
            for path, value in row["leaves"]:
                set_at(rest, tuple(path), value)
        ours: dict[str, Any] = {
            key: rest.pop(key) for key in ("state_dict", "optimizer_states") if key in rest
        }
        return {**rest, OURS: ours}

    def _write_file(self, name: str, raw: bytes) -> FileSums:
        file = DataFile(name, self._folder.open(self._token, name))
        file.write(raw)
        file.close()
        return file.sums


def _digest(tensor: torch.Tensor) -> int | None:
    """Return a checksum of what is worth sharing out, if it is the same everywhere.

    What differs between ranks, such as running statistics, is the first rank's, as under DDP.
    """
    if tensor.nbytes < _SHARED_NBYTES:
        return None
    found = 0
    for part in bytes_of(tensor.detach().contiguous().reshape(-1)):
        found = zlib.crc32(part, found)
    return found


def _write_piece(
    file: DataFile, piece: Piece, seen: dict[tuple[torch.dtype, bytes], list[SavedBox]]
) -> list[SavedBox]:
    """Append a piece; equal scalars, such as step counts, are stored once."""
    local = piece.elements()
    if piece.shape or not local.numel():
        return file.write_span(local, piece.shape, piece.span, piece.stride)
    value = (local.dtype, bytes(local.cpu().view(torch.uint8).tolist()))
    if value not in seen:
        seen[value] = file.write_span(local, (), piece.span)
    return seen[value]


def _record(piece: Piece, boxes: list[SavedBox]) -> list[Any]:
    dtype = str(piece.local.dtype).removeprefix("torch.")
    return [dtype, list(piece.shape), [saved.packed() for saved in boxes]]
