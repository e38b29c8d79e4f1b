"""A model or a setting that differs between ranks is refused on all ranks, by its difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.zero import shard
from tests.local.small import Net, assert_weights, on_ranks, sharded, whole

Change = Callable[[Any], object]


def _rename(module: Any) -> None:
    module.third = module.second
    del module.second


DIFFERENCES: dict[str, tuple[Change, str, str]] = {
    "shape": (
        lambda m: setattr(m, "second", nn.Linear(37, 4)),
        "second.weight (3, 37) float32 (trainable)",
        "second.weight (4, 37) float32 (trainable)",
    ),
    "dtype": (
        lambda m: m.first.double(),
        "first.weight (37, 5) float32 (trainable)",
        "first.weight (37, 5) float64 (trainable)",
    ),
    "trainability": (
        lambda m: m.second.bias.requires_grad_(False),
        "second.bias (3,) float32 (trainable)",
        "second.bias (3,) float32 (frozen)",
    ),
    "name": (_rename, "second.weight (3, 37)", "third.weight (3, 37)"),
    "one more": (
        lambda m: setattr(m.second, "extra", nn.Parameter(torch.ones(2))),
        "count () torch.float32 (buffer)",
        "second.extra (2,) float32 (trainable)",
    ),
    "one less": (
        lambda m: m.second.register_parameter("bias", None),
        "second.bias (3,) float32 (trainable)",
        "count () torch.float32 (buffer)",
    ),
    "a buffer": (
        lambda m: m.register_buffer("late", torch.ones(2)),
        "nothing",
        "late (2,) torch.float32 (buffer)",
    ),
    "a buffer's shape": (
        lambda m: m.register_buffer("count", torch.ones(2)),
        "count () torch.float32",
        "count (2,) torch.float32",
    ),
}


def _refused(transport: Transport, module: nn.Module, stage: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        sharded(module, transport, stage)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    return str(caught.value)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_first_difference_is_named_on_all_ranks(name: str, odd: int) -> None:
    change, usual, other = DIFFERENCES[name]

    def body(transport: Transport) -> str:
        module = Net()
        if transport.rank == odd:
            change(module)
        return _refused(transport, module)

    texts = on_ranks(3, body)
    assert len(set(texts)) == 1
    first, second = (other, usual) if odd == 0 else (usual, other)
    assert f"got {first}" in texts[0]
    assert f"{second}" in texts[0].partition(" on rank 0 and ")[2]
    assert f" on rank {odd or 1}. " in texts[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tie_on_one_rank_only_is_refused(stage: int) -> None:
    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def body(transport: Transport) -> str:
        module = build()
        if transport.rank == 1:
            module[1].weight = module[0].weight
        return _refused(transport, module, stage)

    for text in on_ranks(2, body):
        assert "1.weight" in text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ties_that_differ_are_refused(stage: int) -> None:
    """Equal parameters by name and shape; only which modules share them differs."""

    def body(transport: Transport) -> str:
        module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        module[2].weight = module[transport.rank].weight
        return _refused(transport, module, stage)

    for text in on_ranks(2, body):
        assert "2.weight" in text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_values_that_differ_become_those_of_rank_0(stage: int) -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = Net(seed=transport.rank)
        engine = sharded(module, transport, stage)
        assert module.count.item() == 0.0
        return whole(engine)

    for found in on_ranks(3, body):
        assert_weights(found, Net(seed=0))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("stage", (2, 3)),
        ("bucket_nbytes", (256, 1 << 20)),
        ("reduce_dtype", (None, "fp64")),
        ("unused_gradients", ("skip", "zero")),
    ],
)
def test_settings_that_differ_are_named_on_all_ranks(field: str, values: tuple[Any, Any]) -> None:
    def body(transport: Transport) -> str:
        config = EngineConfig(**{field: values[transport.rank]})
        with pytest.raises(ConfigError) as caught:
            shard(Net(), config, transport)
        return str(caught.value)

    for text in on_ranks(2, body, timeout_s=5):
        assert field in text


# -- models that no rank can shard


def test_a_module_without_parameters_is_refused() -> None:
    for text in on_ranks(2, lambda t: _refused(t, nn.ReLU())):
        assert "Expected a module with parameters" in text


def test_a_lazy_parameter_is_refused_by_name() -> None:
    module_of: Callable[[], nn.Module] = lambda: nn.Sequential(nn.LazyLinear(3))  # noqa: E731

    def body(transport: Transport) -> str:
        with pytest.raises(ConfigError) as caught:
            sharded(module_of(), transport, 2)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "0.weight (UninitializedParameter)" in text
        assert "Run one forward" in text


def test_a_sparse_parameter_is_refused_by_name() -> None:
    def body(transport: Transport) -> str:
        module = nn.Linear(2, 2)
        module.odd = nn.Parameter(torch.eye(3).to_sparse())
        return _refused(transport, module)

    for text in on_ranks(2, body):
        assert "odd (Parameter)" in text
