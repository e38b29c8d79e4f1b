"""Parameter groups of the optimizer that DeepSpeed wrapped, and what both forms say alike.

DeepSpeed's optimizer steps flat tensors: one for each group at stages 1 and 2, one for each
sub-group at stage 3. A *part* is the parameters of one such tensor; a group has one or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import fault, own, take
from lightning_zeroplus.checkpoint.deepspeed.model_states import ModelStates
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor

__all__ = ["Groups", "Source", "partition_count", "read_groups", "same_value", "stage_of"]


@dataclass(frozen=True)
class Groups:
    """The groups.

    Attributes:
        settings: hyper-parameters of each group.
        members: the group of each part.
        keys: under which the optimizer has the state of each part.
    """

    settings: list[dict[str, Any]]
    members: list[int]
    keys: list[Any]


@dataclass(frozen=True)
class Source:
    """A checkpoint of either form.

    Attributes:
        stage: of ZeRO.
        world: ranks that wrote it.
        models: their model states; of rank 0 alone at stages 1 and 2.
        optimizer: entries of the optimizer around the parameters, of rank 0.
        groups: the parameter groups.
        parts: the part of each parameter.
        weights: fp32 masters by name.
        states: of the optimizer by name.
    """

    stage: int
    world: int
    models: list[ModelStates]
    optimizer: Mapping[str, Any]
    groups: Groups
    parts: dict[str, int]
    weights: dict[str, SavedTensor]
    states: dict[str, dict[str, Any]]


def stage_of(optimizer: Mapping[str, Any], path: Path) -> int:
    """Return the ZeRO stage; the bf16 optimizer of stage 1 does not write it."""
    stage = optimizer.get("zero_stage", 1)
    if type(stage) is not int or stage not in (1, 2, 3):
        raise fault("ZeRO stage 1, 2 or 3", repr(stage), path)
    return stage


def partition_count(optimizer: Mapping[str, Any], path: Path) -> int:
    """Return how many ranks share the states.

    Raises:
        CheckpointError: groups have different counts, as experts have.
    """
    saved = optimizer.get("partition_count")
    counts: list[Any] = saved if isinstance(saved, list) and saved else [saved]
    if not all(type(count) is int and count > 0 for count in counts):
        raise fault("partition_count to be a number of ranks", repr(saved), path)
    if len(set(counts)) != 1:
        raise fault(
            "one partition count for all groups",
            f"{saved}, as groups of experts (MoE) have",
            path,
            "Consolidate it with DeepSpeed first.",
        )
    return int(counts[0])


def read_groups(value: Any, parts: int, path: Path) -> Groups:
    """Return the groups from ``param_groups`` of the wrapped optimizer.

    Args:
        value: as read.
        parts: how many parts the files have.
        path: of the file.

    Raises:
        CheckpointError: it does not say which parts are in which group, or a group has experts.
    """
    if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        raise fault("param_groups of the optimizer", type(value).__name__, path)
    settings, members, keys = [], [], []
    for index, group in enumerate(value):
        if group.get("moe"):
            raise fault(
                "groups without experts",
                f"group {index} of experts (MoE)",
                path,
                "Consolidate it with DeepSpeed first.",
            )
        mine = take(group, "params", list, path)
        settings.append({key: own(item) for key, item in group.items() if key != "params"})
        members += [index] * len(mine)
        keys += mine
    if len(members) != parts or len(set(map(repr, keys))) != parts:
        raise fault(
            f"param_groups to name each of {parts} flat tensors of parameters once",
            f"{len(members)} names, so it is not known which parameters are in which group",
            path,
            "Save the checkpoint again with a current DeepSpeed.",
        )
    return Groups(settings, members, keys)


def same_value(one: Any, other: Any) -> bool:
    """Return whether two ranks saved the same value."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
