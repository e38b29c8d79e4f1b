"""Checkpoints in one file: Lightning's own keys, gathered to rank 0, loadable at any stage.

Loading has two phases. Weights are loaded into the module before it is sharded, so callbacks and
hooks that edit them there work as under DDP; optimizer state is loaded once there are optimizers.
Only what is on the meta device waits until the engine has given it memory, and only a restore in
the middle of a run (the learning rate finder's) goes through the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.checkpoint import align_names, find_mismatches, plain_name
from lightning_zeroplus.comm import Operation, Tag, Transport
from lightning_zeroplus.errors import CheckpointError, name_offenders
from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO
from lightning_zeroplus.zero import Engine

__all__ = ["CheckpointingStrategy"]


class CheckpointingStrategy(DDPStrategy):
    """The saving and loading half of `ZeroPlusStrategy`."""

    _engine: Engine | None = None
    """Shards the module of the run that is under way."""

    _optimizer_engine: Engine | None = None
    _transport: Transport | None = None
    """Holds the state of `optimizers`; outlives the run, so that it can still be saved."""

    _exclude_frozen_parameters: bool = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._waiting_state: dict[str, Any] | None = None
        self._waiting_strict = True
        self._wide_state: dict[str, Tensor] = {}

    # -- saving

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's full state, on rank 0; elsewhere the same names without values.

        Collective while a run is under way. Names are free of wrapper prefixes; a tied weight is
        there under each of its names.
        """
        module = self._connected_module()
        own = own_state(module)
        if self._exclude_frozen_parameters:
            own = {name: value for name, value in own.items() if not _is_frozen(value)}
        if self._engine is None:
            return {plain_name(name): _detached(value) for name, value in own.items()}
        weights = self._gather_weights(self._engine, module)
        return {
            plain_name(name): _saved(value, weights, keep=self.is_global_zero)
            for name, value in own.items()
        }

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return torch's own state dict of ``optimizer``, full, on rank 0; elsewhere {}.

        Collective, during a run and after it.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._optimizer_engine is None or not owns_parameters(optimizer):
            return super().optimizer_state(optimizer)
        return self._optimizer_engine.full_optimizer_state_dict(optimizer, keep_on=0)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` on rank 0; collective, so that all ranks see a failure.

        Raises:
            CheckpointError: rank 0 could not write.
        """
        failure: Exception | None = None
        if self.is_global_zero:
            try:
                self.checkpoint_io.save_checkpoint(
                    checkpoint, filepath, storage_options=storage_options
                )
            except Exception as error:  # noqa: BLE001  # raised below, when all ranks know of it
                failure = error
        reason = self._tell("" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if reason:
            raise CheckpointError(
                f"Expected rank 0 to write a checkpoint, got {reason} ({filepath}). See its error."
            )

    def _tell(self, text: str) -> str:
        """Return rank 0's text on every rank; a peer that has failed instead is named."""
        if self._transport is None:
            return self.broadcast(text)
        tag = Tag(0, Operation.SETUP, -1, "a checkpoint's outcome")
        return self._transport.exchange_bytes(text.encode(), tag)[0].decode()

    # -- loading

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at rank 0's path, its tensors mapped from the file; collective.

        Raises:
            FileNotFoundError: there is nothing at the path.
            CheckpointError: the file is damaged, or a peer could not read it.
        """
        path = self.broadcast(checkpoint_path)
        checkpoint: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            _refuse_other_content(checkpoint, path)
        except Exception as error:  # noqa: BLE001  # raised below, when all ranks know of it
            failure = error
        all_read = self.reduce_boolean_decision(failure is None)
        if failure is not None:
            raise failure
        if not all_read:
            raise CheckpointError(
                f"Expected every rank to read a checkpoint, got a failure on a peer ({path}). "
                f"See its error; the path must be reachable from every machine."
            )
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
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if engine is None or not owns_parameters(optimizer):
                optimizer.load_state_dict(state)
                _optimizer_to_device(optimizer, self.root_device)
            else:
                engine.load_full_optimizer_state_dict(optimizer, state)

    # -- where

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files: the user's, or `ZeroPlusCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = ZeroPlusCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = ZeroPlusCheckpointIO()  # kept if it has one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

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

    def _gather_weights(self, engine: Engine, module: nn.Module) -> dict[int, Tensor]:
        """Return full weights on rank 0 by the parameter's id; collective."""
        identity = {
            plain_name(name): id(p) for name, p in module.named_parameters(remove_duplicate=False)
        }
        return {
            identity[fqn]: tensor
            for fqn, tensor in engine.iterate_full_state(keep_on=0)
            if tensor is not None and fqn in identity
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
        optional = {n for n, value in own.items() if _is_frozen(value)}
        problems = find_mismatches(own, state, optional if self._exclude_frozen_parameters else ())
        if problems:
            raise CheckpointError(
                f"Expected a checkpoint of {type(self.lightning_module).__qualname__}, got another "
                f"set of weights: {name_offenders(problems)}. Load it into the model it was saved "
                f"from, or set strict_loading=False on the module."
            )

    def _connected_module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def own_state(module: nn.Module) -> dict[str, Any]:
    """Return ``module.state_dict()`` with the parameters themselves as values; nothing is read.

    A class whose `state_dict` cannot be asked for the parameters gives its values instead.
    """
    parameters = inspect.signature(module.state_dict).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if takes_any or "keep_vars" in parameters:
        return dict(module.state_dict(keep_vars=True))
    return dict(module.state_dict())


def owns_parameters(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` can be sharded at all.

    Lightning's stand-in for "no optimizer" holds a tensor of its own.
    """
    return any(isinstance(p, nn.Parameter) for g in optimizer.param_groups for p in g["params"])


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


def _is_frozen(value: object) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _saved(value: Any, weights: Mapping[int, Tensor], *, keep: bool) -> Any:
    if not isinstance(value, nn.Parameter):
        return _detached(value)
    if keep and id(value) in weights:
        return weights[id(value)]
    if keep:
        return value.detach()
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _refuse_other_content(checkpoint: object, path: _PATH) -> None:
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"Expected a checkpoint dictionary, got a {type(checkpoint).__name__} ({path}). "
            f"Give the path of a file that a Trainer has saved."
        )
