"""The user's post-accumulate hooks see this rank's gradient, whenever they come and go."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from tests.local.small import STAGES, Run, same_training

pytestmark = pytest.mark.parametrize("stage", STAGES)


class Halving:
    """Halves every gradient that comes: after it was accumulated or, in the plain run, before."""

    def __init__(self, run: Run) -> None:
        self.calls = 0
        self.handles: list[Any] = []
        for param in run.module.parameters():
            if run.engine is None:
                self.handles.append(param.register_hook(lambda grad: grad * 0.5))
            else:
                self.handles.append(param.register_post_accumulate_grad_hook(self._halve))

    def _halve(self, param: nn.Parameter) -> None:
        self.calls += 1
        assert param.grad is not None
        assert param.grad.shape == param.shape
        param.grad.mul_(0.5)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def sgd(run: Run) -> SGD:
    optimizer = SGD(run.module.parameters(), lr=0.1, momentum=0.5)
    run.attach(optimizer)
    return optimizer


@pytest.mark.parametrize("world", [1, 2])
def test_they_may_come_and_go(stage: int, world: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.update(optimizer, 0)
        for number in (10, 20):
            halving = Halving(run)
            run.backward(number)
            run.update(optimizer, number + 1)
            halving.remove()
            if run.engine is not None:
                assert halving.calls == 2 * len(halving.handles)
            run.backward(number + 2)
            run.update(optimizer, number + 3)

    same_training(script, stage, world)


def test_what_they_drop_is_not_reduced(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.update(optimizer, 0)
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            for p in run.module.parameters()
        ]
        run.backward(1)
        assert all(p.grad is None for p in run.module.parameters())
        optimizer.step()
        for handle in handles:
            handle.remove()
        run.update(optimizer, 2)

    same_training(script, stage)


def test_training_goes_on_after_one_has_raised(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.update(optimizer, 0)

        def refuse(param: nn.Parameter) -> None:
            raise RuntimeError("the user's own")

        handles = [p.register_post_accumulate_grad_hook(refuse) for p in run.module.parameters()]
        with suppress(RuntimeError):
            run.backward(1)
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
        run.update(optimizer, 2)

    same_training(script, stage)
