"""Stage 3 on one host: weights are stored once, and no rank sees another's work half done."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.comm.host import mapped, over_host
from lightning_zeroplus.comm.host.mapped import MappedWeights
from lightning_zeroplus.comm.host.memory import Mapping, find_edits
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.zero import Engine, shard

WORLD = 2


class Slow(nn.Module):
    """Waits on one rank, while its weights are in use."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) * 0.1)
        self.wait_s = 0.0
        self.edit: Callable[[nn.Parameter], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit is not None:
            self.edit(self.weight)
        time.sleep(self.wait_s)
        return nn.functional.linear(x, self.weight)


def make() -> Slow:
    torch.manual_seed(1)
    return Slow(40)


def on_ranks(body: Callable[[Transport, Slow, Engine, torch.optim.Optimizer], Any]) -> list[Any]:
    def run(transport: Transport) -> Any:
        over, reason = over_host(transport)
        assert over is not None, reason
        torch.manual_seed(1)
        model = models[transport.rank]
        engine = shard(model, EngineConfig(stage=3), over)
        assert all(isinstance(u.weights, MappedWeights) for u in engine.units)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach(optimizer)
        found = body(over, model, engine, optimizer)
        engine.close()
        return found, model.weight.detach().clone()

    models = [make() for _ in range(WORLD)]
    return run_virtual_ranks(WORLD, run, timeout_s=20)


def step(model: Slow, engine: Engine, optimizer: torch.optim.Optimizer, x: float) -> float:
    with engine.forward_pass():
        loss = model(torch.full((2, 40), x)).square().mean()
    with engine.backward_pass():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def plain(body: Callable[[Slow, Callable[[float], float]], Any]) -> tuple[Any, torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x: float) -> float:
        loss = model(torch.full((2, 40), x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return body(model, run), model.weight.detach().clone()


def scaled(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def test_edits_in_forward_are_kept_and_hide_no_update() -> None:
    """Pages that an edit made private must go, or later updates would stay unseen."""

    def editing(model: Slow, run: Callable[[float], float]) -> list[float]:
        losses = []
        for turn in range(6):
            model.edit = scaled if turn in {1, 2, 4} else None
            losses.append(run(0.1 * turn + 0.1))
        return losses

    losses, weight = plain(editing)

    def body(transport: Any, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        return editing(model, lambda x: step(model, engine, optimizer, x))

    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_write_at_rest_waits_for_a_peer_that_still_reads(slow: int) -> None:
    def writing(model: Slow, run: Callable[[float], float], evaluate: Any) -> list[float]:
        losses = [run(0.3)]
        for turn in range(4):
            losses.append(evaluate(0.2 + turn))
            with torch.no_grad():
                model.weight.mul_(1.5)
        return [*losses, evaluate(0.7)]

    def plainly(model: Slow, run: Any) -> list[float]:
        def evaluate(x: float) -> float:
            with torch.no_grad():
                return float(model(torch.full((2, 40), x)).square().mean())

        return writing(model, run, evaluate)

    losses, weight = plain(plainly)

    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        model.wait_s = 0.05 if transport.rank == slow else 0.0

        def evaluate(x: float) -> float:
            with torch.no_grad(), engine.forward_pass():
                return float(model(torch.full((2, 40), x)).square().mean())

        return writing(model, lambda x: step(model, engine, optimizer, x), evaluate)

    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


@pytest.mark.parametrize("slow", [0, 1])
def test_an_update_waits_for_a_peer(slow: int) -> None:
    losses, weight = plain(lambda _, run: [run(0.1 * n) for n in range(5)])

    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        model.wait_s = 0.02 if transport.rank == slow else 0.0
        if transport.rank != slow:
            delays = iter([0.5, 0.5, 0.0, 0.0, 0.0])
            optimizer.register_step_pre_hook(lambda *_: time.sleep(next(delays)))
        return [step(model, engine, optimizer, 0.1 * n) for n in range(5)]

    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


def test_a_lone_touch_is_served_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    losses, weight = plain(lambda _, run: [run(0.1 * n) for n in range(5)])

    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> Any:
        found, norms = [], []
        for n in range(5):
            if transport.rank == 1 and n in {1, 3}:
                norms.append(float(model.weight.detach().norm()))
                norms.append(float((model.weight @ torch.ones(40)).sum().detach()))
            found.append(step(model, engine, optimizer, 0.1 * n))
        return found, norms

    with caplog.at_level(logging.WARNING, logger="lightning_zeroplus"):
        (first, none), (second, norms) = (found for found, _ in on_ranks(body))
    assert first == second == losses
    assert none == []
    assert len(norms) == 4
    warned = [r for r in caplog.records if "others have not" in r.getMessage()]
    assert len(warned) == 1
    del weight


def test_a_write_after_a_lone_touch_is_still_in_order() -> None:
    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        found = []
        for n in range(4):
            if transport.rank == 0:
                (model.weight @ torch.ones(40)).sum()
            found.append(step(model, engine, optimizer, 0.1 * n))
            with torch.no_grad():
                model.weight.mul_(1.1)
        return found

    def plainly(model: Slow, run: Callable[[float], float]) -> list[float]:
        found = []
        for n in range(4):
            found.append(run(0.1 * n))
            with torch.no_grad():
                model.weight.mul_(1.1)
        return found

    losses, weight = plain(plainly)
    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


def test_edits_are_found_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(mappings: Sequence[Mapping]) -> list[bool]:
        raise OSError("no page table")

    monkeypatch.setattr(mapped, "find_edits", fails)
    test_edits_in_forward_are_kept_and_hide_no_update()


def test_unused_private_memory_has_no_edits_and_written_memory_has() -> None:
    file = os.memfd_create("test")
    os.ftruncate(file, 8 * 4096)
    shared, private = Mapping(file, 0, 8 * 4096), Mapping(file, 0, 8 * 4096, private=True)
    os.close(file)
    assert not find_edits([private])[0]
    shared.bytes.fill_(3)
    assert int(private.bytes.sum()) == 3 * 8 * 4096
    assert not find_edits([private])[0]
    private.bytes[5 * 4096] = 3  # the value that it has: a write all the same
    assert find_edits([private])[0]
    shared.bytes.fill_(4)
    assert int(private.bytes[5 * 4096]) == 3
    private.forget_edits()
    assert not find_edits([private])[0]
    assert int(private.bytes[5 * 4096]) == 4


def test_of_many_pieces_of_memory_those_that_were_written_are_named() -> None:
    file = os.memfd_create("test")
    os.ftruncate(file, 64 * 4096)
    pieces = [Mapping(file, 4096 * n, 4096, private=True) for n in range(60)]
    far = Mapping(file, 0, 4 * 4096, private=True)
    shared = Mapping(file, 0, 64 * 4096)
    os.close(file)
    shared.bytes.fill_(3)
    for piece in pieces:
        assert int(piece.bytes[0]) == 3
    for n in (0, 7, 59):
        pieces[n].bytes[4095] = 1
    far.bytes[-1] = 1
    found = find_edits([far, *reversed(pieces)])
    assert [n for n, edited in enumerate(found) if edited] == [0, 1, 60 - 7, 60]


def test_a_planted_page_that_is_not_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mapping, "forget_edits", lambda self: None)
    with pytest.raises(AssertionError):
        test_edits_in_forward_are_kept_and_hide_no_update()


def test_a_planted_write_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MappedWeights, "before_write", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_write_at_rest_waits_for_a_peer_that_still_reads(1)


def test_a_planted_update_that_does_not_meet_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "meet", lambda self: None)
    with pytest.raises(AssertionError):
        test_an_update_waits_for_a_peer(1)
