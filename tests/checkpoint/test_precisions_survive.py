"""Weights and optimizer states keep their dtypes; wide masters are what is saved of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from tests.checkpoint.virtual import (
    Live,
    Mixed,
    Place,
    State,
    differences,
    far,
    plain,
    resumed,
    saved,
    straight,
)

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
MOVES: list[tuple[Place, Place]] = [
    ((1, 2), (1, 2)),
    ((1, 3), (3, 2)),
    ((2, 1), (3, 3)),
    ((3, 2), (2, 3)),
    ((3, 3), (3, 3)),
    ((3, 2), (1, 1)),
]
BUFFERS = ("mean", "steps")


@pytest.mark.parametrize(("at", "to"), MOVES, ids=str)
@pytest.mark.parametrize("optimizer", ["fused AdamW", "SGD"])
@pytest.mark.parametrize("dtype", [BF16, FP64], ids=str)
def test_every_bit_returns_in_the_same_precision(
    dtype: torch.dtype, optimizer: str, at: Place, to: Place
) -> None:
    path, state = saved(optimizer, at, dtype)
    wide = FP32 if dtype == BF16 else FP64
    stored = read_checkpoint(path)["state_dict"]
    assert {v.dtype for n, v in stored.items() if n not in BUFFERS} == {wide}
    assert stored["mean"].dtype == dtype
    loaded, after = resumed(path, optimizer, to, dtype=dtype)
    wrong = differences(loaded, state)
    assert not wrong
    if at == to:
        for rank, whole in zip(after, straight(optimizer, to, 4, dtype), strict=True):
            wrong = differences(rank, whole)
            assert not wrong
    if dtype == FP64:
        wrong = far(after[0].weights, plain(optimizer, 4, FP64), rtol=1e-12)
        assert not wrong


def masters_of(path: Path) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = read_whole(read_checkpoint(path)["state_dict"])
    return stored


@pytest.mark.parametrize(("at", "to"), MOVES, ids=str)
def test_masters_of_narrow_weights_become_the_weights_of_a_wide_module(
    at: Place, to: Place
) -> None:
    path, _ = saved("fused AdamW", at, BF16)
    masters = masters_of(path)
    moved = [n for n, v in masters.items() if n not in BUFFERS and bool((v != v.to(BF16)).any())]
    assert len(moved) > 8, "masters have digits of their own"
    loaded, _ = resumed(path, "fused AdamW", to, until=2)
    for name, value in loaded.weights.items():
        wanted = masters[name].to(FP32) if name in BUFFERS[:1] else masters[name]
        assert torch.equal(value, wanted), name
        assert value.dtype == wanted.dtype


@pytest.mark.parametrize(("at", "to"), MOVES, ids=str)
def test_a_wide_run_becomes_the_masters_of_narrow_weights(at: Place, to: Place) -> None:
    path, state = saved("fused AdamW", at)
    loaded, _ = resumed(path, "fused AdamW", to, until=2, dtype=BF16)
    for name, value in state.weights.items():
        if name not in BUFFERS:
            assert torch.equal(loaded.weights[name], value), name
    for name, values in state.optimizer.items():
        for key, value in values.items():
            assert torch.equal(loaded.optimizer[name][key], value), (name, key)


def state_dtypes(place: Place, path: Path, dtype: torch.dtype, **options: Any) -> list[Any]:
    def body(transport: Transport) -> Any:
        checkpoint = read_checkpoint(path)
        module = Mixed(seed=1).to(dtype)
        module.load_state_dict(checkpoint["state_dict"])
        live = Live(transport, place[0], "fused AdamW", module=module, **options)
        (own,) = checkpoint["optimizer_states"]
        live.engine.load_full_optimizer_state_dict(live.optimizer, own)
        values = [v for s in live.optimizer.state.values() for k, v in s.items() if k != "step"]
        steps = [s["step"] for s in live.optimizer.state.values()]
        return (
            {v.dtype for v in values},
            {s.dtype for s in steps},
            len({id(s) for s in steps}),
            [s.untyped_storage().data_ptr() for s in steps],
        )

    return run_virtual_ranks(place[1], body)


@pytest.mark.parametrize("place", [(1, 2), (3, 2), (3, 1)], ids=str)
def test_states_stay_fp32_and_steps_are_tensors_of_their_own(place: Place) -> None:
    for dtype in (FP32, BF16):
        path, _ = saved("fused AdamW", (2, 3), dtype)
        for values, steps, count, memory in state_dtypes(place, path, dtype):
            assert values == {FP32}
            assert steps == {FP32}  # as a fused optimizer needs them
            assert count == len(set(memory)) == len(memory)


def test_what_is_compared_is_not_empty() -> None:
    _, state = saved("fused AdamW", (3, 2), BF16)
    assert isinstance(state, State)
    assert {v["exp_avg"].dtype for v in state.optimizer.values()} == {FP32}
    assert state.weights["conv.weight"].dtype == FP32
