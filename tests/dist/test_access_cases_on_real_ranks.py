"""Ways of touching parameters equal plain PyTorch on real processes too."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from tests.dist_pool import RankPool
from tests.local.access_cases import CASES, Scene, ShardedScene, run_case
from tests.rank_transport import rank_transport

pytestmark = pytest.mark.dist

SOME = [
    "plain training",
    "weights in the loss, after forward",
    "AveragedModel made after sharding",
    "checkpointed blocks, reentrant",
    "directional derivative by torch.func.jvp",
    "gradient penalty on the input",
    "the whole model compiled, aot_eager",
    "weights clamped inside forward",
    "two adversaries without toggling",
    "a forward that raises, then going on",
    "parts frozen, thawed and frozen again",
    "sharpness-aware minimisation",
]


def rank_runs_a_case(rank: int, world: int, name: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    transport = rank_transport(20)
    found, expected = run_case(name, ShardedScene(transport, 3)), run_case(name, Scene())
    rtol = CASES[name].tolerance
    assert found.keys() == expected.keys()
    for what, value in expected.items():
        torch.testing.assert_close(found[what], value, rtol=rtol, atol=rtol / 10, msg=what)
    dist.barrier()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOME else pytest.mark.full) for n in CASES]
)
def test_a_case_equals_plain_pytorch_over_gloo(pool2: RankPool, name: str) -> None:
    pool2.run(rank_runs_a_case, name)


def test_the_chosen_cases_exist() -> None:
    assert [name for name in SOME if name not in CASES] == []
