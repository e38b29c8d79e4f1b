"""A module on the meta device becomes real one unit at a time, as its own code initialises it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.errors import ConfigError
from tests.local.small import STAGES, on_ranks, sharded, whole

pytestmark = pytest.mark.parametrize("stage", STAGES)


class Ramp(nn.Linear):
    """Initialises itself without random numbers, and tells when."""

    told: Callable[[Ramp], None] | None = None

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(self.weight.numel()).view(self.weight.shape))
            self.bias.fill_(0.5)
        if self.told is not None:
            self.told()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Ramp(7, 7) for _ in range(3))
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def test_values_are_those_of_a_module_built_on_a_device(stage: int) -> None:
    def body(transport: Transport) -> dict[str, Tensor]:
        module = meta(Model)
        engine = sharded(module, transport, stage)
        assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
        return whole(engine)

    expected = dict(Model().named_parameters())
    for found in on_ranks(2, body):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], p.detach()) for name, p in expected.items())


def test_random_values_are_rank_0s_on_all_ranks(stage: int) -> None:
    def body(transport: Transport) -> dict[str, Tensor]:
        engine = sharded(meta(lambda: nn.Sequential(nn.Linear(9, 5))), transport, stage)
        return whole(engine)

    first, second = on_ranks(2, body)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["0.weight"].std() > 0.05
    assert first["0.weight"].abs().max() <= 1 / 3


def test_buffers_become_real_as_the_module_initialises_them(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = meta(Model)
        sharded(module, transport, stage)
        assert torch.equal(module.norm.running_var, torch.ones(7))
        assert torch.equal(module.norm.running_mean, torch.zeros(7))
        assert module.norm.num_batches_tracked.item() == 0
        module(torch.randn(4, 7))
        assert module.norm.num_batches_tracked.item() == 1

    on_ranks(2, body)


def test_only_one_unit_is_real_and_whole_at_a_time(stage: int) -> None:
    def body(transport: Transport) -> list[int]:
        module = meta(Model)
        whole_beside = []

        def told(block: Ramp) -> None:
            others = [b for b in module.blocks if b is not block]
            whole_beside.append(
                sum(not b.weight.is_meta and type(b.weight) is nn.Parameter for b in others)
            )

        for block in module.blocks:
            block.told = told.__get__(block)
        sharded(module, transport, stage)
        return whole_beside

    for found in on_ranks(2, body):
        # Replicated weights stay whole once they are real.
        assert found == ([0, 0, 0] if stage == 3 else [0, 1, 2])


def test_tied_weights_stay_tied(stage: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(11, 7)
            self.head = nn.Linear(7, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens))

    def body(transport: Transport) -> None:
        module = meta(Tied)
        engine = sharded(module, transport, stage)
        assert module.head.weight is module.tokens.weight
        entry = engine.find(module.head.weight)
        assert entry is not None
        assert entry.model.names == ["tokens.weight", "head.weight"]
        module(torch.arange(3)).sum().backward()
        assert module.head.weight.grad is not None

    on_ranks(2, body)


def test_settings_of_a_parameter_survive(stage: int) -> None:
    class Mine(nn.Parameter):
        pass

    def body(transport: Transport) -> None:
        module = meta(Model)
        weight = Mine(module.blocks[0].weight.data, requires_grad=False)
        weight.tensor_rule = "rowwise"
        module.blocks[0].weight = weight
        engine = sharded(module, transport, stage)
        found = module.blocks[0].weight
        assert not found.requires_grad
        assert found.tensor_rule == "rowwise"
        assert isinstance(found, Mine)
        assert engine.find(found) is not None

    on_ranks(2, body)


def test_a_module_that_cannot_initialise_itself_is_refused_by_name(stage: int) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)

    def body(transport: Transport) -> str:
        with pytest.raises(ConfigError) as caught:
            sharded(meta(Bare), transport, stage)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "reset_parameters(), got none on Bare" in text
        assert "Linear" not in text


class Angles(nn.Module):
    """Holds a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(7.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.angles


class ResettingAngles(Angles):
    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(7.0))


def test_a_buffer_without_parameters_beside_it_becomes_real(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = meta(lambda: nn.Sequential(ResettingAngles(), Ramp(7, 7)))
        sharded(module, transport, stage)
        assert torch.equal(module[0].angles, torch.arange(7.0))

    on_ranks(2, body)


def test_a_buffer_that_nothing_can_initialise_is_refused_by_name(stage: int) -> None:
    def body(transport: Transport) -> str:
        with pytest.raises(ConfigError) as caught:
            sharded(meta(lambda: nn.Sequential(Angles(), Ramp(7, 7))), transport, stage)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "Angles" in text
