"""The files ``*_model_states.pt``: shapes, buffers, frozen parameters and the caller's own data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import fault, own, shapes_of, take
from lightning_zeroplus.checkpoint.deepspeed.pieces import Piece, join_pieces, view_saved
from lightning_zeroplus.checkpoint.deepspeed.unpickle import load_file
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor

__all__ = ["RESERVED", "ModelStates", "read_frozen", "read_model_states"]

_RUN = ("dp_world_size", "ds_config", "ds_version", "global_samples", "global_steps")
RESERVED = frozenset(
    {
        *_RUN,
        "buffer_names",
        "checkpoint_parallel_dimensions",
        "csr_tensor_module_names",
        "data_sampler",
        "frozen_param_fragments",
        "frozen_param_shapes",
        "lr_scheduler",
        "module",
        "mp_world_size",
        "optimizer",
        "param_shapes",
        "random_ltd",
        "shared_params",
        "skipped_steps",
        "sparse_tensor_module_names",
        "universal_checkpoint_info",
    }
)
"""Entries of DeepSpeed itself; the others are what its caller gave it."""

_EXPERTS = ("autoep_layers", "ds_autoep_layers", "num_experts")


@dataclass(frozen=True)
class ModelStates:
    """What one file has.

    Attributes:
        path: of the file.
        module: the state dict; at stage 3 parameters in it have no elements.
        buffers: names of buffers.
        shapes: of parameters in the order of the flat partitions, group by group.
        frozen_shapes: of parameters that are not trained.
        frozen: what this rank has of them, at stage 3 a part.
        shared: for the second name of a tied parameter, the first.
        client: what the caller of DeepSpeed saved with it.
        run: the counters and settings of the run.
        lr_scheduler: state of the scheduler, or None.
    """

    path: Path
    module: Mapping[str, Any]
    buffers: list[str]
    shapes: list[dict[str, tuple[int, ...]]]
    frozen_shapes: dict[str, tuple[int, ...]]
    frozen: Mapping[str, Any]
    shared: dict[str, str]
    client: dict[str, Any]
    run: dict[str, Any]
    lr_scheduler: Any


def read_model_states(path: Path) -> ModelStates:
    """Read one file.

    Raises:
        CheckpointError: it is damaged, or of model parallelism or experts.
    """
    data = load_file(path)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise fault("a dictionary of model states", type(data).__name__, path)
    _check_parallelism(data, path)
    if data.get("param_shapes") is None:
        raise fault(
            "param_shapes, which ZeRO writes",
            "a file without them",
            path,
            "Use a checkpoint of ZeRO stage 1, 2 or 3.",
        )
    shapes = [
        shapes_of(group, "param_shapes", path) for group in take(data, "param_shapes", list, path)
    ]
    names = [name for group in shapes for name in group]
    if len(names) != len(set(names)):
        raise fault("each parameter in one group", "a name in two of them", path)
    shared = data.get("shared_params") or {}
    if not isinstance(shared, dict) or not all(
        isinstance(name, str) for pair in shared.items() for name in pair
    ):
        raise fault("shared_params to map names to names", repr(shared)[:100], path)
    frozen_shapes = shapes_of(data.get("frozen_param_shapes") or {}, "frozen_param_shapes", path)
    # Where there are no frozen parameters, DeepSpeed may leave the entry out or at None.
    frozen = take(data, "frozen_param_fragments", dict, path) if frozen_shapes else {}
    return ModelStates(
        path=path,
        module=take(data, "module", dict, path),
        buffers=[str(name) for name in take(data, "buffer_names", list, path)],
        shapes=shapes,
        frozen_shapes=frozen_shapes,
        frozen=frozen,
        shared=dict(shared),
        client={key: own(data[key]) for key in data if key not in RESERVED and key not in _EXPERTS},
        run={key: own(data[key]) for key in (*_RUN, "skipped_steps") if key in data},
        lr_scheduler=own(data.get("lr_scheduler")),
    )


def _check_parallelism(data: dict[str, Any], path: Path) -> None:
    degrees = data.get("checkpoint_parallel_dimensions") or {}
    sizes = {"mp_world_size": data.get("mp_world_size", 1)}
    if isinstance(degrees, dict):
        sizes |= {str(key): value for key, value in degrees.items()}
    wrong = [f"{key} {value}" for key, value in sizes.items() if value not in (1, None)]
    wrong += [f"{key} (MoE)" for key in _EXPERTS if data.get(key)]
    if wrong:
        raise fault(
            "a data-parallel checkpoint",
            ", ".join(wrong),
            path,
            "Consolidate it with DeepSpeed first.",
        )


def read_frozen(models: list[ModelStates], stage: int) -> dict[str, SavedTensor]:
    """Return parameters that are not trained, each whole.

    Args:
        models: the files of all ranks at stage 3, else the one file.
        stage: of ZeRO.

    Raises:
        CheckpointError: elements are missing.
    """
    found = {}
    for name, shape in models[0].frozen_shapes.items():
        numel = math.prod(shape)
        chunk = -(-numel // len(models))
        pieces = []
        for rank, model in enumerate(models):
            part = model.frozen.get(name)
            want = max(0, min(chunk, numel - rank * chunk)) if stage == 3 else numel
            if not isinstance(part, torch.Tensor) or part.numel() < want:
                got = f"{part.numel()}" if isinstance(part, torch.Tensor) else "none"
                raise fault(f"{want} elements of the frozen {name}", got, model.path)
            if stage < 3 and part.shape == shape:
                found[name] = view_saved(part)  # whichever order its elements lie in
            elif want:
                pieces.append(Piece(part.detach().reshape(-1), 0, want))
        if name not in found:
            dtype = models[0].frozen[name].dtype
            found[name] = join_pieces(shape, dtype, pieces)
    return found
