"""Where a DeepSpeed checkpoint lies on disk, and which files belong to it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from lightning_zeroplus.checkpoint.deepspeed.fields import check_name, fault
from lightning_zeroplus.errors import CheckpointError, name_offenders

__all__ = ["RankFiles", "detect_deepspeed", "find_checkpoint", "scan_folder"]

_OPTIM_END, _MODEL_END = "optim_states.pt", "model_states.pt"
_RANKED = re.compile(
    r"(?P<precision>bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>[0-9]{1,9})_)?"
    r"mp_rank_(?P<model>[0-9_]+)_(?P<kind>optim|model)_states\.pt"
)
_LONGEST_TAG = 4096


class RankFiles(NamedTuple):
    """The files of a checkpoint by data-parallel rank; files of no rank count as of rank 0."""

    folder: Path
    optim: dict[int, Path]
    model: dict[int, Path]

    def expect(self, kind: str, count: int) -> list[Path]:
        """Return the files of ``kind``, 'optim' or 'model', in the order of ranks.

        Raises:
            CheckpointError: there are not exactly ``count``, one for each rank.
        """
        found = self.optim if kind == "optim" else self.model
        missing = [f"rank {rank}" for rank in range(count) if rank not in found]
        extra = [found[rank].name for rank in sorted(found) if rank >= count]
        if missing or extra:
            parts = [f"none of {name_offenders(missing)}"] if missing else []
            parts += [f"also {name_offenders(extra)}"] if extra else []
            raise fault(
                f"{count} files *_{kind}_states.pt, one for each rank",
                f"{len(found)}, {' and '.join(parts)}",
                self.folder,
                "Copy the whole checkpoint; remove files of another run.",
            )
        return [found[rank] for rank in range(count)]


def detect_deepspeed(path: str | os.PathLike[str]) -> str | None:
    """Return the form of the DeepSpeed checkpoint at ``path``, a local folder. *Local.*

    Only names of files are looked at, and the text of ``latest`` or ``latest_universal``.

    Returns:
        ``"universal"``, ``"zero"`` or, for anything else, None.
    """
    try:
        return find_checkpoint(Path(path), None)[1]
    except (OSError, ValueError, CheckpointError):
        return None


def find_checkpoint(path: Path, tag: str | None) -> tuple[Path, str]:
    """Return the folder with the files, and its form.

    Args:
        path: that folder, or the one above it with ``latest`` or ``latest_universal``. Where both
            of these stand, ``latest`` counts: the universal folder is made from what it names.
        tag: names the folder in ``path``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: it is no checkpoint of DeepSpeed.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint folder not found: {path}")
    if not path.is_dir():
        raise fault("a folder of DeepSpeed", "a file", path, "Give the folder that it saved.")
    if tag is not None:
        return _tagged(path, check_name(tag, "the tag", path))
    form = _form_of(path)
    if form is not None:
        return path, form
    named = {pointer: path / pointer for pointer in ("latest", "latest_universal")}
    tags = {pointer: _read_tag(file) for pointer, file in named.items() if file.is_file()}
    usable = [tag for tag in tags.values() if (path / tag).is_dir()]
    if tags:
        return _tagged(path, (usable or list(tags.values()))[0])
    raise fault(
        f"a DeepSpeed checkpoint, with files *{_OPTIM_END} or a folder zero/",
        f"{len(os.listdir(path))} other files",
        path,
        "Give the folder that DeepSpeed saved or the universal folder.",
    )


def _tagged(path: Path, tag: str) -> tuple[Path, str]:
    folder = path / tag
    form = _form_of(folder) if folder.is_dir() else None
    if form is None:
        got = "a folder without its files" if folder.is_dir() else "no folder"
        raise fault(
            f"the checkpoint {tag!r}", got, folder, "Give another tag, or copy the whole folder."
        )
    return folder, form


def _read_tag(file: Path) -> str:
    with file.open("rb") as stream:
        content = stream.read(_LONGEST_TAG)
    return check_name(content.decode("utf-8", "replace").strip(), "the text", file)


def _form_of(folder: Path) -> str | None:
    names = os.listdir(folder)
    if any(name.endswith(_OPTIM_END) for name in names):
        return "zero"
    states = any(name.endswith(_MODEL_END) for name in names)
    if (folder / "zero").is_dir() and (states or (folder / "zero/optimizer_state.pt").is_file()):
        return "universal"
    return "zero" if states else None


def scan_folder(folder: Path) -> RankFiles:
    """Return the files of a checkpoint by rank.

    Raises:
        CheckpointError: there are files of model parallelism, of experts, of states on NVMe, or of
            two runs.
    """
    names = sorted(os.listdir(folder))
    files = RankFiles(folder, {}, {})
    precisions: dict[str, str] = {}
    for name in names:
        if not name.endswith((_OPTIM_END, _MODEL_END)):
            continue
        match = _RANKED.fullmatch(name)
        if match is None or match["model"].strip("0"):
            raise _not_data_parallel(folder / name)
        found = files.optim if match["kind"] == "optim" else files.model
        rank = int(match["rank"] or 0)
        if rank in found:
            raise fault(
                f"one file of rank {rank}",
                f"{found[rank].name} and {name}",
                folder,
                "Remove the files of another run.",
            )
        found[rank] = folder / name
        if match["kind"] == "optim":
            precisions[match["precision"] or ""] = name
    if len(precisions) > 1:
        got = " and ".join(sorted(precisions.values()))
        raise fault("files of one run", got, folder, "Remove the files of another run.")
    if "offloaded_tensors" in names:
        raise fault(
            "optimizer states in the files of the ranks",
            "states that were offloaded to NVMe",
            folder / "offloaded_tensors",
            "Save again with the optimizer on the CPU or the device.",
        )
    return files


def _not_data_parallel(path: Path) -> CheckpointError:
    name = path.name
    if "expert" in name or name.startswith("expp_"):
        got = "a file of experts (MoE)"
    elif name.startswith("layer_"):
        got = "a file of one layer (pipeline parallelism)"
    elif "mp_rank_" in name:
        got = "a file of model parallelism (TP or PP above 1)"
    else:
        got = "a file of another kind"
    return fault(
        "a data-parallel checkpoint, with the files of mp_rank_00 alone",
        got,
        path,
        "Consolidate it with DeepSpeed first.",
    )
