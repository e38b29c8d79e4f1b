"""Opening a checkpoint directory: ours, PyTorch's own, or Lightning's; tensors are read later.

What comes back is the dictionary that Lightning made, with a `SavedTensor` for every stored tensor;
optimizer states are keyed by parameter name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_zeroplus.checkpoint.checksum import Checksum
from lightning_zeroplus.checkpoint.dcp import METADATA, WRITER, parse_metadata
from lightning_zeroplus.checkpoint.folder import Folder
from lightning_zeroplus.checkpoint.full import damage_as
from lightning_zeroplus.checkpoint.manifest import BLOCK_NBYTES, MANIFEST, Manifest, SavedBox
from lightning_zeroplus.checkpoint.manifest import TensorRecord as Record
from lightning_zeroplus.checkpoint.save import META, OURS
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor
from lightning_zeroplus.checkpoint.tree import key_of_mark, map_leaves
from lightning_zeroplus.errors import CheckpointError, name_offenders
from lightning_zeroplus.layout.box import Box, find_gaps

_READ_NBYTES = 16 * 2**20

__all__ = ["find_damage", "has_manifest", "open_dcp", "open_universal", "read_manifest"]


def has_manifest(folder: Folder) -> bool:
    """Return whether ``folder`` is a complete universal checkpoint, as far as names tell."""
    return folder.nbytes_of(MANIFEST) is not None


def read_manifest(folder: Folder) -> Manifest:
    """Return the table of contents.

    Raises:
        CheckpointError: it is damaged, or a later version's.
    """
    return Manifest.from_bytes(bytes(folder.read(MANIFEST)), folder)


def find_damage(
    folder: Folder,
    manifest: Manifest,
    *,
    check: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[str]:
    """Yield what is wrong with files, one text each, after reading this rank's share of blocks."""
    blocks = []
    for name, sums in manifest.files.items():
        nbytes = folder.nbytes_of(name)
        if nbytes is None:
            yield f"{name} is missing"
        elif nbytes != sums.nbytes:
            yield f"{name} has {nbytes} bytes instead of {sums.nbytes}"
        else:
            blocks += [(name, n) for n in range(len(sums.blocks))]
    for name, n in blocks[rank::world_size] if check else ():
        sums = manifest.files[name]
        start = n * BLOCK_NBYTES
        stop = min(start + BLOCK_NBYTES, sums.nbytes)
        try:
            sound = _checksum(folder, name, start, stop) == sums.blocks[n]
        except OSError as error:
            yield f"{name} cannot be read: {error}"
            continue
        if not sound:
            yield f"{name} is damaged between bytes {start} and {stop}"


def _checksum(folder: Folder, name: str, start: int, stop: int) -> int:
    found = Checksum()
    for at in range(start, stop, _READ_NBYTES):
        found.update(folder.read(name, at, min(at + _READ_NBYTES, stop)))
    return found.value


def open_universal(
    folder: Folder,
    *,
    weights_only: bool | None = None,
    check: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, Any]:
    """Return what `save_universal` wrote; this rank checks its share of the files.

    Args:
        folder: holds a universal checkpoint.
        weights_only: as in `torch.load`, for Lightning's metadata; None: True.
        check: compare checksums; else only that files are there and as long as they should be.
        rank: of this process among those that read together.
        world_size: how many do.

    Raises:
        CheckpointError: a file is missing or damaged; all such are listed.
    """
    manifest = read_manifest(folder)
    damage = list(find_damage(folder, manifest, check=check, rank=rank, world_size=world_size))
    if damage:
        raise CheckpointError(
            f"Expected the files that the manifest lists, got: {name_offenders(damage)} "
            f"({folder}). Resume from another checkpoint."
        )
    saved = {key: _saved_tensor(folder, record) for key, record in manifest.tensors.items()}
    meta = read_meta(folder, weights_only)
    ours = meta.pop(OURS)

    def restore(path: tuple[str | int, ...], leaf: Any) -> Any:
        key = key_of_mark(leaf)
        if key is not None and key not in saved:
            raise CheckpointError(
                f"Expected every tensor of {META} in {MANIFEST}, got none for {key} ({folder}). "
                f"Resume from another checkpoint."
            )
        return leaf if key is None else saved[key]

    checkpoint: dict[str, Any] = map_leaves({**meta, **ours}, restore)
    checkpoint[OURS] = {"facts": manifest.facts}
    return checkpoint


