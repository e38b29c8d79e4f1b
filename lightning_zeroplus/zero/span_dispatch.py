"""How operators act on span tensors.

Elementwise ones run on the local part, norms and sums exchange one number, others gather.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_zeroplus.zero.entry import memory_order
from lightning_zeroplus.zero.norm import power_sum, root_of
from lightning_zeroplus.zero.span_tensor import (
    Geometry,
    SpanTensor,
    SpanView,
    gather_full,
    is_mapped,
    parts_of_all,
)

__all__ = ["dispatch"]

aten = torch.ops.aten


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator on span tensors: locally, by exchanging numbers, or on full tensors."""
    # In inference mode composite operators arrive whole.
    done = func.decompose(*args, **kwargs)
    if done is not NotImplemented:
        return done
    handler = _HANDLERS.get(func)
    if handler is not None and not any(isinstance(a, SpanView) for a in args):
        done = handler(func, args, kwargs)
    if done is NotImplemented and func._schema.name.startswith("aten::_foreach_"):
        done = _foreach(func, args, kwargs)
    if done is NotImplemented and _is_view(func) and isinstance(args[0], SpanTensor):
        done = _view(func, args, kwargs)
    if done is NotImplemented and _is_elementwise(func):
        done = _elementwise(func, args, kwargs)
    return _on_full(func, args, kwargs) if done is NotImplemented else done


def _is_view(func: Any) -> bool:
    returned = [r.alias_info for r in func._schema.returns]
    written = any(
        a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
    )
    return not written and any(info is not None and not info.is_write for info in returned)


def _geometry_of(span: SpanTensor) -> Geometry:
    if isinstance(span, SpanView):
        return span._geometry
    model = span._entry.model
    return Geometry(tuple(model.shape), model.stride, 0)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find a view's geometry by making the same view of a tensor without memory."""
    span = args[0]
    base = span._whole if isinstance(span, SpanView) else span
    flat = torch.empty(span._entry.numel, dtype=span.dtype, device="meta")
    out = func(_geometry_of(span).of(flat), *args[1:], **kwargs)
    made = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor)]
    memory = flat.untyped_storage()._cdata
    if any(o.untyped_storage()._cdata != memory or o.dtype != span.dtype for o in made):
        return NotImplemented

    def wrap(meta: Any) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta
        geometry = Geometry(tuple(meta.shape), tuple(meta.stride()), int(meta.storage_offset()))
        return SpanView.of(base, geometry)

    return tree_map(wrap, out)


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
    if isinstance(item, SpanView):
        raise _NotLocalError
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
    if any(isinstance(i, SpanView) for i in items):
        return _write_view(func, args, kwargs, lead) if mutated else NotImplemented
    if kwargs.get("device") not in (None, lead.device):
        return NotImplemented
    try:
        local_args, local_kwargs = tree_unflatten([_localise(i, lead) for i in items], spec)
    except _NotLocalError:
        return NotImplemented
    local_kwargs.pop("memory_format", None)
    if mutated:
        _before_write(lead)
    out = func(*local_args, **local_kwargs)
    if mutated:
        _note_write(lead)
        return lead
    return tree_map(lambda o: _wrap(o, lead), out)


def _before_write(span: SpanTensor) -> None:
    if span.of_weight:
        unit = span._entry.unit
        unit.context.settle_weights(unit, writes=True)


def _note_write(span: SpanTensor) -> None:
    if span.of_weight and span.bumps_version:
        torch.autograd.graph.increment_version(span._entry.param)


def _write_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lead: SpanTensor) -> Any:
    """Run an elementwise write on a scratch tensor and keep the elements this rank holds.

    Elements of other ranks are undefined in the scratch tensor and are not kept.
    """
    if not isinstance(lead, SpanView):
        return NotImplemented
    _before_write(lead)
    base, span = lead._whole, lead._whole.span
    local = base.to_local()
    scratch = local.new_zeros(lead._entry.numel)
    scratch[span.start : span.stop] = local

    def stand_in(item: Any) -> Any:
        if item is lead:
            return lead._geometry.of(scratch)
        return _gathered(item, func)[0] if isinstance(item, SpanTensor) else item

    func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
    local.copy_(scratch[span.start : span.stop])
    _note_write(lead)
    return lead


