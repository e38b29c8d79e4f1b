"""A module, or a data module, made from a checkpoint of any form, outside of a Trainer.

What `LightningModule.load_from_checkpoint` does, step by step and with its own pieces: that method
itself opens single files only, and knows no names without what `torch.compile` adds.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from pathlib import PurePath
from typing import IO, Any, TypeVar, cast

import lightning
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.saving import (
    CHECKPOINT_PAST_HPARAMS_KEYS,
    _convert_loaded_hparams,
    _default_map_location,
    _load_from_checkpoint,
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
)
from lightning.pytorch.utilities.migration import pl_legacy_patch
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import parse_class_init_keys

from lightning_zeroplus.checkpoint import (
    SavedTensor,
    align_names,
    find_mismatches,
    local_path,
    read_whole,
)
from lightning_zeroplus.errors import CheckpointError, ConfigError, name_offenders
from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO
from lightning_zeroplus.plugin.saving import own_state

__all__ = ["load_from_checkpoint"]

_T = TypeVar("_T", bound=LightningModule | LightningDataModule)

# What a checkpoint may name to make the object; `LightningCLI` saves the first.
_INSTANTIATORS = {
    "lightning.pytorch.cli.instantiate_module",
    "pytorch_lightning.cli.instantiate_module",
}


def load_from_checkpoint(
    cls: type[_T],
    path: _PATH | IO[bytes],
    *,
    map_location: Any = None,
    hparams_file: _PATH | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> _T:
    """Return an object of ``cls`` with the weights and hyper-parameters of the checkpoint. *Local.*

    Like Lightning's ``cls.load_from_checkpoint``, for checkpoints of every form: universal folders,
    folders of `torch.distributed.checkpoint`, of Lightning's FSDP strategies and of DeepSpeed, and
    single files. Weights are the master weights, in the dtypes that ``cls`` makes.

    Args:
        cls: a `LightningModule` or a `LightningDataModule`.
        path: of the checkpoint: local, or one that fsspec reaches.
        map_location: as in `torch.load`; where the module is afterwards. None: where the tensors of
            a file were saved, the CPU for a folder.
        hparams_file: a ``.yaml`` or ``.csv`` file with hyper-parameters in place of the saved ones.
        strict: whether names must match. None: as the module's ``strict_loading`` says.
        weights_only: as in `torch.load`. False: the checkpoint may have objects of any class, whose
            code then runs; only for checkpoints you trust.
        **kwargs: hyper-parameters that replace saved ones.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: the checkpoint is damaged, or of another model.
        ConfigError: ``strict`` contradicts the module, or ``hparams_file`` is of another kind.
    """
    if not isinstance(path, str | os.PathLike) or str(path).startswith(("http://", "https://")):
        load: Any = _load_from_checkpoint
        return cast(_T, load(cls, path, map_location, hparams_file, strict, weights_only, **kwargs))
    checkpoint = _read(path, map_location, weights_only)
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY
    if hparams_file is not None:
        checkpoint[key] = _read_hparams(hparams_file)
    checkpoint[key] = read_whole(checkpoint.get(key, {}))
    checkpoint[key].update(kwargs)
    if issubclass(cls, LightningModule) and "state_dict" not in checkpoint:
        raise CheckpointError(
            f"Expected a checkpoint with a state_dict, got one without ({path}). Give the path of "
            f"one that a Trainer has saved."
        )
    made = _make(cls, checkpoint, kwargs)
    if isinstance(made, LightningModule):
        _load_weights(made, checkpoint, strict, path)
        return cast(_T, made.to(_device(checkpoint["state_dict"], map_location)))
    if type(made).__qualname__ in checkpoint:
        made.load_state_dict(read_whole(checkpoint[type(made).__qualname__]))
    return made


def _read(path: _PATH, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    where = _default_map_location if map_location is None else map_location
    io = ZeroPlusCheckpointIO()
    io.reading_ranks = (0, 1)  # tensors are read one by one
    with pl_legacy_patch():
        checkpoint = io.load_checkpoint(path, where, weights_only)
    # What others wrote lacks what Lightning asks for.
    checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)
    local = local_path(path)
    return _pl_migrate_checkpoint(checkpoint, None if local is None else str(local))


def _read_hparams(path: _PATH) -> dict[str, Any]:
    kind = PurePath(path).suffix.lower()
    if kind == ".csv":
        return load_hparams_from_tags_csv(path)
    if kind in {".yml", ".yaml"}:
        return load_hparams_from_yaml(path)
    raise ConfigError(
        f"Expected hyper-parameters in a .yaml or .csv file, got {kind or 'none'} ({path}). "
        f"Write them as YAML."
    )


# -- the object


def _make(cls: type[_T], checkpoint: dict[str, Any], given: dict[str, Any]) -> _T:
    """Return ``cls(...)`` with the saved arguments; ``given`` ones come first."""
    specials = [name for name in parse_class_init_keys(cls) if name]
    known = [n for n in inspect.signature(cls.__init__).parameters if n not in specials]
    saved: dict[str, Any] = {}
    if issubclass(cls, LightningModule):
        for past in CHECKPOINT_PAST_HPARAMS_KEYS:
            saved.update(checkpoint.get(past, {}))
    saved.update(checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY])
    saved = _convert_loaded_hparams(saved, checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_TYPE))
    name = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    arguments = {**({name: saved} if name and name in known else saved), **given}
    instantiator = arguments.pop("_instantiator", None)
    if instantiator is not None:
        _refuse_foreign(instantiator, arguments.get("_class_path"), cls)
    if not inspect.getfullargspec(cls.__init__).varkw:
        arguments = {key: value for key, value in arguments.items() if key in known}
    if instantiator is None:
        return cls(**arguments)
    module, _, function = instantiator.rpartition(".")
    return cast(_T, getattr(importlib.import_module(module), function)(cls, arguments))


def _refuse_foreign(instantiator: object, class_path: object, cls: type) -> None:
    """Check that a checkpoint names nothing to be called but what makes a ``cls``."""
    if not isinstance(instantiator, str) or instantiator not in _INSTANTIATORS:
        raise CheckpointError(
            f"Expected {min(_INSTANTIATORS)} to make the object, got {instantiator!r}, which "
            f"the checkpoint names. Do not load checkpoints from where you do not trust."
        )
    if class_path is None:
        return
    module, _, name = str(class_path).rpartition(".")
    target = getattr(sys.modules.get(module), name, None)
    if not (isinstance(target, type) and issubclass(target, cls)):
        raise CheckpointError(
            f"Expected an imported subclass of {cls.__name__}, got {class_path!r}, which the "
            f"checkpoint names. Import the module that defines it if you trust the checkpoint."
        )


# -- its weights


def _load_weights(
    module: LightningModule, checkpoint: dict[str, Any], strict: bool | None, path: _PATH
) -> None:
    if module._strict_loading is not None and strict not in {None, module.strict_loading}:
        raise ConfigError(
            f"Expected strict={module.strict_loading}, as {type(module).__name__}.strict_loading "
            f"has it, got {strict}. Set both alike, or one."
        )
    strict = module.strict_loading if strict is None else strict
    if is_overridden("configure_model", module):
        module.configure_model()
    module.on_load_checkpoint(checkpoint)
    state = align_names(checkpoint["state_dict"], own := own_state(module))
    if not state:
        rank_zero_warn(f"The checkpoint has no weights ({path}).")
    try:
        keys = module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        problems = find_mismatches(own, state) if strict else []
        got = name_offenders(problems) if problems else str(error)
        raise CheckpointError(
            f"Expected a checkpoint of {type(module).__qualname__}, got another set of weights: "
            f"{got} ({path}). Load it into the class it was saved from, or with strict=False where "
            f"names differ."
        ) from error
    if not strict and keys is not None and (keys.missing_keys or keys.unexpected_keys):
        rank_zero_warn(
            f"Missing in the checkpoint: {keys.missing_keys}; not in the module: "
            f"{keys.unexpected_keys} ({path})."
        )


def _device(state: dict[str, Any], map_location: Any) -> torch.device:
    """Return where the module belongs: with the first of its saved tensors."""
    first = next((value for value in state.values() if isinstance(value, torch.Tensor)), None)
    if not isinstance(first, SavedTensor):
        return torch.device("cpu") if first is None else first.device
    if map_location is None:
        return first.device
    if isinstance(map_location, dict):
        return torch.device(map_location.get("cpu", "cpu"))
    if callable(map_location):
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        return torch.device("cpu") if moved is None else torch.device(moved.device)
    return torch.device(map_location)
