"""Gradients and optimizer state come out whole and go in whole, as torch has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.errors import CheckpointError, ConfigError
from tests.local.small import (
    STAGES,
    Net,
    Run,
    assert_weights,
    on_ranks,
    plain_step,
    same_training,
    sharded,
    step,
    whole,
)

pytestmark = pytest.mark.parametrize("stage", STAGES)
KINDS: dict[str, Any] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: AdamW(params, lr=0.1, eps=1e-2),
    "fused AdamW": lambda params: AdamW(params, lr=0.1, eps=1e-2, fused=True),
    "amsgrad": lambda params: Adam(params, lr=0.1, eps=1e-2, amsgrad=True),
}


def adamw(params: Any) -> AdamW:
    return AdamW(params, lr=0.1, eps=1e-2)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_full_gradient_is_that_of_the_global_batch(stage: int) -> None:
    def script(run: Run) -> list[Tensor | None]:
        run.backward(0)
        run.backward(1)
        run.module.second.bias.grad = None
        params = list(run.module.parameters())
        if run.engine is None:
            return [p.grad for p in params]
        return [run.engine.full_gradient(p) for p in params]

    plain, ranks = same_training(script, stage, world=3)
    for found in ranks:
        assert_close(found, plain)


def test_full_state_is_that_of_plain_pytorch(stage: int) -> None:
    def script(run: Run) -> list[Tensor]:
        optimizer = adamw(run.module.parameters())
        run.attach(optimizer)
        run.update(optimizer, 0)
        run.update(optimizer, 1)
        params = list(run.module.parameters())
        if run.engine is None:
            return [optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
        return [
            run.engine.full_optimizer_state(optimizer, p, key)
            for p in params
            for key in ("exp_avg", "exp_avg_sq")
        ]

    plain, ranks = same_training(script, stage, world=3)
    for found in ranks:
        assert_close(found, plain)


def test_state_that_was_set_is_stepped_on(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = adamw(run.module.parameters())
        run.attach(optimizer)
        run.update(optimizer, 0)
        weight = run.module.first.weight
        value = torch.linspace(0, 1, 185).view(37, 5)
        if run.engine is None:
            optimizer.state[weight]["exp_avg"].copy_(value)
        else:
            run.engine.set_full_optimizer_state(optimizer, weight, "exp_avg", value)
        run.update(optimizer, 1)

    same_training(script, stage)


def test_state_that_is_not_there_is_named_on_every_rank(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = adamw(module.parameters())
        engine.attach(optimizer)
        with pytest.raises(ConfigError, match=r"'exp_avg' of 'first\.weight', got none"):
            engine.full_optimizer_state(optimizer, module.first.weight, "exp_avg")
        with pytest.raises(ConfigError, match=r"shape \(37, 5\) for 'first\.weight', got \(5,\)"):
            engine.set_full_optimizer_state(
                optimizer, module.first.weight, "exp_avg", torch.ones(5)
            )

    on_ranks(2, body)


# -- the whole state dict


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_dict_is_torchs_own(stage: int, kind: str) -> None:
    plain = Net()
    expected = KINDS[kind](plain.parameters())
    for number in range(2):
        plain_step(plain, expected, 3, number)

    def body(transport: Transport) -> dict[str, Any]:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = KINDS[kind](module.parameters())
        engine.attach(optimizer)
        for number in range(2):
            step(engine, optimizer, transport.rank, number)
        return engine.full_optimizer_state_dict(optimizer, keep_on=1)

    ranks = on_ranks(3, body)
    assert ranks[0] == ranks[2] == {}
    wanted = expected.state_dict()
    assert ranks[1]["param_groups"] == wanted["param_groups"]
    assert ranks[1]["state"].keys() == wanted["state"].keys()
    for n, state in wanted["state"].items():
        assert ranks[1]["state"][n].keys() == state.keys()
        for key, value in state.items():
            found = ranks[1]["state"][n][key]
            assert_close(found, value)
            if isinstance(value, Tensor):
                assert (found.dtype, found.stride()) == (value.dtype, value.stride())


@pytest.mark.parametrize("kind", KINDS)
def test_plain_training_goes_on_from_a_sharded_state(stage: int, kind: str) -> None:
    def body(transport: Transport) -> Any:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = KINDS[kind](module.parameters())
        engine.attach(optimizer)
        step(engine, optimizer, transport.rank, 0)
        halfway = whole(engine), engine.full_optimizer_state_dict(optimizer)
        step(engine, optimizer, transport.rank, 1)
        return halfway, whole(engine)

    ((weights, state), after), _ = on_ranks(2, body)
    plain = Net()
    plain.load_state_dict(weights, strict=False)
    optimizer = KINDS[kind](plain.parameters())
    optimizer.load_state_dict(state)
    plain_step(plain, optimizer, 2, 1)
    assert_weights(after, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attached", ["before", "after"])
def test_sharded_training_goes_on_from_a_plain_state(stage: int, kind: str, attached: str) -> None:
    plain = Net()
    optimizer = KINDS[kind](plain.parameters())
    plain_step(plain, optimizer, 2, 0)
    weights = {name: p.detach().clone() for name, p in plain.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    for number in (1, 2):
        plain_step(plain, optimizer, 2, number)

    def body(transport: Transport) -> dict[str, Tensor]:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer: Optimizer = KINDS[kind](module.parameters())
        if attached == "before":
            engine.attach(optimizer)
        engine.load_full_state(weights)
        engine.load_full_optimizer_state_dict(optimizer, state)
        if attached == "after":
            engine.attach(optimizer)
        for number in (1, 2):
            step(engine, optimizer, transport.rank, number)
        return whole(engine)

    for found in on_ranks(2, body):
        assert_weights(found, plain)


def test_a_rank_keeps_its_spans_of_a_loaded_state_only(stage: int) -> None:
    plain = Net()
    optimizer = adamw(plain.parameters())
    plain_step(plain, optimizer, 2)
    state = optimizer.state_dict()

    def body(transport: Transport) -> int:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = adamw(module.parameters())
        engine.attach(optimizer)
        engine.load_full_optimizer_state_dict(optimizer, state)
        kept = [optimizer.state[p]["exp_avg"] for p in optimizer.state]
        assert all(k.untyped_storage().nbytes() == k.numel() * 4 for k in kept)
        return sum(k.numel() for k in kept)

    assert sum(on_ranks(2, body)) == sum(p.numel() for p in plain.parameters())


def test_hyper_parameters_come_with_the_state(stage: int) -> None:
    state = SGD(Net().parameters(), lr=0.7, momentum=0.3, weight_decay=0.1).state_dict()

    def body(transport: Transport) -> tuple[float, float, float]:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        engine.load_full_optimizer_state_dict(optimizer, state)
        group = optimizer.param_groups[0]
        return group["lr"], group["momentum"], group["weight_decay"]

    assert on_ranks(2, body) == [(0.7, 0.3, 0.1)] * 2


def test_a_state_of_other_groups_is_refused(stage: int) -> None:
    state = SGD(list(Net().parameters())[:3], lr=0.7).state_dict()

    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        with pytest.raises(CheckpointError, match=r"sizes \[5\], got \[3\]"):
            engine.load_full_optimizer_state_dict(optimizer, state)
        assert optimizer.param_groups[0]["lr"] == 0.1

    on_ranks(2, body)


def test_groups_may_be_ordered_differently_on_each_rank(stage: int) -> None:
    """Parameters collected in a set come in another order in each process."""

    def script(run: Run) -> None:
        params = list(run.module.parameters())
        if run.rank == 1:
            params.reverse()
        optimizer = adamw(params)
        run.attach(optimizer)
        for number in range(2):
            run.update(optimizer, number)

    same_training(script, stage)
