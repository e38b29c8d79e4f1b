"""Inside `full_parameters` weights are whole; edits survive if asked for, else they are undone."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.errors import ConfigError, PhaseError
from lightning_zeroplus.zero import Engine
from tests.local.small import (
    STAGES,
    Net,
    Run,
    assert_weights,
    on_ranks,
    same_training,
    sharded,
    whole,
)

pytestmark = pytest.mark.parametrize("stage", STAGES)


def bits(engine: Engine) -> list[Tensor]:
    """Return copies of what this rank holds of weights and masters."""
    return [t.clone() for unit in engine.units for t in (unit.weights.shard, unit.master)]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_weights_are_whole_inside(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Net(), transport, stage)
        with engine.full_parameters():
            for name, p in Net().named_parameters():
                assert torch.equal(engine.module.get_parameter(name).detach(), p.detach())

    on_ranks(3, body)


def test_edits_without_writeback_are_undone(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Net(), transport, stage)
        before = bits(engine)
        with torch.no_grad(), engine.full_parameters():
            for p in engine.module.parameters():
                p.mul_(3.0)
        assert_same_bits(bits(engine), before)
        assert_weights(whole(engine), Net())

    on_ranks(2, body)


def test_edits_with_writeback_survive_and_train_on(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = SGD(run.module.parameters(), lr=0.1, momentum=0.9)
        run.attach(optimizer)
        run.update(optimizer, 0)
        if run.engine is None:
            edit(run)
        else:
            with run.engine.full_parameters(writeback=True):
                edit(run)
        run.update(optimizer, 1)

    def edit(run: Run) -> None:
        module: Any = run.module
        with torch.no_grad():
            module.first.weight[30:].mul_(0.5)
            module.second.weight.data.t()[0].zero_()
            module.scale.add_(1.0)

    same_training(script, stage)


@pytest.mark.parametrize("writeback", [False, True])
def test_masters_of_untouched_narrow_weights_keep_their_bits(stage: int, writeback: bool) -> None:
    def body(transport: Transport) -> None:
        module = Net().bfloat16()
        engine = sharded(module, transport, stage)
        for unit in engine.units:
            unit.master.mul_(1 + 1e-4)  # rounds to the same narrow weight
        before = bits(engine)
        with engine.full_parameters(writeback=writeback):
            pass
        assert_same_bits(bits(engine), before)

    on_ranks(2, body)


def test_edited_elements_of_narrow_weights_reach_the_master(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net().bfloat16()
        engine = sharded(module, transport, stage)
        entry = engine.find(module.first.weight)
        assert entry is not None
        assert entry.shard is not None
        span = engine.units[entry.unit.number].layout.owned(entry.index, transport.rank)
        entry.shard.mul_(1 + 1e-4)
        expected = entry.shard.clone()
        with torch.no_grad(), engine.full_parameters(writeback=True):
            module.first.weight.view(-1)[10:150].fill_(0.75)
        edited = torch.arange(span.start, span.stop)
        expected[(edited >= 10) & (edited < 150)] = 0.75
        assert torch.equal(entry.shard, expected)

    on_ranks(2, body)


def test_an_exception_inside_leaves_nothing_unsharded(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Net(), transport, stage)
        before = bits(engine)
        with suppress(KeyError), torch.no_grad(), engine.full_parameters():
            engine.module.scale.fill_(9.0)
            raise KeyError
        assert_same_bits(bits(engine), before)
        assert not any(u.weights.is_unsharded for u in engine.units if not u.weights.resident)

    on_ranks(2, body)


def test_only_what_was_asked_for_is_unsharded(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        with engine.full_parameters(module.second):
            unsharded = {u.name for u in engine.units if u.weights.is_unsharded}
            assert (unsharded == {"second"}) == (stage == 3)
        with engine.full_parameters([module.scale, module.first.bias]):
            unsharded = {u.name for u in engine.units if u.weights.is_unsharded}
            assert (unsharded == {"root", "first"}) == (stage == 3)

    on_ranks(2, body)


def test_it_may_be_entered_again_inside(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        with torch.no_grad(), engine.full_parameters(writeback=True):
            module.scale.fill_(2.0)
            with engine.full_parameters(module.first):
                pass
            assert module.first.weight.sum().isfinite()
            module.first.bias.fill_(1.0)
        found = whole(engine)
        assert found["scale"].item() == 2.0
        assert bool((found["first.bias"] == 1).all())

    on_ranks(2, body)


def test_a_forward_inside_uses_the_edits(stage: int) -> None:
    def body(transport: Transport) -> float:
        module = Net()
        engine = sharded(module, transport, stage)
        with torch.no_grad(), engine.full_parameters():
            module.scale.zero_()
            inside = float(module(torch.ones(1, 5)).abs().sum())
        with torch.no_grad():
            after = float(module(torch.ones(1, 5)).abs().sum())
        assert after > 0
        return inside

    assert on_ranks(2, body) == [0.0, 0.0]


def test_a_parameter_of_another_module_is_refused(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Net(), transport, stage)
        with (
            pytest.raises(ConfigError, match=r"got one of shape \(37, 5\)"),
            engine.full_parameters(Net().first),
        ):
            pass

    on_ranks(2, body)


def test_a_closed_engine_refuses(stage: int) -> None:
    def body(transport: Transport) -> None:
        engine = sharded(Net(), transport, stage)
        engine.close()
        with pytest.raises(PhaseError, match="closed"), engine.full_parameters():
            pass

    on_ranks(2, body)
