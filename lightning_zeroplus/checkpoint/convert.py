"""A checkpoint of any form, written in another; one tensor is in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal

import torch

from lightning_zeroplus.checkpoint.archive import write_sums
from lightning_zeroplus.checkpoint.folder import folder_at, local_path
from lightning_zeroplus.checkpoint.lazy import Tell, save_lazily, tell_reads
from lightning_zeroplus.checkpoint.save import Solo, save_universal
from lightning_zeroplus.checkpoint.sharded import ShardedCheckpoint
from lightning_zeroplus.checkpoint.source import Source, open_source
from lightning_zeroplus.checkpoint.target import new_file, refuse_taken
from lightning_zeroplus.checkpoint.tree import free_key, join_key, mark
from lightning_zeroplus.errors import CheckpointError, name_offenders

__all__ = ["ConvertTo", "consolidate", "convert_checkpoint"]

ConvertTo = Literal["universal", "full", "deepspeed"]
"""The forms that can be written."""


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    weights_only: bool | None = None,
) -> None:
    """Write the checkpoint at ``path`` as one ``.ckpt`` file, as Lightning saves it under DDP.

    Weights are full, optimizer states are by number as `torch.optim` has them, and a `Trainer` with
    any strategy resumes from the file. One tensor is in memory at a time.

    Args:
        path: a universal folder, a folder of `torch.distributed.checkpoint`, of Lightning's FSDP
            strategies or of DeepSpeed, or a file.
        out: of the new file.
        force: replace what is at ``out``.
        weights_only: False: metadata may have objects of any class; only for files you trust.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        FileExistsError: there is something at ``out``.
        CheckpointError: the checkpoint is damaged, or the file cannot be written.
    """
    convert_checkpoint(path, out, "full", force=force, weights_only=weights_only)


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: ConvertTo,
    *,
    force: bool = False,
    weights_only: bool | None = None,
    tell: Tell | None = None,
) -> None:
    """Write the checkpoint at ``source`` to ``target`` in the form ``to``. *Local.*

    Args:
        source: of any form that can be read.
        target: nothing may be there; it appears complete or not at all.
        to: "universal" (a folder that plain `torch.distributed.checkpoint` reads too), "full" (one
            file, as under DDP) or "deepspeed" (its universal folder).
        force: replace what is at ``target``.
        weights_only: False: metadata may have objects of any class; only for files you trust.
        tell: follows the progress.

    Raises:
        FileNotFoundError: there is nothing at ``source``.
        FileExistsError: there is something at ``target``.
        CheckpointError: the checkpoint is damaged, the form cannot hold it, or it cannot be
            written.
    """
    refuse_taken(target, source, force=force)
    opened = open_source(source, weights_only=weights_only)
    if to == "universal":
        _write_universal(opened, target, tell)
    elif to == "full":
        _write_full(opened, target, tell)
    else:
        _write_deepspeed(opened, target, tell)


# -- one file


def _write_full(source: Source, target: str | os.PathLike[str], tell: Tell | None) -> None:
    checkpoint = {**source.checkpoint}
    # Without these Lightning's Trainer does not take it.
    checkpoint.setdefault("pytorch-lightning_version", version("lightning"))
    checkpoint.setdefault("epoch", 0)
    checkpoint.setdefault("global_step", source.facts.get("global_step", 0))
    checkpoint.setdefault("lr_schedulers", [])
    if isinstance(checkpoint.get("optimizer_states"), list):
        checkpoint["optimizer_states"] = [
            number_states(one, source.path) for one in checkpoint["optimizer_states"]
        ]
    with new_file(target) as file:
        sums = save_lazily(tell_reads(checkpoint, tell), file)
        if local_path(target) is not None:
            write_sums(file, sums)


def number_states(optimizer: Any, path: object) -> Any:
    """Return an optimizer's state dict as `torch.optim` has it, by number in the groups' order.

    Raises:
        CheckpointError: it has states of parameters that are in no group.
    """
    if not isinstance(optimizer, dict) or "param_groups" not in optimizer:
        return optimizer
    groups = optimizer["param_groups"]
    names = [name for group in groups for name in group["params"]]
    if not any(isinstance(name, str) for name in names):
        return optimizer
    number = {name: n for n, name in enumerate(names)}
    state = optimizer.get("state", {})
    lost = [str(name) for name in state if name not in number]
    if lost or len(number) != len(names):
        got = f"states of {name_offenders(lost)} too" if lost else "a parameter in two groups"
        raise CheckpointError(
            f"Expected states of the parameters in the optimizer's groups, got {got} ({path}). "
            f"Load it with the strategy that wrote it and save again."
        )
    numbered, start = [], 0
    for group in groups:
        stop = start + len(group["params"])
        numbered.append({**group, "params": list(range(start, stop))})
        start = stop
    # In the order of the parameters, as torch has it.
    states = {number[name]: state[name] for name in names if name in state}
    return {**optimizer, "state": states, "param_groups": numbered}


# -- a universal folder


def _write_universal(source: Source, target: str | os.PathLike[str], tell: Tell | None) -> None:
    checkpoint = tell_reads(source.checkpoint, tell)
    facts = {
        **source.facts,
        "converted_from": source.form,
        "torch": source.facts.get("torch", torch.__version__),
        "lightning_zeroplus": version("lightning-zeroplus"),
    }
    sharded = ShardedCheckpoint({}, facts)
    for key, value in checkpoint.items():
        if key == "state_dict":
            sharded.rest[key] = _take_weights(sharded, value, source.shared)
        elif key == "optimizer_states" and isinstance(value, list):
            sharded.rest[key] = [_take_states(sharded, n, one) for n, one in enumerate(value)]
        else:
            sharded.rest[key] = sharded.take((free_key(key),), value, inline=True)
    save_universal(sharded, folder_at(target), Solo())


def _take_weights(
    sharded: ShardedCheckpoint, weights: Mapping[str, Any], shared: Mapping[str, str]
) -> dict[str, Any]:
    found = {}
    for name, value in weights.items():
        path = ("state_dict", name)
        if name in shared:
            key, place = join_key(path)
            sharded.aliases[key] = (place, join_key(("state_dict", shared[name]))[0])
            found[name] = mark(key)
        else:
            found[name] = sharded.take(path, value, inline=False)
    return found


def _take_states(sharded: ShardedCheckpoint, number: int, optimizer: Any) -> Any:
    path = ("optimizer_states", number)
    if not isinstance(optimizer, dict) or "state" not in optimizer:
        return sharded.take(path, optimizer, inline=True)
    rest = {key: value for key, value in optimizer.items() if key != "state"}
    return {
        "state": sharded.take((*path, "state"), optimizer["state"], inline=False),
        **sharded.take(path, rest, inline=True),
    }


# -- DeepSpeed


def _write_deepspeed(source: Source, target: str | os.PathLike[str], tell: Tell | None) -> None:
    from lightning_zeroplus.checkpoint.deepspeed import write_deepspeed_universal

    local = local_path(target)
    if local is None:
        raise CheckpointError(
            f"Expected a local path for a checkpoint of DeepSpeed, got {target}. Write it to a "
            f"disk and copy it from there."
        )
    states = source.checkpoint.get("optimizer_states") or []
    groups = [group for one in states if isinstance(one, dict) for group in one["param_groups"]]
    if any(not isinstance(name, str) for group in groups for name in group["params"]):
        raise CheckpointError(
            f"Expected optimizer states by parameter name, got them by number ({source.path}). "
            f"Resume from it once with ZeroPlusStrategy, save, and convert what that has written."
        )
    checkpoint = tell_reads(source.checkpoint, tell)
    write_deepspeed_universal(checkpoint, local, shared_params=_kept(source, groups), force=True)


def _kept(source: Source, groups: list[Any]) -> dict[str, str]:
    """Return ``source.shared`` with the names that the optimizer has as those that are kept."""
    trained = {name for group in groups for name in group["params"]}
    kept = {first: name for name, first in source.shared.items() if name in trained}
    names = {*source.shared, *source.shared.values()}
    first_of = {name: source.shared.get(name, name) for name in names}
    best = {name: kept.get(first, first) for name, first in first_of.items()}
    return {name: other for name, other in best.items() if name != other}
