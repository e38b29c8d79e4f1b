"""Ranks of one host that read differently often, or lag, still see each other's writes in order."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.comm.host import HostTransport, over_host
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.zero import Engine, reduce, shard
from tests.local.test_weights_of_one_host import Slow, on_ranks, plain, scaled, step


def evaluate(model: Slow, engine: Engine, x: float) -> float:
    with torch.no_grad(), engine.forward_pass(evaluation=True):
        return float(model(torch.full((2, 40), x)).square().mean())


def evaluate_plainly(model: Slow, x: float) -> float:
    with torch.no_grad():
        return float(model(torch.full((2, 40), x)).square().mean())


def multiply(model: Slow, by: float) -> None:
    with torch.no_grad():
        model.weight.mul_(by)


@pytest.mark.parametrize("counts", [(2, 3), (3, 2), (0, 2), (2, 0)])
@pytest.mark.parametrize("slow", [0, 1])
def test_uneven_evaluations_leave_writes_in_order(slow: int, counts: tuple[int, int]) -> None:
    def plainly(model: Slow, run: Any) -> list[float]:
        found = [run(0.3)]
        for _ in range(3):
            multiply(model, 1.5)
            found.append(evaluate_plainly(model, 0.2))
            multiply(model, 0.7)
            found.append(run(0.4))
        return found

    losses, weight = plain(plainly)

    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        model.wait_s = 0.03 if transport.rank == slow else 0.0
        found = [step(model, engine, optimizer, 0.3)]
        for _ in range(3):
            multiply(model, 1.5)
            seen = {evaluate(model, engine, 0.2) for _ in range(counts[transport.rank])}
            engine.end_evaluation()
            assert seen <= {losses[len(found)]}
            found.append(losses[len(found)])
            multiply(model, 0.7)
            found.append(step(model, engine, optimizer, 0.4))
        return found

    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("edits", [False, True], ids=["writes at rest", "edits in forward"])
def test_a_lone_read_holds_up_no_write(reader: int, edits: bool) -> None:
    def change(model: Slow, turn: int) -> None:
        if edits:
            model.edit = scaled if turn % 2 else None
        else:
            multiply(model, 1.1)

    def plainly(model: Slow, run: Any) -> list[float]:
        found = []
        for turn in range(4):
            change(model, turn)
            found.append(run(0.1 * turn + 0.1))
        return found

    losses, weight = plain(plainly)

    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        found = []
        for turn in range(4):
            if transport.rank == reader:
                model.weight.detach().norm()
            change(model, turn)
            found.append(step(model, engine, optimizer, 0.1 * turn + 0.1))
        return found

    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


@pytest.mark.parametrize("writeback", [False, True])
def test_reading_full_parameters_keeps_edits_of_a_forward_before(writeback: bool) -> None:
    def plainly(model: Slow, run: Any) -> list[float]:
        found = []
        for turn in range(3):
            model.edit = scaled if turn != 1 else None
            found.append(run(0.2))
        return found

    losses, weight = plain(plainly)

    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        def reads(*_: object) -> None:
            with engine.full_parameters(writeback=writeback):
                model.weight.detach().sum()

        optimizer.register_step_pre_hook(reads)
        found = []
        for turn in range(3):
            model.edit = scaled if turn != 1 else None
            found.append(step(model, engine, optimizer, 0.2))
        return found

    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_foreach_write_after_a_forward_waits_for_a_slow_peer(slow: int) -> None:
    def plainly(model: Slow, run: Any) -> list[float]:
        found = []
        for _ in range(3):
            found.append(float(model(torch.full((2, 40), 0.3)).square().mean().detach()))
            with torch.no_grad():
                torch._foreach_mul_([model.weight], 1.2)
        return [*found, run(0.3)]

    losses, weight = plain(plainly)

    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        model.wait_s = 0.05 if transport.rank == slow else 0.0
        found = []
        for _ in range(3):
            with engine.forward_pass():
                loss = model(torch.full((2, 40), 0.3)).square().mean()
            found.append(float(loss.detach()))
            del loss
            with torch.no_grad():
                torch._foreach_mul_([model.weight], 1.2)
        return [*found, step(model, engine, optimizer, 0.3)]

    for found, kept in on_ranks(body):
        assert found == losses
        assert torch.equal(kept, weight)


@pytest.mark.parametrize("reader", [0, 1])
def test_a_look_at_the_own_part_after_an_edit_is_local(reader: int) -> None:
    def body(transport: Transport, model: Slow, engine: Engine, optimizer: Any) -> list[float]:
        found = []
        for _ in range(3):
            for last in (False, True):
                model.edit = scaled
                with engine.forward_pass():
                    loss = model(torch.full((2, 40), 0.4)).square().mean()
                with engine.backward_pass():
                    loss.backward()
                found.append(float(loss.detach()))
                if transport.rank == reader and not last:
                    assert model.weight.to_local().abs().max() > 0  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
        return found

    def plainly(model: Slow, run: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            for _ in range(2):
                model.edit = scaled
                loss = model(torch.full((2, 40), 0.4)).square().mean()
                loss.backward()
                found.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        return found

    losses, weight = plain(plainly)
    for found, kept in on_ranks(body):
        assert found == pytest.approx(losses, rel=1e-6)
        torch.testing.assert_close(kept, weight, rtol=1e-6, atol=1e-7)


def on_host(transport: Transport) -> HostTransport:
    over, reason = over_host(transport)
    assert over is not None, reason
    return over


@pytest.mark.parametrize("stage", [2, 3])
def test_nobody_runs_ahead_of_its_records(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "_PATIENCE_S", 0.001)
    units = 150

    def body(transport: Transport) -> int:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(units)])
        config = EngineConfig(stage=stage, units=("Linear",), bucket_nbytes=256)
        engine = shard(model, config, on_host(transport))
        for turn in range(3):
            with engine.forward_pass():
                loss = model(torch.ones(1, 8)).sum()
            if transport.rank == 1:
                time.sleep(0.3)
            with engine.backward_pass():
                loss.backward()
            del turn
        count = len(engine.units)
        engine.close()
        return count

    assert min(run_virtual_ranks(2, body, timeout_s=20)) >= units


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_abandoned_engine_leaves_the_transport_usable(stage: int) -> None:
    torch.manual_seed(0)
    template = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def body(transport: Transport) -> list[float]:
        over = on_host(transport)
        losses = []
        for turn in range(3):
            model = copy.deepcopy(template)
            first, second = model
            config = EngineConfig(stage=stage, units=("Linear",), bucket_nbytes=256)
            engine = shard(model, config, over)
            for _ in range(3):
                with engine.forward_pass():
                    hidden = first(torch.ones(2, 8))
                    hidden = _Raises.apply(hidden) if turn == 1 else hidden
                    loss = second(hidden).square().sum()
                losses.append(float(loss.detach()))
                if turn == 1:
                    with pytest.raises(ValueError, match="planted"), engine.backward_pass():
                        loss.backward()
                    break
                with engine.backward_pass():
                    loss.backward()
            if turn == 1:
                engine.abandon()
            else:
                engine.close()
        return losses

    first, second = run_virtual_ranks(2, body, timeout_s=20)
    assert first == second
    assert first[:3] == first[-3:]


class Crossing(nn.Module):
    """Its second layer's weight is changed while the first one runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.register_forward_pre_hook(self._change)

    def _change(self, *_: object) -> None:
        with torch.no_grad():
            self.b.weight.mul_(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("host", [False, True], ids=["copies", "shared memory"])
def test_a_module_may_change_another_ones_weight(host: bool) -> None:
    def train(model: nn.Module, run: Any) -> list[float]:
        return [run(0.1 * turn + 0.1) for turn in range(3)]

    models = [Crossing(), Crossing()]  # here: virtual ranks share one random state

    def body(transport: Transport) -> tuple[list[float], torch.Tensor]:
        model = models[transport.rank]
        engine = shard(model, EngineConfig(stage=3), on_host(transport) if host else transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach(optimizer)

        def run(x: float) -> float:
            with engine.forward_pass():
                loss = model(torch.full((2, 8), x)).square().mean()
            with engine.backward_pass():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        losses = train(model, run)
        engine.close()
        return losses, model.b.weight.detach().clone()

    whole = Crossing()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)

    def plain_run(x: float) -> float:
        loss = whole(torch.full((2, 8), x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    expected = train(whole, plain_run)
    for losses, weight in run_virtual_ranks(2, body, timeout_s=20):
        assert losses == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(weight, whole.b.weight.detach(), rtol=1e-6, atol=1e-7)
