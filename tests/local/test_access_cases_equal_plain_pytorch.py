"""Every way of touching parameters trains as plain PyTorch does, at every stage."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.comm import run_virtual_ranks
from lightning_zeroplus.config import Stage
from lightning_zeroplus.errors import PhaseError
from tests.local.access.scene import Bracket
from tests.local.access_cases import CASES, Scene, ShardedScene, run_case

NAMES = [name for name, found in CASES.items() if found.in_threads]
REFUSED = [name for name in NAMES if CASES[name].refused]
SERVED = [name for name in NAMES if not CASES[name].refused]


def params(names: list[str]) -> list[Any]:
    # Dynamo silences warnings for a moment, which two threads cannot do at once.
    quiet = pytest.mark.filterwarnings("ignore")
    return [pytest.param(n, marks=quiet if "compile" in n else ()) for n in names]


@cache
def plain(name: str) -> dict[str, Tensor]:
    return run_case(name, Scene())


def sharded(name: str, stage: Stage, *, world: int = 2, **settings: Any) -> list[dict[str, Tensor]]:
    return run_virtual_ranks(
        world,
        lambda transport: run_case(name, ShardedScene(transport, stage, **settings)),
        timeout_s=20,
    )


def assert_equal(name: str, results: list[dict[str, Tensor]]) -> None:
    rtol = CASES[name].tolerance
    for rank, found in enumerate(results):
        assert found.keys() == plain(name).keys()
        for what, value in plain(name).items():
            torch.testing.assert_close(
                found[what],
                value,
                rtol=rtol,
                atol=rtol / 10,
                msg=lambda text, rank=rank, what=what: f"{what} on rank {rank}: {text}",
            )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", params(NAMES))
def test_a_case_equals_plain_pytorch(name: str, stage: Stage) -> None:
    assert_equal(name, sharded(name, stage))


@pytest.mark.parametrize("name", params(NAMES))
def test_a_case_equals_plain_pytorch_in_manual_optimization(name: str) -> None:
    assert_equal(name, sharded(name, 3, bracket="step"))


@pytest.mark.full
@pytest.mark.parametrize("bracket", ["none", "loss", "step"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", params(NAMES))
def test_a_case_equals_plain_pytorch_on_three_ranks(
    name: str, stage: Stage, bracket: Bracket
) -> None:
    assert_equal(name, sharded(name, stage, world=3, bracket=bracket))


@pytest.mark.full
@pytest.mark.parametrize(("least_unit_nbytes", "prefetch"), [(4 << 20, 1), (1500, 0), (0, 3)])
@pytest.mark.parametrize("name", params(NAMES))
def test_a_case_equals_plain_pytorch_however_units_are_cut_and_prefetched(
    name: str, least_unit_nbytes: int, prefetch: int
) -> None:
    assert_equal(name, sharded(name, 3, least_unit_nbytes=least_unit_nbytes, prefetch=prefetch))


@pytest.mark.parametrize("name", params(SERVED))
def test_the_strict_setting_serves_what_needs_no_gather_on_touch(name: str) -> None:
    assert_equal(name, sharded(name, 3, on_access="error"))


@pytest.mark.parametrize("name", REFUSED)
def test_the_strict_setting_refuses_by_name(name: str) -> None:
    with pytest.raises(
        PhaseError,
        match=r"Expected a full weight, got the sharded parameter '[\w.]+' at rest in [\w.]+ "
        r"\(rank \d\)\. Wrap the access in full_parameters\(\.\.\.\) on every rank, or set "
        r"unshard_on_access='gather'\.",
    ):
        sharded(name, 3, on_access="error")


def test_there_are_at_least_as_many_cases_as_the_design_lists() -> None:
    assert len(NAMES) >= 59
