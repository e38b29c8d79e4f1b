"""All weights and buffers come out whole, one unit at a time, and go in by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.errors import CheckpointError
from tests.local.small import (
    STAGES,
    Net,
    assert_weights,
    on_ranks,
    plain_step,
    sharded,
    step,
    whole,
)

pytestmark = pytest.mark.parametrize("stage", STAGES)


class Tied(Net):
    """With a weight of two names, buffers of both kinds, and odd strides."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.third = nn.Linear(5, 37)
        self.third.weight = self.first.weight
        self.third.bias = nn.Parameter(torch.full((37,), 0.25))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.norm = nn.BatchNorm1d(3)
        self.flipped = nn.Parameter(torch.arange(12.0).view(3, 4).t())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_names_and_values_are_those_of_the_plain_module(stage: int) -> None:
    def body(transport: Transport) -> dict[str, Tensor | None]:
        engine = sharded(Tied(), transport, stage)
        return dict(engine.iterate_full_state(keep_on=1))

    ranks = on_ranks(3, body)
    expected = state_of(Tied())
    for rank, found in enumerate(ranks):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if rank != 1:
                assert value is None
            else:
                assert value is not None
                assert torch.equal(value, expected[name])
                assert value.device.type == "cpu"
                assert not value.requires_grad


def test_a_tied_weight_comes_by_both_names_with_the_same_bits(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Tied(), transport, stage)
        found = dict(engine.iterate_full_state())
        if transport.rank == 0:
            assert torch.equal(found["first.weight"], found["third.weight"])

    on_ranks(2, body)


def test_what_comes_out_is_a_copy(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Tied(), transport, stage)
        for _, value in engine.iterate_full_state():
            if value is not None:
                value.zero_()
        assert_weights(whole(engine), Tied())

    on_ranks(2, body)


def test_training_goes_on_from_loaded_weights(stage: int) -> None:
    plain = Net(seed=1)
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    given = state_of(plain)
    for number in range(2):
        plain_step(plain, optimizer, 2, number)

    def body(transport: Transport) -> dict[str, Tensor]:
        module = Net(seed=0)
        engine = sharded(module, transport, stage)
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        engine.attach(optimizer)
        assert engine.load_full_state(given) == ([], [])
        assert module.count.item() == 1.0
        for number in range(2):
            step(engine, optimizer, transport.rank, number)
        return whole(engine)

    for found in on_ranks(2, body):
        assert_weights(found, plain)


def test_wide_values_reach_the_masters_of_narrow_weights(stage: int) -> None:
    given = {name: value + 1e-4 for name, value in state_of(Net()).items()}

    def body(transport: Transport) -> None:
        module = Net().bfloat16()
        engine = sharded(module, transport, stage)
        engine.load_full_state(given)
        for name, weight in whole(engine).items():
            assert torch.equal(weight, given[name].bfloat16())
        for unit in engine.units:
            for entry in unit.entries:
                span = unit.layout.owned(entry.index, transport.rank)
                right = given[entry.fqn].reshape(-1)[span.start : span.stop]
                assert entry.shard is not None
                assert torch.equal(entry.shard, right)

    on_ranks(2, body)


def wrong_state() -> dict[str, Tensor]:
    given = state_of(Tied())
    del given["first.bias"], given["norm.running_var"]
    given["extra.weight"] = torch.ones(2)
    given["second.weight"] = torch.ones(37, 3)
    given["norm.running_mean"] = torch.ones(4)
    return given


def test_all_that_does_not_fit_is_listed_and_nothing_is_loaded(stage: int) -> None:
    given = {name: value + 1 for name, value in wrong_state().items()}

    def body(transport: Transport) -> str:
        module = Tied()
        engine = sharded(module, transport, stage)
        with pytest.raises(CheckpointError) as caught:
            engine.load_full_state(given)
        assert_weights(whole(engine), Tied())
        assert torch.equal(module.norm.running_mean, torch.zeros(3))
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "missing: first.bias, norm.running_var" in text
        assert "unexpected: extra.weight" in text
        assert "second.weight (37, 3) instead of (3, 37)" in text
        assert "norm.running_mean (4,) instead of (3,)" in text


def test_without_strict_names_may_differ_but_shapes_may_not(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Tied()
        engine = sharded(module, transport, stage)
        given = wrong_state()
        with pytest.raises(CheckpointError, match="reshaped: ") as caught:
            engine.load_full_state(given, strict=False)
        assert "missing" not in str(caught.value)
        del given["second.weight"], given["norm.running_mean"]
        missing, unexpected = engine.load_full_state(
            {name: value + 1 for name, value in given.items()}, strict=False
        )
        assert sorted(missing) == [
            "first.bias",
            "norm.running_mean",
            "norm.running_var",
            "second.weight",
        ]
        assert unexpected == ["extra.weight"]
        found = whole(engine)
        assert torch.equal(found["first.bias"], Tied().first.bias.detach())
        assert torch.equal(found["scale"], Tied().scale.detach() + 1)

    on_ranks(2, body)


def test_names_with_wrapper_prefixes_are_understood(stage: int) -> None:
    given = {f"_orig_mod.{name}": value for name, value in state_of(Net(seed=1)).items()}

    def body(transport: Transport) -> None:
        engine = sharded(Net(), transport, stage)
        engine.load_full_state(given)
        assert_weights(whole(engine), Net(seed=1))

    on_ranks(2, body)


def test_nothing_is_unsharded_on_the_way_out(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Net(), transport, stage)
        for _ in engine.iterate_full_state():
            assert all(unit.weights.is_unsharded == (stage != 3) for unit in engine.units)
        assert engine.memory_report().unsharded_peak == 0

    on_ranks(2, body)
