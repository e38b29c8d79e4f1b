from __future__ import annotations

from typing import Any

import pytest

from tests.dist_pool import RankPool
from tests.plugin.scenes import close, fit

pytestmark = pytest.mark.dist

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sgd, accumulating, short last window": (
        {"accumulate_grad_batches": 4, "max_epochs": 2},
        {"optimizer": "sgd", "lr": 0.1},
    ),
    "clipped by norm": ({"gradient_clip_val": 0.05}, {}),
    "clipped by value, accumulating": (
        {
            "gradient_clip_val": 0.003,
            "gradient_clip_algorithm": "value",
            "accumulate_grad_batches": 3,
        },
        {},
    ),
}


@pytest.fixture(scope="module")
def ddp(pair: RankPool) -> dict[str, Any]:
    return {name: pair.run(fit, "ddp", *case_of(name))[0] for name in CASES}


def case_of(name: str) -> tuple[Any, ...]:
    options, arguments = CASES[name]
    from tests.plugin.scenes import Net

    return options, Net, arguments


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_weights_losses_and_metrics_equal(
    pair: RankPool, ddp: dict[str, Any], name: str, stage: int
) -> None:
    ranks = pair.run(fit, {"stage": stage}, *case_of(name))
    for got in ranks:
        close(got["weights"], ddp[name]["weights"])
        assert got["steps"] == ddp[name]["steps"]
        assert got["metrics"] == pytest.approx(ddp[name]["metrics"], rel=1e-5)
    assert ranks[0]["losses"] == pytest.approx(ddp[name]["losses"], rel=1e-5)
