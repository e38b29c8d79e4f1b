"""Torch's profiler shows named ranges of the engine, by verb and unit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.comm.host import over_host
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.zero import shard

WIDTH = 8


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))


def _ranges(stage: int, *, host: bool, closure: bool = False) -> Counter[str]:
    nets = [_net(), _net()]

    def body(transport: Transport) -> Counter[str] | None:
        beneath = transport
        if host:
            found, reason = over_host(beneath)
            assert found is not None, reason
            transport = found
        net = nets[transport.rank]
        engine = shard(net, EngineConfig(stage=stage, units=("Linear",)), transport)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine.attach(optimizer)

        def loss() -> torch.Tensor:
            with engine.forward_pass():
                value: torch.Tensor = net(torch.ones(2, WIDTH)).sum()
            with engine.backward_pass():
                value.backward()
            engine.clip_grad_norm_(net.parameters(), 1.0)
            return value

        def step() -> None:
            if closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()

        step()
        if transport.rank == 0:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                step()
        else:
            step()
        engine.close()
        if transport.rank:
            return None
        names = [event.name for event in seen.events()]
        return Counter(n for n in names if n.startswith("ZeroPlus::"))

    found = run_virtual_ranks(2, body)[0]
    assert found is not None
    return found


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("closure", [False, True])
def test_each_verb_is_shown_for_each_unit_at_stage_3(host: bool, closure: bool) -> None:
    found = _ranges(3, host=host, closure=closure)
    for unit in ("0", "1"):
        assert found[f"ZeroPlus::reduce {unit}"] == 1
        assert found[f"ZeroPlus::accumulate {unit}"] == 1
        assert found[f"ZeroPlus::unshard {unit}"] >= 1
    assert found["ZeroPlus::update"] == 1
    assert found["ZeroPlus::norm"] == 1
    assert found["ZeroPlus::meet"] == 2


def test_refreshes_are_shown_at_stage_1() -> None:
    found = _ranges(1, host=False)
    refreshes = [name for name in found if name.startswith("ZeroPlus::refresh ")]
    assert refreshes
    assert not any(name.startswith("ZeroPlus::unshard") for name in found)
    assert found["ZeroPlus::update"] == 1
