"""What a sharded parameter is between its uses: the same object, of a resting class.

Metadata, hooks, identity and ``requires_grad`` answer as always; elementwise updates and a few
reductions under ``no_grad`` run on the shard; anything else gathers, on all ranks together, or is
refused, as the settings say.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_map

from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.zero.entry import Entry
from lightning_zeroplus.zero.grad_span import read_slot, write_slot
from lightning_zeroplus.zero.span_tensor import SpanTensor, gather_full, refusal

__all__ = ["RestMixin", "WeightSpan", "entry_of", "rest_register", "resting_class"]

_ENTRIES: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()


def rest_register(entry: Entry) -> None:
    """Make ``entry`` findable from its parameter."""
    _ENTRIES[id(entry.param)] = entry


def entry_of(param: torch.Tensor) -> Entry | None:
    """Return the entry of a parameter of a live engine, or None."""
    entry = _ENTRIES.get(id(param))
    return entry if entry is not None and entry.param is param else None


class WeightSpan(SpanTensor):
    """This rank's span of a resting weight; writes count."""

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements of the weight shard, 1-D. *Local.*"""
        unit = self._entry.unit
        unit.context.settle_weights(unit)
        chunk = unit.weights.own_part() if unit.weights.is_unsharded else unit.weights.own_shard()
        return chunk[unit.shard_range(self._entry.index)]

    of_weight = True


def weight_span(entry: Entry) -> WeightSpan:
    """Return the resting weight of ``entry`` as a span tensor."""
    made = SpanTensor.__new__(WeightSpan, entry, None, entry.unit.dtype)
    made.__init__(entry, None, entry.unit.dtype)  # type: ignore[misc]
    return made  # type: ignore[return-value]


def _getters(*names: str) -> set[Any]:
    found = (getattr(torch.Tensor, name, None) for name in names)
    return {descriptor.__get__ for descriptor in found if descriptor is not None}


_T: Any = torch.Tensor
_LOCAL = {
    *_getters(
        "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "ndim", "names",
        "_version", "grad_fn", "is_sparse", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta",
        "is_quantized", "itemsize", "nbytes", "retains_grad", "output_nr", "_backward_hooks",
        "_post_accumulate_grad_hooks", "is_nested", "is_mkldnn", "_base", "grad_dtype",
    ),
    _T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__, _T._backward_hooks.__set__,
    _T._post_accumulate_grad_hooks.__set__, _T.grad_dtype.__set__,
    _T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.storage_offset, _T.is_contiguous,
    _T.element_size, _T.requires_grad_, _T.register_hook, _T.is_floating_point, _T.is_complex,
    _T.register_post_accumulate_grad_hook, _T.__hash__, _T.is_inference, _T.ndimension,
    _T.is_shared, _T.is_pinned, _T.type_as, _T.get_device, _T.retain_grad, _T.__len__,
    _T.is_signed, _T.is_neg, _T.is_conj, _T._is_view, _T.is_same_size, _T.dim_order,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor,
    _T.__dir__, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_empty, _T.new_tensor,
    _T.is_set_to, torch.result_type, torch._has_compatible_shallow_copy_type,
    torch.autograd.graph.get_gradient_edge, torch.is_same_size, torch.is_conj, torch.is_neg,
    torch.is_inference,
}  # fmt: skip
_LOCAL -= {_T.type_as, _T.is_shared, _T.is_pinned}


class RestMixin:
    """Mixed in front of the parameter's own class while its unit rests."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOCAL:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _access(func, args, kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        entry = _required(self)
        span = weight_span(entry).span
        return (
            f"Parameter({entry.fqn}, shape={tuple(entry.model.shape)}, dtype={entry.unit.dtype}, "
            f"sharded, rank {entry.unit.context.rank} holds [{span.start}, {span.stop}))"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        entry = _required(self)
        copy = entry.unit.user_classes[entry.index](
            _full(entry, "deepcopy"), entry.param.requires_grad
        )
        memo[id(self)] = copy
        return copy  # type: ignore[no-any-return]

    def __reduce_ex__(self, proto: Any) -> Any:
        entry = _required(self)
        raise PhaseError(
            f"Expected full weights to pickle, got the sharded parameter {entry.fqn!r} at rest. "
            f"Save trainer.save_checkpoint(...), or wrap in full_parameters(...) on every rank."
        )

    def as_subclass(self, cls: type) -> Any:
        """Gather as any access does; the C function would pass Python."""
        entry = _required(self)
        if not entry.unit.context.gathers_on_access:
            raise PhaseError(refusal(entry, "as_subclass"))
        entry.unit.context.unshard_for_touch(entry.unit, "as_subclass")
        return _T.as_subclass(self, cls)

    def set_(self, *args: object, **kwargs: object) -> Any:
        """Refuse: the C function would pass Python."""
        raise PhaseError(refusal(_required(self), "set_"))

    def resize_(self, *args: object, **kwargs: object) -> Any:
        """Refuse: the C function would pass Python."""
        raise PhaseError(refusal(_required(self), "resize_"))

    def is_shared(self) -> bool:
        """Return False: resting weights lie in memory of this process."""
        return False

    def is_pinned(self, device: object = None) -> bool:
        """Return False: resting weights lie in pageable memory."""
        return False

    def full_tensor(self) -> torch.Tensor:
        """Return the full weight as a tensor of its own; collective."""
        entry = _required(self)
        return gather_full(entry, weight_span(entry).to_local(), "full_tensor")

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements of the weight, 1-D. *Local.*"""
        return weight_span(_required(self)).to_local()


def _required(param: object) -> Entry:
    entry = _ENTRIES.get(id(param))
    if entry is None or entry.unit.context.is_gone:
        name = "a parameter" if entry is None else repr(entry.fqn)
        raise PhaseError(
            f"Expected {name} of a live engine, got a shard whose run has failed: the other ranks' "
            f"spans are gone. Load the weights from the last checkpoint into a new module."
        )
    return entry


def _full(entry: Entry, operation: str) -> torch.Tensor:
    span = weight_span(entry)
    span._may_gather(operation)
    return gather_full(entry, span.to_local(), operation)


def _resting_entries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Entry]:
    items, _ = tree_flatten((args, kwargs))
    return [_required(item) for item in items if isinstance(item, RestMixin)]


def _access(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    if getattr(func, "__module__", "") == "torch.nn.init":
        with torch.no_grad():
            return _on_spans(func, args, kwargs)
    entries = _resting_entries(args, kwargs)
    if entries and all(_is_in_use(entry) for entry in entries):
        # Another module of the same unit runs: full weights are there, and it reads them next.
        for entry in entries:
            entry.unit.wake([entry])
        return func(*args, **kwargs)
    return _access_values(func, args, kwargs)


def _is_in_use(entry: Entry) -> bool:
    context = entry.unit.context
    return context.gathers_on_access and context.is_in_forward(entry.unit)


def _access_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return _on_spans(func, args, kwargs)
    name = _name_of(func)
    entries = _resting_entries(args, kwargs)
    for entry in entries:
        if not entry.unit.context.gathers_on_access:
            raise PhaseError(refusal(entry, name))
    for unit in dict.fromkeys(entry.unit for entry in entries):
        unit.context.unshard_for_touch(unit, name)
    return func(*args, **kwargs)


def _name_of(func: Any) -> str:
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


def _refuse_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise PhaseError(refusal(_required(args[0]), _name_of(func)))


def _as_span(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    span = weight_span(_required(args[0]))
    span.bumps_version = func is _T.detach
    return span


def _assign_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _set_data(args[0], args[1])


def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(_blank(_required(args[0])), *args[1:], **kwargs)


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p.to(...)`` and ``p.cpu()`` return the parameter itself where nothing changes."""
    param = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        device, dtype = param.device, param.dtype
    if func is _T.cpu:
        wanted, kind = torch.device("cpu"), None
    elif kwargs.get("copy") or isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
        return _access_values(func, args, kwargs)
    else:
        wanted, kind, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
    if wanted in (None, device) and kind in (None, dtype):
        return param
    return _access_values(func, args, kwargs)


def _blank(entry: Entry) -> torch.Tensor:
    """Return a plain full tensor of the parameter's kind, with undefined contents."""
    model, unit = entry.model, entry.unit
    return torch.empty_strided(model.shape, model.stride, dtype=unit.dtype, device=unit.device)


def _by_edges(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differentiate with respect to a resting weight: its edge says where, no value is read."""

    def edge(item: Any) -> Any:
        if isinstance(item, RestMixin):
            return GradientEdge(_required(item).node, 0)  # type: ignore[arg-type]
        return item

    position = 1 if func is torch.autograd.grad else -1
    given = [tree_map(edge, a) if n == position else a for n, a in enumerate(args)]
    if kwargs.get("inputs") is not None:
        kwargs = {**kwargs, "inputs": tree_map(edge, kwargs["inputs"])}
    return func(*given, **kwargs)


def _set_data(param: Any, value: torch.Tensor) -> None:
    entry = _required(param)
    same_kind = value.dtype == entry.unit.dtype and value.device == entry.unit.device
    if isinstance(value, SpanTensor) and value._entry is entry and same_kind:
        local = value.to_local()
        entry.unit.context.settle_weights(entry.unit, writes=True)
        mine = weight_span(entry).to_local()
        if local.data_ptr() != mine.data_ptr():
            with torch.no_grad():
                mine.copy_(local)
            torch.autograd.graph.increment_version(entry.param)
        return
    if value is param:
        return
    if value.shape != entry.model.shape or not same_kind:
        raise PhaseError(
            f"Expected data of shape {tuple(entry.model.shape)}, {entry.unit.dtype} on "
            f"{entry.unit.device} for {entry.fqn!r} at rest, got {tuple(value.shape)}, "
            f"{value.dtype} on {value.device}. Convert the model before training starts."
        )
    with torch.no_grad():
        weight_span(entry).copy_(value.detach())
    torch.autograd.graph.increment_version(entry.param)


def _on_spans(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seen: dict[int, tuple[WeightSpan, Any]] = {}

    def stand_in(item: Any) -> Any:
        if not isinstance(item, RestMixin):
            return item
        span = weight_span(_required(item))
        span.bumps_version = True
        seen[id(span)] = (span, item)
        return span

    new_args = tree_map(stand_in, args)
    new_kwargs = tree_map(stand_in, kwargs)
    name = str(getattr(func, "__name__", ""))
    if name in _READERS and isinstance(new_args[0], WeightSpan):
        return getattr(new_args[0], name)(*new_args[1:], **new_kwargs)
    out = func(*new_args, **new_kwargs)
    if _writes(func):
        for _, param in seen.values():
            torch.autograd.graph.increment_version(param)
    return tree_map(lambda o: seen[id(o)][1] if id(o) in seen else o, out)


_READERS = {"tolist", "numpy", "__array__"}


def _writes(func: Any) -> bool:
    name = str(getattr(func, "__name__", ""))
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


_SPECIAL: dict[Any, Any] = {
    _T.data.__set__: _assign_data,
    _T.data.__get__: _as_span,
    _T.detach: _as_span,
    _T.cpu: _converted,
    _T.to: _converted,
    **dict.fromkeys((_T.untyped_storage, _T.data_ptr, _T.share_memory_), _refuse_memory),
    **dict.fromkeys(
        (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like), _on_spans
    ),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _random_like),
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward, _T.backward), _by_edges),
}


_CLASSES: dict[type, type] = {}


_GRAD = property(read_slot, write_slot, lambda param: write_slot(param, None))
"""What `grad` is on all parameters, without the way over ``__torch_function__``."""


def resting_class(user_class: type) -> type:
    """Return the resting class of parameters of ``user_class``, one per class."""
    found = _CLASSES.get(user_class)
    if found is None:
        own: dict[str, Any] = {"__slots__": ()}
        if inspect.getattr_static(user_class, "grad", None) is _T.grad:
            own["grad"] = _GRAD
        found = type(user_class.__name__, (RestMixin, user_class), own)
        _CLASSES[user_class] = found
    return found
