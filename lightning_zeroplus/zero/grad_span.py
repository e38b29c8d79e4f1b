"""The gradient that a parameter's own slot shows: this rank's span of the reduced gradient."""

from __future__ import annotations

from typing import Any

import torch

from lightning_zeroplus.zero.span_tensor import SpanTensor
from lightning_zeroplus.zero.unit import Entry

__all__ = ["GradSpan", "read_slot", "write_slot"]

_T: Any = torch.Tensor
_get_grad = _T.grad.__get__
_set_grad = _T.grad.__set__


class GradSpan(SpanTensor):
    """The accumulated gradient of one parameter; reading it settles what is still pending."""

    @classmethod
    def of(cls, entry: Entry) -> GradSpan:
        """Return the gradient of ``entry``; it has the accumulator's dtype."""
        made = SpanTensor.__new__(cls, entry, None, entry.unit.master_dtype)
        made.__init__(entry, None, entry.unit.master_dtype)  # type: ignore[misc]
        return made  # type: ignore[return-value]

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements of the accumulator, 1-D; writes count."""
        self._entry.unit.context.settle()
        return self._entry.unit.grad_view(self._entry.index)


def read_slot(param: torch.Tensor) -> torch.Tensor | None:
    """Return ``param.grad``, whatever the parameter's Python class says of ``grad``."""
    return _get_grad(param)  # type: ignore[no-any-return]


def write_slot(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set ``param.grad``, whatever the parameter's Python class says of ``grad``."""
    _set_grad(param, grad)
