"""A tensor that has a parameter's shape but holds this rank's span of it.

Elementwise operations with spans of the same parameter, full tensors and scalars run on the span
alone; norms, sums and comparisons exchange one number; everything else gathers the full tensor, on
all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_zeroplus.comm.transport import Operation
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.layout.span import Span
from lightning_zeroplus.zero.norm import power_sum, root_of
from lightning_zeroplus.zero.unit import Entry, memory_order

__all__ = ["SpanTensor", "gather_full"]

aten = torch.ops.aten


class SpanTensor(torch.Tensor):
    """This rank's span of a tensor with the geometry of one parameter.

    ``local`` is 1-D ``[span]`` in the parameter's memory order.
    """

    _entry: Entry
    _local: torch.Tensor | None

    @staticmethod
    def __new__(cls, entry: Entry, local: torch.Tensor | None, dtype: torch.dtype) -> SpanTensor:
        """Make the wrapper; it is no inference tensor even in inference mode."""
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls,
                entry.model.shape,
                strides=entry.model.stride,
                dtype=dtype,
                device=entry.unit.device,
                requires_grad=False,
            )

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

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor on every rank; collective."""
        return gather_full(self._entry, self.to_local(), "full_tensor")

    def _may_gather(self, operation: str) -> None:
        """Refuse a gather where the settings say so."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        span = self.span
        return (
            f"{type(self).__name__}({self.fqn}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"span=[{span.start}, {span.stop}))"
        )

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
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """Return the full tensor as lists; collective."""
        return self.full_tensor().tolist()

    def __array__(self, dtype: Any = None) -> Any:
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


# -- dispatch


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _HANDLERS.get(func)
    if handler is not None:
        done = handler(func, args, kwargs)
        if done is not NotImplemented:
            return done
    if func._schema.name.startswith("aten::_foreach_"):
        done = _foreach(func, args, kwargs)
    elif _is_elementwise(func):
        done = _elementwise(func, args, kwargs)
    else:
        done = NotImplemented
    return _on_full(func, args, kwargs) if done is NotImplemented else done


_ELEMENTWISE = {
    aten.copy_.default,
    aten.clone.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.nan_to_num_.default,
}


def _is_elementwise(func: Any) -> bool:
    if func in _ELEMENTWISE:
        return True
    tags = func.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[n] if n < len(args) else kwargs.get(argument.name))
    return found


def _localise(item: Any, lead: SpanTensor) -> Any:
    """Return what stands for ``item`` beside the local part of ``lead``; raises if none does."""
    if isinstance(item, SpanTensor):
        if item._entry is lead._entry or _same_geometry(item, lead):
            return item.to_local()
        raise _NotLocalError
    if not isinstance(item, torch.Tensor) or item.dim() == 0:
        return item
    if item.dim() > lead.dim():
        raise _NotLocalError
    try:
        full = item.expand(lead.shape)
    except RuntimeError as error:
        raise _NotLocalError from error
    span = lead.span
    return memory_order(full, lead._entry.model)[span.start : span.stop]


class _NotLocalError(Exception):
    pass


def _same_geometry(a: SpanTensor, b: SpanTensor) -> bool:
    return (
        a.span == b.span
        and a._entry.model.shape == b._entry.model.shape
        and a._entry.model.stride == b._entry.model.stride
        and a._entry.unit.layout.world_size == b._entry.unit.layout.world_size
        and a._entry.unit.context.world_size == 1
    )


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mutated = _mutated(func, args, kwargs)
    if any(not isinstance(m, SpanTensor) for m in mutated):
        return NotImplemented
    items, spec = tree_flatten((args, kwargs))
    lead = mutated[0] if mutated else next(i for i in items if isinstance(i, SpanTensor))
    if kwargs.get("device") not in (None, lead.device):
        return NotImplemented
    try:
        local_args, local_kwargs = tree_unflatten([_localise(i, lead) for i in items], spec)
    except _NotLocalError:
        return NotImplemented
    local_kwargs.pop("memory_format", None)
    out = func(*local_args, **local_kwargs)
    if mutated:
        return lead
    return tree_map(lambda o: _wrap(o, lead), out)


def _wrap(out: Any, lead: SpanTensor) -> Any:
    return SpanTensor(lead._entry, out, out.dtype) if isinstance(out, torch.Tensor) else out


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mutated = _mutated(func, args, kwargs)
    lists = [a for a in (*args, *kwargs.values()) if _is_tensor_list(a)]
    leads: list[SpanTensor | None] = [
        next((row[n] for row in lists if isinstance(row[n], SpanTensor)), None)
        for n in range(max(len(row) for row in lists))
    ]
    for row in mutated:
        for item, lead in zip(row, leads, strict=True):
            if lead is not None and not isinstance(item, SpanTensor):
                return NotImplemented

    def local(arg: Any) -> Any:
        if not _is_tensor_list(arg):
            return arg
        return [i if m is None else _localise(i, m) for i, m in zip(arg, leads, strict=True)]

    try:
        out = func(*[local(a) for a in args], **{k: local(v) for k, v in kwargs.items()})
    except _NotLocalError:
        return NotImplemented
    if mutated or out is None:
        return None
    return [o if m is None else _wrap(o, m) for o, m in zip(out, leads, strict=True)]


def _is_tensor_list(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and bool(arg) and isinstance(arg[0], torch.Tensor)


def _on_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mutated = [
        m for arg in _mutated(func, args, kwargs) for m in (arg if _is_tensor_list(arg) else [arg])
    ]
    cache: dict[int, torch.Tensor] = {}
    back: dict[int, SpanTensor] = {}

    def full(item: Any) -> Any:
        if not isinstance(item, SpanTensor):
            return item
        if id(item) not in cache:
            item._may_gather(str(func))
            cache[id(item)] = gather_full(item._entry, item.to_local(), func._schema.name)
            back[id(cache[id(item)])] = item
        return cache[id(item)]

    out = func(*tree_map(full, args), **tree_map(full, kwargs))
    for item in mutated:
        if isinstance(item, SpanTensor):
            span = item.span
            flat = memory_order(cache[id(item)], item._entry.model)
            item.to_local().copy_(flat[span.start : span.stop])
    # In-place operations return their own argument, which is still a span.
    return tree_map(lambda o: back.get(id(o), o) if mutated else o, out)


# -- operations with a handler of their own


def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    span = args[0]
    shared = type(span).__new__(type(span), span._entry, span._local, span.dtype)
    shared.__init__(span._entry, span._local, span.dtype)
    return shared


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    span = args[0]
    if kwargs.get("device") not in (None, span.device):
        return NotImplemented
    dtype = kwargs.get("dtype") or span.dtype
    return _wrap(span.to_local().to(dtype, copy=True), span)


def _view_as_itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if tuple(args[1]) == tuple(args[0].shape):
        return _share(func, args, kwargs)
    return NotImplemented


def _norms(spans: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[Any]:
    ours = [s for s in spans if isinstance(s, SpanTensor)]
    context = ours[0]._entry.unit.context
    partial = [power_sum([s.to_local()], order) for s in ours]
    rows = context.gather_values(partial, -1, "norm")
    combine: Callable[[Sequence[float]], float] = max if order == math.inf else math.fsum
    totals = iter(root_of(combine([row[n] for row in rows]), order) for n in range(len(ours)))
    out: list[Any] = []
    for span in spans:
        if isinstance(span, SpanTensor):
            real = dtype or (span.dtype.to_real() if span.dtype.is_complex else span.dtype)
            out.append(torch.tensor(next(totals), dtype=real, device=span.device))
        else:
            out.append(torch.linalg.vector_norm(span, order, dtype=dtype))
    return out


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    if order <= 0:
        return NotImplemented
    return _norms(args[0], order, args[2] if len(args) > 2 else kwargs.get("dtype"))


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keep = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if order <= 0 or keep or (dims is not None and len(dims) not in (0, args[0].dim())):
        return NotImplemented
    return _norms([args[0]], order, kwargs.get("dtype"))[0]


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    span = args[0]
    if not span.dtype.is_floating_point:
        return NotImplemented
    part = float(span.to_local().sum(dtype=torch.float64))
    rows = span._entry.unit.context.gather_values([part], -1, "sum")
    dtype = kwargs.get("dtype") or span.dtype
    return torch.tensor(math.fsum(row[0] for row in rows), dtype=dtype, device=span.device)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spans, found_inf, inverse_scale = args
    context = next(s for s in spans if isinstance(s, SpanTensor))._entry.unit.context
    local = [s.to_local() if isinstance(s, SpanTensor) else s for s in spans]
    func(local, found_inf, inverse_scale)
    rows = context.gather_values([float(found_inf)], -1, "unscale")
    found_inf.fill_(max(row[0] for row in rows))


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.detach.default: _share,
    aten.alias.default: _share,
    aten.view.default: _view_as_itself,
    aten._to_copy.default: _to_copy,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.sum.default: _sum,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
