"""A resting weight answers what the parameter would, locally where no other rank is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.config import EngineConfig, UnshardOnAccess
from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.zero import Engine, shard
from tests.local.resting_reads import EDITS, GATHERING, METADATA, SHARDWISE

_BUILDING = threading.Lock()
_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def build() -> nn.Sequential:
    with _BUILDING:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(13, 11), nn.Linear(11, 3))


def on_two_ranks(
    body: Callable[[nn.Sequential, Engine], object], *, on_access: UnshardOnAccess = "gather"
) -> list[Any]:
    """Return what `body` answers on each rank of a small model at rest."""

    def run(transport: Transport) -> object:
        transport.least_unit_nbytes = 0
        model = build()
        engine = shard(model, EngineConfig(stage=3, unshard_on_access=on_access), transport)
        return body(model, engine)

    return run_virtual_ranks(2, run, timeout_s=20)


def unsharded(engine: Engine) -> int:
    return sum(unit.weights.is_unsharded for unit in engine.units)


def ordinary(answer: Any) -> Any:
    """Return plain tensors and values for what a read answered."""
    if isinstance(answer, Tensor) and hasattr(answer, "full_tensor"):
        answer = answer.full_tensor()
    return answer.detach().clone() if isinstance(answer, Tensor) else answer


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert found == expected


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("name", METADATA)
def test_metadata_answers_as_always_without_the_other_rank(name: str, mode: str) -> None:
    read = METADATA[name]

    def body(model: nn.Sequential, engine: Engine) -> object:
        before = engine.context.transport.sent_nbytes
        with _MODES[mode]():
            answer = read(model[0].weight)
        assert engine.context.transport.sent_nbytes == before
        assert unsharded(engine) == 0
        return answer

    plain = build()[0].weight
    with _MODES[mode]():
        expected = read(plain)
    for found in on_two_ranks(body, on_access="error"):
        assert found == expected


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("name", [*SHARDWISE, *GATHERING])
def test_a_read_equals_that_of_the_plain_weight(name: str, mode: str) -> None:
    read = {**SHARDWISE, **GATHERING}[name]

    def body(model: nn.Sequential, engine: Engine) -> object:
        with _MODES[mode]():
            answer = read(model[0].weight)
        return ordinary(answer)

    plain = build()[0].weight
    with _MODES[mode]():
        expected = ordinary(read(plain))
    for found in on_two_ranks(body):
        assert_same(found, expected)


@pytest.mark.parametrize("name", SHARDWISE)
def test_a_shardwise_read_is_served_by_the_strict_setting(name: str) -> None:
    def body(model: nn.Sequential, engine: Engine) -> object:
        with torch.no_grad():
            answer = SHARDWISE[name](model[0].weight)
        assert unsharded(engine) == 0
        return ordinary(answer)

    with torch.no_grad():
        expected = ordinary(SHARDWISE[name](build()[0].weight))
    for found in on_two_ranks(body, on_access="error"):
        assert_same(found, expected)


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("name", GATHERING)
def test_the_strict_setting_refuses_a_gathering_read_and_goes_on(name: str, mode: str) -> None:
    def body(model: nn.Sequential, engine: Engine) -> object:
        with (
            _MODES[mode](),
            pytest.raises(PhaseError, match=r"sharded parameter '0\.weight' at rest in \S+ \(rank"),
        ):
            GATHERING[name](model[0].weight)
        with torch.no_grad():
            return model(torch.ones(2, 13))

    for found in on_two_ranks(body, on_access="error"):
        assert_same(found, build()(torch.ones(2, 13)).detach())


def test_reads_under_no_grad_leave_nothing_unsharded() -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        with torch.no_grad():
            for name, read in {**SHARDWISE, **GATHERING}.items():
                if name != "plain class":  # an alias, which has to stay right
                    read(model[0].weight)
        assert unsharded(engine) == 0

    on_two_ranks(body)


def test_a_read_under_autograd_stays_unsharded_until_the_window_ends() -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach(optimizer)
        view = model[0].weight.view(-1)
        (model(torch.ones(2, 13)).sum() + view.square().sum()).backward()
        assert unsharded(engine) == 1
        assert bool(view.detach().isfinite().all())
        optimizer.step()
        assert unsharded(engine) == 0

    on_two_ranks(body)


@pytest.mark.parametrize("name", EDITS)
def test_an_elementwise_edit_at_rest_is_local_and_kept(name: str) -> None:
    def body(model: nn.Sequential, engine: Engine) -> Tensor:
        before = engine.context.transport.sent_nbytes
        version = model[0].weight._version
        with torch.no_grad():
            EDITS[name](model[0].weight)
        assert engine.context.transport.sent_nbytes == before
        assert unsharded(engine) == 0
        assert name.startswith(("data", "detach", "assigned")) or model[0].weight._version > version
        engine.close()
        return model[0].weight.detach()

    model = build()
    with torch.no_grad():
        EDITS[name](model[0].weight)
    for found in on_two_ranks(body, on_access="error"):
        assert_same(found, model[0].weight.detach())


def test_random_fills_with_one_generator_per_rank_equal_the_plain_one() -> None:
    def fill(weight: nn.Parameter) -> None:
        with torch.no_grad():
            weight.normal_(generator=torch.Generator().manual_seed(3))
        nn.init.xavier_uniform_(weight[:3], generator=torch.Generator().manual_seed(4))

    def body(model: nn.Sequential, engine: Engine) -> Tensor:
        fill(model[0].weight)
        engine.close()
        return model[0].weight.detach()

    model = build()
    fill(model[0].weight)
    for found in on_two_ranks(body):
        assert_same(found, model[0].weight.detach())


def test_a_full_state_dict_is_loaded_without_the_other_rank() -> None:
    other = {name: p.detach() * 2 for name, p in build().named_parameters()}

    def body(model: nn.Sequential, engine: Engine) -> dict[str, Tensor]:
        before = engine.context.transport.sent_nbytes
        model.load_state_dict(other)
        assert engine.context.transport.sent_nbytes == before
        engine.close()
        return model.state_dict()

    for found in on_two_ranks(body, on_access="error"):
        assert found.keys() == other.keys()
        for name, value in other.items():
            assert_same(found[name], value)


def test_the_object_and_its_class_are_the_users_in_forward_and_after_close() -> None:
    def body(model: nn.Sequential, engine: Engine) -> None:
        weight = model[0].weight
        seen: list[tuple[bool, type]] = []
        model[0].register_forward_pre_hook(
            lambda module, _: seen.append((module.weight is weight, type(module.weight)))
        )
        model(torch.ones(2, 13))
        assert seen == [(True, nn.Parameter)]
        engine.end_window()
        assert model[0].weight is weight
        assert isinstance(weight, nn.Parameter)
        assert type(weight) is not nn.Parameter
        engine.close()
        assert model[0].weight is weight
        assert type(weight) is nn.Parameter

    on_two_ranks(body)


def test_the_gradient_of_a_resting_weight_knows_its_full_value() -> None:
    def body(model: nn.Sequential, engine: Engine) -> tuple[Tensor, Tensor]:
        model(torch.ones(2, 13)).square().mean().backward()
        engine.end_window()
        slope = model[0].weight.grad
        assert slope is not None
        assert slope.shape == (11, 13)
        with torch.no_grad():
            return slope.full_tensor(), slope.norm()  # type: ignore[attr-defined]

    model = build()
    model(torch.ones(2, 13)).square().mean().backward()
    expected = model[0].weight.grad
    for full, norm in on_two_ranks(body, on_access="error"):
        assert_same(full, expected)
        assert_same(norm, expected.norm())
