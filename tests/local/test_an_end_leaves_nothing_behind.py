"""After `close` the module lies in ordinary memory and works; nothing keeps an engine alive."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.errors import PhaseError
from tests.local.small import (
    STAGES,
    Net,
    assert_weights,
    on_ranks,
    plain_step,
    sharded,
    step,
)

pytestmark = pytest.mark.parametrize("stage", STAGES)


def trained(transport: Transport, stage: int) -> tuple[Net, Any, SGD]:
    module = Net()
    engine = sharded(module, transport, stage)
    optimizer = SGD(module.parameters(), lr=0.1)
    engine.attach(optimizer)
    step(engine, optimizer, transport.rank, 0)
    return module, engine, optimizer


def plain_after_one_step(world: int = 2) -> Net:
    plain = Net()
    plain_step(plain, SGD(plain.parameters(), lr=0.1), world, 0)
    return plain


def test_a_closed_engine_leaves_full_weights_in_memory_of_their_own(stage: int) -> None:
    def body(transport: Transport) -> None:
        module, engine, _ = trained(transport, stage)
        before = list(module.parameters())
        engine.close()
        after = list(module.parameters())
        assert all(a is b for a, b in zip(after, before, strict=True))
        assert_weights(dict(module.named_parameters()), plain_after_one_step())
        for p in after:
            assert type(p) is nn.Parameter
            assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
            assert p.grad is None

    on_ranks(2, body)


def test_an_optimizer_has_its_own_step_after_close(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = SGD(module.parameters(), lr=0.1)
        own = optimizer.step
        engine.attach(optimizer)
        engine.close()
        assert optimizer.step == own

    on_ranks(2, body)


def test_a_module_works_on_alone_after_close(stage: int) -> None:
    def body(transport: Transport) -> None:
        module, engine, _ = trained(transport, stage)
        engine.close()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        optimizer = SGD(module.parameters(), lr=0.1)
        plain = plain_after_one_step()
        plain_step(plain, SGD(plain.parameters(), lr=0.1), 1, 5)
        plain_step(module, optimizer, 1, 5)
        assert_weights(dict(module.named_parameters()), plain)

    on_ranks(2, body)


def test_a_module_copies_and_pickles_after_close(stage: int) -> None:
    def body(transport: Transport) -> None:
        module, engine, _ = trained(transport, stage)
        engine.close()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
            assert_weights(dict(other.named_parameters()), module)

    on_ranks(2, body)


def test_a_close_in_the_middle_of_a_window_drops_the_gradients(stage: int) -> None:
    def body(transport: Transport) -> None:
        module, engine, _ = trained(transport, stage)
        with engine.block_backward_sync():
            step(engine, None, transport.rank, 1)
        engine.close()
        assert all(p.grad is None for p in module.parameters())
        assert_weights(dict(module.named_parameters()), plain_after_one_step())

    on_ranks(2, body)


def test_a_second_close_does_nothing_and_a_closed_engine_says_so(stage: int) -> None:
    def body(transport: Transport) -> None:
        _, engine, _ = trained(transport, stage)
        engine.close()
        engine.close()
        with pytest.raises(PhaseError, match="Shard the module again"), engine.forward_pass():
            pass
        with pytest.raises(PhaseError, match="Shard the module again"), engine.backward_pass():
            pass
        with pytest.raises(PhaseError, match="Shard the module again"):
            engine.load_full_state({})
        with pytest.raises(PhaseError, match="Shard the module again"):
            next(engine.iterate_full_state())

    on_ranks(2, body)


def test_a_module_may_be_sharded_again(stage: int) -> None:
    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module, engine, _ = trained(transport, stage)
        engine.close()
        other = sharded(module, transport, 1 + stage % 3)
        optimizer = SGD(module.parameters(), lr=0.1)
        other.attach(optimizer)
        step(other, optimizer, transport.rank, 1)
        other.close()
        return dict(module.named_parameters())

    plain = plain_after_one_step()
    plain_step(plain, SGD(plain.parameters(), lr=0.1), 2, 1)
    for found in on_ranks(2, body):
        assert_weights({name: p.detach() for name, p in found.items()}, plain)


def test_tied_weights_are_tied_after_close(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        module.third = nn.Linear(5, 37)
        module.third.weight = module.first.weight
        engine = sharded(module, transport, stage)
        engine.close()
        assert module.third.weight is module.first.weight

    on_ranks(2, body)


def alive_after(world: int, body: Callable[[Transport], tuple[Any, ...]]) -> list[str]:
    """Return what is left of an engine, its module and its optimizer when all is dropped."""

    def refs(transport: Transport) -> list[Any]:
        module, engine, optimizer = body(transport)
        kept = (engine, engine.reducer, module, module.first.weight, optimizer)
        return [weakref.ref(x) for x in kept]

    rows = on_ranks(world, refs)
    gc.collect()
    return [type(ref()).__name__ for row in rows for ref in row if ref() is not None]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("closed", [True, False])
def test_all_of_it_is_collectable_after_a_step(stage: int, closed: bool, world: int) -> None:
    def body(transport: Transport) -> tuple[Any, ...]:
        module, engine, optimizer = trained(transport, stage)
        if closed:
            engine.close()
        return module, engine, optimizer

    assert alive_after(world, body) == []


@pytest.mark.parametrize("closed", [True, False])
def test_all_of_it_is_collectable_in_the_middle_of_a_window(stage: int, closed: bool) -> None:
    def body(transport: Transport) -> tuple[Any, ...]:
        module, engine, optimizer = trained(transport, stage)
        step(engine, None, transport.rank, 1)
        engine.finalize()
        if closed:
            engine.close()
        return module, engine, optimizer

    assert alive_after(2, body) == []


@pytest.mark.parametrize("world", [1, 2])
def test_a_closed_engine_is_collectable_while_module_and_optimizer_live(
    stage: int, world: int
) -> None:
    def body(transport: Transport) -> tuple[Any, ...]:
        module, engine, optimizer = trained(transport, stage)
        engine.close()
        return weakref.ref(engine), weakref.ref(engine.reducer), module, optimizer

    ranks = on_ranks(world, body)
    gc.collect()
    assert [(row[0](), row[1]()) for row in ranks] == [(None, None)] * world
