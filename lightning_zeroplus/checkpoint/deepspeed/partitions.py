"""Where each parameter lies in the flat partitions of the ranks.

At stages 1 and 2 a group is one flat tensor: its parameters one after the other, in the order of
``param_shapes``, cut evenly over the ranks. At stage 3 each parameter by itself is cut into equal
chunks; a rank has its chunks one after the other, over one or more sub-groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import fault
from lightning_zeroplus.checkpoint.deepspeed.model_states import ModelStates
from lightning_zeroplus.checkpoint.deepspeed.pieces import Run, cut_runs

__all__ = ["Place", "RankStates", "place_parameters"]


class RankStates(NamedTuple):
    """The optimizer file of a rank.

    Attributes:
        path: of the file.
        optimizer: all entries of DeepSpeed's optimizer.
        masters: flat fp32 masters by part.
        paddings: by part, elements that the states may have more than the masters.
        states: of the wrapped optimizer.
        param_groups: of the wrapped optimizer, unchecked.
    """

    path: Path
    optimizer: Mapping[str, Any]
    masters: list[torch.Tensor]
    paddings: list[int]
    states: Mapping[Any, Any]
    param_groups: Any


class Place(NamedTuple):
    """Where a parameter lies.

    Attributes:
        shape: of the parameter.
        part: in which it starts.
        runs: its elements in order, as (rank, part, start, numel).
    """

    shape: tuple[int, ...]
    part: int
    runs: list[tuple[int, int, int, int]]


def place_parameters(
    ranks: Sequence[RankStates], model: ModelStates, stage: int
) -> dict[str, Place]:
    """Return where each parameter lies.

    Raises:
        CheckpointError: the partitions have other sizes than the parameters.
    """
    return _place_chunks(ranks, model) if stage == 3 else _place_groups(ranks, model)


def _place_groups(ranks: Sequence[RankStates], model: ModelStates) -> dict[str, Place]:
    first, align = ranks[0], 2 * len(ranks)
    if len(model.shapes) != len(first.masters):
        got, like = str(len(model.shapes)), first.path.name
        raise fault(f"{len(first.masters)} groups of param_shapes, as in {like}", got, model.path)
    gaps = _alignment_gaps(first, model)
    places = {}
    for part, shapes in enumerate(model.shapes):
        # Padding ends a group, so leaving it out, as most versions do, moves no parameter.
        lengths = [rank.masters[part].numel() for rank in ranks]
        offset = end = 0
        for (name, shape), gap in zip(shapes.items(), gaps[part], strict=True):
            end = offset + math.prod(shape)
            runs = cut_runs(lengths, offset, end - offset)
            places[name] = Place(
                shape, part, [(run.which, part, run.start, run.numel) for run in runs]
            )
            offset = end + gap
        if not end <= sum(lengths) <= -(-offset // align) * align:
            raise fault(
                f"{end} elements in group {part}, padded to a multiple of {align} at most",
                f"{sum(lengths)} on {len(ranks)} ranks",
                first.path.parent,
            )
    return places


def _alignment_gaps(rank: RankStates, model: ModelStates) -> list[list[int]]:
    """Return the padding after each parameter, which ``parameter_alignment`` asks for."""
    gaps = rank.optimizer.get("param_alignment_paddings")
    wanted = [len(shapes) for shapes in model.shapes]
    if gaps is None:
        return [[0] * count for count in wanted]
    lists = [group for group in gaps if isinstance(group, list)] if isinstance(gaps, list) else []
    known = all(type(gap) is int and gap >= 0 for group in lists for gap in group)
    if not known or [len(group) for group in lists] != wanted:
        raise fault("param_alignment_paddings for each parameter", repr(gaps)[:100], rank.path)
    return lists


def _place_chunks(ranks: Sequence[RankStates], model: ModelStates) -> dict[str, Place]:
    lengths = [flat.numel() for flat in ranks[0].masters]
    for rank in ranks:
        theirs = [flat.numel() for flat in rank.masters]
        if theirs != lengths:
            raise fault(f"flat groups of {lengths} elements, as on rank 0", str(theirs), rank.path)
    starts_part = len(model.shapes) == len(lengths)
    places, offset = {}, 0
    for index, shapes in enumerate(model.shapes):
        for name, shape in shapes.items():
            numel = math.prod(shape)
            chunk = -(-numel // len(ranks))
            runs = _chunk_runs(cut_runs(lengths, offset, chunk), numel, chunk, len(ranks))
            part = runs[0][1] if runs else index if starts_part else 0
            places[name] = Place(shape, part, runs)
            offset += chunk
    if offset != sum(lengths):
        got = str(sum(lengths))
        raise fault(f"{offset} elements in the flat groups of a rank", got, ranks[0].path)
    return places


def _chunk_runs(
    runs: list[Run], numel: int, chunk: int, world: int
) -> list[tuple[int, int, int, int]]:
    """Return the runs of a parameter whose chunk is ``runs`` on each rank; the last are padded."""
    found = []
    for rank in range(world):
        left = max(0, min(chunk, numel - rank * chunk))
        for run in runs:
            if left:
                found.append((rank, run.which, run.start, min(left, run.numel)))
                left -= min(left, run.numel)
    return found
