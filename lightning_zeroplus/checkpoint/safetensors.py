"""Files of the safetensors format, written from tensors that are read one at a time.

    8 bytes   length of the header, little-endian
    header    JSON: for each tensor its dtype, shape and place after the header; and some metadata
    elements  row-major, without gaps

Source: github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO

import torch

from lightning_zeroplus.checkpoint.lazy import byte_parts
from lightning_zeroplus.errors import CheckpointError, name_offenders

__all__ = ["SAFETENSORS_DTYPES", "cut_shards", "refuse_dtypes", "write_safetensors"]

SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}

_HEADER_ALIGNMENT = 8


def refuse_dtypes(tensors: Mapping[str, torch.Tensor], where: object) -> None:
    """Check that the format has a name for every dtype.

    Raises:
        CheckpointError: it has not; all such tensors are listed.
    """
    bad = [f"{n} of {t.dtype}" for n, t in tensors.items() if t.dtype not in SAFETENSORS_DTYPES]
    if bad:
        raise CheckpointError(
            f"Expected dtypes that safetensors has, got {name_offenders(bad)} ({where}). "
            f"Export with the format torch."
        )


def cut_shards(tensors: Mapping[str, torch.Tensor], most_nbytes: int) -> list[list[str]]:
    """Return the names of each file's tensors, in order; a file has at least one.

    >>> cut_shards({n: torch.empty(k) for n, k in zip("abc", (2, 1, 9))}, 12)
    [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = [[]]
    nbytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and nbytes + tensor.nbytes > most_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += tensor.nbytes
    return shards


def write_safetensors(
    file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write one file; each tensor is read when its turn comes.

    Args:
        file: at its start.
        tensors: by name.
        metadata: goes into the header.
    """
    names = _order(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _HEADER_ALIGNMENT)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for name in names:
        for part in byte_parts(tensors[name]):
            file.write(part)


def _order(tensors: Mapping[str, torch.Tensor]) -> Sequence[str]:
    """Return names by size of element, so that every tensor lies on a multiple of its own."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
