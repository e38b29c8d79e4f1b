"""What is in a checkpoint, without reading its tensors; and whether all of it can be read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from lightning_zeroplus.checkpoint.archive import find_bad_records, records_of
from lightning_zeroplus.checkpoint.folder import Folder, folder_at, local_path
from lightning_zeroplus.checkpoint.lazy import Tell, flat_bytes, tensors_in
from lightning_zeroplus.checkpoint.load import find_damage, read_manifest
from lightning_zeroplus.checkpoint.read import form_of
from lightning_zeroplus.checkpoint.source import Source, open_source
from lightning_zeroplus.checkpoint.tree import join_key
from lightning_zeroplus.errors import CheckpointError

__all__ = ["Row", "Summary", "Verdict", "describe_checkpoint", "verify_checkpoint"]


class Row(NamedTuple):
    """One tensor of a checkpoint."""

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    same_as: str
    """Name of the tensor that this is too; such a row has no bytes of its own."""


@dataclass(frozen=True)
class Summary:
    """What a checkpoint holds.

    Args:
        path: where it is.
        form: "universal", "dcp", "deepspeed" or "file".
        facts: who wrote it and when, as far as known.
        rows: its tensors, in order.
        groups: for each optimizer, the learning rates of its groups.
        callbacks: names of those with a state.
        other: further keys of Lightning's dictionary, each with what it is.
    """

    path: str
    form: str
    facts: dict[str, Any]
    rows: list[Row]
    groups: list[list[Any]]
    callbacks: list[str]
    other: dict[str, str]

    def parts(self) -> dict[str, tuple[int, int, int]]:
        """Return, by part, the number of tensors, of elements and of bytes."""
        found: dict[str, tuple[int, int, int]] = {}
        for row in self.rows:
            if not row.same_as:
                tensors, numel, nbytes = found.get(row.part, (0, 0, 0))
                found[row.part] = tensors + 1, numel + row.numel, nbytes + row.nbytes
        return found


WEIGHTS = "weights"
REST = "buffers and untrained weights"
OTHER = "other tensors"


def describe_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None
) -> Summary:
    """Return what is in the checkpoint at ``path``; checksums are not compared.

    Args:
        path: of any form that can be read.
        weights_only: False: metadata may have objects of any class; only for files you trust.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: it is incomplete, or no checkpoint.
    """
    source = open_source(path, weights_only=weights_only, check=False)
    checkpoint = source.checkpoint
    states = checkpoint.get("optimizer_states")
    states = states if isinstance(states, list) else []
    optimizers = [one for one in states if isinstance(one, dict)]
    shown = {"state_dict", "optimizer_states", "callbacks", "pytorch-lightning_version"}
    callbacks = checkpoint.get("callbacks")
    return Summary(
        path=source.path,
        form=source.form,
        facts=source.facts,
        rows=list(_rows(source, optimizers)),
        groups=[[group.get("lr") for group in one.get("param_groups", [])] for one in optimizers],
        callbacks=[str(name) for name in callbacks] if isinstance(callbacks, dict) else [],
        other={
            key: _kind(value)
            for key, value in checkpoint.items()
            if key not in shown and key not in source.facts
        },
    )


def _rows(source: Source, optimizers: list[Any]) -> Iterator[Row]:
    named = {
        name
        for one in optimizers
        for group in one.get("param_groups", [])
        for name in group["params"]
        if isinstance(name, str)
    }
    trained = named | {first for name, first in source.shared.items() if name in named}
    for path, tensor in tensors_in(source.checkpoint):
        if path[0] == "state_dict":
            name = ".".join(map(str, path[1:]))
            part = WEIGHTS if not trained or source.shared.get(name, name) in trained else REST
            yield _row(part, name, tensor, source.shared.get(name, ""))
        elif path[0] == "optimizer_states" and "state" in path[2:3]:
            yield _row(f"optimizer {path[1]} states", join_key(path)[0], tensor)
        else:
            yield _row(OTHER, join_key(path)[0], tensor)


def _row(part: str, name: str, tensor: torch.Tensor, same_as: str = "") -> Row:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return Row(part, name, dtype, shape, tensor.numel(), tensor.nbytes, same_as)


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, list(value)[:8]))
        return f"{{{keys}{', ...' if len(value) > 8 else ''}}}"
    if isinstance(value, list | tuple | set):
        return f"{len(value)} of {type(value).__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return type(value).__name__


# -- whether it can be read


@dataclass(frozen=True)
class Verdict:
    """What came of reading all of a checkpoint.

    Args:
        form: of the checkpoint.
        problems: one text each; none: it is sound.
        nbytes: that were read.
        has_checksums: whether they were compared, for all of it.
    """

    form: str
    problems: list[str]
    nbytes: int
    has_checksums: bool


def verify_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, tell: Tell | None = None
) -> Verdict:
    """Return whether the checkpoint at ``path`` is complete, after reading all of it once.

    Universal folders are compared with the checksums in their manifest; the files of `torch.save`,
    and so DeepSpeed's too, with those that they have themselves.

    Args:
        path: of any form that can be read.
        weights_only: False: metadata may have objects of any class; only for files you trust.
        tell: follows the progress.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: its table of contents is damaged, or it is no checkpoint.
    """
    form = form_of(path)
    count = _Count(tell)
    if form == "universal":
        folder = folder_at(path)
        manifest = read_manifest(folder)
        count.total = sum(sums.nbytes for sums in manifest.files.values())
        watched = cast(Folder, _Watched(folder, count))
        return Verdict(form, list(find_damage(watched, manifest)), count.done, True)
    files = _archives(path, form)
    if files:
        return _verify_archives(path, form, files, count, weights_only)
    source = open_source(path, weights_only=weights_only)
    tensors = list(tensors_in(source.checkpoint))
    count.total = sum(tensor.nbytes for _, tensor in tensors)
    problems = []
    for place, tensor in tensors:
        try:
            flat_bytes(tensor)
        except (CheckpointError, OSError, EOFError, ValueError) as error:
            problems.append(f"{join_key(place)[0]}: {error}")
        count(tensor.nbytes)
    return Verdict(form, problems, count.done, False)


def _verify_archives(
    path: str | os.PathLike[str],
    form: str,
    files: list[Path],
    count: _Count,
    weights_only: bool | None,
) -> Verdict:
    count.total = sum(file.stat().st_size for file in files)
    problems = [text for file in files for text in find_bad_records(file, count)]
    summed = True
    if not problems:
        open_source(path, weights_only=weights_only)  # all files are there and fit together
        for file in files:
            with file.open("rb") as stream:
                summed &= all(record.crc32 for record in records_of(stream) if record.nbytes)
    return Verdict(form, problems, count.done, summed)


def _archives(path: str | os.PathLike[str], form: str) -> list[Path]:
    """Return the files that have checksums of their own, or none if there is another kind."""
    local = local_path(path)
    if local is None or form not in {"file", "deepspeed"}:
        return []
    if form == "deepspeed":
        from lightning_zeroplus.checkpoint.deepspeed.folders import find_checkpoint

        return sorted(find_checkpoint(local, None)[0].rglob("*.pt"))
    with local.open("rb") as file:
        return [local] if file.read(2) == b"PK" else []


class _Count:
    """Adds up bytes and passes them on."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self.total = self.done = 0

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self._tell is not None:
            self._tell(nbytes, self.total)


class _Watched:
    """A folder whose reads are counted."""

    def __init__(self, folder: Folder, count: _Count) -> None:
        self._folder = folder
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def read(self, name: str, start: int, stop: int) -> Any:
        self._count(stop - start)
        return self._folder.read(name, start, stop)