def _gathered(item: SpanTensor, func: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the full tensor that ``item`` stands for, and the flat buffer it is a view of."""
    base = item._whole if isinstance(item, SpanView) else item
    item._may_gather(str(func))
    whole = gather_full(base._entry, base.to_local(), func._schema.name)
    flat = memory_order(whole, base._entry.model)
    return _geometry_of(item).of(flat), flat


def _wrap(out: Any, lead: SpanTensor) -> Any:
    if not isinstance(out, torch.Tensor):
        return out
    made = SpanTensor(lead._entry, out, out.dtype)
    made.of_weight = lead.of_weight
    return made


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mutated = _mutated(func, args, kwargs)
    lists = [a for a in (*args, *kwargs.values()) if _is_tensor_list(a)]
    leads: list[SpanTensor | None] = [
        next((row[n] for row in lists if isinstance(row[n], SpanTensor)), None)
        for n in range(max(len(row) for row in lists))
    ]
    if any(isinstance(item, SpanView) for row in lists for item in row):
        return NotImplemented
    for row in mutated:
        for item, lead in zip(row, leads, strict=True):
            if lead is not None and not isinstance(item, SpanTensor):
                return NotImplemented

    def local(arg: Any) -> Any:
        if not _is_tensor_list(arg):
            return arg
        return [i if m is None else _localise(i, m) for i, m in zip(arg, leads, strict=True)]

    for span in (item for row in mutated for item in row if isinstance(item, SpanTensor)):
        _before_write(span)
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
    flats: dict[int, torch.Tensor] = {}
    fulls: dict[int, torch.Tensor] = {}
    back: dict[int, SpanTensor] = {}

    def full(item: Any) -> Any:
        if not isinstance(item, SpanTensor):
            return item
        if id(item) not in fulls:
            fulls[id(item)], flats[id(item)] = _gathered(item, func)
            back[id(fulls[id(item)])] = item
        return fulls[id(item)]

    out = func(*tree_map(full, args), **tree_map(full, kwargs))
    for item in mutated:
        if isinstance(item, SpanTensor):
            _before_write(item)
            base = item._whole if isinstance(item, SpanView) else item
            base.to_local().copy_(flats[id(item)][base.span.start : base.span.stop])
            _note_write(item)
    # In-place operations return their own argument, which is still a span.
    return tree_map(lambda o: back.get(id(o), o) if mutated else o, out)


# -- operations with a handler of their own


def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    span = args[0]
    shared = type(span).__new__(type(span), span._entry, span._local, span.dtype)
    shared.__init__(span._entry, span._local, span.dtype)
    shared.of_weight, shared.bumps_version = span.of_weight, span.bumps_version
    return shared


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    span = args[0]
    if kwargs.get("device") not in (None, span.device):
        return NotImplemented
    dtype = kwargs.get("dtype") or span.dtype
    return _wrap(span.to_local().to(dtype, copy=True), span)


def _exactly(spans: Sequence[SpanTensor], what: str) -> str:
    names = [span.fqn for span in spans]
    more = f" and {len(names) - 1} more [{zlib.crc32(','.join(names).encode())}]"
    return f"{names[0]}{more if len(names) > 1 else ''} ({what})"


def _everyones(
    spans: Sequence[SpanTensor], value_of: Callable[[torch.Tensor], float], what: str
) -> list[list[float]]:
    """Return a number of each rank's part of each span, by rank; collective over a network."""
    if all(span.of_weight and is_mapped(span._entry, span.to_local()) for span in spans):
        columns = [[value_of(part) for part in parts_of_all(span._entry)] for span in spans]
        return [list(row) for row in zip(*columns, strict=True)]
    unit = spans[0]._entry.unit
    own = [value_of(span.to_local()) for span in spans]
    return unit.context.gather_values(own, unit.number, _exactly(spans, what))


def _norms(spans: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[Any]:
    ours = [s for s in spans if isinstance(s, SpanTensor)]
    rows = _everyones(ours, lambda part: power_sum([part], order), f"norm {order}")
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
    if any(isinstance(s, SpanView) for s in args[0]):
        return NotImplemented
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
    rows = _everyones([span], lambda part: float(part.sum(dtype=torch.float64)), "sum")
    dtype = kwargs.get("dtype") or span.dtype
    return torch.tensor(math.fsum(row[0] for row in rows), dtype=dtype, device=span.device)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spans, found_inf, inverse_scale = args
    ours = [s for s in spans if isinstance(s, SpanTensor)]
    unit = ours[0]._entry.unit
    local = [s.to_local() if isinstance(s, SpanTensor) else s for s in spans]
    func(local, found_inf, inverse_scale)
    rows = unit.context.gather_values([float(found_inf)], unit.number, _exactly(ours, "unscale"))
    found_inf.fill_(max(row[0] for row in rows))


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.detach.default: _share,
    aten.alias.default: _share,
    aten._to_copy.default: _to_copy,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.sum.default: _sum,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
