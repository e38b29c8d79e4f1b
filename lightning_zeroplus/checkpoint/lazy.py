"""Trees of tensors that are read one at a time: cast, counted, and written as `torch.save` would.

Names of the same tensor share one `SavedTensor`, so what is tied in memory stays tied in a file.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch

from lightning_zeroplus.checkpoint.blob import save_streamed
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor, identity_of
from lightning_zeroplus.checkpoint.tree import Path, map_leaves
from lightning_zeroplus.layout.box import Box, whole_box

__all__ = [
    "Tell",
    "byte_parts",
    "cast_tensors",
    "find_shared",
    "flat_bytes",
    "is_dense",
    "save_lazily",
    "tell_reads",
    "tensors_in",
]

Tell = Callable[[int, int], None]
"""Is told how many bytes were read since the last time, and how many there are in all."""


_PART_NUMEL = 2**20

_PLAIN = (torch.Tensor, torch.nn.Parameter, SavedTensor)


def is_dense(leaf: object) -> bool:
    """Return whether ``leaf`` is a tensor that is its elements, shape and dtype, and no more."""
    return (
        isinstance(leaf, torch.Tensor)
        and type(leaf) in _PLAIN
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
        and not leaf.is_meta
    )


def tensors_in(tree: Any, at: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the dense tensors of nested dictionaries and lists, each with its place."""
    found: list[tuple[Path, torch.Tensor]] = []

    def note(path: Path, leaf: Any) -> Any:
        if is_dense(leaf):
            found.append((path, leaf))
        return leaf

    map_leaves(tree, note, at)
    yield from found


def find_shared(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return, for every name of a tensor but its first, the first."""
    first: dict[Any, str] = {}
    shared = {}
    for name, value in tensors.items():
        if is_dense(value):
            kept = first.setdefault(identity_of(value), name)
            if kept != name:
                shared[name] = kept
    return shared


def _map_tensors(tree: Any, change: Callable[[torch.Tensor], SavedTensor]) -> Any:
    """Return ``tree`` with its dense tensors changed, those that are one as one."""
    done: dict[Any, tuple[torch.Tensor, SavedTensor]] = {}

    def change_once(_: Path, leaf: Any) -> Any:
        if not is_dense(leaf):
            return leaf
        key = identity_of(leaf)
        if key not in done:
            done[key] = leaf, change(leaf)  # with the leaf: its identity must not be given away
        return done[key][1]

    return map_leaves(tree, change_once)


def _box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    if isinstance(tensor, SavedTensor):
        return tensor.read_box(box)
    return tensor.detach()[box.slices()].cpu()


def cast_tensors(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree`` with floating-point tensors that are in ``dtype`` once they are read.

    None leaves the dtypes as they are. Views and device memory become tensors of their own.
    """

    def cast(tensor: torch.Tensor) -> SavedTensor:
        to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return SavedTensor(tensor.shape, to, _Cast(tensor, to))

    return _map_tensors(tree, cast)


class _Cast:
    """Reads a box of a tensor in another dtype."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor, self.dtype = tensor, dtype

    def __call__(self, box: Box) -> torch.Tensor:
        return _box_of(self.tensor, box).to(self.dtype)


def tell_reads(tree: Any, tell: Tell | None) -> Any:
    """Return ``tree`` with tensors that ``tell`` their bytes when they are read first.

    Views and device memory become tensors of their own.
    """
    total = 0

    def watch(tensor: torch.Tensor) -> SavedTensor:
        nonlocal total
        total += tensor.nbytes
        left = [tensor.nbytes]

        def fetch(box: Box) -> torch.Tensor:
            found = _box_of(tensor, box)
            if tell is not None:
                tell(left[0], total)
            left[0] = 0
            return found

        return SavedTensor(tensor.shape, tensor.dtype, fetch)

    return _map_tensors(tree, watch)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements on the CPU, row-major, as bytes ``[nbytes]``; read now if in a file."""
    flat = _box_of(tensor, whole_box(tensor.shape)).contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def byte_parts(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the same in parts; what is cast is cast part by part."""
    cast = tensor._source._fetch if isinstance(tensor, SavedTensor) else None
    source = cast.tensor if isinstance(cast, _Cast) else tensor
    flat = _box_of(source, whole_box(source.shape)).contiguous().reshape(-1)
    for part in torch.split(flat, _PART_NUMEL) if flat.numel() else ():
        yield part.to(tensor.dtype).view(torch.uint8).numpy().data


# -- one file


def save_lazily(tree: Any, file: IO[bytes]) -> list[int]:
    """Write what `torch.save` would for ``tree``; return the CRC-32 of each tensor's memory.

    A `SavedTensor` is read when its turn comes and forgotten afterwards, so they take memory for
    one. Any other object is written as it is.
    """
    blanks: dict[int, tuple[SavedTensor, torch.Tensor]] = {}
    sources: dict[int, SavedTensor] = {}

    def blank(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, SavedTensor):
            return leaf
        if id(leaf) not in blanks:
            empty = torch.empty(leaf.shape, dtype=leaf.dtype)
            blanks[id(leaf)] = leaf, empty
            sources[empty.untyped_storage()._cdata] = leaf
        return blanks[id(leaf)][1]

    sums: list[int] = []

    def values() -> Iterator[torch.Tensor]:
        for storage in storages:
            raw = _bytes_behind(storage, sources.get(storage._cdata))
            sums.append(zlib.crc32(raw.numpy().data))
            yield raw

    skeleton = map_leaves(tree, blank)
    storages = _storages_in(skeleton)
    save_streamed(skeleton, values(), file)
    return sums


def _bytes_behind(storage: torch.UntypedStorage, source: SavedTensor | None) -> torch.Tensor:
    if source is not None:
        return flat_bytes(source)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()


def _storages_in(tree: Any) -> list[torch.UntypedStorage]:
    """Return the memory behind all tensors, however deep, in the order in which it is saved."""
    found: dict[int, torch.UntypedStorage] = {}

    class Collector(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, torch.storage.TypedStorage) and not torch.is_storage(obj):
                return None
            storage: Any = getattr(obj, "_untyped_storage", obj)
            found.setdefault(storage._cdata, storage)
            return "storage"

    Collector(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL).dump(tree)
    return [storage for storage in found.values() if storage.nbytes()]
