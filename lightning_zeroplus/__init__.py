"""ZeRO-1/2/3 sharding for PyTorch Lightning in pure PyTorch.

Importing this package registers the strategy names (``zeroplus``, ``zeroplus_stage_3``, ...) with
Lightning, at once or as soon as Lightning is imported. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_zeroplus.plugin.registry import register_on_import

if TYPE_CHECKING:
    from lightning_zeroplus.checkpoint import consolidate
    from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO
    from lightning_zeroplus.plugin.load_from import load_from_checkpoint
    from lightning_zeroplus.plugin.strategy import ZeroPlusStrategy

__all__ = [
    "ZeroPlusCheckpointIO",
    "ZeroPlusStrategy",
    "__version__",
    "consolidate",
    "load_from_checkpoint",
]

__version__ = "0.1.0.dev0"

register_on_import()


_WHERE = {
    "ZeroPlusCheckpointIO": "lightning_zeroplus.plugin.checkpoint_io",
    "ZeroPlusStrategy": "lightning_zeroplus.plugin.strategy",
    "consolidate": "lightning_zeroplus.checkpoint",
    "load_from_checkpoint": "lightning_zeroplus.plugin.load_from",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
