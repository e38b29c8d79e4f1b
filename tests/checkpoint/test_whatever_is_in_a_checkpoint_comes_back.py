"""Callbacks and hooks put anything into a checkpoint; each finds its own again."""

from __future__ import annotations

import collections
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from tests.checkpoint.virtual import Live, write

BIG = 5000
"""Elements enough for a tensor to be stored apart."""


def tensor(seed: int, *shape: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (BIG,)), generator=source)


def through(path: Path, more: dict[str, Any], world: int = 2, **options: Any) -> dict[str, Any]:
    """Return what comes back of what ranks put into the checkpoint."""

    def body(transport: Transport) -> None:
        live = Live(transport, 2, "SGD")
        live.train(0, 1)
        write(live, path, **(more[transport.rank] if 0 in more else more))  # type: ignore[call-overload]

    run_virtual_ranks(world, body)
    found: dict[str, Any] = read_whole(read_checkpoint(path, **options))
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and (torch.equal(one, other) if one.layout is torch.strided else True)
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


class Pair(NamedTuple):
    a: Any
    b: Any


VALUES: dict[str, Any] = {
    "plain": [1, 2.5, True, None, "text", b"bytes", 1 + 2j, float("inf"), float("nan"), -(2**70)],
    "nested": {"a": [{"b": (1, [2, {"c": 3}])}], "empty": [{}, [], ()]},
    "small tensors": [tensor(1, 3), torch.tensor(4), torch.empty(0, 5), torch.ones(1).bfloat16()],
    "big tensors": {"x": tensor(2), "y": [tensor(3, 70, 80), (tensor(4, 2, 50, 60),)]},
    "other dtypes": [
        tensor(5).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    ]
    + [torch.complex(tensor(6), tensor(7)), (tensor(8) * 100).to(torch.uint8)],
    "other layouts": [
        tensor(9, 80, 70).t(),
        tensor(10, 2, 3, 40, 50).to(memory_format=torch.channels_last),
        tensor(11, 20000)[::2],
        tensor(12, 1, 1).expand(90, 90),
    ],
    "numbers as keys": {0: tensor(13), 1: {2: tensor(14)}, -1: "x"},
    "keys that read alike": {1: tensor(15), "1": tensor(16)},
    "dots in keys": {"a.b": tensor(17), "a": {"b": tensor(18)}},
    "lists beside keys": {"l": [tensor(19)], "l.0": tensor(20)},
    "nothing": None,
    "a number": math.pi,
    "a tensor": tensor(21),
    "ordered": collections.OrderedDict(b=tensor(22), a=1),
}


@pytest.mark.parametrize("name", VALUES)
def test_it_is_as_it_was(tmp_path: Path, name: str) -> None:
    value = VALUES[name]
    found = through(tmp_path / "x.ckpt", {"mine": value, "callbacks": {"Mine": {"state": value}}})
    assert same(found["mine"], value)
    assert same(found["callbacks"]["Mine"]["state"], value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a.b", {"c": tensor(1)}), ("a", {"b.c": tensor(2)})),
        (("model", {"inner.weight": tensor(1)}), ("other.model", {"inner.weight": tensor(2)})),
        (("optimizer_0", {"state": tensor(1)}), ("other.optimizer_0", {"state": tensor(2)})),
        (("model", {"inner.weight": tensor(1)}), ("other", {"model": {"inner.weight": tensor(2)}})),
    ],
    ids=lambda row: row[0],
)
def test_keys_that_would_meet_do_not(
    tmp_path: Path, one: tuple[str, Any], other: tuple[str, Any]
) -> None:
    found = through(tmp_path / "x.ckpt", dict([one, other]))
    assert same(found[one[0]], one[1])
    assert same(found[other[0]], other[1])
    assert found["state_dict"]["inner.weight"].shape == (7, 5)


def test_what_differs_between_ranks_is_rank_0s(tmp_path: Path) -> None:
    rows = {
        rank: {"big": [tensor(rank), tensor(9)], "small": torch.tensor(rank), "number": rank}
        for rank in range(3)
    }
    found = through(tmp_path / "x.ckpt", rows, world=3)
    assert same(found["big"], [tensor(0), tensor(9)])
    assert same(found["small"], torch.tensor(0))
    assert found["number"] == 0


def test_what_only_rank_0_has_is_there(tmp_path: Path) -> None:
    rows: dict[int, Any] = {
        0: {"mine": {"a": tensor(1), "b": 1}},
        1: {},
        2: {"mine": {"c": tensor(2)}},
    }
    found = through(tmp_path / "x.ckpt", rows, world=3)
    assert same(found["mine"], {"a": tensor(1), "b": 1})


def test_a_tensor_under_several_names_is_stored_once(tmp_path: Path) -> None:
    value = torch.ones(500_000)
    found = through(tmp_path / "x.ckpt", {"a": value, "b": [value, value]})
    assert same(found["b"], [value, value])
    size = sum(file.stat().st_size for file in (tmp_path / "x.ckpt").iterdir())
    assert size < 2 * value.nbytes


def test_classes_are_kept_for_those_who_allow_them(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        through(path, {"mine": Pair(1, tensor(1))})
    found = read_whole(read_checkpoint(path, weights_only=False))
    assert isinstance(found["mine"], Pair)
    assert same(found["mine"].b, tensor(1))
