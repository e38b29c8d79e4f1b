"""Files of DeepSpeed, read without running what is in them.

They are pickles with a few objects of DeepSpeed. Those become stand-ins that have attributes and do
nothing; every other class is refused by name.
"""

from __future__ import annotations

import pickle
import re
import struct
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_zeroplus.checkpoint.deepspeed.fields import fault
from lightning_zeroplus.errors import CheckpointError

__all__ = ["Record", "load_file"]


class Record:
    """An object of DeepSpeed: the attributes that were saved, without the class."""

    def __init__(self, *args: Any) -> None:
        """Accept what the class would; the attributes come after."""


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_STAND_INS: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Record, f"{_SCALERS}.LossScaler"),
    (Record, f"{_SCALERS}.DynamicLossScaler"),
    (Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Record, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
]
_CLASS = re.compile(r"GLOBAL ([\w.]+)")
_LOCK = threading.Lock()  # torch keeps the allowed classes in one set for the process

# What the reader of archives, the unpickler and the stand-ins raise for damaged content.
_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)


def load_file(path: Path) -> Any:
    """Return what ``path`` holds; its tensors are mapped, so memory is taken when they are read.

    Raises:
        CheckpointError: the file is missing, damaged, or has a class that is not DeepSpeed's.
    """
    try:
        with path.open("rb") as file:
            complete = zipfile.is_zipfile(file)  # the table of contents is at the end
        if not complete:
            raise EOFError("it ends early or is not of torch.save")
        with _LOCK, torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise fault("a file", "none", path, "Copy the whole checkpoint.") from error
    except _DAMAGE as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: Exception) -> CheckpointError:
    text = str(error)
    if isinstance(error, pickle.UnpicklingError) and (name := _CLASS.search(text)):
        return fault(
            "tensors, plain values and DeepSpeed's own classes",
            f"the class {name[1]}",
            path,
            "If you trust the file, allow the class with torch.serialization.add_safe_globals.",
        )
    reason = text.splitlines()[0] if text else type(error).__name__
    size = path.stat().st_size if path.is_file() else 0
    return fault(
        "a complete file of a checkpoint",
        f"{size} unreadable bytes: {reason.rstrip('.')}",
        path,
        "Copy it again, or use an earlier checkpoint.",
    )
