"""Lightning's checkpoint dictionary, turned into what each rank writes of it.

    dump_checkpoint: state_dict of span tensors and full tensors, optimizer states of span tensors
    hooks of callbacks and of the module: add, remove, rename, change
    `shard_checkpoint`: spans become pieces, full tensors are replicated, the rest stays

A weight is recognised by the object that `state_dict` got, so that hooks may move it to other keys
and what is written still is the master weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zeroplus.checkpoint import (
    Piece,
    ShardedCheckpoint,
    TreePath,
    free_key,
    map_leaves,
    mark,
)
from lightning_zeroplus.comm import Operation, Tag, Transport
from lightning_zeroplus.layout.names import plain_name
from lightning_zeroplus.zero import Engine, OwnSpan, SpanTensor, own_part

__all__ = ["OwnState", "TransportGroup", "shard_checkpoint"]


class TransportGroup:
    """The ranks of a transport, for saving together."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Return every rank's payload; a peer that is gone is named."""
        return self._transport.exchange_bytes(payload, Tag(0, Operation.SETUP, -1, what))


class OwnState:
    """A module's state dict, with this rank's spans behind its values.

    Args:
        engine: shards the module, or did until it was closed.
        own: ``module.state_dict()`` with the parameters themselves.
    """

    def __init__(self, engine: Engine, own: Mapping[str, Any]) -> None:
        spans = engine.own_weights()
        shown: dict[int, Tensor] = {}
        self._span_of: dict[int, OwnSpan] = {}
        self.values: dict[str, Any] = {}
        for name, value in own.items():
            if isinstance(value, nn.Parameter) and id(value) in spans:
                if id(value) not in shown:
                    shown[id(value)] = engine.shown_weight(value)
                    self._span_of[id(shown[id(value)])] = spans[id(value)]
                self.values[plain_name(name)] = shown[id(value)]
            else:
                self.values[plain_name(name)] = (
                    value.detach() if isinstance(value, Tensor) else value
                )
        # Lasts as long as the table: an identity must not be given to another tensor.
        self._kept = shown

    def span_of(self, value: object) -> OwnSpan | None:
        """Return this rank's part of a value of the state dict, or of what was made of one."""
        known = self._span_of.get(id(value))
        if known is None and isinstance(value, SpanTensor) and value.is_whole:
            known = own_part(value)
        return known


def shard_checkpoint(
    checkpoint: Mapping[str, Any], state: OwnState | None, rank: int
) -> ShardedCheckpoint:
    """Return what this rank writes of ``checkpoint``.

    Args:
        checkpoint: what Lightning and its hooks made, on this rank.
        state: where the weights of its ``state_dict`` are; None: they are full.
        rank: of this process.
    """
    sharded = ShardedCheckpoint({})
    keys: dict[int, str] = {}

    def place(path: TreePath, leaf: Any, *, inline: bool) -> Any:
        span = None if state is None else state.span_of(leaf)
        if span is None and isinstance(leaf, SpanTensor):
            span = own_part(leaf) if leaf.is_whole else None
            leaf = leaf.full_tensor() if span is None else leaf
        if span is None:
            return sharded.take(path, leaf, inline=inline)
        key, nested = sharded.key_for(path)
        if keys.setdefault(id(leaf), key) != key:
            sharded.aliases[key] = (nested, keys[id(leaf)])
        elif span.local.numel() or (rank == 0 and 0 in span.shape):
            sharded.pieces.append(Piece(key, nested, *span))
        return mark(key)

    for key, value in checkpoint.items():
        if key == "optimizer_states":
            sharded.rest[key] = [_optimizer(sharded, n, one, place) for n, one in enumerate(value)]
        elif key == "state_dict":
            sharded.rest[key] = {
                name: place((key, name), leaf, inline=False) for name, leaf in value.items()
            }
        else:
            sharded.rest[key] = map_leaves(
                value, lambda path, leaf: place(path, leaf, inline=True), (free_key(key),)
            )
    return sharded


def _optimizer(sharded: ShardedCheckpoint, number: int, saved: Any, place: Any) -> Any:
    """Return an optimizer's groups; its states join by name what other ranks have of them."""
    path: TreePath = ("optimizer_states", number)
    if not isinstance(saved, dict) or "state" not in saved:
        return map_leaves(saved, lambda at, leaf: place(at, leaf, inline=True), path)
    for name, values in saved["state"].items():
        for key, value in values.items():
            at: TreePath = (*path, "state", name, key)
            if isinstance(value, torch.Tensor) and not isinstance(value, SpanTensor):
                # Only the first rank that has a span of the parameter has this at all.
                named, nested = sharded.key_for(at)
                sharded.pieces.append(Piece.whole(named, nested, value))
                sharded.leaves.append((at, mark(named)))
            else:
                sharded.leaves.append((at, place(at, value, inline=False)))
    rest = {key: value for key, value in saved.items() if key != "state"}
    groups = map_leaves(rest, lambda at, leaf: place(at, leaf, inline=True), path)
    return {"state": {}, **groups}
