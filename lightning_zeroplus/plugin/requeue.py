"""SLURM's requeue signal, answered by all ranks at the same batch.

Lightning saves in the signal handler, wherever each rank happens to be. Saving a sharded model
takes all ranks, so the handler only notes the signal here, and the ranks act on it together.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

__all__ = ["Requeue"]


class Requeue:
    """The requeue signal of one fit.

    Args:
        trainer: its signal handlers are not registered yet.
        agree: returns whether any rank passed True; collective.
    """

    def __init__(self, trainer: Trainer, agree: Callable[[bool], bool]) -> None:
        self._signals = trainer._signal_connector
        self._agree = agree
        self._noted: int | None = None
        self._act: Callable[[int, Any], None] = self._signals._slurm_sigusr_handler_fn
        vars(self._signals)["_slurm_sigusr_handler_fn"] = self._note

    @staticmethod
    def is_on(trainer: Trainer) -> bool:
        """Return whether ``trainer`` answers requeue signals at all."""
        environment = trainer._accelerator_connector.cluster_environment
        return isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)

    def act_if_noted(self) -> None:
        """Save and requeue if any rank has got the signal; collective."""
        if self._agree(self._noted is not None):
            signum, self._noted = self._noted, None
            self._act(signum if signum is not None else 0, None)

    def close(self) -> None:
        """Give Lightning its handler back."""
        vars(self._signals).pop("_slurm_sigusr_handler_fn", None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted = signum
