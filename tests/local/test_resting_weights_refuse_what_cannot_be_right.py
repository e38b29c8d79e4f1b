"""What would leave freed memory, another object or another value behind is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import dlpack

from lightning_zeroplus.errors import PhaseError, ZeroPlusError
from lightning_zeroplus.zero import Engine
from tests.local.test_resting_weights import assert_same, build, on_two_ranks, unsharded

_MEMORY: dict[str, Callable[[Any], object]] = {
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "share_memory_": lambda p: p.share_memory_(),
    "set_": torch.no_grad()(lambda p: p.set_(torch.ones(11, 13))),
    "resize_": torch.no_grad()(lambda p: p.resize_(3)),
    "data_ptr of data": lambda p: p.data.data_ptr(),
    "untyped_storage of data": lambda p: p.data.untyped_storage(),
    "share_memory_ of data": lambda p: p.data.share_memory_(),
    "from_dlpack": lambda p: torch.from_dlpack(p.detach()),
    "pickle": pickle.dumps,
    "pickle of data": lambda p: pickle.dumps(p.data),
    "multiprocessing pickle": lambda p: pickle.dumps([p]),
}


@pytest.mark.parametrize("on_access", ["gather", "error"])
@pytest.mark.parametrize("name", _MEMORY)
def test_the_memory_of_a_resting_weight_is_refused_by_name(name: str, on_access: Any) -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        with pytest.raises(PhaseError, match=r"Expected .*0\.weight"):
            _MEMORY[name](model[0].weight)
        assert unsharded(engine) == 0

    on_two_ranks(body, on_access=on_access)


def test_a_dlpack_capsule_of_a_span_is_an_error_and_no_crash() -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        with pytest.raises(RuntimeError):
            dlpack.to_dlpack(model[0].weight.detach())

    on_two_ranks(body)


def test_a_module_at_rest_is_refused_by_pickle() -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        with pytest.raises(PhaseError, match=r"Expected full weights to pickle, .*'0\.weight'"):
            pickle.dumps(model)

    on_two_ranks(body)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(13, 11),
        torch.ones(11, 13, dtype=torch.float64),
        torch.ones(11, 13, device="meta"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_assigned_data_of_another_geometry_is_refused(value: Tensor) -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        with pytest.raises(PhaseError, match=r"Expected data of shape \(11, 13\).*'0\.weight'"):
            model[0].weight.data = value

    on_two_ranks(body)


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16)],
    ids=["half", "double", "bfloat16"],
)
def test_a_module_is_not_converted_at_rest(convert: Callable[[nn.Module], object]) -> None:
    def body(model: nn.Sequential, engine: Engine) -> Tensor:
        with pytest.raises(PhaseError, match=r"0\.weight"):
            convert(model)
        with torch.no_grad():
            return model(torch.ones(2, 13))

    for found in on_two_ranks(body):
        assert_same(found, build()(torch.ones(2, 13)).detach())


def test_moving_a_module_to_where_it_is_changes_nothing() -> None:
    def body(model: nn.Sequential, engine: Engine) -> Tensor:
        weight = model[0].weight
        assert model.cpu().float().to("cpu")[0].weight is weight
        assert unsharded(engine) == 0
        with torch.no_grad():
            return model(torch.ones(2, 13))

    for found in on_two_ranks(body, on_access="error"):
        assert_same(found, build()(torch.ones(2, 13)).detach())


def test_data_assigned_inside_forward_is_refused_by_name() -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        def replace(module: nn.Linear, _: object) -> None:
            module.weight.data = torch.ones(11, 13)

        model[0].register_forward_pre_hook(replace)
        model(torch.ones(2, 13))
        with pytest.raises(PhaseError, match=r"Expected '0\.weight' to stay in its unit's memory"):
            engine.end_window()

    on_two_ranks(body)


@pytest.mark.parametrize(
    "replace",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(11, 13))),
        lambda m: m.load_state_dict(build().state_dict(), assign=True),
        lambda m: m.to("meta"),
    ],
    ids=["attribute", "load_state_dict(assign=True)", "another device"],
)
def test_a_replaced_parameter_is_refused_by_the_next_step(
    replace: Callable[[nn.Sequential], object],
) -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach(optimizer)
        replace(model)
        with pytest.raises(ZeroPlusError, match=r"0\.weight"), engine.forward_pass():
            pass
        with pytest.raises(ZeroPlusError, match=r"0\.weight"):
            optimizer.step()
        with pytest.raises(ZeroPlusError, match=r"0\.weight"):
            list(engine.iterate_full_state())

    on_two_ranks(body)


def test_an_alias_kept_past_the_use_reads_nan_and_is_not_written() -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        kept: list[Tensor] = []
        model[0].register_forward_pre_hook(
            lambda module, _: kept.extend([module.weight.t(), module.weight.detach()])
        )
        model(torch.ones(2, 13))
        engine.end_window()
        for alias in kept:
            assert bool(alias.detach().isnan().all())
            with torch.no_grad(), pytest.raises(RuntimeError):
                alias.add_(1)

    on_two_ranks(body)


def test_a_deepcopy_works_without_the_engine() -> None:
    def body(model: nn.Sequential, engine: Engine) -> Tensor:
        twin = copy.deepcopy(model)
        assert type(twin[0].weight) is nn.Parameter
        before = engine.context.transport.sent_nbytes
        twin(torch.ones(2, 13)).sum().backward()
        assert engine.context.transport.sent_nbytes == before
        assert type(twin[0].weight.grad) is Tensor
        engine.close()
        return pickle.loads(pickle.dumps(twin))(torch.ones(2, 13)).detach()

    for found in on_two_ranks(body):
        assert_same(found, build()(torch.ones(2, 13)).detach())


def test_a_graph_from_before_a_step_is_refused_as_in_plain_pytorch() -> None:
    def stale(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        first = model(torch.ones(2, 13, requires_grad=True)).square().sum()
        model(torch.ones(2, 13)).square().sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()

    model = build()
    stale(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def body(model: nn.Sequential, engine: Engine) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach(optimizer)
        stale(model, optimizer)

    on_two_ranks(body)


def test_a_weight_edited_between_forward_and_backward_is_refused_as_in_plain_pytorch() -> None:
    def edited(model: nn.Sequential) -> None:
        loss = model(torch.ones(2, 13, requires_grad=True)).square().sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    edited(build())
    on_two_ranks(lambda model, engine: edited(model))
