"""From the set-up of a run to its teardown: when the module is sharded, and when it is whole."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_zeroplus.comm import choose_transport
from lightning_zeroplus.config import EngineConfig, SaveFormat, TransportName
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.layout import STAGES, Placement
from lightning_zeroplus.plugin import checks
from lightning_zeroplus.plugin.checkpointing import CheckpointingStrategy, widen
from lightning_zeroplus.plugin.precision import GradientRoute, fit_to_device, wide_weights
from lightning_zeroplus.plugin.requeue import Requeue
from lightning_zeroplus.plugin.saving import DEFAULT_TIMEOUT, owns_parameters
from lightning_zeroplus.zero import Engine, shard

__all__ = ["ShardingStrategy", "unwrapped"]

_OF_ONE_PROCESS = (
    "_engine",
    "_optimizer_engine",
    "_sharded_module",
    "_transport",
    "_saving_transport",
    "_pending",
    "_own_state",
    "_route",
    "_requeue",
)


class ShardingStrategy(CheckpointingStrategy):
    """The set-up and teardown half of `ZeroPlusStrategy`.

    Args:
        config: settings of the engine.
        save_format: of checkpoints.
        exclude_frozen_parameters: leave parameters that need no gradient out of checkpoints.
        kwargs: those of `DDPStrategy`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        transport: TransportName,
        save_format: SaveFormat,
        exclude_frozen_parameters: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._config = config
        self._transport_name = transport
        self._save_format = save_format
        self._exclude_frozen_parameters = exclude_frozen_parameters
        self._sharded_module: nn.Module | None = None
        self._route: GradientRoute | None = None
        self._requeue: Requeue | None = None
        self._failed = False
        self._weights_lost = False

    @property
    def engine(self) -> Engine:
        """What shards the module of the run that is under way.

        Raises:
            PhaseError: no run is under way.
        """
        if self._engine is None:
            raise PhaseError(
                "Expected a run under way, got none: there are shards between the set-up and the "
                "teardown of fit, validate, test and predict. Call this from a hook or a callback."
            )
        return self._engine

    @override
    def setup_environment(self) -> None:
        """Join the process group; the precision plugin is then for this rank's device."""
        checks.refuse_devices(self.parallel_devices or [])
        super().setup_environment()
        if self._precision_plugin is not None:
            self._precision_plugin = fit_to_device(self._precision_plugin, self.root_device.type)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Shard the connected module, then make its optimizers; collective.

        Raises:
            ConfigError: the model, an optimizer, a callback or a plugin cannot work sharded.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._failed = self._weights_lost = False
        checks.refuse_precision(self.precision_plugin)
        checks.refuse_callbacks(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        engine = self._shard_connected_module(fitting=fitting)
        if fitting:
            if self._optimizer_engine is not None:
                self._optimizer_engine.detach_optimizers()
            self._reset_optimizers_and_schedulers()
            self._optimizer_engine = engine
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._route = GradientRoute(self.precision_plugin, engine)
            if Requeue.is_on(trainer):
                self._requeue = Requeue(trainer, self._any_rank)

    def _shard_connected_module(self, *, fitting: bool) -> Engine:
        """Return the engine of the connected module: the live one, or a new one."""
        module = self._connected_module()
        if self._engine is not None:
            if self._sharded_module is module:
                return self._engine
            self._engine.close()
            self._engine = None
        if fitting:
            if self._layer_sync is not None:
                self._layer_sync.apply(module)
            checks.refuse_sync_batchnorm(module, self.root_device)
        loaded = self._take_wide_state(module)
        originals = wide_weights(module, self.precision_plugin.convert_module)
        widen(module, loaded)  # a 64-true run was loaded into the fp32 module that it was made as
        if self._transport is None:
            self._transport = choose_transport(
                self._transport_name, self.root_device, timeout=self._timeout or DEFAULT_TIMEOUT
            )
            if self._transport.world_size == 1:
                rank_zero_info("ZeroPlusStrategy runs on one rank: it works, and shards nothing.")
        self._sharded_module = module
        self._engine = shard(
            module, self._config, self._transport, device=self.root_device, originals=originals
        )
        self.model_to_device()
        self._load_waiting_state(self._engine)
        return self._engine

    @override
    def model_to_device(self) -> None:
        """Move what is neither parameter nor buffer; those went with the shards."""
        for part in self._connected_module().modules():
            if isinstance(part, Metric):
                part.to(self.root_device)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers; whichever are set during a fit step on shards."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._lightning_optimizers = [
            LightningOptimizer._to_lightning_optimizer(optimizer, self) for optimizer in optimizers
        ]
        # After a fit its optimizers stay here to be saved, and a later evaluation sets them again.
        if self._engine is None or self._engine is not self._optimizer_engine:
            return
        checks.refuse_optimizers(optimizers)
        for optimizer in filter(owns_parameters, optimizers):
            self._engine.attach(unwrapped(optimizer))

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Note the failure and tell peers; local, since other ranks may be anywhere."""
        self._failed = True
        if self._transport is not None:
            self._transport.fail(f"{type(exception).__name__}: {exception}")

    @override
    def teardown(self) -> None:
        """Leave the module in ordinary memory with its full weights; collective after success.

        After an exception nothing is exchanged: weights of which this rank has only a span are
        then lost, and reading them is an error.
        """
        try:
            self._end_run()
        finally:
            module = self._lightning_module
            if self._weights_lost:  # what cannot be read cannot be moved
                self._lightning_module = None
            try:
                super().teardown()  # waits for a checkpoint that is being written
            finally:
                self._lightning_module = module
                self._saving_transport = None

    def _end_run(self) -> None:
        engine, self._engine = self._engine, None
        self._sharded_module = None
        if self._route is not None:
            self._route.close()
        if self._requeue is not None:
            self._requeue.close()
        self._route = self._requeue = None
        self._waiting_state, self._wide_state = None, {}
        if self._failed:
            # What peers wait for would never come over this transport again.
            self._optimizer_engine = self._transport = None
            if engine is not None:
                row = STAGES[self._config.stage]
                self._weights_lost = row.weight is Placement.FLAT and self.world_size > 1
                engine.abandon()
        elif engine is not None:
            engine.close()

    def _any_rank(self, decision: bool) -> bool:
        return bool(self.reduce_boolean_decision(decision, all=False))

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.update(dict.fromkeys(_OF_ONE_PROCESS))
        return state

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Make tensors on the meta device if ``empty_init``, otherwise on the CPU.

        Sharding then moves them unit by unit, so no rank ever has the whole model on its device.
        """
        where = torch.device("meta") if empty_init else nullcontext()
        with _EmptyInit(enabled=False), where, self.precision_plugin.tensor_init_context():
            yield


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the user's object behind Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
