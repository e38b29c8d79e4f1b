"""The optimizer holds the user's parameters but inside its step, and updates as ever."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.local.small import STAGES, Net, Run, on_ranks, same_training, sharded, step

pytestmark = pytest.mark.parametrize("stage", STAGES)


def adamw(params: Any, lr: float = 0.1) -> AdamW:
    return AdamW(params, lr=lr, eps=1e-2)


def holds(optimizer: Optimizer, params: list[nn.Parameter]) -> bool:
    """Whether the groups hold these very objects in this order."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return len(held) == len(params) and all(a is b for a, b in zip(held, params, strict=True))


# -- what the groups hold


def test_groups_hold_the_users_parameters_before_in_the_closure_and_after(stage: int) -> None:
    def script(run: Run) -> list[bool]:
        params = list(run.module.parameters())
        optimizer = adamw(params)
        group = optimizer.param_groups[0]
        run.attach(optimizer)
        seen = [holds(optimizer, params)]

        def closure() -> float:
            optimizer.zero_grad()
            run.backward()
            seen.append(holds(optimizer, params))
            return 1.5

        assert optimizer.step(closure) == 1.5
        seen.append(holds(optimizer, params))
        assert optimizer.param_groups[0] is group
        return seen

    plain, ranks = same_training(script, stage)
    assert [plain, *ranks] == [[True, True, True]] * 3


@pytest.mark.parametrize("form", ["step()", "step(closure)", "step(closure=closure)"])
def test_every_way_to_step_updates_alike(stage: int, form: str) -> None:
    def script(run: Run) -> None:
        optimizer = adamw(run.module.parameters())
        run.attach(optimizer)
        for number in range(3):

            def closure(number: int = number) -> None:
                optimizer.zero_grad()
                run.backward(number)

            match form:
                case "step()":
                    closure()
                    optimizer.step()
                case "step(closure)":
                    optimizer.step(closure)
                case _:
                    optimizer.step(closure=closure)

    same_training(script, stage)


def test_a_step_hook_sees_the_users_parameters_and_gradients(stage: int) -> None:
    def script(run: Run) -> list[bool]:
        params = list(run.module.parameters())
        optimizer = SGD(params, lr=0.5)
        run.attach(optimizer)
        seen = []

        def clip(opt: Optimizer, args: Any, kwargs: Any) -> None:
            seen.append(holds(opt, params))
            nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 0.1)

        optimizer.register_step_pre_hook(clip)
        for number in range(2):
            run.update(optimizer, number)
        return seen

    plain, ranks = same_training(script, stage)
    assert [plain, *ranks] == [[True, True]] * 3


def test_a_hook_after_the_step_sees_the_new_weights(stage: int) -> None:
    def script(run: Run) -> torch.Tensor:
        params = list(run.module.parameters())
        optimizer = SGD(params, lr=0.5)
        run.attach(optimizer)
        average = torch.zeros(37, 5)

        def track(opt: Optimizer, args: Any, kwargs: Any) -> None:
            assert holds(opt, params)
            average.lerp_(run.module.first.weight.detach().clone(), 0.5)

        optimizer.register_step_post_hook(track)
        for number in range(2):
            run.update(optimizer, number)
        return average

    plain, ranks = same_training(script, stage)
    for found in ranks:
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


class Twice(SGD):
    """Updates twice a step, each time after the closure."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            if closure is not None:
                closure()
            super().step()


def test_each_call_of_the_closure_sees_the_users_parameters_and_the_newest_weights(
    stage: int,
) -> None:
    def script(run: Run) -> list[bool]:
        params = list(run.module.parameters())
        optimizer = Twice(params, lr=0.5)
        run.attach(optimizer)
        seen = []

        def closure() -> None:
            seen.append(holds(optimizer, params))
            optimizer.zero_grad()
            run.backward(len(seen))

        for _ in range(2):
            optimizer.step(closure)
        return seen

    plain, ranks = same_training(script, stage)
    assert [plain, *ranks] == [[True] * 4] * 3


# -- exceptions


def test_an_exception_in_the_closure_restores_everything(stage: int) -> None:
    def script(run: Run) -> None:
        params = list(run.module.parameters())
        optimizer = adamw(params)
        run.attach(optimizer)
        run.update(optimizer, 0)
        state = optimizer.state

        def closure() -> None:
            run.backward(1)
            raise KeyError("closure")

        with pytest.raises(KeyError, match="closure"):
            optimizer.step(closure)
        assert holds(optimizer, params)
        assert optimizer.state is state
        # The gradient of the failed closure is still there, as in plain PyTorch.
        run.update(optimizer, 2)

    same_training(script, stage)


class Fragile(SGD):
    """Raises before an update when told so."""

    breaks = False

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        if self.breaks:
            raise KeyError("step")
        return super().step()


@pytest.mark.parametrize("by_closure", [False, True])
def test_an_exception_in_the_step_restores_everything(stage: int, by_closure: bool) -> None:
    def script(run: Run) -> None:
        params = list(run.module.parameters())
        optimizer = Fragile(params, lr=0.1, momentum=0.9)
        run.attach(optimizer)
        run.update(optimizer, 0)
        state = optimizer.state
        optimizer.breaks = True
        if not by_closure:
            run.backward(1)
        closure = (lambda: run.backward(1)) if by_closure else None
        with pytest.raises(KeyError, match="step"):
            optimizer.step(closure)
        optimizer.breaks = False
        assert holds(optimizer, params)
        assert optimizer.state is state
        run.update(optimizer, 2)

    same_training(script, stage)


# -- schedulers and state


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_works_whenever_it_was_made(stage: int, when: str) -> None:
    def script(run: Run) -> list[float]:
        optimizer = SGD(run.module.parameters(), lr=0.5, momentum=0.9)
        if when == "before":
            scheduler = StepLR(optimizer, 1, gamma=0.5)
            run.attach(optimizer)
        else:
            run.attach(optimizer)
            scheduler = StepLR(optimizer, 1, gamma=0.5)
        rates = []
        for number in range(3):
            run.update(optimizer, number)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    # Schedulers warn when they think that the optimizer has not stepped.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, ranks = same_training(script, stage)
    assert [plain, *ranks] == [[0.25, 0.125, 0.0625]] * 3


def test_state_is_keyed_by_the_users_parameters_between_steps(stage: int) -> None:
    def body(transport: Any) -> set[int]:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = adamw(module.parameters())
        engine.attach(optimizer)
        step(engine, optimizer, transport.rank)
        params = list(module.parameters())
        assert all(any(key is p for p in params) for key in optimizer.state)
        owners = {n for n, p in enumerate(params) if p in optimizer.state}
        for n in owners:
            entry = engine.find(params[n])
            assert optimizer.state[params[n]]["exp_avg"].shape == entry.shard.shape
            assert entry.shard.grad is None
        kept = {n: optimizer.state[params[n]]["exp_avg"] for n in owners}
        step(engine, optimizer, transport.rank, 1)
        assert all(optimizer.state[params[n]]["exp_avg"] is kept[n] for n in owners)
        return owners

    ranks = on_ranks(3, body)
    assert set.union(*ranks) == set(range(5))


def test_a_detached_optimizer_has_its_own_step_again(stage: int) -> None:
    def body(transport: Any) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = adamw(module.parameters())
        before = optimizer.step
        engine.attach(optimizer)
        engine.attach(optimizer)
        assert optimizer.step != before
        engine.detach_optimizers()
        assert optimizer.step == before

    on_ranks(2, body)
