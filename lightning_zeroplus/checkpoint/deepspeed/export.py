"""Write DeepSpeed's universal checkpoint, in the form of stages 1 and 2."""

from __future__ import annotations

import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from lightning_zeroplus.checkpoint.blob import save_streamed
from lightning_zeroplus.checkpoint.deepspeed.contents import Contents, plain, sort_contents
from lightning_zeroplus.checkpoint.deepspeed.fields import fault
from lightning_zeroplus.checkpoint.deepspeed.model_states import RESERVED
from lightning_zeroplus.checkpoint.folder import take_place
from lightning_zeroplus.checkpoint.full import flush_folder
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor
from lightning_zeroplus.errors import CheckpointError

__all__ = ["write_deepspeed_universal"]

_LAYOUT_OF = "0.19.8"  # the version of DeepSpeed whose layout this is
_INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "vocabulary_parameter_patterns": [],
    "pipeline_replicated_parameter_patterns": [],
    "tp_replicated_parameter_patterns": [],
    "parameter_to_average_patterns": [],
    "parameter_with_row_parallelism_patterns": [],
    "parameter_with_2_sub_params_cat_dim_0": [],
    "parameter_with_sub_params": [],
    "sub_param_shard_widths": {},
}
_NOT_CLIENT = ("state_dict", "optimizer_states", "deepspeed")


def write_deepspeed_universal(
    checkpoint: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    buffer_names: Collection[str] | None = None,
    shared_params: Mapping[str, str] | None = None,
    force: bool = False,
) -> None:
    """Write ``checkpoint`` as a universal folder that DeepSpeed loads at stages 1 and 2. *Local.*

    The folder appears complete or not at all; ``latest_universal`` beside it then names it. One
    tensor is in memory at a time. Masters become fp32, states of the optimizer keep their dtype;
    where only some parameters of a group have states, the others get zeros, as DeepSpeed gives
    them. DeepSpeed restores trained parameters and the optimizer from such a folder; frozen
    parameters and buffers are in it, but its loader leaves those of the model as they are.

    Args:
        checkpoint: what `read_deepspeed` returns, or a checkpoint of Lightning with the states of
            one optimizer by name of the parameter.
        folder: a local path.
        buffer_names: the buffers in ``state_dict``. None: as `read_deepspeed` found them, else all
            that no group has.
        shared_params: for the second name of a tied parameter, the first. None: as `read_deepspeed`
            found them, and names of the same tensor.
        force: replace what is at ``folder``.

    Raises:
        FileExistsError: there is something at ``folder``.
        CheckpointError: DeepSpeed's layout cannot hold the checkpoint, or it cannot be written.
    """
    target = Path(os.path.abspath(folder))
    if os.path.lexists(target) and not force:
        raise FileExistsError(
            f"Expected no file or folder, got one ({target}). Choose another name or use force."
        )
    contents = sort_contents(checkpoint, target, buffer_names, shared_params)
    model = _model_states(checkpoint, contents, target)
    optimizer = _optimizer_state(checkpoint, contents, target)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        _write_files(draft, contents, model, optimizer)
        _publish(draft, target, force)
        _point_at(target)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        raise _not_written(target, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _not_written(target: Path, error: Exception) -> CheckpointError:
    # torch turns a failed write into a RuntimeError whose context has the reason.
    cause = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
    got = f"{type(cause).__name__}: {cause}"
    return fault(
        "to write a universal checkpoint", got, target, "Free space or choose another folder."
    )


def _write_files(
    folder: Path, contents: Contents, model: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    (folder / "zero").mkdir(parents=True)
    _save(optimizer, folder / "zero" / "optimizer_state.pt")
    _write_parameters(contents, folder / "zero")
    with (folder / "mp_rank_00_model_states.pt").open("xb") as file:
        save_streamed(model, _in_order(model, contents), file)
        _flush(file)


def _write_parameters(contents: Contents, folder: Path) -> None:
    for group, step in zip(contents.groups, contents.steps, strict=True):
        keys = sorted({key for name in group for key in contents.states[name]})
        for name in group:
            place = folder / name
            place.mkdir()
            master = contents.weights[name]
            _save_whole(_read(master).float(), place / "fp32.pt")
            for key in keys:
                state = contents.states[name].get(key)
                value = torch.zeros(master.shape) if state is None else _read(state)
                _save_whole(value, place / f"{key}.pt")
            if step is not None:
                _save(step, place / "step.pt")


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read() if isinstance(tensor, SavedTensor) else tensor.detach()


def _save_whole(tensor: torch.Tensor, path: Path) -> None:
    """Write a tensor from where it is: it may be mapped from a file with many others."""
    frame = {"cat_dim": 0, "param": torch.empty(tensor.shape, dtype=tensor.dtype)}
    with path.open("xb") as file:
        save_streamed(frame, iter([tensor]), file)
        _flush(file)


def _save(value: Any, path: Path) -> None:
    with path.open("xb") as file:
        torch.save(value, file)
        _flush(file)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _shapes(weights: Mapping[str, Any], names: Iterable[str]) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, torch.Size(weights[name].shape)) for name in names)


