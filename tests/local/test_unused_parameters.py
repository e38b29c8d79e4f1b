"""A parameter without a gradient on some ranks gets their mean; without one on any, none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from tests.local.small import STAGES, Run, batch, same_training

pytestmark = pytest.mark.parametrize("stage", STAGES)


def use(run: Run, rank: int, number: int, parts: set[str]) -> None:
    """Make one rank's backward through the named parts only."""
    module: Any = run.module
    x, _ = batch(rank, number)
    with nullcontext() if run.engine is None else run.engine.forward_pass():
        loss = x.sum() * 0.0
        for part in sorted(parts):
            if part == "scale":
                loss = loss + module.scale.square()
            else:
                layer = getattr(module, part)
                loss = loss + layer(torch.ones(1, layer.in_features)).square().mean()
    if parts:
        (loss / (run.world if run.engine is None else 1)).backward()


def train(run: Run, plan: list[dict[int, set[str]]]) -> list[list[bool]]:
    """Step through what each rank uses in each step; return who had a gradient."""
    optimizer = AdamW(run.module.parameters(), lr=0.1, eps=1e-2, weight_decay=0.3)
    run.attach(optimizer)
    seen = []
    for number, used in enumerate(plan):
        for rank in range(run.world) if run.engine is None else [run.rank]:
            use(run, rank, number, used[rank])
        if run.engine is not None:
            run.engine.finalize()
        seen.append([p.grad is not None for p in run.module.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


ALL = {"first", "second", "scale"}


@pytest.mark.parametrize(
    "plan",
    [
        [{0: ALL, 1: ALL}, {0: ALL, 1: {"second"}}, {0: {"scale"}, 1: {"first"}}],
        [{0: {"first"}, 1: ALL}, {0: ALL, 1: {"first"}}],
        [{0: {"first"}, 1: {"first"}}, {0: ALL, 1: ALL}, {0: {"scale"}, 1: {"scale"}}],
        [{0: {"scale"}, 1: {"first", "scale"}}] * 3,
    ],
    ids=["taking turns", "one side each", "unused on all", "always one-sided"],
)
def test_a_parameter_used_on_some_ranks_or_none_is_that_of_plain_pytorch(
    stage: int, plan: list[dict[int, set[str]]]
) -> None:
    def script(run: Run) -> list[list[bool]]:
        return train(run, plan)

    # Ranks that run different modules need them in one unit.
    plain, ranks = same_training(script, stage, least_unit_nbytes=1 << 20)
    for found in ranks:
        assert found == plain


def test_a_stale_gradient_never_comes_back(stage: int) -> None:
    """Used in the first step, unused in the second, used on one rank in the third."""

    def script(run: Run) -> Tensor | None:
        train(run, [{0: ALL, 1: ALL}, {0: {"scale"}, 1: {"scale"}}])
        return run.module.first.weight.grad

    plain, ranks = same_training(script, stage)
    assert [plain, *ranks] == [None] * 3
