"""`ZeroPlusStrategy`: the engine under Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zeroplus.config import (
    EngineConfig,
    FloatDtype,
    SaveFormat,
    Stage,
    TransportName,
    UnshardOnAccess,
    UnusedGradients,
)
from lightning_zeroplus.errors import ConfigError, PhaseError
from lightning_zeroplus.plugin.loops import (
    EvaluatingLoop,
    LoaderEnds,
    compare_training_batches,
    tell_loader_ends,
    tell_skipped_loop,
)
from lightning_zeroplus.plugin.registry import register
from lightning_zeroplus.plugin.resume import CHECKPOINT_KEY, Resume
from lightning_zeroplus.plugin.saving import DEFAULT_TIMEOUT
from lightning_zeroplus.plugin.sharding import ShardingStrategy, unwrapped
from lightning_zeroplus.zero import Engine

__all__ = ["ZeroPlusStrategy"]

_Output = TypeVar("_Output")


class ZeroPlusStrategy(ShardingStrategy):
    """Trains as DDP does, with optimizer state, gradients and weights sharded over the ranks.

    Args:
        stage: 1 shards optimizer state, 2 gradients too, 3 weights too.
        units: Class names, import paths or classes whose instances are unsharded together at
            stage 3, usually the repeated block of the model. None: found by itself.
        bucket_nbytes: Size in bytes of the buckets in which replicated weights and gradients are
            communicated. None: chosen for the transport.
        prefetch: Units unsharded ahead of need at stage 3.
        master_dtype: Type of the weights that the optimizer updates. None: the wider of fp32 and
            the parameter's own type.
        reduce_dtype: Type in which gradients are reduced and kept. None: as `master_dtype`.
        transport: What carries weights and gradients between ranks: "c10d" the process group,
            "shared_memory" the memory of the host, for ranks on the CPUs of one. "auto" chooses.
        unused_gradients: What the optimizer sees of a parameter without a gradient on any rank:
            "skip" leaves it alone as PyTorch does, "zero" gives zeros as DeepSpeed does.
        unshard_on_access: What reading a resting stage-3 weight does outside of its module's
            forward: "gather" it, on all ranks together, or "error".
        save_format: "universal" has every rank write its part of a folder that loads at any stage
            and world size, and that `torch.distributed.checkpoint` opens; "full" gathers to rank 0
            and writes one `.ckpt` file, which DDP loads too.
        exclude_frozen_parameters: Leave parameters that need no gradient out of checkpoints;
            loading such a checkpoint keeps the frozen values that the module has.
        accelerator: As in `DDPStrategy`.
        parallel_devices: As in `DDPStrategy`.
        cluster_environment: As in `DDPStrategy`.
        checkpoint_io: As in `DDPStrategy`. None: files are written atomically and read mapped.
        precision_plugin: As in `DDPStrategy`.
        process_group_backend: As in `DDPStrategy`.
        timeout: Longest silence of a peer before an error. None: 30 minutes.
        start_method: How processes are started: "popen" runs the script again, "spawn", "fork"
            and "forkserver" are those of `multiprocessing`.

    Raises:
        ConfigError: a setting outside what it allows.
    """

    def __init__(  # noqa: PLR0913  # every setting is one
        self,
        stage: Stage = 2,
        *,
        units: list[str | type[nn.Module]] | None = None,
        bucket_nbytes: int | None = None,
        prefetch: int = 1,
        master_dtype: FloatDtype | None = None,
        reduce_dtype: FloatDtype | None = None,
        transport: TransportName = "auto",
        unused_gradients: UnusedGradients = "skip",
        unshard_on_access: UnshardOnAccess = "gather",
        save_format: SaveFormat = "universal",
        exclude_frozen_parameters: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if save_format not in get_args(SaveFormat):
            raise ConfigError(
                f"Expected save_format 'universal' or 'full', got {save_format!r}. Use one of them."
            )
        if transport not in get_args(TransportName):
            raise ConfigError(
                f"Expected transport 'auto', 'c10d' or 'shared_memory', got {transport!r}. "
                f"Use one of them."
            )
        config = EngineConfig(
            stage=stage,
            units=None if units is None else tuple(units),
            bucket_nbytes=bucket_nbytes,
            prefetch=prefetch,
            master_dtype=master_dtype,
            reduce_dtype=reduce_dtype,
            unused_gradients=unused_gradients,
            unshard_on_access=unshard_on_access,
        )
        super().__init__(
            config,
            transport=transport,
            save_format=save_format,
            exclude_frozen_parameters=exclude_frozen_parameters,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._loader_ends: LoaderEnds | None = None
        self._resume = Resume()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make the names of this package known to ``strategy_registry``."""
        register(strategy_registry)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_loader_ends"] = None
        state["_resume"] = Resume()
        return state

    # -- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's training step on unsharded weights."""
        with self.engine.forward_pass(evaluation=False):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's validation step on unsharded weights."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's test step on unsharded weights."""
        return self._evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step on unsharded weights."""
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., _Output], *args: Any, **kwargs: Any) -> _Output:
        try:
            with self.engine.forward_pass(evaluation=True):
                return step(*args, **kwargs)
        except StopIteration:
            # The step fetches for itself and has found its iterator empty.
            if self._loader_ends is not None:
                self._loader_ends.finish()
            raise

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward; hooks after it find reduced gradients."""
        module = self._connected_module()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self.engine.backward_pass():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate the gradients of the backwards inside, however the stage keeps them."""
        with self.engine.block_backward_sync():
            yield

    # -- loops

    @override
    def on_train_start(self) -> None:
        """Compare from now on whether the ranks' training batches end together; resume."""
        self._compare_training_batches()
        self._resume.on_train_start()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Answer a requeue signal; a reloaded dataloader is compared like the first."""
        self._compare_training_batches()
        if self._requeue is not None:
            self._requeue.act_if_noted()

    @override
    def on_train_end(self) -> None:
        """Answer a requeue signal that came with the last batch."""
        if self._requeue is not None:
            self._requeue.act_if_noted()

    @override
    def on_validation_start(self) -> None:
        """Evaluate with rank 0's buffers; ranks whose batches have ended serve the others."""
        self._tell_loader_ends()
        self._resume.on_validation_start()

    @override
    def on_test_start(self) -> None:
        """Evaluate with rank 0's buffers; ranks whose batches have ended serve the others."""
        self._tell_loader_ends()

    @override
    def on_predict_start(self) -> None:
        """Evaluate with rank 0's buffers; ranks whose batches have ended serve the others."""
        self._tell_loader_ends()

    def _tell_loader_ends(self) -> None:
        trainer = self._connected_module().trainer
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        self._loader_ends = tell_loader_ends(
            loop, self.engine.begin_evaluation, self.engine.end_evaluation
        )

    @override
    def _end_run(self) -> None:
        try:
            self._serve_skipped_evaluation()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._loader_ends = None
            try:
                module = self.lightning_module
                self._resume.close(None if module is None else module._trainer)
            finally:
                super()._end_run()

    def _serve_skipped_evaluation(self) -> None:
        """A rank without a single batch skips its loop, but its peers may need its shards."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if self._engine is None or self._failed or self._loader_ends is not None or trainer is None:
            return
        loops: dict[TrainerFn | None, EvaluatingLoop] = {
            TrainerFn.VALIDATING: trainer.validate_loop,
            TrainerFn.TESTING: trainer.test_loop,
            TrainerFn.PREDICTING: trainer.predict_loop,
        }
        loop = loops.get(trainer.state.fn)
        if loop is not None:
            tell_skipped_loop(loop, self._engine.begin_evaluation, self._engine.end_evaluation)

    def _compare_training_batches(self) -> None:
        if self.world_size > 1:
            compare_training_batches(self._connected_module().trainer.fit_loop, self._exchange)

    def _exchange(self, number: int) -> list[int]:
        return [int(row[0]) for row in self.engine.exchange([float(number)])]

    # -- resuming: generators of random numbers, positions of dataloaders

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return ``dataloader``; a training epoch that is resumed goes on where it stood."""
        return self._resume.process(self._connected_module().trainer, dataloader)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` with what each rank needs to go on; collective."""
        if "optimizer_states" in checkpoint:  # not one of weights alone
            own = self._resume.capture(self._connected_module().trainer)
            checkpoint[CHECKPOINT_KEY] = self._gather_objects(own, "what a rank resumes from")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at rank 0's path; collective."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._engine is None:  # not one that a callback loads inside of a fit
            saved = checkpoint.get(CHECKPOINT_KEY)
            self._resume.restore(saved, self.global_rank, self.world_size)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each optimizer's state; Lightning's counters are loaded by now."""
        super().load_optimizer_state_dict(checkpoint)
        self._resume.arm(self._connected_module().trainer)

    # -- full values

    def full_parameters(
        self,
        module_or_params: nn.Module | Iterable[nn.Parameter] | None = None,
        writeback: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside the context the parameters have their full values on every rank; collective.

        Args:
            module_or_params: whose parameters; None: all.
            writeback: keep edits that are made inside.
        """
        if self._engine is None:  # full values are all there is
            return nullcontext()
        return self._engine.full_parameters(module_or_params, writeback=writeback)

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the full reduced gradient of ``param`` on every rank, or None; collective."""
        return self.engine.full_gradient(param)

    def full_optimizer_state(self, param: nn.Parameter, key: str) -> Any:
        """Return what ``param``'s optimizer keeps under ``key``, in full shape; collective.

        Raises:
            PhaseError: no optimizer of a fit has ``param``.
        """
        engine, optimizer = self._optimizer_of(param)
        return engine.full_optimizer_state(optimizer, param, key)

    def set_full_optimizer_state(self, param: nn.Parameter, key: str, value: Any) -> None:
        """Give every rank its span of ``value`` as ``param``'s state under ``key``.

        Raises:
            PhaseError: no optimizer of a fit has ``param``.
        """
        engine, optimizer = self._optimizer_of(param)
        engine.set_full_optimizer_state(optimizer, param, key, value)

    def grad_norm(
        self, params: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Return the norm of all gradients over all ranks, 0-d fp32; collective."""
        return self.engine.grad_norm(params, norm_type=norm_type)

    def memory_report(self) -> Any:
        """Return this rank's bytes per role, measured from live storages."""
        return self.engine.memory_report()

    def _optimizer_of(self, param: nn.Parameter) -> tuple[Engine, Optimizer]:
        if self._optimizer_engine is not None:
            for optimizer in self.optimizers:
                if any(p is param for group in optimizer.param_groups for p in group["params"]):
                    return self._optimizer_engine, unwrapped(optimizer)
        raise PhaseError(
            "Expected a parameter of one of the fit's optimizers, got one that none of them has. "
            "Call this during a fit or after it, with a parameter of the module."
        )


ZeroPlusStrategy.__module__ = "lightning_zeroplus"
