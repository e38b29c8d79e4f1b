"""The strategy takes shared memory where ranks share a host, or what it is told to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_zeroplus import ZeroPlusStrategy
from lightning_zeroplus.errors import ConfigError
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, data, make_trainer, seed_everything


def fit(rank: int, world: int, settings: dict[str, Any]) -> tuple[str, list[torch.Tensor]]:
    seed_everything(5, verbose=False)
    module = Net()
    trainer = make_trainer({"stage": 3, **settings}, world)
    trainer.fit(module, data())
    name = type(trainer.strategy._transport).__name__
    return name, [p.detach().clone() for p in module.parameters()]


@pytest.mark.dist
def test_both_ways_give_the_same_bits(pool2: RankPool) -> None:
    shared = pool2.run(fit, {})
    group = pool2.run(fit, {"transport": "c10d"})
    named = pool2.run(fit, {"transport": "shared_memory"})
    assert [name for name, _ in shared] == ["HostTransport"] * 2
    assert [name for name, _ in group] == ["C10dTransport"] * 2
    assert [name for name, _ in named] == ["HostTransport"] * 2
    for _, weights in (*shared, *named):
        for found, expected in zip(weights, group[0][1], strict=True):
            assert torch.equal(found, expected)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto', 'c10d' or 'shared_memory', got 'mpi'"):
        ZeroPlusStrategy(transport="mpi")  # type: ignore[arg-type]
