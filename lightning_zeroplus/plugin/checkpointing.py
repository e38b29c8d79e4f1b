"""Checkpoints: universal directories written by all ranks, or one file gathered to rank 0.

Loading has two phases. Weights are loaded into the module before it is sharded, so callbacks and
hooks that edit them there work as under DDP; optimizer state is loaded once there are optimizers.
Only what is on the meta device waits until the engine has given it memory, and only a restore in
the middle of a run (the learning rate finder's) goes through the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.types import _PATH
from torch import Tensor, nn
from typing_extensions import override

from lightning_zeroplus.checkpoint import (
    align_names,
    find_mismatches,
    form_of,
    read_whole,
)
from lightning_zeroplus.errors import CheckpointError, name_offenders
from lightning_zeroplus.layout.names import plain_name
from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO, innermost
from lightning_zeroplus.plugin.saving import SavingStrategy, is_frozen, own_state, owns_parameters
from lightning_zeroplus.zero import Engine

__all__ = ["CheckpointingStrategy"]


class CheckpointingStrategy(SavingStrategy):
    """The saving and loading half of `ZeroPlusStrategy`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._waiting_state: dict[str, Any] | None = None
        self._waiting_strict = True
        self._wide_state: dict[str, Tensor] = {}

    # -- loading

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at rank 0's path, of any form; its tensors are read when used.

        Collective.

        Raises:
            FileNotFoundError: there is nothing at the path.
            CheckpointError: the checkpoint is damaged, or a peer could not read it.
        """
        self._wait_for_save()
        path = self.broadcast(checkpoint_path)
        checkpoint: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            checkpoint = self._read(path, weights_only)
        except Exception as error:  # noqa: BLE001  # raised below, when all ranks know of it
            failure = error
        all_read = self.reduce_boolean_decision(failure is None)
        if all_read:
            return checkpoint
        mine = "" if failure is None else f"{type(failure).__name__}: {failure}"
        reasons = [self.broadcast(mine, src=n) for n in range(self.world_size)]
        if failure is not None:
            raise failure
        first = next(f"{reason} (rank {n})" for n, reason in enumerate(reasons) if reason)
        raise CheckpointError(
            f"Expected every rank to read a checkpoint, got a failure on a peer: {first}. "
            f"The path must be reachable from every machine."
        )

    def _read(self, path: _PATH, weights_only: bool | None) -> dict[str, Any]:
        io = self.checkpoint_io
        if not isinstance(innermost(io), ZeroPlusCheckpointIO) and form_of(path) != "file":
            io = ZeroPlusCheckpointIO()  # a foreign one does not know folders
        inner = innermost(io)
        if isinstance(inner, ZeroPlusCheckpointIO):
            inner.reading_ranks = (self.global_rank, self.world_size)
        checkpoint = io.load_checkpoint(path, weights_only=weights_only)
        _refuse_other_content(checkpoint, path)
        # What others wrote lacks what Lightning asks for.
        checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)
        checkpoint.setdefault("lr_schedulers", [])
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of ``checkpoint`` into the module, or keep them until it has memory."""
        module = self._connected_module()
        own = own_state(module)
        state = align_names(checkpoint["state_dict"], own)
        if self._engine is not None:
            self._load_into_shards(self._engine, state, strict=strict)
        elif any(isinstance(value, Tensor) and value.is_meta for value in own.values()):
            self._waiting_state, self._waiting_strict = state, strict
        else:
            if strict and self._exclude_frozen_parameters:
                self._refuse_mismatches(own, state)
                strict = False
            module.load_state_dict(state, strict=strict)
            self._wide_state = {n: t for n, t in state.items() if _is_wider(t, own.get(n))}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each optimizer's full state; every rank keeps its spans of it."""
        engine = self._optimizer_engine
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"Expected the states of {len(self.optimizers)} optimizers in the checkpoint, got "
                f"{len(states)}. Make the optimizers as the run did that wrote it."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if engine is None or not owns_parameters(optimizer):
                optimizer.load_state_dict(read_whole(state))
                _optimizer_to_device(optimizer, self.root_device)
            else:
                engine.load_full_optimizer_state_dict(optimizer, state)

    # -- ours

    def _load_waiting_state(self, engine: Engine) -> None:
        """Load what arrived while the module had no memory."""
        state, self._waiting_state = self._waiting_state, None
        if state is not None:
            self._load_into_shards(engine, state, strict=self._waiting_strict)

    def _take_wide_state(self, module: nn.Module) -> dict[str, Tensor]:
        """Return loaded values that ``module`` could hold only rounded, if it still has them."""
        wide, self._wide_state = self._wide_state, {}
        if not wide:
            return {}
        own = own_state(module)
        return {
            name: value
            for name, value in wide.items()
            if torch.equal(own[name].detach(), value.to(own[name].device, own[name].dtype))
        }

    def _load_into_shards(self, engine: Engine, state: Mapping[str, Any], *, strict: bool) -> None:
        module = self._connected_module()
        own = own_state(module)
        if not strict:
            state = {name: value for name, value in state.items() if name in own}
            own = {name: value for name, value in own.items() if name in state}
        self._refuse_mismatches(own, state)
        fqn = {id(p): plain_name(name) for name, p in module.named_parameters()}
        weights = {fqn[id(own[n])]: value for n, value in state.items() if id(own[n]) in fqn}
        others = {name: value for name, value in state.items() if id(own[name]) not in fqn}
        engine.load_full_state(weights, strict=False)
        if others:
            module.load_state_dict(others, strict=False)

    def _refuse_mismatches(self, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        optional = {n for n, value in own.items() if is_frozen(value)}
        problems = find_mismatches(own, state, optional if self._exclude_frozen_parameters else ())
        if problems:
            raise CheckpointError(
                f"Expected a checkpoint of {type(self.lightning_module).__qualname__}, got another "
                f"set of weights: {name_offenders(problems)}. Load it into the model it was saved "
                f"from, or set strict_loading=False on the module."
            )


@torch.no_grad()
def widen(module: nn.Module, wide: Mapping[str, Tensor]) -> None:
    """Copy exact values into ``module`` where it can hold them by now."""
    own = own_state(module) if wide else {}
    for name, value in wide.items():
        if not _is_wider(value, own[name]):
            own[name].copy_(value)


def _is_wider(value: object, than: object) -> bool:
    if not isinstance(value, Tensor) or not isinstance(than, Tensor):
        return False
    return torch.promote_types(value.dtype, than.dtype) != than.dtype


def _refuse_other_content(checkpoint: object, path: _PATH) -> None:
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"Expected a checkpoint dictionary, got a {type(checkpoint).__name__} ({path}). "
            f"Give the path of a file that a Trainer has saved."
        )
