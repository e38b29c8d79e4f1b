"""An optimizer may step on shards if it updates each element by itself; the probe finds out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.zero.probe import probe_optimizer
from tests.local.small import Net, on_ranks, sharded

Make = Callable[[list[nn.Parameter]], Optimizer]


def _of(name: str, **settings: Any) -> Make:
    return lambda params: getattr(torch.optim, name)(params, **{"lr": 1e-3, **settings})


class Lamb(Optimizer):
    """Scales each update by a trust ratio of whole-tensor norms."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / p.grad.norm().clamp(min=1e-6)
                    p.sub_(p.grad, alpha=group["lr"] * float(ratio))


class NormedSGD(Optimizer):
    """Divides all gradients by their global norm."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / norm)


class Mixed(NormedSGD):
    """Plain SGD in some groups, normed in others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        for group in (g for g in groups if not g.get("normed")):
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
        self.param_groups = [g for g in groups if g.get("normed")]
        if self.param_groups:
            super().step()
        self.param_groups = groups


class OwnList(Optimizer):
    """Keeps the parameters in a list of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.mine = params

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.mine:
            if p.grad is not None:
                p.sub_(self.param_groups[0]["lr"] * p.grad)


class Centred(Optimizer):
    """Centres each gradient over its rows."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad - p.grad.mean(-1, keepdim=True)))


class Lion(Optimizer):
    """Sign of an interpolated momentum; elementwise, with state of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.sub_(group["lr"] * torch.sign(state["momentum"] * 0.9 + p.grad * 0.1))
                state["momentum"].lerp_(p.grad, 0.01)
        return loss


PASS: dict[str, Make] = {
    "SGD": _of("SGD"),
    "SGD momentum": _of("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": _of("SGD", momentum=0.9, fused=True),
    "Adam": _of("Adam"),
    "Adam amsgrad": _of("Adam", amsgrad=True, weight_decay=0.1),
    "Adam fused": _of("Adam", fused=True),
    "Adam with a tensor lr": _of("Adam", lr=torch.tensor(1e-3), foreach=False),
    "AdamW": _of("AdamW"),
    "AdamW fused": _of("AdamW", fused=True),
    "AdamW foreach": _of("AdamW", foreach=True),
    "AdamW one by one": _of("AdamW", foreach=False),
    "Adagrad": _of("Adagrad", lr_decay=0.1),
    "RMSprop": _of("RMSprop", centered=True, momentum=0.9),
    "NAdam": _of("NAdam"),
    "RAdam": _of("RAdam"),
    "Adamax": _of("Adamax"),
    "Adadelta": _of("Adadelta"),
    "Rprop": _of("Rprop"),
    "Lion": Lion,
    "ASGD": _of("ASGD"),
    "nothing to learn yet": _of("SGD", lr=0.0),
    "nothing to learn yet by a tensor": _of("Adam", lr=torch.tensor(0.0), foreach=False),
    "mixed, of which only the elementwise part is used": Mixed,
}
REFUSED: dict[str, tuple[Make, str]] = {
    "LBFGS": (lambda params: torch.optim.LBFGS(params), "LBFGS"),
    "Adafactor": (_of("Adafactor"), "Adafactor"),
    "SparseAdam": (lambda params: torch.optim.SparseAdam(params), "SparseAdam"),
    "Lamb": (Lamb, "Lamb, whose update of one element depends on others"),
    "NormedSGD": (NormedSGD, "NormedSGD, whose update of one element depends on others"),
    "Centred": (Centred, "Centred, whose update of one element depends on others"),
    "mixed, the second group": (
        lambda params: Mixed([{"params": params[:2]}, {"params": params[2:], "normed": True}]),
        "Mixed, whose update of one element depends on others",
    ),
    "OwnList": (OwnList, "OwnList, which leaves the parameters of its param_groups as they were"),
}
if hasattr(torch.optim, "Muon"):

    def _muon(params: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Muon([p for p in params if p.dim() == 2])

    REFUSED["Muon"] = (_muon, "Muon")


def snapshot(optimizer: Optimizer) -> list[Any]:
    """Return copies of all that a probe might change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        [p.detach().clone() for p in params],
        [None if p.grad is None else p.grad.clone() for p in params],
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in params],
        len(optimizer.state),
        sorted(optimizer.__dict__),
    ]


def assert_untouched(found: Any, before: Any) -> None:
    if isinstance(before, Tensor):
        assert torch.equal(found, before)
    elif isinstance(before, list | tuple):
        assert len(found) == len(before)
        for a, b in zip(found, before, strict=True):
            assert_untouched(a, b)
    elif isinstance(before, dict):
        assert found.keys() == before.keys()
        for key, value in before.items():
            assert_untouched(found[key], value)
    else:
        assert found == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PASS)
def test_an_elementwise_optimizer_passes(name: str, dtype: torch.dtype) -> None:
    probe_optimizer(PASS[name](list(Net().parameters())), [dtype])


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_mixes_elements_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        probe_optimizer(make(list(Net().parameters())), [torch.float32])
    assert f"updates each element by itself, got {reason}" in str(caught.value)
    assert "Use an elementwise one" in str(caught.value)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW fused", "Lion", "Adamax"])
def test_a_probe_leaves_the_optimizer_and_the_weights_untouched(name: str) -> None:
    module = Net()
    optimizer = PASS[name](list(module.parameters()))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    calls.clear()
    state, groups, step = optimizer.state, optimizer.param_groups, optimizer.step
    before = snapshot(optimizer)
    probe_optimizer(optimizer, [torch.float32, torch.float64])
    assert_untouched(snapshot(optimizer), before)
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert optimizer.step == step
    assert calls == []
    assert scheduler.optimizer is optimizer


def test_a_probe_leaves_the_random_numbers_untouched() -> None:
    optimizer = PASS["AdamW"](list(Net().parameters()))
    before = torch.get_rng_state()
    probe_optimizer(optimizer, [torch.float32])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_refused_optimizer_is_as_before() -> None:
    optimizer = Lamb(Net().parameters())
    before = snapshot(optimizer)
    with pytest.raises(ConfigError):
        probe_optimizer(optimizer, [torch.float32])
    assert_untouched(snapshot(optimizer), before)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_attaching_asks_the_probe_on_every_rank(stage: int) -> None:
    def body(transport: Any) -> str:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = NormedSGD(module.parameters())
        step = optimizer.step
        with pytest.raises(ConfigError) as caught:
            engine.attach(optimizer)
        assert optimizer.step == step
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "NormedSGD" in text


def test_a_world_of_one_takes_any_optimizer() -> None:
    def body(transport: Any) -> None:
        module = Net()
        engine = sharded(module, transport, 2)
        engine.attach(NormedSGD(module.parameters()))

    on_ranks(1, body)
