"""Checkpoints of either form, read in one way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole

__all__ = ["FORMATS", "numbered", "read"]

FORMATS = ["full", "universal"]


def read(path: str | Path) -> dict[str, Any]:
    """Return the checkpoint at ``path`` with every tensor in memory."""
    checkpoint: dict[str, Any] = read_whole(read_checkpoint(path))
    return checkpoint


def numbered(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the states of an optimizer by the parameter's number, as torch has them."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    return {names.index(name): values for name, values in state["state"].items()}
