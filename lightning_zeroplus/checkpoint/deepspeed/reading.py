"""A DeepSpeed checkpoint of either form as the dictionary that Lightning saves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import fault, own
from lightning_zeroplus.checkpoint.deepspeed.folders import find_checkpoint
from lightning_zeroplus.checkpoint.deepspeed.groups import Source
from lightning_zeroplus.checkpoint.deepspeed.model_states import read_frozen
from lightning_zeroplus.checkpoint.deepspeed.pieces import view_saved
from lightning_zeroplus.checkpoint.deepspeed.universal import read_universal
from lightning_zeroplus.checkpoint.deepspeed.unpickle import Record
from lightning_zeroplus.checkpoint.deepspeed.zero import read_zero
from lightning_zeroplus.errors import name_offenders

__all__ = ["read_deepspeed"]

_WRAPPER = "_forward_module."  # Lightning before 2.1 wrapped the module
_OWN = ("state_dict", "optimizer_states", "deepspeed")


def read_deepspeed(path: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Return the DeepSpeed checkpoint at ``path`` in Lightning's form. *Local.*

    Weights and states of the optimizer are `SavedTensor`: each is read from the mapped files when
    it is needed, so reading takes memory for one tensor.

    Args:
        path: a local folder: the checkpoint itself, in the form of ZeRO 1, 2 or 3 or universal, or
            the folder above it with ``latest`` or ``latest_universal``. Where both of these stand,
            ``latest`` counts.
        tag: names the checkpoint in ``path``.

    Returns:
        ``state_dict`` with fp32 masters, and frozen parameters and buffers as they were saved;
        ``optimizer_states``, by name of the parameter; ``deepspeed``, what else is known of the
        run; ``lr_schedulers``, where there are any; and all that DeepSpeed's caller saved, which
        from Lightning is the rest of its checkpoint.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: it is no such checkpoint, or is incomplete, damaged, of model parallelism
            or experts, or has objects of classes that are not known to be harmless.
    """
    folder, form = find_checkpoint(Path(path), tag)
    source = read_universal(folder) if form == "universal" else read_zero(folder)
    model = source.models[0]
    found: dict[str, Any] = {key: value for key, value in model.client.items() if key not in _OWN}
    if "lr_schedulers" not in found and model.lr_scheduler is not None:
        found["lr_schedulers"] = [model.lr_scheduler]
    weights = _weights(source)
    found["state_dict"] = {_plain(name): value for name, value in weights.items()}
    found["optimizer_states"] = [_optimizer(source)]
    found["deepspeed"] = _about(source)
    return found


def _plain(name: str) -> str:
    return name.removeprefix(_WRAPPER)


def _weights(source: Source) -> dict[str, Any]:
    model = source.models[0]
    known = read_frozen(source.models, source.stage) | source.weights
    found: dict[str, Any] = dict.fromkeys(model.module)  # for its order
    empty = []
    for name, value in model.module.items():
        if name in known:
            found[name] = known[name]
        elif not isinstance(value, torch.Tensor):
            found[name] = own(value)
        elif source.stage == 3 and not value.numel() and name not in model.buffers:
            empty.append(name)
        else:
            found[name] = view_saved(value)
    found |= known
    for name, kept in model.shared.items():
        if name not in known and kept in found:
            found[name] = found[kept]
            empty = [other for other in empty if other != name]
    if empty:
        raise fault(
            "elements of every parameter",
            f"none of {name_offenders(empty)}",
            model.path,
            "Save the checkpoint again, with frozen parameters.",
        )
    return found


def _optimizer(source: Source) -> dict[str, Any]:
    groups = [dict(settings) | {"params": []} for settings in source.groups.settings]
    # Older fused optimizers keep the step in the group.
    steps = [group.pop("step", None) if any(source.states.values()) else None for group in groups]
    states = {}
    for name, saved in source.states.items():
        index = source.groups.members[source.parts[name]]
        groups[index]["params"].append(_plain(name))
        state = dict(saved)
        if state and "step" not in state and steps[index] is not None:
            state["step"] = steps[index]
        if "step" in state:
            state["step"] = _own_step(state["step"])
        if state:
            states[_plain(name)] = state
    return {"state": states, "param_groups": groups}


def _own_step(step: Any) -> torch.Tensor:
    """Return a step that no other parameter shares: optimizers count it up in place."""
    return torch.tensor(float(step), dtype=torch.float32)


def _about(source: Source) -> dict[str, Any]:
    model, optimizer = source.models[0], source.optimizer
    about = {
        "zero_stage": source.stage,
        "dp_world_size": source.world,
        "ds_version": optimizer.get("ds_version"),
        **model.run,
    }
    about["dp_world_size"] = source.world
    about["loss_scale"] = _loss_scale(optimizer)
    about["clip_grad"] = optimizer.get("clip_grad")
    about["buffer_names"] = [_plain(name) for name in model.buffers]
    about["frozen_names"] = [_plain(name) for name in model.frozen_shapes]
    about["shared_params"] = {_plain(name): _plain(kept) for name, kept in model.shared.items()}
    return about


def _loss_scale(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    scaler = optimizer.get("loss_scaler")
    attributes = vars(scaler) if isinstance(scaler, Record) else {}
    found = {
        key: value
        for key, value in attributes.items()
        if value is None or type(value) in (bool, int, float, str)
    }
    if isinstance(attributes.get("dtype"), torch.dtype):
        found["dtype"] = str(attributes["dtype"]).removeprefix("torch.")
    found.setdefault("dynamic", bool(optimizer.get("dynamic_loss_scale", False)))
    return found
