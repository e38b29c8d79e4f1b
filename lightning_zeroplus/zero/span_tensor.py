"""A tensor that has a parameter's shape but holds this rank's span of it.

Elementwise operations with spans of the same parameter, full tensors and scalars run on the span
alone; norms, sums and comparisons exchange one number; everything else gathers the full tensor, on
all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lightning_zeroplus.comm.host.mapped import MappedWeights
from lightning_zeroplus.comm.private import forbid_raw_memory
from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.layout.span import Span
from lightning_zeroplus.zero.entry import Entry, memory_order

__all__ = ["Geometry", "SpanTensor", "SpanView", "gather_full", "refusal"]

aten = torch.ops.aten


class SpanTensor(torch.Tensor):
    """This rank's span of a tensor with the geometry of one parameter.

    ``local`` is 1-D ``[span]`` in the parameter's memory order.
    """

    _entry: Entry
    _local: torch.Tensor | None
    of_weight = False
    """Whether it came of a resting weight: then settings may refuse to gather it."""

    bumps_version = False
    """Whether writes count for the version of the parameter, as those through ``.data`` do not."""

    @staticmethod
    def __new__(cls, entry: Entry, local: torch.Tensor | None, dtype: torch.dtype) -> SpanTensor:
        """Make the wrapper; it is no inference tensor even in inference mode."""
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                entry.model.shape,
                strides=entry.model.stride,
                dtype=dtype,
                device=entry.unit.device,
                requires_grad=False,
            )
            forbid_raw_memory(made)
            return made

    def __init__(self, entry: Entry, local: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._entry = entry
        self._local = local

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def fqn(self) -> str:
        """Name of the parameter."""
        return self._entry.fqn

    @property
    def span(self) -> Span:
        """Range of the parameter's elements, in memory order, that this rank holds."""
        return self._entry.unit.layout.owned(self._entry.index, self._entry.unit.context.rank)

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements, 1-D; writes count. *Local.*"""
        assert self._local is not None
        return self._local

    is_whole = True
    """Whether this stands for all of a tensor, not for a view of one."""

    def is_span_of(self, entry: Entry) -> bool:
        """Return whether this holds the own span of ``entry``, and no view of it. *Local.*"""
        return self._entry is entry

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor on every rank; collective."""
        return gather_full(self._entry, self.to_local(), "full_tensor")

    def _may_gather(self, operation: str) -> None:
        """Refuse a gather where the settings say so."""
        if self.of_weight and not self._entry.unit.context.gathers_on_access:
            raise PhaseError(refusal(self._entry, operation))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Here, because the dispatch rules need this class.
        from lightning_zeroplus.zero.span_dispatch import dispatch

        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        span = self.span
        return (
            f"{type(self).__name__}({self.fqn}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"span=[{span.start}, {span.stop}))"
        )

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else super().__format__(spec)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, proto: object) -> Any:
        raise PhaseError(
            f"Expected a full tensor to pickle, got this rank's span of {self.fqn}. "
            f"Save span.full_tensor(), called on every rank."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SpanTensor:
        return SpanTensor(self._entry, self.to_local().clone(), self.dtype)

    def _no_memory(self, what: str) -> PhaseError:
        return PhaseError(
            f"Expected a full tensor for {what}, got this rank's span of {self.fqn}. "
            f"Use span.full_tensor(), called on every rank, or span.to_local()."
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full tensor as an array; collective."""
        self._may_gather("numpy")
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """Return the full tensor as lists; collective."""
        self._may_gather("tolist")
        return self.full_tensor().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        self._may_gather("__array__")
        return self.full_tensor().__array__(dtype)  # type: ignore[no-untyped-call]

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse: a span has no memory of the tensor's size."""
        raise self._no_memory("untyped_storage()")

    def data_ptr(self) -> int:
        """Refuse: a span has no memory of the tensor's size."""
        raise self._no_memory("data_ptr()")

    def share_memory_(self) -> torch.Tensor:
        """Refuse: a span has no memory of the tensor's size."""
        raise self._no_memory("share_memory_()")

    def __dlpack__(self, **_: Any) -> Any:
        raise self._no_memory("__dlpack__()")


class Geometry(NamedTuple):
    """Where a view lies in the memory-order buffer of the full tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of ``flat`` ``[numel]``."""
        return flat.as_strided(self.size, self.stride, self.offset)


class SpanView(SpanTensor):
    """A view of a span tensor, such as a row: writes reach the elements that this rank holds."""

    _whole: SpanTensor
    _geometry: Geometry
    is_whole = False

    @staticmethod
    def of(base: SpanTensor, geometry: Geometry) -> SpanView:
        """Return the view of ``base`` at ``geometry``."""
        with torch.inference_mode(False):
            made: Any = torch.Tensor._make_wrapper_subclass(
                SpanView,
                geometry.size,
                strides=geometry.stride,
                dtype=base.dtype,
                device=base.device,
                requires_grad=False,
            )
            forbid_raw_memory(made)
        made._entry, made._local, made.of_weight = base._entry, None, base.of_weight
        made.bumps_version = base.bumps_version
        made._whole, made._geometry = base, geometry
        return made  # type: ignore[no-any-return]

    def is_span_of(self, entry: Entry) -> bool:
        """Return False: a view is no span."""
        return False

    def to_local(self) -> torch.Tensor:
        """Refuse: which elements of a view this rank holds is no range."""
        raise PhaseError(
            f"Expected a whole gradient or weight for to_local(), got a view of {self.fqn}. "
            f"Use to_local() of what it is a view of, or full_tensor() on every rank."
        )

    def full_tensor(self) -> torch.Tensor:
        """Return the full view on every rank; collective."""
        full = self._whole.full_tensor()
        return self._geometry.of(memory_order(full, self._entry.model)).clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.full_tensor()


def refusal(entry: Entry, operation: str) -> str:
    """Return what an access to a resting weight says when it is refused."""
    return (
        f"Expected a full weight, got the sharded parameter {entry.fqn!r} at rest in {operation} "
        f"(rank {entry.unit.context.rank}). Wrap the access in full_parameters(...) on every rank, "
        f"or set unshard_on_access='gather'."
    )


def is_mapped(entry: Entry, local: torch.Tensor) -> bool:
    """Return whether ``local`` is of weights that are there for every rank of the host."""
    weights = entry.unit.weights
    return isinstance(weights, MappedWeights) and weights.holds(local)


def parts_of_all(entry: Entry) -> Iterator[torch.Tensor]:
    """Yield each rank's elements of a weight for which `is_mapped` holds, by rank; no copies."""
    unit = entry.unit
    assert isinstance(unit.weights, MappedWeights)
    start = unit.layout.offsets[entry.index]
    with unit.weights.reading() as whole:
        for rank in range(unit.layout.world_size):
            owned = unit.layout.owned(entry.index, rank)
            yield whole[start + owned.start : start + owned.stop]


@torch.no_grad()
def gather_full(entry: Entry, local: torch.Tensor, why: str) -> torch.Tensor:
    """Return the full tensor of which every rank holds ``local``, in the parameter's strides."""
    unit = entry.unit
    context = unit.context
    model = entry.model
    with torch.inference_mode(False):
        full = torch.empty_strided(
            model.shape, model.stride, dtype=local.dtype, device=local.device
        )
    flat = full.as_strided((model.numel,), (1,))
    if context.world_size == 1:
        flat.copy_(local)
        return full
    if is_mapped(entry, local):
        start = 0
        for part in parts_of_all(entry):
            flat[start : start + part.numel()] = part
            start += part.numel()
        return full
    owned = [unit.layout.owned(entry.index, r) for r in range(context.world_size)]
    most = max(span.numel for span in owned)
    mine = local.new_zeros(most)
    mine[: local.numel()] = local
    rows = local.new_empty(most * context.world_size)
    tag = context.weights_tag(Operation.TOUCH, unit.number, f"{entry.fqn} ({why})")
    context.transport.all_gather(rows, mine, tag).wait()
    for rank, span in enumerate(owned):
        flat[span.start : span.stop] = rows[rank * most : rank * most + span.numel]
    return full
