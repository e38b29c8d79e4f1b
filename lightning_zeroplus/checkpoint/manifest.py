"""The table of contents of a universal checkpoint; written last, so that it marks completion.

It says which boxes of which tensor lie where in which file, and what every block of every file must
sum to. It is JSON with a checksum of its own, and pure data: nothing in it is imported, executed or
followed out of the directory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_zeroplus.errors import CheckpointError, name_offenders
from lightning_zeroplus.layout.box import Box, find_gaps

__all__ = ["BLOCK_NBYTES", "FORMAT", "MANIFEST", "FileSums", "Manifest", "SavedBox", "TensorRecord"]

FORMAT = "lightning-zeroplus universal checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BLOCK_NBYTES = 64 * 2**20
"""Files are summed in blocks of this size, so that ranks share the work of checking them."""


class SavedBox(NamedTuple):
    """Where one box of a tensor lies: a blob of a file, and in it the elements, row-major."""

    file: str
    start: int
    stop: int
    body: int
    """Offset in the file at which the elements start."""

    box: Box

    def packed(self) -> list[Any]:
        """Return plain lists; `TensorRecord.parse` reads them."""
        file, start, stop, body, box = self
        return [file, start, stop, body, list(box.offsets), list(box.sizes)]


@dataclass
class TensorRecord:
    """One saved tensor."""

    dtype: str
    """As in ``torch.float32``, without ``torch.``."""

    shape: tuple[int, ...]
    boxes: list[SavedBox] = field(default_factory=list)

    @classmethod
    def parse(cls, row: Any) -> TensorRecord:
        """Return the record of which the parts are given as plain lists.

        Raises:
            TypeError: of other kinds than they should be.
            ValueError: of other lengths, or numbers that no tensor has.
        """
        dtype, shape, boxes = _items(row, 3)
        record = cls(_text(dtype), _numbers(shape))
        for file, start, stop, body, at, sizes in (_items(box, 6) for box in _list(boxes)):
            box = Box(_numbers(at), _numbers(sizes))
            place = _number(start), _number(stop), _number(body)
            record.boxes.append(SavedBox(_text(file), *place, box))
        return record


class FileSums(NamedTuple):
    """Length of a file and the `Checksum` of each of its blocks of `BLOCK_NBYTES`."""

    nbytes: int
    blocks: list[int]

    @classmethod
    def parse(cls, row: Any) -> FileSums:
        """Return the sums of which the parts are given as plain lists; raises like its sibling."""
        nbytes, blocks = _items(row, 2)
        return cls(_number(nbytes), [_number(value) for value in _list(blocks)])


@dataclass
class Manifest:
    """What a universal checkpoint holds.

    Args:
        tensors: by key; keys that share one stored tensor have equal records.
        files: by name, every file but the manifest.
        facts: who wrote it, at which step: shown to people, never needed to read it.
    """

    tensors: dict[str, TensorRecord]
    files: dict[str, FileSums]
    facts: dict[str, Any]

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored, its checksum in the first line."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "facts": self.facts,
            "files": {name: [sums.nbytes, sums.blocks] for name, sums in self.files.items()},
            "tensors": {
                key: [record.dtype, record.shape, [saved.packed() for saved in record.boxes]]
                for key, record in self.tensors.items()
            },
        }
        body = json.dumps(content, separators=(",", ":")).encode()
        return _first_line(body) + body + b"\n}\n"

    @classmethod
    def from_bytes(cls, raw: bytes, where: object) -> Manifest:
        """Return the manifest that was stored at ``where``.

        Raises:
            CheckpointError: it is damaged, of a later version, or names what it must not.
        """
        try:
            first, body, last = raw.split(b"\n", 2)
            sound = first + b"\n" == _first_line(body) and last == b"}\n"
            content = json.loads(body) if sound else {}
        except (ValueError, RecursionError):
            content = {}
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(
                f"Expected a whole manifest, got one that is damaged ({where}). "
                f"Resume from another checkpoint."
            )
        try:
            version = _number(content["version"])
            if version > VERSION:
                raise CheckpointError(
                    f"Expected a manifest of version {VERSION} at most, got version {version} "
                    f"({where}). Update lightning-zeroplus."
                )
            manifest = cls(
                tensors={k: TensorRecord.parse(row) for k, row in _table(content["tensors"])},
                files={name: FileSums.parse(row) for name, row in _table(content["files"])},
                facts=dict(_table(content["facts"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Expected a manifest of this format, got {type(error).__name__}: {error} "
                f"({where}). Resume from another checkpoint."
            ) from error
        manifest.refuse_nonsense(where)
        return manifest

    def refuse_nonsense(self, where: object) -> None:
        """Check that files are of this directory and that boxes tile their tensors.

        Raises:
            CheckpointError: they do not; all are listed.
        """
        bad = [f"file name {name!r}" for name in self.files if not _is_plain_name(name)]
        bad += [
            f"{len(sums.blocks)} checksums of {name}"
            for name, sums in self.files.items()
            if len(sums.blocks) != -(-sums.nbytes // BLOCK_NBYTES)
        ]
        for key, record in self.tensors.items():
            gaps = find_gaps(record.shape, [saved.box for saved in record.boxes])
            if gaps:
                bad.append(f"{key} with {gaps}")
            for saved in record.boxes:
                known = self.files.get(saved.file)
                if known is None:
                    bad.append(f"{key} in a file without a checksum, {saved.file!r}")
                elif not 0 <= saved.start <= saved.body <= saved.stop <= known.nbytes:
                    bad.append(f"{key} outside of {saved.file}")
        if bad:
            raise CheckpointError(
                f"Expected complete tensors in a manifest, got {name_offenders(bad)} ({where}). "
                f"Resume from another checkpoint."
            )


def _table(value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} where a table should be")
    return value.items()


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__} where a list should be")
    return list(value)


def _items(value: Any, count: int) -> list[Any]:
    items = _list(value)
    if len(items) != count:
        raise ValueError(f"{len(items)} entries where {count} should be")
    return items


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text should be")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"a {type(value).__name__} where a whole number should be")
    if not 0 <= value < 2**63:
        raise ValueError(f"{value} where a size should be")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(_number(item) for item in _list(value))


def _first_line(body: bytes) -> bytes:
    return f'{{"crc32":{zlib.crc32(body)},"manifest":\n'.encode()


def _is_plain_name(name: str) -> bool:
    return bool(name) and name not in {".", "..", MANIFEST} and not set(name) & set("/\\:\0")
