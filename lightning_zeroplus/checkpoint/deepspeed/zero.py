"""Checkpoints as ZeRO wrote them: flat partitions of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import fault, own, take
from lightning_zeroplus.checkpoint.deepspeed.folders import scan_folder
from lightning_zeroplus.checkpoint.deepspeed.groups import (
    Source,
    partition_count,
    read_groups,
    same_value,
    stage_of,
)
from lightning_zeroplus.checkpoint.deepspeed.model_states import read_model_states
from lightning_zeroplus.checkpoint.deepspeed.partitions import (
    Place,
    RankStates,
    place_parameters,
)
from lightning_zeroplus.checkpoint.deepspeed.pieces import Piece, join_pieces
from lightning_zeroplus.checkpoint.deepspeed.unpickle import load_file
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor

__all__ = ["read_zero"]


class _PartStates(NamedTuple):
    """States of a part: names of those with a value per element, and the others."""

    flat: dict[str, list[torch.Tensor]]  # by rank
    scalars: dict[str, Any]


def read_zero(folder: Path) -> Source:
    """Read the checkpoint of ZeRO 1, 2 or 3 in ``folder``.

    Raises:
        CheckpointError: files are missing, damaged, of other sizes than the parameters have, or of
            model parallelism or experts.
    """
    files = scan_folder(folder)
    if not files.optim:
        raise fault("files *_optim_states.pt of ZeRO", "none", folder, "Copy the whole checkpoint.")
    first = _read_rank(files.optim[min(files.optim)])
    stage = stage_of(first.optimizer, first.path)
    world = partition_count(first.optimizer, first.path)
    paths = files.expect("optim", world)
    ranks = [first if path == first.path else _read_rank(path) for path in paths]
    models = [read_model_states(path) for path in files.expect("model", world if stage == 3 else 1)]
    _check_ranks(ranks, stage, world)
    groups = read_groups(first.param_groups, len(first.masters), first.path)
    places = place_parameters(ranks, models[0], stage)
    masters = {part: [rank.masters[part] for rank in ranks] for part in range(len(first.masters))}
    parts = [_part_states(ranks, part, key) for part, key in enumerate(groups.keys)]
    return Source(
        stage=stage,
        world=world,
        models=models,
        optimizer=first.optimizer,
        groups=groups,
        parts={name: place.part for name, place in places.items()},
        weights={name: _join(place, masters) for name, place in places.items()},
        states={name: _states(name, place, parts, folder) for name, place in places.items()},
    )


def _read_rank(path: Path) -> RankStates:
    data = load_file(path)
    if not isinstance(data, dict):
        raise fault("a dictionary of optimizer states", type(data).__name__, path)
    optimizer = take(data, "optimizer_state_dict", dict, path)
    whole = stage_of(optimizer, path) == 3
    base = optimizer.get("optimizer_state_dict" if whole else "base_optimizer_state")
    if not isinstance(base, dict):
        raise fault(
            "the state dict of the optimizer",
            f"{type(base).__name__}, as elastic_checkpoint writes it",
            path,
            "Save again without elastic_checkpoint.",
        )
    key = "fp32_flat_groups" if whole else "single_partition_of_fp32_groups"
    masters = take(optimizer, key, list, path)
    for flat in masters:
        if not isinstance(flat, torch.Tensor) or flat.dim() != 1:
            raise fault("flat tensors of fp32 masters", type(flat).__name__, path)
    paddings = (None if whole else optimizer.get("group_paddings")) or [0] * len(masters)
    if len(paddings) != len(masters) or not all(type(n) is int for n in paddings):
        raise fault(f"{len(masters)} group_paddings", repr(paddings)[:100], path)
    if optimizer.get("ds_zero_partition_groups"):
        raise fault("partitions over all ranks", "partitions of experts (MoE)", path)
    states = take(base, "state", dict, path)
    return RankStates(path, optimizer, masters, paddings, states, base.get("param_groups"))


def _check_ranks(ranks: Sequence[RankStates], stage: int, world: int) -> None:
    dtypes = [flat.dtype for flat in ranks[0].masters]
    for rank in ranks:
        theirs = (stage_of(rank.optimizer, rank.path), partition_count(rank.optimizer, rank.path))
        if theirs != (stage, world):
            raise fault(
                f"stage {stage} on {world} ranks, as in {ranks[0].path.name}",
                f"stage {theirs[0]} on {theirs[1]} ranks",
                rank.path,
                "Remove the files of another run.",
            )
        found = [flat.dtype for flat in rank.masters]
        if found != dtypes:
            raise fault(f"flat masters of {dtypes}, as on rank 0", str(found), rank.path)


def _part_states(ranks: Sequence[RankStates], part: int, key: Any) -> _PartStates:
    # A rank whose share is padding alone may never have stepped.
    holders = [rank for rank in ranks if rank.masters[part].numel()] or ranks[:1]
    for rank in ranks:
        saved = rank.states.get(key, {})
        if not isinstance(saved, dict):
            raise fault("states of the optimizer by name", type(saved).__name__, rank.path)
    first = holders[0].states.get(key, {})
    for rank in holders:
        odd = set(first) ^ set(rank.states.get(key, {}))
        if odd:
            got = f"{sorted(map(str, odd))} on one of the two alone"
            raise fault(f"the states of {holders[0].path.name}", got, rank.path)
    found = _PartStates({}, {})
    for name, value in first.items():
        if all(_is_flat(rank, part, rank.states[key][name]) for rank in holders):
            found.flat[name] = [rank.states.get(key, {}).get(name, value) for rank in ranks]
            continue
        for rank in holders:
            _check_scalar(name, rank.states[key][name], value, rank, part)
        found.scalars[name] = value
    return found


def _is_flat(rank: RankStates, part: int, value: Any) -> bool:
    """Return whether ``value`` has an element for each of the rank's masters."""
    numel = rank.masters[part].numel()
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 1
        and numel <= value.numel() <= numel + rank.paddings[part]
    )


def _check_scalar(name: str, value: Any, first: Any, rank: RankStates, part: int) -> None:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise fault(
            f"{name} of part {part} to have {rank.masters[part].numel()} elements or one",
            str(value.numel()),
            rank.path,
            "Only optimizers that treat each element by itself can be read.",
        )
    if not same_value(value, first):
        raise fault(f"{name} of part {part} as on the other ranks", repr(value)[:100], rank.path)


def _join(place: Place, flats: Mapping[int, list[torch.Tensor]]) -> SavedTensor:
    """Return the parameter at ``place`` of ``flats``, which are by part and rank."""
    pieces = [Piece(flats[part][rank], start, numel) for rank, part, start, numel in place.runs]
    return join_pieces(place.shape, flats[place.part][0].dtype, pieces)


def _states(name: str, place: Place, parts: Sequence[_PartStates], folder: Path) -> dict[str, Any]:
    mine = parts[place.part]
    within = {part for _, part, _, _ in place.runs} | {place.part}
    if any(parts[part].flat.keys() != mine.flat.keys() for part in within):
        raise fault(f"the same states for all of {name}", "others in its sub-groups", folder)
    found = {key: own(value) for key, value in mine.scalars.items()}
    for key in mine.flat:
        found[key] = _join(place, {part: parts[part].flat[key] for part in within})
    return found
