"""Universal checkpoints: a folder for each parameter, a file for each of its tensors.

Files of stages 1 and 2 hold the tensor in its shape and how to cut it; those of stage 3 hold a flat
tensor, whose shape is in the model states.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import check_name, fault, own, take
from lightning_zeroplus.checkpoint.deepspeed.folders import scan_folder
from lightning_zeroplus.checkpoint.deepspeed.groups import (
    Source,
    partition_count,
    read_groups,
    stage_of,
)
from lightning_zeroplus.checkpoint.deepspeed.model_states import read_model_states
from lightning_zeroplus.checkpoint.deepspeed.unpickle import load_file
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor
from lightning_zeroplus.errors import name_offenders
from lightning_zeroplus.layout.box import Box

__all__ = ["read_universal"]


def read_universal(folder: Path) -> Source:
    """Read the universal checkpoint in ``folder``.

    Raises:
        CheckpointError: files are missing, damaged, of other sizes than the parameters have, or of
            model parallelism or experts.
    """
    path = folder / "zero" / "optimizer_state.pt"
    optimizer = load_file(path)
    if not isinstance(optimizer, dict):
        raise fault("a dictionary of optimizer states", type(optimizer).__name__, path)
    stage, world = stage_of(optimizer, path), partition_count(optimizer, path)
    files = scan_folder(folder).expect("model", world if stage == 3 else 1)
    models = [read_model_states(file) for file in files]
    shapes = models[0].shapes
    wrapped = take(optimizer, "optimizer_state_dict", dict, path) if stage == 3 else optimizer
    groups = read_groups(wrapped.get("param_groups"), len(shapes), path)
    parts = {name: part for part, names in enumerate(shapes) for name in names}
    _check_folders(folder / "zero", parts)
    # At stage 3 what is not per element, as the step, is in this file alone.
    states = take(wrapped, "state", dict, path) if stage == 3 else {}
    scalars = [_scalars(states.get(key, {}), path) for key in groups.keys]
    source = Source(stage, world, models, optimizer, groups, parts, {}, {})
    for part, named in enumerate(shapes):
        for name, shape in named.items():
            source.states[name] = own(scalars[part]) | _read_states(folder / "zero" / name, shape)
            source.weights[name] = source.states[name].pop("fp32")
    _check_order(source, folder)
    return source


def _check_order(source: Source, folder: Path) -> None:
    """Refuse what DeepSpeed's converter mixed up.

    With ``round_robin_gradients`` it takes parameters to lie in the partitions in the order of the
    model, which they do not. The weights in the model states are the right ones.
    """
    config = source.models[0].run.get("ds_config")
    settings = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(settings, dict) or not settings.get("round_robin_gradients"):
        return
    module = source.models[0].module
    wrong = [
        name
        for name, weight in source.weights.items()
        if isinstance(right := module.get(name), torch.Tensor)
        and right.numel()
        and not torch.equal(weight.read().to(right.dtype), right)
    ]
    if wrong:
        raise fault(
            "the weights of the model states",
            f"others for {name_offenders(wrong)}, which DeepSpeed's converter mixed up because "
            f"round_robin_gradients was set",
            folder / "zero",
            "Read the checkpoint that it was converted from.",
        )


def _check_folders(folder: Path, names: dict[str, int]) -> None:
    missing = [
        name for name in names if not (folder / check_name(name, "a parameter", folder)).is_dir()
    ]
    if missing:
        raise fault(
            f"a folder for each of {len(names)} parameters",
            f"none for {name_offenders(missing)}",
            folder,
            "Copy the whole checkpoint.",
        )


def _scalars(states: Any, path: Path) -> dict[str, Any]:
    if not isinstance(states, dict):
        raise fault("states of the optimizer by name", type(states).__name__, path)
    return {
        key: value
        for key, value in states.items()
        if not isinstance(value, torch.Tensor) or value.dim() == 0
    }


def _read_states(folder: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    names = sorted(name for name in os.listdir(folder) if name.endswith(".pt"))
    if "fp32.pt" not in names:
        raise fault("the file fp32.pt", "none", folder, "Copy the whole checkpoint.")
    return {name.removesuffix(".pt"): _read_value(folder / name, shape) for name in names}


def _read_value(path: Path, shape: tuple[int, ...]) -> Any:
    value = load_file(path)
    if isinstance(value, dict):
        if value.get("is_expert_param"):
            raise fault(
                "a parameter without experts",
                "one of experts (MoE)",
                path,
                "Consolidate it with DeepSpeed first.",
            )
        value = take(value, "param", torch.Tensor, path)
    elif not isinstance(value, torch.Tensor) or (value.dim() == 0 and path.name != "fp32.pt"):
        return own(value)  # the step, and whatever else is one for the parameter
    if value.numel() != math.prod(shape):
        raise fault(
            f"{math.prod(shape)} elements of shape {list(shape)}",
            f"{value.numel()}",
            path,
            "Convert the checkpoint again, without padding of the vocabulary.",
        )
    return SavedTensor(shape, value.dtype, _FileFetch(path, shape))


class _FileFetch:
    """Reads a box from a file that is opened when needed: there may be more than can be mapped."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self._path, self._shape = path, shape

    def __call__(self, box: Box) -> torch.Tensor:
        value = load_file(self._path)
        tensor: torch.Tensor = value["param"] if isinstance(value, dict) else value
        if tensor.numel() != math.prod(self._shape):
            got = f"{tensor.numel()}"
            raise fault(f"{math.prod(self._shape)} elements, as before", got, self._path)
        return tensor.detach().reshape(self._shape)[box.slices()]
