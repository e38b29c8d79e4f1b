"""The strategy names that `Trainer(strategy="...")` understands once this package is imported.

Lightning takes seconds to import and the engine does not need it, so the names are registered at
once only if Lightning is there already, and otherwise right after its strategies are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Protocol

__all__ = ["NAMES", "register", "register_on_import"]

_HOST = "lightning.pytorch.strategies"

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

NAMES: dict[str, dict[str, Any]] = {
    "zeroplus": {"stage": 2},
    **{
        f"zeroplus_stage_{stage}{suffix}": {"stage": stage, "start_method": start_method}
        for stage in (1, 2, 3)
        for suffix, start_method in _START_METHODS.items()
    },
}
"""Registered name to the arguments of `ZeroPlusStrategy`."""


class _Registry(Protocol):
    def __contains__(self, name: object, /) -> bool: ...

    def register(
        self, name: str, strategy: Callable[..., Any], description: str, **init_params: Any
    ) -> Any: ...


def register(registry: _Registry) -> None:
    """Make every name of `NAMES` known to ``registry``; names already taken are left alone."""
    for name, arguments in NAMES.items():
        if name not in registry:
            settings = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            registry.register(name, _make_strategy, f"ZeroPlusStrategy({settings})", **arguments)


def register_on_import() -> None:
    """Register with Lightning now, or as soon as its strategies are imported."""
    host = sys.modules.get(_HOST)
    if host is not None and hasattr(host, "StrategyRegistry"):
        register(host.StrategyRegistry)
    elif not any(isinstance(finder, _HostFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HostFinder())


def _make_strategy(**arguments: Any) -> Any:
    from lightning_zeroplus.plugin.strategy import ZeroPlusStrategy

    return ZeroPlusStrategy(**arguments)


class _HostFinder(MetaPathFinder):
    """Finds Lightning's strategies once, so that the names are registered after their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _HOST:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads as the loader that it stands for, then registers and steps aside."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        register(module.StrategyRegistry)
