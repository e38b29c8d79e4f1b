"""The comparison of the grid fails when saving or loading is broken on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.checkpoint.datafile import DataFile
from lightning_zeroplus.checkpoint.manifest import SavedBox
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.layout.span import Span
from lightning_zeroplus.zero import load_state, local_state
from lightning_zeroplus.zero.span_tensor import SpanTensor
from tests.checkpoint.virtual import Live, State, differences, far, plain, resumed, write

_write_span = DataFile.write_span
_read_span = SavedTensor.read_span
_values_of = local_state._values_of
_load_one = load_state._load_one


def _halves_swapped(
    self: DataFile, local: Tensor, shape: Sequence[int], span: Span, stride: Any = None
) -> list[SavedBox]:
    return _write_span(self, local.roll(local.numel() // 2), shape, span, stride)


def _as_if_row_major(
    self: DataFile, local: Tensor, shape: Sequence[int], span: Span, stride: Any = None
) -> list[SavedBox]:
    return _write_span(self, local, shape, span, None)


def _span_of_another_rank(
    self: SavedTensor, span: Span, stride: Sequence[int], out: Tensor | None = None
) -> Tensor:
    moved = Span(0, span.numel) if span.start else span
    return _read_span(self, moved, stride, out)


def _without_the_second_moment(optimizer: Any, entry: Any) -> dict[str, Any]:
    values = _values_of(optimizer, entry)
    if "exp_avg" in values:
        first = values["exp_avg"]
        values["exp_avg_sq"] = SpanTensor(entry, first.to_local().clone(), first.dtype)
    return values


def _one_step_less(optimizer: Any, entry: Any, saved: Any, *rest: Any) -> Any:
    saved = {key: value - 1 if key == "step" else value for key, value in saved.items()}
    return _load_one(optimizer, entry, saved, *rest)


def _rate_of_the_constructor(optimizer: Any, *rest: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    return _load_one(optimizer, *rest)


DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "halves of spans swapped": (DataFile, "write_span", _halves_swapped),
    "memory order forgotten": (DataFile, "write_span", _as_if_row_major),
    "another rank's span read": (SavedTensor, "read_span", _span_of_another_rank),
    "a moment saved twice": (local_state, "_values_of", _without_the_second_moment),
    "a step not counted": (load_state, "_load_one", _one_step_less),
    "a learning rate lost": (load_state, "_load_one", _rate_of_the_constructor),
}


def round_trip(folder: Path, stage: int) -> tuple[list[str], list[str]]:
    """Return what the grid's two comparisons find after saving on 2 ranks and loading on 3."""
    path = folder / "x.ckpt"

    def save(transport: Transport) -> State:
        live = Live(transport, stage, "fused AdamW")
        live.train(0, 2)
        state = live.state()
        write(live, path)
        return state

    state = run_virtual_ranks(2, save)[0]
    loaded, after = resumed(path, "fused AdamW", (stage, 3))
    return differences(loaded, state), far(after[0].weights, plain("fused AdamW", 4))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("defect", DEFECTS)
def test_it_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: int, defect: str
) -> None:
    assert round_trip(tmp_path, stage) == ([], [])
    monkeypatch.setattr(*DEFECTS[defect])
    bits, values = round_trip(tmp_path, stage)
    assert bits
    assert values


def test_a_comparison_of_bits_sees_dtypes_shapes_and_the_last_digit() -> None:
    one = State({"w": torch.ones(2)})
    for other in (torch.ones(2, dtype=torch.float64), torch.ones(1, 2), torch.ones(2) * (1 + 2e-7)):
        assert differences(State({"w": other}), one) == ["weight w"]
