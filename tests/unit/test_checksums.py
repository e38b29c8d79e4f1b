"""Checksums of files: their definition, and what they find."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

from lightning_zeroplus.checkpoint.checksum import SECTOR_NBYTES, Checksum


def checksum(*parts: bytes | bytearray | memoryview) -> int:
    found = Checksum()
    for part in parts:
        found.update(part)
    return found.value


def by_definition(data: bytes) -> int:
    sums = b""
    for start in range(0, len(data), 512):
        sector = data[start : start + 512].ljust(512, b"\0")
        sums += struct.pack("<Q", sum(struct.unpack("<64Q", sector)) % 2**64)
    return zlib.crc32(sums)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 511, 512, 513, 1024, 5000, 3 * 512])
def test_a_checksum_is_what_the_docs_say(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    assert checksum(data) == by_definition(data)
    assert checksum(bytearray(data)) == by_definition(data)


def test_pieces_larger_than_the_cache_join() -> None:
    data = random.Random(1).randbytes(17 * 2**20 + 3)
    assert checksum(data) == by_definition(data)


@pytest.mark.parametrize("seed", range(20))
def test_how_bytes_are_cut_makes_no_difference(seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(chance.randbytes(6000))
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(12)))
    view = memoryview(data)
    ends = [*cuts, len(data)]
    parts = [view[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    assert checksum(*parts) == by_definition(data)


def test_asking_for_the_value_ends_nothing() -> None:
    found = Checksum()
    found.update(b"abc")
    assert found.value == by_definition(b"abc") == found.value
    found.update(b"def")
    assert found.value == by_definition(b"abcdef")


def test_buffers_of_other_element_types_are_bytes() -> None:
    numbers = memoryview(bytearray(1024)).cast("f")
    numbers[3] = 1.5
    assert checksum(numbers) == by_definition(numbers.tobytes())


def test_every_flipped_bit_is_found() -> None:
    data = bytearray(random.Random(2).randbytes(1100))
    right = checksum(data)
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert checksum(data) != right, (at, bit)
            data[at] ^= 1 << bit


def test_sectors_that_are_zeroed_swapped_or_repeated_are_found() -> None:
    chance = random.Random(3)
    sectors = [chance.randbytes(SECTOR_NBYTES) for _ in range(9)]
    right = checksum(*sectors)
    for a in range(9):
        for b in range(9):
            swapped = list(sectors)
            swapped[a], swapped[b] = sectors[b], sectors[a]
            repeated = list(sectors)
            repeated[a] = sectors[b]
            assert (checksum(*swapped) == right) is (a == b)
            assert (checksum(*repeated) == right) is (a == b)
        zeroed = list(sectors)
        zeroed[a] = bytes(SECTOR_NBYTES)
        assert checksum(*zeroed) != right