def read_meta(folder: Folder, weights_only: bool | None) -> dict[str, Any]:
    """Return Lightning's metadata, without tensors that are stored apart.

    Raises:
        CheckpointError: it is damaged.
        pickle.UnpicklingError: it holds classes that ``weights_only`` keeps out.
    """
    with damage_as(lambda error: _damaged(folder, META, error)):
        raw = io.BytesIO(folder.read(META))
        found = torch.load(raw, map_location="cpu", weights_only=weights_only is not False)
    if not isinstance(found, dict):
        raise _damaged(folder, META, TypeError(f"a {type(found).__name__}"))
    return found


def _damaged(folder: Folder, name: str, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(
        f"Expected a readable {name}, got {reason} ({folder}). Resume from another checkpoint."
    )


def _dtype_of(record: Record, folder: Folder) -> torch.dtype:
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"Expected a dtype of torch {torch.__version__}, got {record.dtype!r} ({folder}). "
            f"Read it with the version of torch that wrote it."
        )
    for saved in record.boxes:
        if saved.body + saved.box.numel * dtype.itemsize > saved.stop:
            raise CheckpointError(
                f"Expected {saved.box.numel} elements of {dtype} in {saved.file}, got "
                f"{saved.stop - saved.body} bytes ({folder}). Resume from another checkpoint."
            )
    return dtype


