"""Every elementwise optimizer of torch gives the same parameters sharded as in one piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import optim

from lightning_zeroplus.comm import run_virtual_ranks
from tests.parity import reference, sharded
from tests.parity.reference import Case, plain_training
from tests.parity.sharded import assert_parity, sharded_training

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adam_amsgrad": partial(optim.Adam, lr=1e-2, eps=1e-2, amsgrad=True),
    "adam_foreach": partial(optim.Adam, lr=1e-2, eps=1e-2, foreach=True),
    "adam_maximize": partial(optim.Adam, lr=1e-2, eps=1e-2, maximize=True),
    "adam_lr_in_a_tensor": lambda p: optim.Adam(p, lr=torch.tensor(1e-2), eps=1e-2),
    "nadam": partial(optim.NAdam, lr=1e-2, eps=1e-2),
    "radam": partial(optim.RAdam, lr=1e-2, eps=1e-2),
    "adamax": partial(optim.Adamax, lr=1e-2, eps=1e-2),
    "adadelta": partial(optim.Adadelta, lr=0.1, eps=1e-2),
    "adagrad": partial(optim.Adagrad, lr=1e-2, eps=1e-2, initial_accumulator_value=0.1),
    "adagrad_fused": partial(optim.Adagrad, lr=1e-2, eps=1e-2, fused=True),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, eps=1e-2, momentum=0.5, centered=True),
    "rprop": partial(optim.Rprop, lr=1e-3),
    "asgd": partial(optim.ASGD, lr=1e-2),
    "sgd_nesterov": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": partial(optim.SGD, lr=1e-2, momentum=0.9, foreach=True),
}


@pytest.fixture(autouse=True)
def more_optimizers(monkeypatch):
    def make(name: str, module: torch.nn.Module) -> optim.Optimizer:
        return OPTIMIZERS[name](list(module.parameters()))

    for place in (reference, sharded):
        monkeypatch.setattr(place, "make_optimizer", make)


@pytest.mark.parametrize("model", ["odd", "tied"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_after_8_steps_are_those_of_plain_pytorch(stage, optimizer, model):
    case = Case(model=model, optimizer=optimizer, accumulate=3, clip="norm", world=3)
    ranks = run_virtual_ranks(3, lambda transport: sharded_training(transport, case, stage))
    assert_parity(ranks, plain_training(case))
