"""Checksums of the archives that `torch.save` writes: set where they are missing, and compared.

`torch.save` sums every record of the file. What is streamed, or saved with that switched off, has
zeros in their place.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

__all__ = ["Record", "find_bad_records", "records_of", "write_sums"]

_READ_NBYTES = 8 * 2**20

_LOCAL, _LOCAL_SIGNATURE = 30, b"PK\x03\x04"
_ENTRY, _ENTRY_SIGNATURE = 46, b"PK\x01\x02"
_AFTER_SIGNATURE = b"PK\x07\x08"


class Record(NamedTuple):
    """One file of an archive, stored as it is."""

    name: str
    start: int
    nbytes: int
    crc32: int
    """0: nobody has summed it."""


def records_of(file: IO[bytes]) -> list[Record]:
    """Return the records of the archive in ``file``.

    Raises:
        zipfile.BadZipFile: its table of contents is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    found = []
    for entry in entries:
        file.seek(entry.header_offset)
        head = file.read(_LOCAL)
        if head[:4] != _LOCAL_SIGNATURE or entry.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"no record {entry.filename} at {entry.header_offset}")
        start = entry.header_offset + _LOCAL + _number(head, 26) + _number(head, 28)
        found.append(Record(entry.filename, start, entry.file_size, entry.CRC))
    return found


def find_bad_records(path: Path, tell: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """Yield what is wrong with the archive at ``path``, one text each; all of it is read.

    Args:
        path: of the file.
        tell: gets the number of bytes that were read since the last time.
    """
    try:
        with path.open("rb") as file:
            for record in records_of(file):
                found = _crc32_of(file, record, tell)
                if record.crc32 and found != record.crc32:
                    stop = record.start + record.nbytes
                    yield f"{path.name} is damaged between bytes {record.start} and {stop}"
    except (OSError, EOFError, zipfile.BadZipFile, ValueError) as error:
        yield f"{path.name} cannot be read: {error}"


def _crc32_of(file: IO[bytes], record: Record, tell: Callable[[int], None]) -> int:
    file.seek(record.start)
    left, found = record.nbytes, 0
    while left:
        part = file.read(min(left, _READ_NBYTES))
        if not part:
            raise EOFError("it ends early")
        found = zlib.crc32(part, found)
        left -= len(part)
        tell(len(part))
    return found


def write_sums(file: IO[bytes], sums: Sequence[int]) -> None:
    """Give the archive in ``file``, open for reading and writing, the checksums of its tensors.

    Args:
        file: as `save_streamed` wrote it.
        sums: CRC-32 of the tensors that have elements, in their order.
    """
    left = iter(sums)
    with zipfile.ZipFile(file) as archive:
        place = archive.start_dir
    for record in records_of(file):
        file.seek(place)
        head = file.read(_ENTRY)
        if record.nbytes and "/data/" in record.name:
            raw = next(left).to_bytes(4, "little")
            _put(file, place, _ENTRY_SIGNATURE, 16, raw)
            _put(file, record.start + record.nbytes, _AFTER_SIGNATURE, 4, raw)
        place += _ENTRY + sum(_number(head, at) for at in (28, 30, 32))


def _put(file: IO[bytes], place: int, signature: bytes, field: int, raw: bytes) -> None:
    file.seek(place)
    if file.read(4) == signature:
        file.seek(place + field)
        file.write(raw)


def _number(head: bytes, at: int) -> int:
    return int.from_bytes(head[at : at + 2], "little")
