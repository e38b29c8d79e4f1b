"""Weights alone, for other programs: safetensors files as on the Hugging Face hub, or a state dict.

Source of the names and of the index: github.com/huggingface/huggingface_hub, `save_torch_model`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

import torch

from lightning_zeroplus.checkpoint.archive import write_sums
from lightning_zeroplus.checkpoint.folder import local_path
from lightning_zeroplus.checkpoint.lazy import (
    Tell,
    cast_tensors,
    is_dense,
    save_lazily,
    tell_reads,
)
from lightning_zeroplus.checkpoint.safetensors import (
    cut_shards,
    refuse_dtypes,
    write_safetensors,
)
from lightning_zeroplus.checkpoint.source import open_source
from lightning_zeroplus.checkpoint.target import new_file, new_folder, refuse_taken
from lightning_zeroplus.errors import CheckpointError

__all__ = ["ExportDtype", "ExportFormat", "export_weights"]

ExportFormat = Literal["safetensors", "torch"]
ExportDtype = Literal["saved", "fp64", "fp32", "bf16", "fp16"]

_DTYPES = {
    "saved": None,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

INDEX = "model.safetensors.index.json"


def export_weights(  # noqa: PLR0913  # each is an option of the command
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: ExportFormat = "safetensors",
    dtype: ExportDtype = "saved",
    max_shard_nbytes: int = 5 * 10**9,
    force: bool = False,
    weights_only: bool | None = None,
    tell: Tell | None = None,
) -> None:
    """Write the weights of the checkpoint at ``source``, and nothing else. *Local.*

    One tensor is in memory at a time. In safetensors files a tied weight is stored once, under the
    name that the checkpoint has first; the header's metadata says which name stands for which.

    Args:
        source: of any form that can be read.
        target: a folder for ``model.safetensors``, or its numbered shards and their index; a name
            that ends in ``.safetensors``: one file. For "torch" a file.
        format: "safetensors", or "torch": a state dict for `torch.load`.
        dtype: of floating-point tensors; "saved": as they are, which are the master weights.
        max_shard_nbytes: of a file in a folder; one tensor may be larger.
        force: replace what is at ``target``.
        weights_only: False: metadata may have objects of any class; only for files you trust.
        tell: follows the progress.

    Raises:
        FileNotFoundError: there is nothing at ``source``.
        FileExistsError: there is something at ``target``.
        CheckpointError: the checkpoint is damaged, or its weights cannot be written.
    """
    single = PurePath(target).suffix == ".safetensors"
    if single and format == "torch":  # which torch.load would take for that
        raise CheckpointError(
            f"Expected a name for a state dict, got one of safetensors ({target}). "
            f"Let it end in .pt."
        )
    refuse_taken(target, source, force=force)
    opened = open_source(source, weights_only=weights_only)
    weights = cast_tensors(tell_reads(opened.weights, tell), _DTYPES[dtype])
    if format == "torch":
        with new_file(target) as file:
            sums = save_lazily(weights, file)
            if local_path(target) is not None:
                write_sums(file, sums)
        return
    tensors = {
        name: value
        for name, value in weights.items()
        if is_dense(value) and name not in opened.shared
    }
    refuse_dtypes(tensors, source)
    metadata = {**opened.shared, "format": "pt"}
    if single:
        with new_file(target) as file:
            write_safetensors(file, tensors, metadata)
    else:
        _write_shards(target, tensors, metadata, max_shard_nbytes)


def _write_shards(
    target: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    most_nbytes: int,
) -> None:
    if most_nbytes < 1:
        raise CheckpointError(
            f"Expected shards of 1 byte or more, got {most_nbytes} ({target}). Give a larger size."
        )
    shards = cut_shards(tensors, most_nbytes)
    files = {
        "model.safetensors"
        if len(shards) == 1
        else f"model-{n:05d}-of-{len(shards):05d}.safetensors": names
        for n, names in enumerate(shards, 1)
    }
    with new_folder(target) as open_file:
        for file_name, names in files.items():
            with open_file(file_name) as file:
                write_safetensors(file, {name: tensors[name] for name in names}, metadata)
        if len(shards) > 1:
            with open_file(INDEX) as file:
                file.write(_index(tensors, files))


def _index(tensors: Mapping[str, torch.Tensor], files: Mapping[str, list[str]]) -> bytes:
    content: dict[str, Any] = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file_name for file_name, names in files.items() for name in names},
    }
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
