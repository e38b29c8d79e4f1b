"""PyTorch's own directory format: its `.metadata` written for ours, and read for those of others.

`.metadata` is a pickle. It is read with an unpickler that knows the classes such a file consists of
and refuses every other.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_zeroplus.checkpoint.manifest import TensorRecord
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.layout.box import Box

__all__ = ["METADATA", "WRITER", "dump_metadata", "parse_metadata"]

METADATA = ".metadata"
WRITER = "lightning_zeroplus"
"""In the metadata of our own directories: without a manifest they are incomplete."""

_DCP_VERSION = "1.0.0"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: object) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            if module.startswith("pathlib"):
                return _PlainPath  # of no use here, and of another system perhaps
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), _TORCH_VALUES):
            return getattr(torch, name)
        raise CheckpointError(
            f"Expected classes of torch.distributed.checkpoint in a .metadata file, got "
            f"{module}.{name} ({self._where}). Do not load files from where you do not trust."
        )


class _PlainPath:
    """Stands in for a path that somebody's save happened to have."""

    def __new__(cls, *parts: str) -> str:  # type: ignore[misc]
        return "/".join(map(str, parts))


def dump_metadata(
    tensors: Mapping[str, TensorRecord], places: Mapping[str, tuple[Any, ...]]
) -> bytes:
    """Return the `.metadata` that makes plain `torch.distributed.checkpoint` read our directory.

    Args:
        tensors: by key.
        places: by key, where in a nested dictionary of state it belongs.
    """
    metadata = Metadata(
        state_dict_metadata={
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, record.dtype)),
                size=torch.Size(record.shape),
                chunks=[_chunk(saved.box) for saved in record.boxes],
            )
            for key, record in tensors.items()
        },
        planner_data=dict(places),
        storage_data={
            MetadataIndex(key, torch.Size(saved.box.offsets)): _StorageInfo(
                saved.file, saved.start, saved.stop - saved.start
            )
            for key, record in tensors.items()
            for saved in record.boxes
        },
        storage_meta=StorageMeta(modules=[WRITER]),
        version=_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def parse_metadata(raw: bytes, where: object) -> Metadata:
    """Return what `.metadata` at ``where`` says.

    Raises:
        CheckpointError: it is damaged, or holds what such a file does not.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO(raw), where).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"Expected a whole .metadata file, got {type(error).__name__}: {error} ({where}). "
            f"Resume from another checkpoint."
        ) from error
    if (
        not isinstance(found, Metadata)
        or not isinstance(found.state_dict_metadata, dict)
        or not isinstance(found.storage_data, dict)
    ):
        raise CheckpointError(
            f"Expected the metadata of a checkpoint, got {type(found).__name__} ({where}). "
            f"Give the folder that torch.distributed.checkpoint.save wrote."
        )
    return found
