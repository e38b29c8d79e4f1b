"""Norm, clipping and unscaling over the spans of reduced gradients, agreed over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.zero.context import Context
from lightning_zeroplus.zero.norm import power_sum, root_of
from lightning_zeroplus.zero.ranges import named_range

__all__ = ["Gradients"]


class Gradients:
    """Works on this rank's spans, each logical parameter given once. Collective unless *local*."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _everyones(self, value: float) -> list[float]:
        tag = self._context.gradients_tag(Operation.NORM)
        return [row[0] for row in self._context.transport.exchange([value], tag)]

    @named_range("norm")
    def norm(self, grads: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """Return the global norm; 0-d, fp64 if a gradient is, else fp32.

        Raises:
            ConfigError: an order of 0 or below.
        """
        if not order > 0:
            raise ConfigError(f"Expected a norm_type above 0, got {order}.")
        parts = self._everyones(power_sum(grads, order))
        if any(map(math.isnan, parts)):
            total = math.nan
        elif order == math.inf:
            total = max(parts)
        else:
            total = root_of(math.inf if math.inf in parts else math.fsum(parts), order)
        widest = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
        dtype = torch.float64 if widest else torch.float32
        return torch.tensor(total, dtype=dtype, device=self._context.device)

    @torch.no_grad()
    def clip_norm_(
        self,
        grads: Sequence[torch.Tensor],
        max_norm: float,
        order: float,
        error_if_nonfinite: bool,
    ) -> torch.Tensor:
        """Scale so that the global norm is at most ``max_norm``; return the norm before.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing is changed.
        """
        norm = self.norm(grads, order)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"The total norm of order {order} for gradients from `parameters` is non-finite, "
                f"so it cannot be clipped. To disable this error and scale the gradients by the "
                f"non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        scale = float(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
        for grad in grads:
            grad.mul_(scale)
        return norm

    @torch.no_grad()
    def clip_value_(self, grads: Sequence[torch.Tensor], value: float) -> None:
        """Clamp every element to ``[-value, value]``. *Local.*"""
        for grad in grads:
            grad.clamp_(-value, value)

    @torch.no_grad()
    def unscale_(self, grads: Sequence[torch.Tensor], inverse_scale: float) -> bool:
        """Multiply by ``inverse_scale``; return whether any rank saw a non-finite element."""
        overflow = False
        for grad in grads:
            grad.mul_(inverse_scale)
            overflow = overflow or not bool(torch.isfinite(grad).all())
        return any(self._everyones(float(overflow)))
