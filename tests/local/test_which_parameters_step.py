"""An update moves the parameters in its groups that have a gradient, whenever they came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_zeroplus.errors import ConfigError
from tests.local.small import STAGES, Net, Run, on_ranks, same_training, sharded, step

pytestmark = pytest.mark.parametrize("stage", STAGES)


def adamw(params: Any, lr: float = 0.1) -> AdamW:
    return AdamW(params, lr=lr, eps=1e-2)


def test_a_group_added_later_steps_too(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = adamw(run.module.first.parameters())
        run.attach(optimizer)
        run.update(optimizer, 0)
        run.module.zero_grad()
        optimizer.add_param_group({"params": run.module.second.parameters(), "lr": 0.05})
        for number in (1, 2):
            run.update(optimizer, number)

    same_training(script, stage)


def test_a_group_from_elsewhere_is_refused_when_it_would_step(stage: int) -> None:
    def body(transport: Any) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = adamw(module.parameters())
        engine.attach(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7, 2))]})
        params = [p for group in optimizer.param_groups for p in group["params"]]
        with pytest.raises(ConfigError, match=r"group 1 position 0 \(7, 2\)"):
            step(engine, optimizer, transport.rank)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(held, params, strict=True))

    on_ranks(2, body)


def test_an_optimizer_over_another_module_is_refused(stage: int) -> None:
    def body(transport: Any) -> None:
        engine = sharded(Net(), transport, stage)
        with pytest.raises(ConfigError, match="belong to the module"):
            engine.attach(adamw(Net().parameters()))

    on_ranks(2, body)


def test_parameters_in_no_group_stay_as_they_are(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = adamw(run.module.second.parameters())
        run.attach(optimizer)
        for number in range(2):
            run.update(optimizer, number)

    same_training(script, stage)


@pytest.mark.parametrize("unused_gradients", ["skip", "zero"])
def test_a_parameter_without_a_gradient_is_skipped_or_gets_zeros(
    stage: int, unused_gradients: str
) -> None:
    """Weight decay and momentum move a parameter whose gradient is zero."""

    def script(run: Run) -> None:
        optimizer = AdamW(run.module.parameters(), lr=0.1, eps=1e-2, weight_decay=0.5)
        run.attach(optimizer)
        for number in range(2):
            run.backward(number)
            if number == 1:
                run.module.first.weight.grad = None
                if run.engine is None and unused_gradients == "zero":
                    run.module.first.weight.grad = torch.zeros(37, 5)
            optimizer.step()
            optimizer.zero_grad()

    same_training(script, stage, unused_gradients=unused_gradients)


def test_two_optimizers_step_apart(stage: int) -> None:
    def script(run: Run) -> None:
        one = adamw(run.module.first.parameters())
        two = SGD([*run.module.second.parameters(), run.module.scale], lr=0.1, momentum=0.9)
        run.attach(one)
        run.attach(two)
        for number in range(4):
            run.backward(number)
            # The gradients of the other one live on until it steps.
            chosen = (one, two)[number % 2]
            chosen.step()
            chosen.zero_grad()

    same_training(script, stage)


def test_a_parameter_in_two_optimizers_steps_twice(stage: int) -> None:
    def script(run: Run) -> None:
        one, two = SGD(run.module.parameters(), lr=0.1), SGD(run.module.parameters(), lr=0.2)
        run.attach(one)
        run.attach(two)
        for number in range(2):
            run.backward(number)
            one.step()
            two.step()
            one.zero_grad()

    same_training(script, stage)


def test_a_parameter_may_be_frozen_and_thawed_mid_run(stage: int) -> None:
    def script(run: Run) -> None:
        first = run.module.first
        first.weight.requires_grad_(False)
        optimizer = adamw(run.module.parameters())
        run.attach(optimizer)
        for number in range(6):
            if number == 2:
                first.weight.requires_grad_(True)
            if number == 4:
                run.module.second.weight.requires_grad_(False)
                first.weight.requires_grad_(False)
            run.update(optimizer, number)

    same_training(script, stage)


def test_a_parameter_frozen_when_sharded_may_be_thawed(stage: int) -> None:
    def body(module: Net, run: Run) -> None:
        optimizer = adamw(module.parameters())
        run.attach(optimizer)
        run.update(optimizer, 0)
        module.first.weight.requires_grad_(True)
        run.update(optimizer, 1)

    plain = Net()
    plain.first.weight.requires_grad_(False)
    body(plain, Run(plain, 2))

    def rank(transport: Any) -> torch.Tensor:
        module = Net()
        module.first.weight.requires_grad_(False)
        engine = sharded(module, transport, stage)
        body(module, Run(module, 2, engine))
        with engine.full_parameters():
            return module.first.weight.detach().clone()

    for found in on_ranks(2, rank):
        torch.testing.assert_close(found, plain.first.weight.detach(), rtol=1e-5, atol=1e-6)
