"""The gradient that a parameter's own slot shows: this rank's span of the reduced gradient."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.span_tensor import SpanTensor

__all__ = ["AS_PLAIN", "GradSpan", "get_grad", "read_slot", "set_grad", "write_slot"]

_T: Any = torch.Tensor
AS_PLAIN = torch._C.DisableTorchFunctionSubclass
"""Context in which a parameter's class is not asked first, for ten times the price."""

get_grad = _T.grad.__get__
set_grad = _T.grad.__set__


class GradSpan(SpanTensor):
    """The accumulated gradient of one parameter; reading it settles what is still pending."""

    # Weak: a parameter holds its gradient where the garbage collector does not look.
    _entry_ref: weakref.ref[Entry]

    @property
    def _entry(self) -> Entry:
        entry = self._entry_ref()
        if entry is None:
            raise PhaseError("Expected a gradient of a live engine, got one whose engine is gone.")
        return entry

    @_entry.setter
    def _entry(self, entry: Entry) -> None:
        self._entry_ref = weakref.ref(entry)

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
    with AS_PLAIN():
        return get_grad(param)  # type: ignore[no-any-return]


def write_slot(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set ``param.grad``, whatever the parameter's Python class says of ``grad``."""
    with AS_PLAIN():
        set_grad(param, grad)