def _saved_tensor(folder: Folder, record: Record) -> SavedTensor:
    dtype = _dtype_of(record, folder)

    def reach(saved: SavedBox, wanted: Box) -> tuple[int, int, tuple[int, ...]]:
        """Return from where to where wanted elements lie in the file, and with which strides."""
        inside = wanted.relative_to(saved.box.offsets)
        stride = _row_major(saved.box.sizes)
        first = sum(a * s for a, s in zip(inside.offsets, stride, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(inside.sizes, stride, strict=True))
        start = saved.body + first * dtype.itemsize
        return start, start + (last - first + 1) * dtype.itemsize, stride

    def part_of(saved: SavedBox, wanted: Box) -> torch.Tensor:
        start, stop, stride = reach(saved, wanted)
        flat = torch.frombuffer(folder.read(saved.file, start, stop), dtype=torch.uint8)
        if start % dtype.itemsize:  # never in files of ours
            flat = flat.clone()
        return flat.view(dtype).as_strided(wanted.sizes, stride)

    def fill(box: Box, out: torch.Tensor) -> None:
        for saved in record.boxes:
            common = saved.box.intersect(box)
            if common is None:
                continue
            target = out[common.relative_to(box.offsets).slices()]
            start, stop, _ = reach(saved, common)
            whole = stop - start == common.numel * dtype.itemsize
            if whole and target.dtype == dtype and target.is_contiguous():
                # Not reshape: one element may have any stride, which view then refuses.
                flat = target.as_strided((target.numel(),), (1,))
                raw = flat.view(torch.uint8).numpy()
                folder.read_into(saved.file, start, memoryview(raw.data))
            else:
                target.copy_(part_of(saved, common))

    return SavedTensor(record.shape, dtype, _fetcher(record, dtype, part_of), fill)


def _fetcher(record: Record, dtype: torch.dtype, part_of: Any) -> Any:
    def fetch(box: Box) -> torch.Tensor:
        if not box.numel:
            return torch.empty(box.sizes, dtype=dtype)
        out: torch.Tensor | None = None
        for saved in record.boxes:
            common = saved.box.intersect(box)
            if common is None:
                continue
            part = part_of(saved, common)
            if common == box:
                return part  # type: ignore[no-any-return]
            if out is None:
                out = torch.empty(box.sizes, dtype=dtype)
            out[common.relative_to(box.offsets).slices()] = part
        assert out is not None
        return out

    return fetch


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(sizes):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


# -- directories of others


def open_dcp(folder: Folder, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint.save` or Lightning's FSDP strategies wrote.

    Keys under ``model.`` or ``state_dict.`` are weights, or all tensors are if no key is; those
    under ``optimizer_0.`` (or ``optim.``, ``optimizer.``) are the optimizer's.

    Raises:
        CheckpointError: it is damaged, or an incomplete checkpoint of ours.
    """
    metadata = parse_metadata(bytes(folder.read(METADATA)), folder)
    if metadata.storage_meta is not None and WRITER in (metadata.storage_meta.modules or []):
        raise CheckpointError(
            f"Expected a complete checkpoint, got one without its {MANIFEST}, which is written "
            f"last ({folder}). Resume from another checkpoint."
        )
    checkpoint: dict[str, Any] = {}
    if folder.nbytes_of(META) is not None:
        checkpoint = read_meta(folder, weights_only)
    state: dict[str, Any] = {}
    optimizers: dict[str, dict[str, Any]] = {}
    places = metadata.planner_data or {}
    for key, entry in metadata.state_dict_metadata.items():
        place = tuple(places.get(key, (key,)))
        value = _foreign_value(folder, metadata, key, entry)
        first = str(place[0])
        if len(place) > 1 and first in {"model", "state_dict"}:
            state[".".join(map(str, place[1:]))] = value
        elif len(place) > 1 and first.partition("_")[0] in {"optimizer", "optim"}:
            _put(optimizers.setdefault(first, {}), place[1:], value)
        else:
            state[".".join(map(str, place))] = value
    checkpoint["state_dict"] = state
    if optimizers:
        checkpoint["optimizer_states"] = [
            _as_lists(optimizers[name]) for name in sorted(optimizers, key=_number)
        ]
    return checkpoint


def _number(name: str) -> int:
    tail = name.rpartition("_")[2]
    return int(tail) if tail.isdecimal() else 0


def _foreign_value(folder: Folder, metadata: Metadata, key: str, entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return _foreign_blob(folder, metadata, MetadataIndex(key))
    dtype = entry.properties.dtype
    record = Record(str(dtype).removeprefix("torch."), tuple(entry.size))
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if box.numel:  # others list empty boxes of empty tensors
            record.boxes.append(SavedBox("", 0, 0, 0, box))
    gaps = find_gaps(record.shape, [saved.box for saved in record.boxes])
    if gaps:
        raise CheckpointError(
            f"Expected all of {key} in .metadata, got {gaps} ({folder}). "
            f"Resume from another checkpoint."
        )
    for saved in record.boxes:
        _foreign_place(folder, metadata, MetadataIndex(key, torch.Size(saved.box.offsets)))

    def part_of(saved: SavedBox, wanted: Box) -> torch.Tensor:
        index = MetadataIndex(key, torch.Size(saved.box.offsets))
        whole = _foreign_blob(folder, metadata, index)
        if (whole.shape, whole.dtype) != (saved.box.sizes, dtype):
            got = f"{tuple(whole.shape)} {whole.dtype} instead of {saved.box.sizes} {dtype}"
            raise _damaged(folder, key, ValueError(got))
        inside = wanted.relative_to(saved.box.offsets)
        return whole[inside.slices()]  # type: ignore[no-any-return]

    return SavedTensor(record.shape, dtype, _fetcher(record, dtype, part_of))


def _foreign_place(folder: Folder, metadata: Metadata, index: MetadataIndex) -> Any:
    at = metadata.storage_data.get(index)
    if at is None or at.offset < 0 or at.length < 0:
        raise _damaged(folder, index.fqn, ValueError(f"{at} as its place"))
    if not _is_inside(at.relative_path):
        raise CheckpointError(
            f"Expected files of the checkpoint's folder, got {at.relative_path!r} ({folder}). "
            f"Do not load files from where you do not trust."
        )
    return at


def _foreign_blob(folder: Folder, metadata: Metadata, index: MetadataIndex) -> Any:
    at = _foreign_place(folder, metadata, index)
    try:
        raw = folder.read(at.relative_path, at.offset, at.offset + at.length)
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, OSError, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(folder, f"{index.fqn} in {at.relative_path}", error) from error


def _is_inside(name: str) -> bool:
    return (
        bool(name) and not name.startswith("/") and ".." not in name.replace("\\", "/").split("/")
    )


def _put(tree: dict[Any, Any], place: Sequence[Any], value: Any) -> None:
    for step in place[:-1]:
        tree = tree.setdefault(step, {})
    tree[place[-1]] = value


def _as_lists(tree: Any) -> Any:
    """Return ``tree`` with lists where its keys count from 0."""
    if not isinstance(tree, dict):
        return tree
    if (
        tree
        and all(isinstance(key, int) for key in tree)
        and sorted(tree) == list(range(len(tree)))
    ):
        return [_as_lists(tree[n]) for n in range(len(tree))]
    return {key: _as_lists(value) for key, value in tree.items()}
