"""A checkpoint of any form, opened to be described, converted or exported."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zeroplus.checkpoint.folder import folder_at, local_path
from lightning_zeroplus.checkpoint.lazy import find_shared
from lightning_zeroplus.checkpoint.load import read_manifest
from lightning_zeroplus.checkpoint.read import form_of, read_checkpoint
from lightning_zeroplus.checkpoint.save import OURS
from lightning_zeroplus.checkpoint.tree import join_key
from lightning_zeroplus.errors import CheckpointError

__all__ = ["Source", "name_states", "open_source"]

_CLASS = re.compile(r"GLOBAL ([\w.]+)")


@dataclass
class Source:
    """What is in a checkpoint.

    Args:
        path: as it was given.
        form: as `form_of` names it.
        checkpoint: Lightning's dictionary without what is ours. Names of a tied weight have one
            tensor; optimizer states are by name wherever names are known.
        facts: about who wrote it.
        shared: for every further name of a tied weight, the first.
    """

    path: str
    form: str
    checkpoint: dict[str, Any]
    facts: dict[str, Any]
    shared: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Any]:
        """The state dict."""
        found: dict[str, Any] = self.checkpoint["state_dict"]
        return found


def open_source(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, check: bool = True
) -> Source:
    """Return the checkpoint at ``path``; its tensors are read when they are used.

    Args:
        path: of any form that can be read.
        weights_only: False: metadata may have objects of any class, whose code then runs.
        check: compare checksums, where there are some.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: it is damaged, no checkpoint, or has classes that are not allowed.
    """
    form = form_of(path)
    try:
        checkpoint = _read(path, form, weights_only, check=check)
    except pickle.UnpicklingError as error:
        name = _CLASS.search(str(error))
        got = f"the class {name[1]}" if name else str(error).splitlines()[0]
        raise CheckpointError(
            f"Expected tensors and plain values, got {got} ({path}). If you trust whoever wrote "
            f"it, allow all classes: --trust, or weights_only=False."
        ) from error
    if not isinstance(checkpoint.get("state_dict"), dict):
        checkpoint = _as_checkpoint(checkpoint, path)
    ours = checkpoint.pop(OURS, None) or {}
    source = Source(os.fspath(path), form, checkpoint, _facts(checkpoint, ours.get("facts")))
    _join_shared(source)
    states = checkpoint.get("optimizer_states")
    if isinstance(states, list):
        checkpoint["optimizer_states"] = [name_states(one, source.weights) for one in states]
    return source


def _read(
    path: str | os.PathLike[str], form: str, weights_only: bool | None, *, check: bool
) -> dict[str, Any]:
    if form == "file" and local_path(path) is None:
        import fsspec

        with fsspec.open(os.fspath(path), "rb") as file:
            found = torch.load(file, map_location="cpu", weights_only=weights_only)
        return found if isinstance(found, dict) else {}
    return read_checkpoint(path, weights_only=weights_only, check=check)


def _as_checkpoint(found: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Return a plain state dict as a checkpoint."""
    if not found or not all(isinstance(value, torch.Tensor) for value in found.values()):
        keys = ", ".join(map(repr, list(found)[:5])) or "nothing"
        raise CheckpointError(
            f"Expected a checkpoint with a state_dict, or a state dict, got {keys} ({path}). "
            f"Give the path of one that a Trainer, torch.save or DeepSpeed has written."
        )
    return {"state_dict": dict(found)}


def _facts(checkpoint: Mapping[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    if known is not None:
        return dict(known)
    about = checkpoint.get("deepspeed") or {}
    found = {
        "stage": about.get("zero_stage"),
        "world_size": about.get("dp_world_size"),
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step", about.get("global_steps")),
        "lightning": checkpoint.get("pytorch-lightning_version"),
        "deepspeed": about.get("ds_version"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _join_shared(source: Source) -> None:
    weights = source.weights
    source.shared = _shared_records(source) if source.form == "universal" else find_shared(weights)
    for name, kept in source.shared.items():
        weights[name] = weights[kept]


def _shared_records(source: Source) -> dict[str, str]:
    """Return names whose elements are stored once; equal scalars are, without being tied."""
    records = read_manifest(folder_at(source.path)).tensors
    first: dict[Any, str] = {}
    shared = {}
    for name in source.weights:
        record = records.get(join_key(("state_dict", name))[0])
        if record is not None and record.shape and record.boxes:
            kept = first.setdefault(tuple(record.boxes), name)
            if kept != name:
                shared[name] = kept
    return shared


def name_states(optimizer: Any, weights: Mapping[str, Any]) -> Any:
    """Return an optimizer's state dict by parameter name, if it has its parameters' names.

    ``torch.optim`` has them when it was made of ``named_parameters()``.
    """
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if not groups or not all(
        len(group.get("param_names", ())) == len(group["params"]) for group in groups
    ):
        return optimizer
    pairs = [pair for g in groups for pair in zip(g["params"], g["param_names"], strict=True)]
    names = dict(pairs)
    if len(set(names.values())) != len(pairs) or not set(names.values()) <= set(weights):
        return optimizer
    return {
        **optimizer,
        "state": {names[key]: value for key, value in optimizer["state"].items()},
        "param_groups": [{**group, "params": list(group["param_names"])} for group in groups],
    }
