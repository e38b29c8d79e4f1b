"""While reductions are blocked gradients add up, and what the user drops in between is dropped."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from tests.local.small import STAGES, Run, same_training

pytestmark = pytest.mark.parametrize("stage", STAGES)


def blocked(run: Run) -> Any:
    return nullcontext() if run.engine is None else run.engine.block_backward_sync()


def sgd(run: Run) -> SGD:
    optimizer = SGD(run.module.parameters(), lr=0.1, momentum=0.5)
    run.attach(optimizer)
    return optimizer


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_window_adds_up(stage: int, length: int, world: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        for window in range(2):
            for number in range(length):
                with blocked(run) if number < length - 1 else nullcontext():
                    run.backward(10 * window + number)
            optimizer.step()
            optimizer.zero_grad()

    same_training(script, stage, world)


def test_a_short_window_steps_with_what_it_has(stage: int) -> None:
    """All backwards were blocked; the step reduces them."""

    def script(run: Run) -> None:
        optimizer = sgd(run)
        for number in range(3):
            with blocked(run):
                run.backward(number)
        optimizer.step()
        optimizer.zero_grad()
        run.update(optimizer, 3)

    same_training(script, stage)


def test_the_slot_is_none_or_right_inside_a_window(stage: int) -> None:
    """Stage 1 keeps gradients unreduced, so a read there settles them."""

    def script(run: Run) -> Tensor:
        optimizer = sgd(run)
        with blocked(run):
            run.backward(0)
        run.backward(1)
        grad = run.module.first.weight.grad
        assert grad is not None
        found = grad.clone() if run.engine is None else grad.full_tensor()
        optimizer.step()
        return found

    plain, ranks = same_training(script, stage)
    for found in ranks:
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["module", "optimizer"])
def test_zero_grad_in_the_middle_of_a_window_drops_what_was_before(
    stage: int, who: str, set_to_none: bool
) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        owner: Any = optimizer if who == "optimizer" else run.module
        with blocked(run):
            run.backward(0)
            owner.zero_grad(set_to_none=set_to_none)
            run.backward(1)
        run.backward(2)
        optimizer.step()

    same_training(script, stage)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_at_the_end_of_a_blocked_window_leaves_nothing(
    stage: int, set_to_none: bool
) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.update(optimizer, 0)
        with blocked(run):
            run.backward(1)
        run.module.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        run.update(optimizer, 2)

    same_training(script, stage)


def test_one_emptied_slot_in_a_window_drops_that_parameter_only(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        with blocked(run):
            run.backward(0)
            run.module.first.weight.grad = None
            run.backward(1)
            run.module.second.bias.grad = None
        run.backward(2)
        optimizer.step()

    same_training(script, stage)


def test_scaling_in_the_middle_of_a_window_counts(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        with blocked(run):
            run.backward(0)
            for p in run.module.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
        run.backward(1)
        optimizer.step()

    same_training(script, stage)


def test_an_assigned_gradient_in_a_window_counts(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        with blocked(run):
            run.backward(0)
            run.module.first.weight.grad = torch.full((37, 5), 0.2)
            run.backward(1)
        run.backward(2)
        optimizer.step()

    same_training(script, stage)


def test_an_assigned_gradient_at_the_end_of_a_window_counts(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        with blocked(run):
            run.backward(0)
        run.module.first.weight.grad = torch.full((37, 5), 0.2)
        optimizer.step()

    same_training(script, stage)


def test_a_window_may_be_left_by_an_exception(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        with suppress(KeyError), blocked(run):
            run.backward(0)
            raise KeyError
        run.backward(1)
        optimizer.step()
        optimizer.zero_grad()
        run.update(optimizer, 2)

    same_training(script, stage)
