"""What one rank brings to a universal checkpoint, before anything is written."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor, identity_of
from lightning_zeroplus.checkpoint.tree import Path, join_key, map_leaves, mark
from lightning_zeroplus.layout.span import Span

__all__ = ["Piece", "ShardedCheckpoint"]

_INLINE_NBYTES = 16 * 1024
"""Smaller tensors of callbacks and the like stay in the metadata."""


@dataclass(frozen=True)
class Piece:
    """One rank's span of a tensor.

    Args:
        key: under which it is stored.
        place: in PyTorch's nested terms.
        local: the elements, 1-D ``[span.numel]``, or of all of the tensor in its own shape.
        shape: of the whole tensor.
        span: its range in memory order.
        stride: of the whole tensor.
    """

    key: str
    place: Path
    local: torch.Tensor
    shape: tuple[int, ...]
    span: Span
    stride: tuple[int, ...]

    @staticmethod
    def whole(key: str, place: Path, tensor: torch.Tensor) -> Piece:
        """Return the piece that is all of ``tensor``; nothing is read or copied for it."""
        shape = tuple(tensor.shape)
        stride = tuple(torch.empty(shape, device="meta").stride())
        return Piece(key, place, tensor.detach(), shape, Span(0, tensor.numel()), stride)

    def elements(self) -> torch.Tensor:
        """Return the elements, 1-D and dense; what is still in a file is read for it."""
        local = self.local.detach()
        if isinstance(local, SavedTensor):
            local = local.read()
        return local.contiguous().reshape(-1)


@dataclass
class ShardedCheckpoint:
    """A checkpoint whose tensors are spread over ranks.

    Args:
        rest: Lightning's dictionary; `take` replaces tensors in it by marks.
        facts: about who writes it, for people.
    """

    rest: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    """This rank's own."""

    replicated: dict[str, tuple[Path, torch.Tensor]] = field(default_factory=dict)
    """By key, what every rank has in full."""

    aliases: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """By key, the key of the stored tensor that it shares."""

    leaves: list[tuple[Path, Any]] = field(default_factory=list)
    """Where in ``rest`` this rank alone knows something."""

    _paths: dict[str, Any] = field(default_factory=dict)
    _keys: dict[Any, str] = field(default_factory=dict)

    def key_for(self, path: Path) -> tuple[str, Path]:
        """Return the key and place of what is at ``path``, unlike those of any other path."""
        key, place = join_key(path)
        typed = tuple((type(step), step) for step in path)
        while self._paths.setdefault(key, typed) != typed:
            key += "~"
            place = (key,)
        return key, place

    def take(self, tree_path: Path, tree: Any, *, inline: bool) -> Any:
        """Return ``tree`` with marks in place of tensors, which join `replicated`.

        Args:
            tree_path: where it is in the checkpoint.
            tree: what is there.
            inline: leave small tensors in.
        """

        def change(path: Path, leaf: Any) -> Any:
            if not _is_dense(leaf) or (inline and leaf.nbytes < _INLINE_NBYTES):
                return leaf.detach().cpu() if _is_dense(leaf) else leaf
            key, place = self.key_for(path)
            first = self._keys.setdefault(identity_of(leaf), key)
            if first == key:
                self.replicated[key] = (place, leaf.detach())
            else:
                self.aliases[key] = (place, first)
            return mark(key)

        return map_leaves(tree, change, tree_path)

    def forget_tensors(self) -> None:
        """Let go of memory that is not needed once this is written."""
        self.pieces.clear()
        self.replicated.clear()

    def snapshot(self) -> ShardedCheckpoint:
        """Return the same in host memory of its own, so that training can go on."""
        copies: dict[int, torch.Tensor] = {}

        def host(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
            return copies[id(tensor)]

        return replace(
            self,
            rest=copy.deepcopy(self.rest),
            pieces=[replace(piece, local=host(piece.local)) for piece in self.pieces],
            replicated={key: (at, host(value)) for key, (at, value) in self.replicated.items()},
            leaves=copy.deepcopy(self.leaves),
        )


def _is_dense(leaf: object) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
    )
