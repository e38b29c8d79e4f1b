"""Names of parameters: the module's own, without what wrappers put in between."""

from __future__ import annotations

__all__ = ["plain_name"]

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """Return ``name`` without the parts that `torch.compile` and checkpoint wrappers add.

    >>> plain_name("encoder._orig_mod.layers.0.weight")
    'encoder.layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