def _model_states(
    checkpoint: Mapping[str, Any], contents: Contents, target: Path
) -> dict[str, Any]:
    """Return the model states; tensors of the module in them have no values yet."""
    about = checkpoint.get("deepspeed") or {}
    weights, stage = contents.weights, _stage(about)
    schedulers = checkpoint.get("lr_schedulers") or [None]
    module = OrderedDict(
        (name, torch.empty(value.shape, dtype=value.dtype))
        if isinstance(value, torch.Tensor)
        else (name, plain(value, f"state_dict.{name}", target))
        for name, value in weights.items()
    )
    module.update({name: module[kept] for name, kept in contents.shared.items()})
    frozen = None if stage == 1 and not contents.frozen else contents.frozen
    client = {key: value for key, value in checkpoint.items() if key not in _NOT_CLIENT}
    clash = sorted(RESERVED & client.keys())
    if clash:
        got = f"one named {clash[0]}, which is DeepSpeed's"
        raise fault("entries of the checkpoint", got, target, "Rename it.")
    run = {key: plain(about[key], key, target) for key in ("global_samples",) if key in about}
    return {
        "module": module,  # first: pickling meets its tensors in the order of `_in_order`
        "buffer_names": contents.buffers,
        "optimizer": None,
        "param_shapes": [_shapes(weights, group) for group in contents.groups],
        "frozen_param_shapes": None if frozen is None else _shapes(weights, frozen),
        "shared_params": dict(contents.shared),
        "frozen_param_fragments": None
        if frozen is None
        else OrderedDict((name, module[name]) for name in frozen),
        "lr_scheduler": plain(schedulers[0], "lr_schedulers[0]", target),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": int(about.get("skipped_steps", 0)),
        "global_steps": _global_steps(checkpoint, contents),
        **run,
        "dp_world_size": int(about.get("dp_world_size", 1)),
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": plain(about.get("ds_config", {}), "ds_config", target),
        "ds_version": str(about.get("ds_version") or _LAYOUT_OF),
        "universal_checkpoint_info": _INFO,
        **plain(client, "checkpoint", target),
    }


def _stage(about: Mapping[str, Any]) -> int:
    return 1 if about.get("zero_stage") == 1 else 2


def _global_steps(checkpoint: Mapping[str, Any], contents: Contents) -> int:
    about = checkpoint.get("deepspeed") or {}
    steps = [int(step) for step in contents.steps if step is not None]
    return int(about.get("global_steps", checkpoint.get("global_step", max(steps, default=0))))


def _optimizer_state(
    checkpoint: Mapping[str, Any], contents: Contents, target: Path
) -> dict[str, Any]:
    about = checkpoint.get("deepspeed") or {}
    # The loss scaler is an object of DeepSpeed's: without it DeepSpeed keeps the one it made. What
    # is not known is left out for the same reason.
    known: dict[str, Any] = {}
    if "dynamic" in about.get("loss_scale", {}):
        known["dynamic_loss_scale"] = bool(about["loss_scale"]["dynamic"])
    if about.get("clip_grad") is not None:
        known["clip_grad"] = float(about["clip_grad"])
    groups = range(len(contents.groups))
    return {
        **known,
        "overflow": False,
        "zero_stage": _stage(about),
        "group_paddings": [0 for _ in groups],
        "param_alignment_paddings": [[0] * len(group) for group in contents.groups],
        "partition_count": [int(about.get("dp_world_size", 1)) for _ in groups],
        "ds_version": str(about.get("ds_version") or _LAYOUT_OF),
        "param_groups": [
            plain(settings, f"param_groups[{n}]", target) | {"params": [n]}
            for n, settings in enumerate(contents.settings)
        ],
    }


def _in_order(model: Mapping[str, Any], contents: Contents) -> Iterator[torch.Tensor]:
    """Yield the values of the tensors in ``model`` as pickling meets them, each once.

    Tensors without elements are not asked for.
    """
    done = set()
    for name, value in model["module"].items():
        first = contents.shared.get(name, name)
        if first in done:
            continue
        done.add(first)
        whole = contents.weights[first]
        tensors = [_read(whole)] if isinstance(whole, torch.Tensor) else _tensors_in(value)
        yield from _filled(tensors)
    for key, value in model.items():
        if key not in ("module", "frozen_param_fragments"):
            yield from _filled(_tensors_in(value))


def _filled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.numel()]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors_in(item)]
    if isinstance(value, list | tuple | set):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []


def _publish(draft: Path, target: Path, force: bool) -> None:
    if force and os.path.lexists(target):
        take_place(draft, target)
    else:
        draft.rename(target)
    flush_folder(target.parent)


def _point_at(target: Path) -> None:
    draft = target.with_name(f".latest_universal.{uuid.uuid4().hex}.tmp")
    draft.write_text(target.name)
    draft.replace(target.with_name("latest_universal"))
