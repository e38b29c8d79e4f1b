"""Saving: universal directories written by all ranks, or one file gathered to rank 0."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.checkpoint import Group, pack, unpack
from lightning_zeroplus.comm import Operation, Tag, Transport, shared_transport
from lightning_zeroplus.config import EngineConfig, SaveFormat
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.layout.names import plain_name
from lightning_zeroplus.plugin.checkpoint_io import (
    PendingSave,
    ZeroPlusCheckpointIO,
    innermost,
    is_async,
)
from lightning_zeroplus.plugin.universal import OwnState, TransportGroup, shard_checkpoint
from lightning_zeroplus.zero import Engine

__all__ = ["DEFAULT_TIMEOUT", "SavingStrategy", "is_frozen", "own_state", "owns_parameters"]

DEFAULT_TIMEOUT = timedelta(minutes=30)


class SavingStrategy(DDPStrategy):
    """The saving part of `ZeroPlusStrategy`."""

    _engine: Engine | None = None
    """Shards the module of the run that is under way."""

    _optimizer_engine: Engine | None = None
    """Holds the state of `optimizers`; outlives the run, so that it can still be saved."""

    _transport: Transport | None = None
    _exclude_frozen_parameters: bool = False
    _save_format: SaveFormat = "universal"
    _config: EngineConfig

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._own_state: OwnState | None = None
        self._pending: PendingSave | None = None
        self._saving_transport: Transport | None = None
        self._told_foreign_io = self._told_how_to_load = self._told_linked = False

    # -- saving

    @property
    def _writes_universal(self) -> bool:
        if self._save_format != "universal":
            return False
        if isinstance(innermost(self.checkpoint_io), ZeroPlusCheckpointIO):
            return True
        if not self._told_foreign_io:
            self._told_foreign_io = True
            rank_zero_warn(
                f"Expected ZeroPlusCheckpointIO for universal checkpoints, got "
                f"{type(innermost(self.checkpoint_io)).__name__}: it gets the whole checkpoint on "
                f"rank 0, as under DDP. Derive it from ZeroPlusCheckpointIO, or set "
                f"save_format='full'."
            )
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state by name, free of wrapper prefixes; collective during a run.

        With ``save_format="full"`` the values are full on rank 0 and have no memory elsewhere. With
        "universal" nothing is gathered: sharded weights are tensors of which each rank holds its
        span, and which reading gathers. A tied weight is there under each of its names.
        """
        module = self._connected_module()
        own = own_state(module)
        if self._exclude_frozen_parameters:
            own = {name: value for name, value in own.items() if not is_frozen(value)}
        engine = self._engine
        if self._writes_universal:
            engine = engine or self._optimizer_engine
            if engine is not None and engine.module is module:
                self._own_state = OwnState(engine, own)
                return dict(self._own_state.values)
            engine = None
        if engine is None:
            return {plain_name(name): _detached(value) for name, value in own.items()}
        weights = self._gather_weights(engine, module)
        return {
            plain_name(name): _saved(value, weights, keep=self.is_global_zero)
            for name, value in own.items()
        }

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of ``optimizer``; collective, during a run and after it.

        With ``save_format="full"`` torch's own state dict, on rank 0, and {} elsewhere; with
        "universal" one that is keyed by name, with this rank's spans.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._optimizer_engine is None or not owns_parameters(optimizer):
            return super().optimizer_state(optimizer)
        if self._writes_universal:
            return self._optimizer_engine.own_optimizer_state(optimizer)
        return self._optimizer_engine.full_optimizer_state_dict(optimizer, keep_on=0)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint``, every rank its own part or rank 0 all of it; collective.

        Raises:
            CheckpointError: a rank could not write; on every rank.
        """
        if self._writes_universal:
            self._save_universal(checkpoint, filepath, storage_options)
            return
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

    def _save_universal(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        state, self._own_state = self._own_state, None
        background = is_async(self.checkpoint_io)
        group = self._saving_group(apart=background)
        sharded = shard_checkpoint(checkpoint, state, group.rank)
        sharded.facts = {
            "stage": self._config.stage,
            "epoch": checkpoint.get("epoch"),
            "global_step": checkpoint.get("global_step"),
            "module": type(self.lightning_module).__qualname__,
            "lightning": checkpoint.get("pytorch-lightning_version"),
            "torch": torch.__version__,
            "lightning_zeroplus": _own_version(),
        }
        if background:
            self._wait_for_save()  # one copy of the state in memory is enough
            if self._pending is not None:
                self._pending.raise_failure()
            sharded = sharded.snapshot()
        pending = PendingSave(sharded, group)
        self._pending = pending if background else None
        try:
            self.checkpoint_io.save_checkpoint(
                pending,  # type: ignore[arg-type]  # ours knows it, wrappers hand it on
                filepath,
                storage_options=storage_options,
            )
        finally:
            if not background:
                pending.expire()
        if background and self._is_linked():
            pending.wait()
            pending.raise_failure()
        if not self._told_how_to_load:
            self._told_how_to_load = True
            rank_zero_info(
                f"Saved a universal checkpoint, which is a folder ({filepath}). Outside of a "
                f"Trainer load it with lightning_zeroplus.load_from_checkpoint"
                f"({type(self.lightning_module).__name__}, path)."
            )

    def _is_linked(self) -> bool:
        """Return whether Lightning will link to a checkpoint as soon as its save returns."""
        callbacks = self._connected_module().trainer.checkpoint_callbacks
        linked = any(getattr(callback, "save_last", None) == "link" for callback in callbacks)
        if linked and not self._told_linked:
            self._told_linked = True
            rank_zero_warn(
                "ModelCheckpoint(save_last='link') links to a checkpoint at once, so training "
                "waits until it is written. Use save_last=True with AsyncCheckpointIO."
            )
        return linked

    def _gather_objects(self, own: Any, what: str) -> list[Any]:
        """Return what each rank has passed, by rank: plain types and tensors; collective."""
        rows = self._saving_group(apart=False).exchange(pack(own), what)
        return [unpack(row) for row in rows]

    def _saving_group(self, *, apart: bool) -> Group:
        """Return the ranks that save; ``apart`` from what training exchanges meanwhile."""
        if self._transport is not None and not apart:
            return TransportGroup(self._transport)
        if self._saving_transport is None:
            self._saving_transport = shared_transport(
                "saving", timeout=self._timeout or DEFAULT_TIMEOUT
            )
        return TransportGroup(self._saving_transport)

    def _wait_for_save(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint, not before one that is being written is complete."""
        if not self.is_global_zero:
            return
        if self._pending is None or not self._pending.remove_after(filepath):
            self.checkpoint_io.remove_checkpoint(filepath)

    def _tell(self, text: str) -> str:
        """Return rank 0's text on every rank; a peer that has failed instead is named."""
        if self._transport is None:
            return self.broadcast(text)
        tag = Tag(0, Operation.SETUP, -1, "a checkpoint's outcome")
        return self._transport.exchange_bytes(text.encode(), tag)[0].decode()

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

    def _connected_module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def _own_version() -> str:
    try:
        return version("lightning-zeroplus")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


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


def is_frozen(value: object) -> bool:
    """Return whether ``value`` is a parameter that needs no gradient."""
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
