"""A tensor of a checkpoint that is read when, and as far as, it is needed.

It stands in `state_dict` and in optimizer states in place of the tensor: its shape and dtype are
known, any operation reads it in full, and whoever needs a part reads that part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.layout.box import Box, dimension_order, span_boxes, whole_box
from lightning_zeroplus.layout.span import Span

__all__ = ["SavedTensor", "identity_of", "read_whole"]

Fetch = Callable[[Box], torch.Tensor]
"""Returns the elements of a box on the CPU, in the box's shape; may be a view of a mapped file."""

Fill = Callable[[Box, torch.Tensor], None]
"""Writes the elements of a box into a tensor of its shape on the CPU, of whatever dtype."""


class _Source:
    """Where the elements are: in a file, or in memory once somebody has written to them."""

    def __init__(self, shape: Sequence[int], fetch: Fetch, fill: Fill | None) -> None:
        self._shape = tuple(shape)
        self._fetch = fetch
        self._fill = fill
        self._memory: torch.Tensor | None = None

    def hold(self) -> torch.Tensor:
        """Return memory with all elements, that is read from now on."""
        if self._memory is None:
            self._memory = self._fetch(whole_box(self._shape)).clone()
        return self._memory

    def fetch(self, box: Box) -> torch.Tensor:
        return self._fetch(box) if self._memory is None else self._memory[box.slices()]

    def fill(self, box: Box, out: torch.Tensor) -> None:
        if self._memory is None and self._fill is not None and out.device.type == "cpu":
            self._fill(box, out.detach())
        else:
            out.detach().copy_(self.fetch(box))


class SavedTensor(torch.Tensor):
    """A tensor on the CPU whose elements are still in a checkpoint. *Local.*

    What is written to it, or to a view of it, is kept in memory; the checkpoint stays as it is.

    Args:
        shape: of the tensor.
        dtype: as it was saved.
        fetch: reads a box.
        fill: reads a box into memory that is there; None: by way of ``fetch``.
    """

    _source: _Source

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, fetch: Fetch, fill: Fill | None = None
    ) -> SavedTensor:
        """Make the wrapper; nothing is read."""
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls, tuple(shape), dtype=dtype, device=torch.device("cpu"), requires_grad=False
            )

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, fetch: Fetch, fill: Fill | None = None
    ) -> None:
        self._source = _Source(shape, fetch, fill)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def read(self) -> torch.Tensor:
        """Return the full tensor; it may share memory with a mapped file, so do not write to it."""
        return self._source.fetch(whole_box(self.shape))

    def read_box(self, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, in its shape; likewise."""
        return self._source.fetch(box)

    def read_into(self, box: Box, out: torch.Tensor) -> None:
        """Write the elements of ``box`` into ``out``, of its shape and any dtype and device."""
        self._source.fill(box, out)

    def read_span(
        self, span: Span, stride: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return elements of the range ``span`` of memory with ``stride``, 1-D ``[span.numel]``.

        Args:
            span: range in the memory order of the tensor that is to be filled.
            stride: its strides; the tensor that was saved may have had others.
            out: is filled, with a change of dtype where it has another, and returned.
        """
        if out is None:
            out = torch.empty(span.numel, dtype=self.dtype)
        order = dimension_order(self.shape, stride)
        place = 0
        for box in span_boxes(self.shape, span, stride):
            part = out[place : place + box.numel].view([box.sizes[dim] for dim in order])
            self.read_into(box, part.permute([order.index(dim) for dim in range(len(order))]))
            place += box.numel
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]._alias()
        if func is torch.ops.aten.copy_.default and _is_plain(args[0], args[1]):
            args[1].read_into(whole_box(args[1].shape), args[0])
            return args[0]
        schema = func._schema
        if schema.is_mutable or any(value.alias_info is not None for value in schema.returns):
            # Writes, now or through the view that comes of it, must be found again.
            held = tree_map_only(SavedTensor, _hold, (args, kwargs or {}))
            found = func(*held[0], **held[1])
            first = args[0] if args else None
            return first if isinstance(first, SavedTensor) and found is held[0][0] else found
        args, kwargs = tree_map_only(SavedTensor, SavedTensor._copy, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _alias(self) -> SavedTensor:
        source = self._source
        made = SavedTensor(self.shape, self.dtype, source._fetch, source._fill)
        made._source = source
        return made

    def _copy(self) -> torch.Tensor:
        """Return the full tensor in memory of its own: an operation may write to it."""
        return self.read().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SavedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._copy()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._copy().__reduce_ex__(proto)  # type: ignore[no-untyped-call]

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full tensor as an array; writes to it are kept."""
        return self._source.hold().numpy(force=force)

    def tolist(self) -> Any:
        """Return the full tensor as lists."""
        return self.read().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self._source.hold().__array__(dtype)  # type: ignore[no-untyped-call]

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return memory with the full tensor; writes to it are kept."""
        return self._source.hold().untyped_storage()


def _hold(tensor: SavedTensor) -> torch.Tensor:
    return tensor._source.hold()


def _is_plain(target: object, source: object) -> bool:
    """Return whether ``target`` is memory for all of ``source``, and no more."""
    return (
        isinstance(source, SavedTensor)
        and not isinstance(target, SavedTensor)
        and isinstance(target, torch.Tensor)
        and target.shape == source.shape
    )


def identity_of(tensor: torch.Tensor) -> Any:
    """Return what tensors have in common that are one; they must live as long as it is compared."""
    if isinstance(tensor, SavedTensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def read_whole(tree: Any) -> Any:
    """Return ``tree`` with every `SavedTensor` in it read, in memory of its own."""
    return tree_map_only(SavedTensor, SavedTensor._copy, tree)
