"""What a checkpoint in Lightning's form is in DeepSpeed's terms; nothing is read for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import check_name, fault
from lightning_zeroplus.checkpoint.saved_tensor import identity_of
from lightning_zeroplus.errors import CheckpointError, name_offenders

__all__ = ["Contents", "plain", "sort_contents"]

_SCALARS: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
_KEPT = (torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Contents:
    """A checkpoint, sorted.

    Attributes:
        weights: everything in the state dict.
        groups: names of trained parameters by group.
        settings: hyper-parameters by group.
        states: per-element tensors of the optimizer by name.
        steps: the step of each group, or None.
        buffers: names of buffers.
        frozen: names of parameters that are not trained.
        shared: for the second name of a tied parameter, the first.
    """

    weights: Mapping[str, Any]
    groups: list[list[str]]
    settings: list[dict[str, Any]]
    states: dict[str, dict[str, torch.Tensor]]
    steps: list[torch.Tensor | None]
    buffers: list[str]
    frozen: list[str]
    shared: dict[str, str]


def sort_contents(
    checkpoint: Mapping[str, Any],
    target: Path,
    buffers: Collection[str] | None,
    shared: Mapping[str, str] | None,
) -> Contents:
    """Return what ``checkpoint`` has for a universal folder at ``target``.

    Raises:
        CheckpointError: it has not one optimizer with states by name, or states that the layout has
            no place for.
    """
    weights = checkpoint.get("state_dict")
    optimizers = checkpoint.get("optimizer_states")
    if not isinstance(weights, Mapping):
        raise _lacking("a state_dict", type(weights).__name__, target)
    if not isinstance(optimizers, list) or len(optimizers) != 1:
        got = str(len(optimizers)) if isinstance(optimizers, list) else "none"
        raise _lacking("the states of one optimizer", got, target)
    groups = [list(group["params"]) for group in optimizers[0]["param_groups"]]
    trained = [name for group in groups for name in group]
    mine = set(trained)
    unknown = [str(name) for name in trained if not isinstance(weights.get(name), torch.Tensor)]
    if unknown or len(mine) != len(trained):
        got = name_offenders(unknown) if unknown else "a name in two groups"
        raise _lacking("groups of parameters by their names in the state_dict", got, target)
    for name in trained:
        check_name(name, "a parameter", target)
    saved = optimizers[0].get("state", {})
    about = checkpoint.get("deepspeed") or {}
    ties = _find_ties(weights, mine) | dict(about.get("shared_params", {}))
    ties = _check_ties(ties if shared is None else shared, weights, target)
    rest = [name for name in weights if name not in mine and name not in ties]
    kept = set(about.get("buffer_names", rest) if buffers is None else buffers)
    tensors = [name for name in rest if isinstance(weights[name], torch.Tensor)]
    return Contents(
        weights=weights,
        groups=groups,
        settings=[
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizers[0]["param_groups"]
        ],
        states={name: _elementwise(name, saved.get(name, {}), weights, target) for name in trained},
        steps=[_step_of(group, saved, target) for group in groups],
        buffers=[name for name in tensors if name in kept],
        frozen=[name for name in tensors if name not in kept],
        shared=ties,
    )


def _lacking(expected: str, got: str, target: Path) -> CheckpointError:
    return fault(
        f"{expected} in the checkpoint", got, target, "Export a checkpoint with all its states."
    )


def _find_ties(weights: Mapping[str, Any], trained: set[str]) -> dict[str, str]:
    """Return names that stand for the very tensor of a trained parameter."""
    first = {identity_of(weights[name]): name for name in trained}
    return {
        name: first[identity_of(value)]
        for name, value in weights.items()
        if name not in trained and isinstance(value, torch.Tensor) and identity_of(value) in first
    }


def _check_ties(
    ties: Mapping[str, str], weights: Mapping[str, Any], target: Path
) -> dict[str, str]:
    for name, kept in ties.items():
        if kept in ties or not all(isinstance(weights.get(n), torch.Tensor) for n in (name, kept)):
            got = f"{name!r} for {kept!r}"
            raise _lacking("two tensors for the names of each tied parameter", got, target)
    return dict(ties)


def _elementwise(
    name: str, state: Mapping[str, Any], weights: Mapping[str, Any], target: Path
) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in state.items():
        if key == "step" or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != weights[name].shape:
            got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise fault(
                f"optimizer states of the shape of {name}, {list(weights[name].shape)}",
                f"{key!r}: {got}",
                target,
                "DeepSpeed's layout has no place for it; export without optimizer states.",
            )
        found[check_name(key, "a state of the optimizer", target)] = value
    return found


def _step_of(group: list[str], saved: Mapping[str, Any], target: Path) -> torch.Tensor | None:
    """Return the step of a group; DeepSpeed has one for all of it."""
    steps = {name: float(saved[name]["step"]) for name in group if "step" in saved.get(name, {})}
    if len(set(steps.values())) > 1:
        got = ", ".join(str(step) for step in sorted(set(steps.values())))
        raise fault("the same step for a whole group", got, target, "Export after full steps.")
    return torch.tensor(next(iter(steps.values())), dtype=torch.float32) if steps else None


def plain(value: Any, at: str, target: Path) -> Any:
    """Return ``value`` made of plain Python types and tensors, each tensor for itself.

    Raises:
        CheckpointError: there is an object of another class in it.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Enum):
        return plain(value.value, at, target)
    if isinstance(value, _KEPT) or value is None:
        return value
    if isinstance(value, Mapping):
        return {
            plain(key, at, target): plain(item, f"{at}.{key}", target)
            for key, item in value.items()
        }
    for many in (list, tuple, set):
        if isinstance(value, many):
            return many(plain(item, f"{at}[{n}]", target) for n, item in enumerate(value))
    for one in _SCALARS:
        if isinstance(value, one):  # also a subclass, such as numpy.float64
            return one(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return plain(value.item(), at, target)
    raise fault(
        "plain values and tensors",
        f"{at}, a {type(value).__module__}.{type(value).__qualname__}",
        target,
        "Leave it out of the checkpoint.",
    )
